"""Alternatives of the embedded model, made on the spot (BlockLLM, tables 3 and 4, figures 10, 11 and 13):
stitching blocks between it and a smaller one, surrogates of its blocks, and accuracies at each depth."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final

import torch
from transformers import AutoTokenizer

from coserve import tiny
from coserve.engine.remembered import device_name
from coserve.tiny.newtasks import NEW_TASKS, examples
from coserve.tiny.world import KINDS, Question, questions
from coserve.zoo.adding import add
from coserve.zoo.alternatives import Fidelity, Pruning, Stitching
from coserve.zoo.depths import measure_depths
from coserve.zoo.distilling import DistillationSettings
from coserve.zoo.finetune import FullFineTuning, finetune
from coserve.zoo.picture import draw_depths
from coserve.zoo.profile import Machine
from coserve.zoo.stitching import stitch
from coserve.zoo.store import Zoo
from coserve.zoo.surrogates import make_surrogate
from coserve_benchmarks.results import Results
from coserve_benchmarks.zoo.applications import FOUNDATION, other_width

SMALL: Final = "small"
TUNED: Final = "tuned"
_WIDTH, _LAYERS = 128, 3  # of the smaller model
_BLOCKS: Final = ("A3", "F3", "L3", "L3-5")
_QUESTIONS: Final = 40  # of each kind, in a text
_SMALL: Final = FullFineTuning(epochs=2, batch_size=8, learning_rate=3e-3, max_length=256, max_steps=300)
_TUNED: Final = FullFineTuning(epochs=2, batch_size=8, learning_rate=3e-4, max_length=256, max_steps=80)
_TRAINING: Final = DistillationSettings(epochs=4, batch_size=8, learning_rate=2e-3, window=64)


def measure_alternatives(results: Results, folder: Path, quick: bool, picture: Path | None) -> None:
    """Makes the models and the alternatives and writes down how near the embedded model they are on text that
    was held out. A full fine-tune of it for tasks that are new to it is judged with layers of the embedded
    model at each depth, on these tasks, and drawn to `picture`."""
    zoo = make_models(folder, quick)
    count = 8 if quick else _QUESTIONS
    text = _text([questions(kind, "train", count, 1) for kind in sorted(KINDS)])
    settings = replace(_TRAINING, epochs=1, max_steps=1) if quick else _TRAINING
    for first, second in ((SMALL, FOUNDATION), (FOUNDATION, SMALL)):
        _stitched(results, zoo, (first, second), text, settings)
    machine = Machine.of(device_name(torch.device("cpu")))
    for block in _BLOCKS:
        made = make_surrogate(zoo, FOUNDATION, block, text, machine, settings=settings).made
        assert isinstance(made, Pruning)
        own = f"surrogate.{block}"
        results.figure(f"{own}.similarity", made.similarity, "cosine behind the block")
        _fidelity(results, f"{own}.pruned", made.before)
        _fidelity(results, f"{own}.recovered", made.after)
        results.figure(f"{own}.bytes", made.nbytes[1] / made.nbytes[0], "of the block's")
        results.figure(f"{own}.speedup", made.seconds[0] / made.seconds[1], "times as fast, one sequence")
    new = _text([examples(task, "held_out", count) for task in sorted(NEW_TASKS)])
    found = measure_depths(zoo, TUNED, new, FOUNDATION, window=settings.window)
    _fidelity(results, "depths.own", found.own)
    for name, depths in found.alternatives.items():
        for depth in depths:
            accuracy = depth.fidelity.accuracy
            results.figure(f"depths.{name}.at-{depth.layers}", accuracy, "next tokens that are right")
    if picture is not None:
        draw_depths(found.accuracies(), found.own.accuracy, TUNED, picture)


def make_models(folder: Path, quick: bool) -> Zoo:
    """A zoo with the embedded model, a smaller one that is trained on the same questions, and a full
    fine-tune of the first for new tasks. `folder` is for files on the way."""
    zoo, count = Zoo.create(folder / "alternatives"), 8 if quick else 4 * _QUESTIONS
    add(zoo, tiny.path(), FOUNDATION)
    add(zoo, other_width(folder, _WIDTH, _LAYERS), "untrained")
    steps = 2 if quick else None
    old = _chats([questions(kind, "train", count) for kind in sorted(KINDS)])
    finetune(zoo, "untrained", _file(folder, old), SMALL, _shortened(_SMALL, steps))
    new = _chats([examples(task, "train", count) for task in sorted(NEW_TASKS)])
    finetune(zoo, FOUNDATION, _file(folder, new), TUNED, _shortened(_TUNED, steps))
    return zoo


def _stitched(
    results: Results, zoo: Zoo, models: tuple[str, str], text: str, settings: DistillationSettings
) -> None:
    made = stitch(zoo, *models, text, settings=settings).made
    assert isinstance(made, Stitching)
    widths = "-".join(str(zoo.application(name).width) for name in models)
    results.figure(f"stitch.{widths}.seconds", made.seconds, f"seconds of {made.steps} steps")
    for point in made.points:
        place = f"stitch.{widths}.behind-{point.layers}-at-{point.enters + 1}"
        _fidelity(results, place, point.fidelity)
    _fidelity(results, "stitch.small-alone", made.alone)


def _shortened(settings: FullFineTuning, steps: int | None) -> FullFineTuning:
    return settings if steps is None else replace(settings, max_steps=steps)


def _chats(kinds: Sequence[Sequence[Question]]) -> list[list[dict[str, str]]]:
    """Questions of several kinds, by turns."""
    return [[dict(message) for message in one.messages] for one in chain(*zip(*kinds, strict=True))]


def _text(kinds: Sequence[Sequence[Question]]) -> str:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    return "".join(tokenizer.apply_chat_template(chat, tokenize=False) for chat in _chats(kinds))


def _file(folder: Path, chats: Sequence[object]) -> Path:
    file = folder / "chats.jsonl"
    file.write_text("".join(f"{json.dumps({'messages': chat})}\n" for chat in chats))
    return file


def _fidelity(results: Results, name: str, found: Fidelity) -> None:
    results.figure(f"{name}.similarity", found.similarity, "cosine at the end")
    results.figure(f"{name}.agreement", found.agreement, "likeliest tokens that are the same")
    results.figure(f"{name}.accuracy", found.accuracy, "next tokens that are right")
    results.figure(f"{name}.loss", found.loss, "nats a token")
