"""Applications, made on the spot: twenty adapters and full fine-tunes of the embedded model and models of
another width; twelve of a larger model, of random weights."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coserve import tiny
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import write_adapter
from coserve.adapters.settings import settings_of
from coserve.model.base import Base
from coserve.model.load import load_base, load_model
from coserve.tiny.world import KINDS, questions
from coserve.train.fresh import fresh_adapter
from coserve.workload.shapes import ModelShape
from coserve.zoo.adding import add
from coserve.zoo.equivalence import evaluate
from coserve.zoo.finetune import FullFineTuning, choose, finetune
from coserve.zoo.store import Zoo

FOUNDATION: Final = "coserve-tiny"
LARGE: Final = "large"
SERVED: Final = (  # twelve that are asked for at once
    *(f"full-{number}" for number in range(1, 7)), *(f"lora-{number}" for number in range(1, 5)),
    "ia3-9", "bottleneck-10",
)  # fmt: skip
_ATTENTION: Final = ["q_proj", "k_proj", "v_proj", "o_proj"]
_LORA: Final[Sequence[dict[str, Any]]] = (
    {"rank": 4, "targets": _ATTENTION[::2]}, {"rank": 8, "targets": _ATTENTION}, {"rank": 8}, {"rank": 16},
    {"rank": 16, "targets": _ATTENTION}, {"rank": 4}, {"rank": 8, "targets": ["gate_proj", "up_proj"]},
    {"rank": 2},
)  # fmt: skip
_OTHERS: Final[Sequence[dict[str, Any]]] = (
    {"type": "ia3"}, {"type": "bottleneck"}, {"type": "bitfit"},
    {"type": "prefix_tuning", "num_virtual_tokens": 16},
)  # fmt: skip
_WIDTHS: Final = (192, 320)  # the embedded model's is 256
_HEADS: Final = 64  # width of an attention head, as the embedded model has it
_STIRRED: Final = 0.05  # standard deviation of what is added to fresh adapters' weights
_MOVED: Final = 0.02  # the same for weights of a large model's full fine-tune, of their own deviation
_STEPS: Final = 30  # optimizer steps of a full fine-tune
_RATE: Final = 1e-4
_EXAMPLES: Final = 240


def make_applications(zoo: Zoo, folder: Path, quick: bool = False) -> None:
    """Adds the foundation and twenty applications to a zoo; `folder` is for files on the way."""
    add(zoo, tiny.path(), FOUNDATION)
    base = load_base(tiny.path())
    _add_adapters(zoo, folder, base, FOUNDATION)
    for number, (components, kind) in enumerate(zip(_changed(base.depth), sorted(KINDS), strict=False)):
        steps = 2 if quick else _STEPS
        settings = FullFineTuning(components, 8, 8, _RATE, 256, steps, number)
        name = f"full-{number + 1}"
        finetune(zoo, FOUNDATION, _data(folder, kind, 16 if quick else _EXAMPLES), name, settings)
        evaluate(zoo, FOUNDATION, name)
    for width in _WIDTHS:
        add(zoo, other_width(folder, width), f"width-{width}")


def make_large_applications(zoo: Zoo, folder: Path, shape: ModelShape) -> None:
    """Adds a model of a shape with random weights, as `LARGE`, its adapters, and the full fine-tunes of
    `SERVED`: random changes of at least half of its layers each."""
    source = folder / LARGE
    shape.build().save_pretrained(source)
    copy_tokenizer(source)
    add(zoo, source, LARGE)
    _add_adapters(zoo, folder, load_base(source), LARGE)
    for number, components in enumerate(_changed(shape.layers), 1):
        generator, model = torch.Generator().manual_seed(number), load_model(source, torch.bfloat16)
        with torch.no_grad():
            for weight in choose(model, components):
                noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight.add_(noise, alpha=_MOVED * float(weight.float().std(correction=0)))
        changed = folder / f"full-{number}"
        model.save_pretrained(changed)
        copy_tokenizer(changed)
        add(zoo, changed, changed.name, LARGE)
        shutil.rmtree(changed)


def _add_adapters(zoo: Zoo, folder: Path, base: Base, foundation: str) -> None:
    for number, fields in enumerate((*_LORA, *_OTHERS)):
        name = f"{fields.get('type', 'lora')}-{number + 1}"
        drawn = _stirred(fresh_adapter(base, name, settings_of(fields), number), number)
        write_adapter(drawn, folder / name, foundation, base.model.config.model_type)
        add(zoo, folder / name, name)


def _changed(layers: int) -> list[tuple[str, ...]]:
    """The components in which each full fine-tune differs: everything, and at least half of the layers."""
    half = layers // 2
    return [
        (), (f"L1-{layers}",), (f"L{half + 1}-{layers}",), (f"L1-{half}",), (f"L{half - 1}-{layers - 1}",),
        (f"L{half}-{layers}", "H"),
    ]  # fmt: skip


def _stirred(adapter: AdapterVersion, seed: int) -> AdapterVersion:
    """The adapter as training might leave it: all of its weights moved."""
    generator = torch.Generator().manual_seed(seed)
    return adapter.with_parameters({
        name: tensor + _STIRRED * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in adapter.parameters().items()
    })  # fmt: skip


def _data(folder: Path, kind: str, count: int) -> Path:
    """Chats of one kind of question, to train on."""
    file = folder / f"{kind}.jsonl"
    chats = ({"messages": list(one.messages)} for one in questions(kind, "train", count))
    file.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    return file


def other_width(folder: Path, width: int, layers: int | None = None) -> Path:
    """A model with the embedded one's tokenizer and random weights, and its depth unless `layers` are
    given."""
    config = AutoConfig.from_pretrained(tiny.path(), trust_remote_code=False)
    config.update({
        "hidden_size": width, "num_attention_heads": width // _HEADS, "num_key_value_heads": 1,
        "intermediate_size": 11 * width // 4, "num_hidden_layers": layers or config.num_hidden_layers,
    })  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(width)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    path = folder / f"width-{width}"
    model.save_pretrained(path)
    copy_tokenizer(path)
    return path


def copy_tokenizer(folder: Path) -> None:
    """Gives the model in a folder the embedded one's tokenizer."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny.path() / file, folder / file)
