"""Refusals of models: one sentence each, which names the model's type, the part of it that is not supported,
and what is planned or what to use instead.

Errors of torch and transformers name classes and shapes, which help nobody who wants to serve a model: they
go to the log.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from coserve.errors import CoserveError, ModelError, UnsupportedModel
from coserve.memory.exhausted import is_out_of_memory
from coserve.model.told_positions import can_be_told

ENCODER_DECODER: Final = "it is an encoder-decoder model"
INSTEAD: Final = "use a decoder such as Llama, Qwen3 or Gemma 3"
# Types of layers as transformers names them.
_SPARSE: Final = frozenset(
    {"compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
)
# Types whose layers hand on more than a hidden state and keys and values, in ways of their own.
_HANDED_ON: Final = {
    "rwkv": "it mixes each row with the one before ahead of its linears, and hands states on as arguments",
    "zaya": "its routers hand numbers on from layer to layer, beside the hidden state",
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"),
        "its layers embed each token with those before it, which are a state of token ids",
    ),
}
# Fields of a configuration that say how weights were quantized: transformers', compressed-tensors' old one,
# and MLX's.
_QUANTIZED: Final = ("quantization_config", "compression_config", "quantization")
# Fields of a quantized model's configuration that may name the one it was made of.
_SOURCES: Final = ("base_model", "base_model_name_or_path", "_name_or_path")
_REPOSITORY: Final = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_CODE: Final = re.compile(r"\b[A-Z]?[a-z0-9]+[A-Z]\w*|\w\.\w+\.\w|__|<class|\[\d+, ")

_LIBRARY: Final = re.compile(r"requires the ([\w-]{1,40}) library")  # as transformers says it

_log = logging.getLogger(__name__)


@contextmanager
def refusing(model: str, doing: str) -> Iterator[None]:
    """Turns every error of its block into a ModelError about `model`: UnsupportedModel, unless memory ran
    out. `doing` says what fails, as in "cannot be loaded". The log has the error."""
    try:
        yield
    except CoserveError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ModelError(f"there is not enough memory for {model}") from error
        reason = str(error).strip().partition("\n")[0]
        _log.warning("%s %s: %s: %s", model, doing, type(error).__name__, reason)
        if isinstance(error, ImportError) and (lacking := _LIBRARY.search(str(error))):
            name = lacking[1]
            said = f"transformers builds it with the package {name}, which is missing; use pip install {name}"
            raise UnsupportedModel(f"{model} {doing}: {said}") from error
        raise UnsupportedModel(
            f"{model} {doing}: transformers' code for it fails (the log has the error); {INSTEAD}"
        ) from error


def told_by(error: BaseException) -> str:
    """The first sentence of an error's text in brackets, where it is plain: empty for one that is long, or
    names classes or modules."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0]
    return f" ({text})" if 0 < len(text) <= 120 and not _CODE.search(text) else ""


def unsupported(model: str, part: str, instead: str = INSTEAD) -> UnsupportedModel:
    """The error for a model and the `part` of it that is not supported."""
    return UnsupportedModel(f"{model} is not supported: {part}; {instead}")


def refuse_kind(name: str) -> None:
    """Raises UnsupportedModel for a type of models that are no language models, of text alone or of more."""
    if name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or name in auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        return
    if name in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise unsupported(name, ENCODER_DECODER)
    if name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise encoder(name)
    raise unsupported(name, "it is no language model that continues a text")


def refuse_layers(config: Any, model: PreTrainedModel | None = None) -> None:
    """Raises UnsupportedModel for layers that cannot be driven, as the configuration or the model's class
    tell."""
    if config.is_encoder_decoder:
        raise unsupported(config.model_type, ENCODER_DECODER)
    text, name = config.get_text_config(), config.model_type
    if (why := _HANDED_ON.get(name)) is not None:
        raise unsupported(name, why)
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds & _SPARSE:
        raise unsupported(name, "its sparse attention chooses keys by an index of its own")
    if getattr(text, "index_kpool_always_select_tail", True) is False:
        raise unsupported(name, "its index of keys leaves out the newest rows of a text")
    if getattr(text, "cross_attention_layers", None):
        raise unsupported(name, "some of its layers attend to images instead of text")
    if model is not None and model.get_output_embeddings() is None:
        raise unsupported(name, "its head is not where transformers says")
    # Where all layers are recurrent there may be no positions; the proof sees one that counts its own.
    is_told = model is None or can_be_told(model)
    if not (is_told or getattr(model, "_is_stateful", False)):
        raise unsupported(name, "it counts positions itself, where rows of several texts have their own")


def refuse_quantized(fields: Mapping[str, Any], made_of: str = "") -> None:
    """Raises UnsupportedModel for a model whose weights are quantized, given the fields of its
    configuration. `made_of` is the repository that it was made of, where its files tell."""
    text = fields.get("text_config")
    every = (fields, *([text] if isinstance(text, dict) else ()))
    found = next((own[key] for own in every for key in _QUANTIZED if own.get(key)), None)
    if found is None:
        return
    own = found if isinstance(found, dict) else {}
    method = str(
        own.get("quant_method") or own.get("quant_algo") or own.get("format") or "in an unknown form"
    )
    bits = next((f", {n} bits" for n in (4, 8) if own.get(f"load_in_{n}bit")), "")
    bits = bits or (f", {own['bits']} bits" if isinstance(own.get("bits"), int) else "")
    named = (made_of, *(fields.get(key) for key in _SOURCES))
    source = next((name for name in named if isinstance(name, str) and _REPOSITORY.fullmatch(name)), None)
    whole = "a checkpoint of it that is not quantized" if source is None else f"{source}, which it names,"
    raise UnsupportedModel(
        f"{fields.get('model_type')} was saved quantized ({method[:40]}{bits}), a form that is not read: "
        f"serve {whole} with --quantize 4bit or 8bit (engine.quantize)"
    )


def planned(name: str, part: str) -> UnsupportedModel:
    """The error for a part of a model that a later version will support."""
    return UnsupportedModel(f"{name} is not supported yet: {part} planned; until then {INSTEAD}")


def encoder(name: str) -> UnsupportedModel:
    """The error for bidirectional attention."""
    if name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return unsupported(name, "it is an encoder, which generates no text")
    return unsupported(name, "its attention looks ahead, as an encoder's does")  # PaliGemma's, in prompts
