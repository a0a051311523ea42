"""Alternatives of the embedded model, made on the spot (BlockLLM, tables 3 and 4, figures 10, 11 and 13):
stitching blocks between it and a smaller one, surrogates of its blocks, and accuracies at each depth."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Final

import torch
from transformers import AutoTokenizer

from coserve import tiny
from coserve.core.request import BASE
from coserve.engine.engine import Engine
from coserve.engine.remembered import device_name
from coserve.model.load import load_model
from coserve.text.tokenizer import load_tokenizer, token_ids
from coserve.tiny.newtasks import NEW_TASKS, examples
from coserve.tiny.world import KINDS, Question, questions
from coserve.train.example import IGNORED, Example
from coserve.workload.requests import greedy
from coserve.zoo.adding import add
from coserve.zoo.alternatives import Fidelity, Pruning, Stitching
from coserve.zoo.depths import measure_depths
from coserve.zoo.distilling import DistillationSettings, windows_of
from coserve.zoo.finetune import FullFineTuning, choose, train
from coserve.zoo.picture import draw_depths
from coserve.zoo.profile import Machine
from coserve.zoo.stitching import stitch
from coserve.zoo.store import Zoo
from coserve.zoo.surrogates import make_surrogate, similarities_behind, surrogate_of
from coserve.zoo.views import serve_from
from coserve_benchmarks.results import Results
from coserve_benchmarks.zoo.applications import FOUNDATION, copy_tokenizer, other_width
from coserve_benchmarks.zoo.serving import CONFIG

SMALL: Final = "small"
TUNED: Final = "tuned"
_WIDTH, _LAYERS = 128, 3  # of the smaller model
_BLOCKS: Final = ("A3", "F3", "L3", "L3-5")
ACCEPTED: Final = 0.95  # cosine similarity from which a speculated output is right (BlockLLM, 7.1)
_ROWS, _ROUNDS = 8, 7  # answers at once, and paired rounds, of which the median counts
_QUESTIONS: Final = 40  # of each kind, in a text
_ROW: Final = 128  # tokens of an example on which models are trained
_SMALL: Final = FullFineTuning(epochs=8, batch_size=8, learning_rate=3e-3, max_steps=400)
_TUNED: Final = FullFineTuning(epochs=8, batch_size=8, learning_rate=3e-4, max_steps=60)
_TRAINING: Final = DistillationSettings(epochs=4, batch_size=8, learning_rate=2e-3, window=64)


def measure_alternatives(results: Results, folder: Path, quick: bool, picture: Path | None) -> None:
    """Makes the models and the alternatives and writes down how near the embedded model they are on text that
    was held out. A full fine-tune of it for tasks that are new to it is judged with layers of the embedded
    model at each depth, on these tasks, and drawn to `picture`."""
    zoo = make_models(folder, quick)
    count = 8 if quick else _QUESTIONS
    text = text_of([questions(kind, "train", count, 1) for kind in sorted(KINDS)])
    settings = replace(_TRAINING, epochs=1, max_steps=1) if quick else _TRAINING
    for first, second in ((SMALL, FOUNDATION), (FOUNDATION, SMALL)):
        _stitched(results, zoo, (first, second), text, settings)
    _stitched_served(results, zoo, quick)
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
    _served(results, zoo, quick)
    _speculated(results, zoo, text, settings.window)
    new = text_of([examples(task, "held_out", count) for task in sorted(NEW_TASKS)])
    found = measure_depths(zoo, TUNED, new, FOUNDATION, window=settings.window)
    _fidelity(results, "depths.own", found.own)
    for name, depths in found.alternatives.items():
        for depth in depths:
            accuracy = depth.fidelity.accuracy
            results.figure(f"depths.{name}.at-{depth.layers}", accuracy, "next tokens that are right")
    if picture is not None:
        draw_depths(found.accuracies(), found.own.accuracy, TUNED, picture)


def _served(results: Results, zoo: Zoo, quick: bool) -> None:
    """Answers of the chain with each surrogate over those of the exact one, tokens a second, by turns in one
    engine: alone in the steps, and half of the rows beside exact ones."""
    served = serve_from(zoo, FOUNDATION, least=0.0)
    engine = Engine(str(served.model), CONFIG)
    for name, folder in served.chains[FOUNDATION].items():
        assert folder is not None
        engine.adapters.register(name, folder)
        engine.adapters.pin(name)
    for block in _BLOCKS:
        own = f"{FOUNDATION}.{block}"
        mixes: dict[str, list[str | None]] = {"alone": [own] * _ROWS, "half": [None, own] * (_ROWS // 2)}
        rounds: dict[str, list[float]] = {mix: [] for mix in mixes}
        for _ in range(1 if quick else _ROUNDS):
            exact = _seconds_of(engine, [None] * _ROWS)
            for mix, versions in mixes.items():
                rounds[mix].append(exact / _seconds_of(engine, versions))
        for mix, ratios in rounds.items():
            results.figure(f"surrogate.{block}.served.{mix}", median(ratios), "times the exact tokens/s")


def _stitched_served(results: Results, zoo: Zoo, quick: bool) -> None:
    """Answers of each chain of the two models, and of the smaller one, over those of the larger, tokens a
    second, by turns in one engine."""
    served = serve_from(zoo, least=-1.0)
    engine = Engine(str(served.model), CONFIG)
    engines = {served.name: engine}
    engines |= {name: engine.add_base(name, str(folder)) for name, folder in served.bases.items()}
    for name, stitched in served.stitched.items():
        first, second = (BASE if base == served.name else base for base in (stitched.first, stitched.second))
        engines[name] = engine.add_base(name, replace(stitched, first=first, second=second))
    rounds: dict[str, list[float]] = {name: [] for name in (SMALL, *served.stitched)}
    for _ in range(1 if quick else _ROUNDS):
        exact = _seconds_of(engines[FOUNDATION], [None] * _ROWS)
        for name, ratios in rounds.items():
            ratios.append(exact / _seconds_of(engines[name], [None] * _ROWS))
    for name, ratios in rounds.items():
        key = f"stitch.{SMALL}-alone"
        if (found := served.stitched.get(name)) is not None:
            widths = "-".join(str(zoo.application(one).width) for one in (found.first, found.second))
            key = f"stitch.{widths}.behind-{name.rpartition('@')[2]}"
        results.figure(f"{key}.served", median(ratios), "times the larger model's tokens/s")


def _seconds_of(engine: Engine, versions: Sequence[str | None]) -> float:
    """Seconds in which an engine answers one prompt of 32 tokens with 32 for each of these versions."""
    begin = time.perf_counter()
    for one in [engine.generate(range(5, 37), version, greedy(32), text=False) for version in versions]:
        one.result()
    return time.perf_counter() - begin


def _speculated(results: Results, zoo: Zoo, text: str, window: int) -> None:
    """Counts the held-out tokens at which the prediction of each surrogate would be accepted, and those at
    which it would be corrected. Each is alone in its chain, and none is the last block."""
    rights, count = 0, 0
    for block in _BLOCKS:
        name = f"{FOUNDATION}.{block}"
        made = zoo.alternatives.get(name).made
        assert isinstance(made, Pruning)
        windows = windows_of(zoo, zoo.application(FOUNDATION), text, window).held_out
        with surrogate_of(zoo, name) as (whole, layers):
            behind = similarities_behind(whole, layers, made.stop - 1, windows)
        right = int((behind >= ACCEPTED).sum())
        results.figure(f"speculation.{block}.right", right / behind.numel(), "of the tokens")
        rights, count = rights + right, count + behind.numel()
    note = f"{rights} right and {count - rights} wrong predictions of {len(_BLOCKS)} surrogates, each alone"
    results.row("speculation.right", rights / count, note=note)


def make_models(folder: Path, quick: bool) -> Zoo:
    """A zoo with the embedded model, a smaller one that is trained on text of the same questions, and a full
    fine-tune of the first on text of new tasks. `folder` is for files on the way."""
    zoo, count = Zoo.create(folder / "alternatives"), 8 if quick else 4 * _QUESTIONS
    add(zoo, tiny.path(), FOUNDATION)
    steps = 2 if quick else None
    old = text_of([questions(kind, "train", count) for kind in sorted(KINDS)])
    untrained = other_width(folder, _WIDTH, _LAYERS)
    add(zoo, trained(untrained, folder / SMALL, old, shortened(_SMALL, steps)), SMALL)
    new = text_of([examples(task, "train", count) for task in sorted(NEW_TASKS)])
    add(zoo, trained(tiny.path(), folder / TUNED, new, shortened(_TUNED, steps)), TUNED, FOUNDATION)
    return zoo


def trained(source: Path, folder: Path, text: str, settings: FullFineTuning) -> Path:
    """A copy of a model, all of whose weights are trained on all tokens of a text."""
    model = load_model(source, torch.float32)
    ids = token_ids(load_tokenizer(source), text)
    rows = [ids[start : start + _ROW] for start in range(0, len(ids) - _ROW, _ROW)]
    train(model, choose(model, ()), [Example(tuple(row), (*row[1:], IGNORED)) for row in rows], settings)
    model.to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


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


def shortened(settings: FullFineTuning, steps: int | None) -> FullFineTuning:
    return settings if steps is None else replace(settings, max_steps=steps)


def text_of(kinds: Sequence[Sequence[Question]]) -> str:
    """Questions of several kinds, by turns, as the models see them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    chats = [list(one.messages) for one in chain(*zip(*kinds, strict=True))]
    return "".join(tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats)


def _fidelity(results: Results, name: str, found: Fidelity) -> None:
    results.figure(f"{name}.similarity", found.similarity, "cosine at the end")
    results.figure(f"{name}.agreement", found.agreement, "likeliest tokens that are the same")
    results.figure(f"{name}.accuracy", found.accuracy, "next tokens that are right")
    results.figure(f"{name}.loss", found.loss, "nats a token")
