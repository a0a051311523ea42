"""LN tuning: norms train whole, weight and bias. Zhao et al. 2023, 2312.11420.

A norm's own gain is divided out of its output (`adapters/replace.py`), so rows of other adapters keep it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from coserve.adapters.bypass import Bypass, Part, Place
from coserve.adapters.method import Written, chosen
from coserve.adapters.replace import (
    REPLACED,
    expect_kept,
    fresh_replacement,
    fresh_replacements,
    read_replacement,
    take_replacements,
    written_kept,
    written_replacements,
)
from coserve.adapters.saved import PREFIX, Saved, shown
from coserve.adapters.selection import select
from coserve.adapters.sites import Frame, Kind
from coserve.errors import AdapterError

_INSIDE: Final = ".ln_tuning_layers"


@dataclass(frozen=True, slots=True)
class LNTuningConfig:
    """Settings of LN tuning: the modules that train whole.

    `targets` are names or path endings of norms, linears and embeddings; empty is every norm of the model,
    the last one included. `modules_to_save` are endings of paths of further ones.
    """

    targets: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("targets", "modules_to_save"):
            if isinstance(names := getattr(self, name), str):
                raise AdapterError(f"LN tuning's {name} are several names, not one: ({shown(names)},)")


class LNTuning:
    """Norms of an adapter's own."""

    name, peft_type, config = "ln_tuning", "LN_TUNING", LNTuningConfig
    aliases: Final[Mapping[str, str]] = {"target_modules": "targets"}

    def fresh(self, config: LNTuningConfig, frame: Frame, generator: torch.Generator) -> Part:
        """Starts from copies of the base's weights."""
        if config.targets:
            sites = chosen(frame, config.targets, REPLACED)
        else:
            sites = {path: site for path, site in frame.sites.items() if site.kind is Kind.NORM}
        bypasses: dict[Place, Bypass] = {
            Place(path): fresh_replacement(site, frame) for path, site in sites.items()
        }
        return Part(self.name, config, {**bypasses, **fresh_replacements(config.modules_to_save, frame)})

    def read(self, saved: Saved, frame: Frame) -> Part:
        """Reads targets and `modules_to_save`, which are the same to this method."""
        selection = select(saved, frame, REPLACED)
        inside = [
            f"{PREFIX}{site.path}{_INSIDE}.{kind}"
            for site in selection.targets
            for kind in ("weight", *["bias"] * site.has_bias)
        ]
        saved.expect([*inside, *selection.within])
        given: dict[str, dict[str, torch.Tensor]] = {}
        for kind in ("weight", "bias"):
            for module, tensor in saved.ending(f"{_INSIDE[1:]}.{kind}").items():
                given.setdefault(module, {})[kind] = tensor
        bypasses: dict[Place, Bypass] = {
            Place(path): read_replacement(saved, frame, path, path + _INSIDE, own)
            for path, own in given.items()
        }
        bypasses |= take_replacements(saved, frame, selection.within)
        expect_kept(saved, {place.path for place in bypasses})
        return Part(self.name, LNTuningConfig(), bypasses)

    def write(self, part: Part) -> Written:
        """Writes all modules as targets."""
        paths, tensors = written_replacements(part.bypasses, _INSIDE)
        return Written({"target_modules": sorted(paths), **written_kept(part.bypasses)}, tensors)


METHOD = LNTuning()
