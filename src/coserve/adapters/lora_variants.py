"""LoRA's variants in PEFT that are refused, and what to do instead of each."""

from collections.abc import Mapping
from typing import Final

from coserve.adapters.saved import shown
from coserve.errors import AdapterError

_MERGED: Final = "merge the adapter into its base with PEFT's merge_and_unload, and serve the merged model"
_PLAIN: Final = "coserve has LoRA, rsLoRA (use_rslora), DoRA (use_dora) and biases (bias, lora_bias)"

# Of `ensure_weight_tying`, where the embedding or the head is a target or replaced.
TIED: Final = f"the head and the embedding have adapters of their own here; train without it, or {_MERGED}"
# By the field of the configuration.
VARIANTS: Final[Mapping[str, str]] = {
    "layer_replication": (
        "it stacks the base's layers anew, and the adapter belongs to that model; have PEFT build it, "
        "merge_and_unload, and serve the merged model"
    ),
    "use_bdlora": (
        f"its matrices are block-diagonal (BD-LoRA), and {_PLAIN}; train without use_bdlora, or {_MERGED}"
    ),
    "use_qalora": f"it averages groups of inputs (QA-LoRA), and {_PLAIN}; train without it, or {_MERGED}",
    "arrow_config": "it routes between several LoRAs (Arrow), which can be served one by one",
    "kasa_config": "it changes the base's weights (KaSA): merge_and_unload with PEFT, and serve the result",
    "velora_config": f"it is a variant (VeLoRA) for training with PEFT, and {_PLAIN}; {_MERGED}",
    "monteclora_config": f"its matrices are drawn anew (MonteCLoRA), and {_PLAIN}; {_MERGED}",
    "megatron_config": "it is for models that Megatron runs; save the adapter without it where none does",
}

# Ways to draw the first A and B: these leave the base's weights as they are,
_HARMLESS: Final = frozenset({"gaussian", "eva", "orthogonal", "mica"})
# and these take A and B's product out of the base, which PEFT puts back when it saves.
_CHANGING: Final = ("pissa", "olora", "corda", "lora_ga")


def expect_unchanged_base(folder: str, init: object) -> None:
    """Raises AdapterError for an `init_lora_weights` after which A and B fit another base than the one they
    are loaded on."""
    if init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in _HARMLESS):
        return
    of_file = f"{folder}: init_lora_weights={shown(init)}"
    if isinstance(init, str) and init.lower().startswith(_CHANGING):
        raise AdapterError(
            f"{of_file} changed the base's weights, and this adapter fits the changed ones: save it with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), with the adapter as "
            "it was before training, which makes it an adapter of the base"
        )
    if isinstance(init, str) and init.lower() == "loftq":
        raise AdapterError(
            f"{of_file} changed the base's weights, and this adapter fits the changed ones: save the base as "
            f"LoftQ left it and serve that, or {_MERGED}"
        )
    raise AdapterError(
        f"{of_file} is no way to begin that is known here: {', '.join(sorted(_HARMLESS))}, true or false"
    )
