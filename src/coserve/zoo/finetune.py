"""Full fine-tuning, offline: trains a copy of a model's weights, all or those of chosen components.

A plain loop of torch and transformers: AdamW on float32 master weights, which are rounded to the model's type
at the end. Weights that are not trained come out bit for bit as they were.
"""

import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.core.ranges import BELOW_ONE, MOST_COUNT, SMALLEST, check_range
from coserve.errors import ConfigError, LossNotFinite
from coserve.jobs.datasets import read
from coserve.text.tokenizer import load_tokenizer
from coserve.train.example import IGNORED, Example, check_tokens, epochs, steps_per_epoch
from coserve.train.lengths import Names, TooLong, check_lengths_of, limit_of
from coserve.train.records import prepare
from coserve.zoo.adding import add
from coserve.zoo.chain import model_of
from coserve.zoo.components import Architecture
from coserve.zoo.export import exported, load_exported
from coserve.zoo.manifest import Application
from coserve.zoo.store import Zoo, check_unlocked

OnStep = Callable[[int, int, float], object]  # told of the step, of how many, and its loss
_RANGE: Final = re.compile(r"([AFL])(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class FullFineTuning:
    """Settings of a full fine-tune. `components` are those that train: E, H, A3, F3, L3 (the attention and
    feed-forward of layer 3, from 1), ranges as L2-4; all where none is named. Raises ConfigError."""

    components: tuple[str, ...] = ()
    epochs: int = 1
    batch_size: int = 8  # examples
    learning_rate: float = 1e-5
    max_length: int | None = None  # tokens of an example
    max_steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("epochs", self.epochs, 1, 10_000, int)
        check_range("batch_size", self.batch_size, 1, MOST_COUNT, int)
        if self.max_steps is not None:
            check_range("max_steps", self.max_steps, 1, MOST_COUNT, int)
        check_range("learning_rate", self.learning_rate, SMALLEST, BELOW_ONE)
        check_range("seed", self.seed, -MOST_COUNT, MOST_COUNT, int)
        if self.max_length is not None:
            check_range("max_length", self.max_length, 2, MOST_COUNT, int)


def finetune(
    zoo: Zoo,
    parent: str,
    data: Path,
    name: str,
    settings: FullFineTuning = FullFineTuning(),
    on_step: OnStep = lambda step, steps, loss: None,
) -> Application:
    """Trains a copy of the model `parent` on a file of examples, and adds it as `name`. Raises ZooError,
    DataError, ConfigError and LossNotFinite."""
    zoo.check_free(name)
    check_unlocked(zoo)
    model_of(zoo.application(parent))
    with exported(zoo, parent) as folder, TemporaryDirectory(prefix="coserve-zoo-") as work:
        model = load_exported(folder)
        dtype = model.dtype
        examples = _examples(folder, data, model, settings)
        trained = choose(model, settings.components)
        train(model.float(), trained, examples, settings, on_step)
        out = Path(work) / name
        model.to(dtype).save_pretrained(out)
        for file in folder.iterdir():
            if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                shutil.copy(file, out / file.name)
        return add(zoo, out, name, parent, waits=True)


def choose(model: PreTrainedModel, components: Sequence[str]) -> list[nn.Parameter]:
    """Has the named components' parameters require gradients, and no others; returns them. Raises
    ConfigError for a component that the model does not have."""
    architecture = Architecture.of_model(model)
    wanted = places_of(components, architecture.places)
    found = []
    for name, parameter in model.named_parameters():
        place, _ = architecture.place(name)
        parameter.requires_grad_(place in wanted)
        if place in wanted:
            found.append(parameter)
    return found


def train(
    model: PreTrainedModel,
    trained: Sequence[nn.Parameter],
    examples: Sequence[Example],
    settings: FullFineTuning,
    on_step: OnStep = lambda step, steps, loss: None,
) -> None:
    """Trains parameters of a model in float32 in place. Raises LossNotFinite."""
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=0.0)
    batches = list(epochs(len(examples), settings.batch_size, settings.epochs, settings.seed))
    batches = batches[: settings.max_steps]
    assert len(batches) <= settings.epochs * steps_per_epoch(len(examples), settings.batch_size)
    model.eval()  # dropout would be drawn from torch's own generator
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        chosen = [examples[index] for index in batch]
        labels = sum(example.label_count for example in chosen)
        total = 0.0
        for example in chosen:
            loss = _loss(model, example) / labels
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if not math.isfinite(total):
            raise LossNotFinite(f"the loss of step {step} is {total}: try a smaller learning rate")
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        on_step(step, len(batches), total)


def _loss(model: PreTrainedModel, example: Example) -> Tensor:
    """Sum of an example's losses over its labels."""
    logits = model(input_ids=torch.tensor([example.tokens], device=model.device), use_cache=False).logits[0]
    labels = torch.tensor(example.labels, device=logits.device)
    return nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def _examples(
    folder: Path, data: Path, model: PreTrainedModel, settings: FullFineTuning
) -> Sequence[Example]:
    text = model.config.get_text_config()
    positions = int(getattr(text, "max_position_embeddings", None) or 1 << 30)
    too_long: TooLong = "error" if settings.max_length is None else "truncate"
    limit = limit_of(settings.max_length, too_long, positions, names=Names("max_length", None))
    prepared = prepare(read(data), load_tokenizer(folder), limit=limit)
    check_lengths_of(prepared, limit)
    check_tokens(prepared, int(text.vocab_size))
    return prepared.examples


def places_of(components: Sequence[str], places: int) -> set[int]:
    """Places of named components (E, H, A3, F3, L3, L2-4) in a chain with that many; all where none is named.
    Raises ConfigError."""
    if not components:
        return set(range(places))
    layers, found = (places - 2) // 2, set[int]()
    for one in components:
        if one in ("E", "H"):
            found.add(0 if one == "E" else places - 1)
            continue
        if (match := _RANGE.fullmatch(one)) is None:
            raise ConfigError(f"{one!r} is no component: expected E, H, A3, F3, L3 or a range as L2-4")
        kind, first, last = match[1], int(match[2]), int(match[3] or match[2])
        if not 1 <= first <= last <= layers:
            raise ConfigError(f"{one!r} is no component of a model with {layers} layers")
        for layer in range(first, last + 1):
            found |= (
                {2 * layer - 1} if kind == "A" else {2 * layer} if kind == "F" else {2 * layer - 1, 2 * layer}
            )
    return found
