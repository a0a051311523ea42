"""AdaLoRA's saved files, y + s B (E ⊙ A x), are read as the LoRA adapters that they are: E ⊙ A is LoRA's A.
Zhang et al. 2023, 2303.10512.

While it trains AdaLoRA moves ranks between linears; a saved file has the ranks that were left, and they stay.
"""

from typing import Final

from coserve.adapters.bypass import Bypass, Part, Place
from coserve.adapters.lora_variants import VARIANTS
from coserve.adapters.lowrank import LoRABypass, expect_product
from coserve.adapters.methods.lora import METHOD as LORA
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.replace import copies_of, expect_copies, take_replacements
from coserve.adapters.saved import PREFIX, Saved, expect_shape, shown
from coserve.adapters.selection import select
from coserve.adapters.sites import Frame, Kind
from coserve.errors import AdapterError

_ENDINGS: Final = ("lora_A", "lora_E", "lora_B")
_LITTLE: Final = 1e-5  # that PEFT adds to the rank by which it divides
# Fields of its training, and of LoRA that AdaLoRA does not read.
_IGNORED: Final = (
    "r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step",
    "use_rslora", "alpha_pattern", "init_lora_weights", "fan_in_fan_out", "megatron_core", "eva_config",
    "corda_config", "lora_ga_config", "qalora_group_size", "lora_bias", "ensure_weight_tying",
)  # fmt: skip


class AdaLoRA:
    """LoRA with singular values."""

    peft_type = "ADALORA"

    def read(self, saved: Saved, frame: Frame) -> Part:
        selection = select(saved, frame, (Kind.LINEAR,), has_layers=True)
        sites = {site.path: site for site in selection.targets}
        for name, why in VARIANTS.items():
            saved.refuse(name, why)
        saved.refuse("use_dora", "AdaLoRA has none, in PEFT neither")
        saved.expect_no_biases("adalora")
        saved.ignore(*_IGNORED)
        first, alpha = saved.take("init_r", 12), saved.take("lora_alpha", 8.0)
        dropout, kept = saved.take("lora_dropout", 0.0), saved.take("rank_pattern", {})
        ranks = dict.fromkeys(sites, first) | _ranks(saved, kept)
        if strange := [path for path in ranks if path not in sites]:
            raise AdapterError(f"{saved.folder}: rank_pattern names {shown(strange[0])}, which is no target")
        saved.expect(
            [*(f"{PREFIX}{path}.{ending}" for path in sites for ending in _ENDINGS), *selection.within],
            allowed=copies_of(frame),
        )
        scales = {path: (alpha if alpha > 0 else rank) / (first + _LITTLE) for path, rank in ranks.items()}
        # LoRA divides alpha by each rank, which ranks that were taken away do not change here.
        config = LoRAConfig(
            rank=first,
            alpha=alpha * first / (first + _LITTLE),
            dropout=dropout,
            rank_pattern={path: rank for path, rank in ranks.items() if rank},
            alpha_pattern={path: scales[path] * rank for path, rank in ranks.items() if rank},
            modules_to_save=tuple(saved.names("modules_to_save")),
        )
        bypasses: dict[Place, Bypass] = {}
        for path, (a, e, b) in saved.pairs(*_ENDINGS).items():
            site, rank = sites[path], ranks[path]
            for ending, tensor, shape in zip(
                _ENDINGS, (a, e, b), ((rank, site.inputs), (rank, 1), (site.outputs, rank)), strict=True
            ):
                expect_shape(site, ending, tensor, *shape)
            if rank:
                expect_product(saved, path, e * a, b, scales[path])
                bypasses[Place(path)] = LoRABypass(e * a, b, scales[path], dropout)
        replaced = take_replacements(saved, frame, selection.within)
        expect_copies(saved, frame)
        return Part(LORA.name, config, {**bypasses, **replaced})


def _ranks(saved: Saved, kept: dict[str, object]) -> dict[str, int]:
    """The ranks that are left by `rank_pattern`, which says of each of the first ones whether it is."""
    found = {}
    for name, flags in kept.items():
        path = name.removesuffix(".default").removesuffix(".lora_E")
        if not isinstance(flags, list) or not all(type(flag) is bool for flag in flags):
            raise AdapterError(
                f"{saved.folder}: rank_pattern must be lists of true and false, not {shown(flags)}"
            )
        found[path] = sum(flags)
    return found


READER = AdaLoRA()
