"""The text part of a multimodal model: the language model below transformers' wrapper, under the names that
the wrapper gives it.

Decoder and head stay where they are in the whole model, so names of modules are those of PEFT on the whole
model; what a text does not pass, towers and projections of images and sound, is taken out of it.
"""

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from coserve.adapters.sites import decoder_of


def auto_class(config: Any) -> Any:
    """transformers' automatic class that makes the model of a configuration, a multimodal one as a whole."""
    return AutoModelForMultimodalLM if is_multimodal(config) else AutoModelForCausalLM


def is_multimodal(config: Any) -> bool:
    """Tells whether transformers counts a configuration's type among those that may read more than text."""
    return config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def made_of(config: Any, **options: Any) -> PreTrainedModel:
    """A model of a configuration with drawn weights, without what a text does not pass. The model writes into
    the configuration."""
    model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False, **options)
    keep_text(model)
    return model


def keep_text(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Takes out the modules that a text does not pass, and returns them by path: beside the decoder and the
    head all that have parameters, and within what the decoder calls models of another kind (Phi-4)."""
    if not is_multimodal(model.config):
        return {}
    decoder, head = decoder_of(model), model.get_output_embeddings()
    taken: dict[str, nn.Module] = {}

    def take(parent: nn.Module, path: str, name: str) -> None:
        taken[f"{path}{name}"] = parent.get_submodule(name)
        setattr(parent, name, None)

    def clear(parent: nn.Module, path: str) -> None:
        for name, child in [*parent.named_children()]:
            inside = [*child.modules()]
            if child is decoder or child is head:
                continue
            if any(module is decoder or module is head for module in inside):
                clear(child, f"{path}{name}.")
            elif any(True for _ in child.parameters()):
                take(parent, path, name)

    path = next(path for path, module in model.named_modules() if module is decoder)
    if decoder is not model:
        clear(model, "")
    for outer, child in [*decoder.named_children()]:
        for name, part in [*child.named_children()]:
            if any(isinstance(module, PreTrainedModel) for module in part.modules()):
                take(child, f"{path}.{outer}." if path else f"{outer}.", name)
    return taken


def put_back(model: PreTrainedModel, taken: dict[str, nn.Module]) -> None:
    """Puts modules back in that `keep_text` has taken out."""
    for path, module in taken.items():
        above, _, name = path.rpartition(".")
        setattr(model.get_submodule(above), name, module)
