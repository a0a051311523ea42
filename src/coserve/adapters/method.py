"""Protocol of the files in `methods/`."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from coserve.adapters.bypass import Part
from coserve.adapters.saved import Saved, shown
from coserve.adapters.sites import Frame, Kind, Site
from coserve.errors import AdapterMismatch

MOST_ALPHA: Final = 65_504  # float16's largest number: a factor beyond it makes infinities of anything
MOST_RANK: Final = 16_384  # full rank of the widest models
_CONVOLUTIONS: Final = ("conv1d", "conv_1d", "conv")  # of recurrent mixers, as transformers calls them


@dataclass(frozen=True, slots=True)
class Written:
    """A part for files: fields of the configuration, tensors by their names in PEFT's format.

    `own` are further tensors for training that PEFT's format lacks; checkpoints have them.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    own: Mapping[str, Tensor] = field(default_factory=dict)


class FileReader(Protocol):
    """Reads files of one `peft_type` as parts of some method."""

    peft_type: str

    def read(self, saved: Saved, frame: Frame) -> Part:
        """Reads a part from a file. Fields and tensors not taken from `saved` are refused. Raises
        AdapterError."""


class Method(FileReader, Protocol):
    """One adapter method.

    `name` is its name in requests and command lines, `peft_type` in files, `config` the frozen dataclass of
    its settings, `aliases` PEFT's names for some of its fields.
    """

    name: str
    config: type[Any]
    aliases: Mapping[str, str]

    def fresh(self, config: Any, frame: Frame, generator: torch.Generator) -> Part:
        """An initial part that changes nothing, or as little as the method allows, in float32 on the CPU.
        Raises AdapterMismatch where the base lacks the places."""

    def write(self, part: Part) -> Written:
        """Writes a part into a file."""


def named(path: str, targets: Container[str]) -> bool:
    """Tells whether a path equals a target or ends with one after a dot."""
    while path not in targets:
        _, dot, path = path.partition(".")
        if not dot:
            return False
    return True


def said_of(path: str) -> str:
    """The reason why a mixer's convolution is no place for an adapter; empty for other modules."""
    if path.rpartition(".")[2] not in _CONVOLUTIONS:
        return ""
    return (
        ": beside a convolution PEFT has ranks that are multiples of its channels alone, and what it adds "
        "there is never computed, as transformers reads the convolution's weight"
    )


def chosen(
    frame: Frame, targets: tuple[str, ...], kinds: tuple[Kind, ...] = (Kind.LINEAR,)
) -> dict[str, Site]:
    """The sites of these kinds that are targets; without targets, all of them inside the layers.

    Raises AdapterMismatch for a target without such a site.
    """
    sites = {path: site for path, site in frame.sites.items() if site.kind in kinds}
    if not targets:
        return {path: site for path, site in sites.items() if 0 <= site.stage < frame.depth}
    found = {path: site for path, site in sites.items() if named(path, targets)}
    unmatched = [target for target in targets if not any(named(path, (target,)) for path in found)]
    if unmatched:
        endings = sorted({path.rpartition(".")[2] for path in sites})
        what = " or ".join(kind.value for kind in kinds)
        raise AdapterMismatch(
            f"no {what} of the model is called {shown(unmatched)}; there are {endings}{said_of(unmatched[0])}"
        )
    return found
