"""PEFT's adapter types that coserve has no method for, and what to use instead of each.

A file or a job of such a type is refused with this: a method that only resembles it would compute other
numbers from the same tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Instead:
    """A type that is refused: what it does, and the method of coserve's that is nearest for a new job.
    `merges`: PEFT (0.21) writes a finished adapter of it into its base's weights. Files that are `read` are
    refused to jobs alone."""

    what: str
    method: str
    merges: bool = True
    read: bool = False

    def __str__(self) -> str:
        job = f"for a job use {self.method!r}"
        if self.read:
            return f"{self.what}; {job}; a finished one is read as it is"
        if not self.merges:
            return f"{self.what}; {job}; a finished one stays with PEFT, which cannot merge it either"
        return (
            f"{self.what}; {job}; a finished one can be merged into its base with PEFT's merge_and_unload, "
            "and the merged model served"
        )


INSTEAD: Final[Mapping[str, Instead]] = {
    "ADALORA": Instead(
        "LoRA whose ranks are redistributed while it trains (Zhang et al. 2023)", "lora", read=True
    ),
    "ADAMSS": Instead("several subspaces of each weight, chosen while it trains", "lora"),
    "ADAPTION_PROMPT": Instead(
        "prompts with gates inside of attention (LLaMA-Adapter)", "prefix_tuning", merges=False
    ),
    "BEFT": Instead("biases of some projections", "bitfit"),
    "BOFT": Instead("products with butterfly-factored rotations (Liu et al. 2024)", "lora"),
    "CARTRIDGE": Instead("keys and values distilled from a text", "prefix_tuning", merges=False),
    "CPT": Instead("a trained prompt made of examples (context-aware)", "prompt_tuning", merges=False),
    "DEFT": Instead("a low-rank change, with the weights' own part in its directions taken out", "lora"),
    "DELORA": Instead("LoRA with a learned, bounded strength (DeLoRA)", "lora"),
    "FROD": Instead("a sparse change in a basis that layers share", "lora"),
    "GLORA": Instead("scales and shifts of weights, inputs and biases (GLoRA)", "lora"),
    "GRALORA": Instead("LoRA in blocks of the weight", "lora"),
    "HIRA": Instead("a low-rank factor that multiplies the weight elementwise", "lora"),
    "LILY": Instead("LoRA whose matrices layers share, mixed by a router", "lora", merges=False),
    "MULTITASK_PROMPT_TUNING": Instead(
        "a prompt shared by tasks, with a factor for each", "prompt_tuning", merges=False
    ),
    "OSF": Instead("training of the weights' minor singular directions", "lora"),
    "PEANUT": Instead("small networks of the weights", "lora"),
    "POLY": Instead("LoRAs that each task mixes", "lora", merges=False),
    "PSOFT": Instead("rotations within the weights' main directions", "lora"),
    "PVERA": Instead("VeRA with random strengths", "lora"),
    "SHADOW": Instead("a small network beside the whole model", "bottleneck", merges=False),
    "SUPERTUNING": Instead("a sparse change of the weights", "lora"),
    "TINYLORA": Instead("a few numbers that all layers share", "lora"),
    "UNILORA": Instead("LoRA whose matrices come of one shared vector", "lora"),
    "WAVEFT": Instead("a few coefficients of the change's wavelet transform", "lora"),
    "XLORA": Instead("LoRAs that a network of its own mixes for each token", "lora", merges=False),
}
