"""Full fine-tunes of the embedded model, one for each new task, with memory for fewer of them, with and
without approximate chains, at three loads: seconds, the share of answers that are adapted, and how accurate
these are (BlockLLM, 7.3)."""

import gc
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

from coserve import tiny
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.text.tokenizer import load_tokenizer, token_ids
from coserve.tiny.newtasks import NEW_TASKS, examples
from coserve.workload.requests import greedy
from coserve.zoo.adding import add
from coserve.zoo.alternatives import Fidelity, Ladder
from coserve.zoo.equivalence import evaluate
from coserve.zoo.finetune import FullFineTuning
from coserve.zoo.ladders import make_ladder
from coserve.zoo.store import Zoo
from coserve.zoo.views import Served, serve_from
from coserve_benchmarks.drawing import MUTED, OUTPUT, new_figure, save, style
from coserve_benchmarks.results import Results
from coserve_benchmarks.zoo.alternatives import shortened, text_of, trained
from coserve_benchmarks.zoo.applications import FOUNDATION
from coserve_benchmarks.zoo.provision import ANSWER, Asked, Outcome, Together, make_load, replay
from coserve_benchmarks.zoo.serving import CONFIG

LOADS: Final = (0.5, 1.0, 1.5)  # of what exact answers can keep up with
# Of components and chains. These models are small and each layer counts: at the usual 0.98 one or two
# components of a full fine-tune are equivalent, and chains hardly differ from it.
THRESHOLD: Final = 0.7
LEAST: Final = 0.6
_TUNED: Final = FullFineTuning(epochs=8, batch_size=8, learning_rate=1e-4, max_steps=30)
_ROOM: Final = 1.7  # of the bytes of a full fine-tune
_TRAINED, _JUDGED = 160, 60  # questions of a task that a model is trained on, and that chains are judged on
_BURST: Final = 64  # requests at once, to find how many a second can be answered
_SECONDS: Final = 12.0  # in which requests arrive


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer: the tokens, and the chain that they are of, 0 for the exact one."""

    tokens: tuple[int, ...]
    chain: int


class AdaptiveEngine:
    """Requests under way in an engine with `room` bytes for full fine-tunes, which may take the chains in
    `chains`, by application, the most accurate first; None is the foundation."""

    def __init__(
        self, served: Served, names: Sequence[str], room: int, chains: Mapping[str, Sequence[str | None]]
    ) -> None:
        gc.collect()
        self._engine = Engine(str(served.model), replace(CONFIG, adapter_memory=room))
        self._chains = chains
        for name in names:
            self._engine.adapters.register(name, served.adapters[name])
            for chain in chains.get(name, ()):
                if chain is not None and (folder := served.chains[name][chain]) is not None:
                    self._engine.adapters.register(chain, folder)
        self._answers: list[tuple[Asked, Completion]] = []
        self.answered: dict[Asked, Answered] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def submit(self, asked: Asked) -> None:
        name = asked.application
        alternatives = self._chains.get(name, ())
        answer = self._engine.generate(
            asked.prompt, name, greedy(asked.answer), text=False, alternatives=alternatives
        )
        self._answers.append((asked, answer))

    def step(self) -> list[Asked]:
        self._engine.step()
        done = [pair for pair in self._answers if pair[1].finish_reason is not None]
        self._answers = [pair for pair in self._answers if pair[1].finish_reason is None]
        for asked, answer in done:
            self.answered[asked] = Answered(tuple(answer.result().tokens), answer.alternative)
        return [asked for asked, _ in done]


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """One load on both engines: requests a second, what came of them, the share of answers that are adapted,
    the means of what their chains were judged to be, of all answers and of the exact chains, and the share of
    an answer's tokens that are those of the exact answer at the same place."""

    rate: float
    exact: Outcome
    adaptive: Outcome
    adapted: float
    similarity: float
    accuracy: float
    exact_accuracy: float
    same: float


def measure_adaptive(results: Results, folder: Path, quick: bool, picture: Path | None) -> None:
    """Makes full fine-tunes for new tasks with a ladder each, and measures the loads, each on the same
    arrivals for both engines. `folder` is for files on the way."""
    zoo, texts = make_fine_tunes(folder, quick)
    names = sorted(texts)
    ladders = {name: _ladder(zoo, name, text) for name, text in texts.items()}
    served = serve_from(zoo)
    chains: dict[str, list[str | None]] = {
        name: [chain if folder is not None else None for chain, folder in served.chains[name].items()]
        for name in names
    }
    room = int(_ROOM * max(ladder.nbytes for ladder in ladders.values()))
    engines = [AdaptiveEngine(served, names, room, own) for own in ({}, chains)]
    tokenizer = load_tokenizer(served.model)
    ids = {name: token_ids(tokenizer, text) for name, text in texts.items()}
    burst = [replace(one, at=0.0) for one in _load(names, _BURST / 8 if quick else _BURST, 1.0, ids, 0)]
    for engine in engines:
        replay(Together(dict.fromkeys(names, engine)), burst)
    capacity = replay(Together(dict.fromkeys(names, engines[0])), burst).rate / ANSWER
    found = []
    for turn, share in enumerate(LOADS):
        load = _load(names, share * capacity, 1.0 if quick else _SECONDS, ids, turn + 1)
        exact, adaptive = (replay(Together(dict.fromkeys(names, engine)), load) for engine in engines)
        own = [engine.answered[asked] for engine in engines[1:] for asked in load]
        plain = [engines[0].answered[asked] for asked in load]
        judged = [
            _judged(ladders[asked.application], one.chain) for asked, one in zip(load, own, strict=True)
        ]
        found.append(
            LoadOutcome(
                rate=share * capacity,
                exact=exact,
                adaptive=adaptive,
                adapted=fmean(one.chain > 0 for one in own),
                similarity=fmean(one.similarity for one in judged),
                accuracy=fmean(one.accuracy for one in judged),
                exact_accuracy=fmean(ladders[asked.application].own.accuracy for asked in load),
                same=fmean(_same(one, other) for one, other in zip(own, plain, strict=True)),
            )
        )
    for share, one in zip(LOADS, found, strict=True):
        _report(results, f"adaptive.{share:g}", one)
    for name, ladder in ladders.items():
        for chain in ladder.chains:
            results.figure(f"adaptive.chain.{chain.name}.bytes", chain.nbytes / ladder.nbytes, f"of {name}'s")
            results.figure(f"adaptive.chain.{chain.name}.similarity", chain.fidelity.similarity, "cosine")
    results.note(
        "adaptive",
        f"{len(names)} full fine-tunes with memory for the weights of {_ROOM:g} of them; loads are "
        f"shares of {capacity:.1f} requests a second, which exact answers keep up with; prompts are 16 to "
        f"96 tokens of the text that chains are judged on, answers {ANSWER}; components from {THRESHOLD:g}, "
        f"chains from {LEAST:g} on",
    )
    if picture is not None:
        draw_loads(found, picture)


def make_fine_tunes(folder: Path, quick: bool) -> tuple[Zoo, dict[str, str]]:
    """A zoo with the embedded model and a full fine-tune of it for each new task, compared with it; and texts
    of these tasks that they were not trained on, by name."""
    zoo, texts = Zoo.create(folder / "adaptive"), dict[str, str]()
    add(zoo, tiny.path(), FOUNDATION)
    settings = shortened(_TUNED, 1 if quick else None)
    for task in sorted(NEW_TASKS):
        text = text_of([examples(task, "train", 16 if quick else _TRAINED)])
        texts[task] = text_of([examples(task, "held_out", 16 if quick else _JUDGED)])
        add(zoo, trained(tiny.path(), folder / task, text, settings), task, FOUNDATION)
        evaluate(zoo, FOUNDATION, task, texts[task])
    return zoo, texts


def draw_loads(found: Sequence[LoadOutcome], path: Path) -> None:
    """Draws accuracy and the share adapted over the load, and beside it how late answers are."""
    rates = [one.rate for one in found]
    with style():
        figure = new_figure(8.4, 3.4)
        left, right = figure.subplots(1, 2)
        for label, values, color, line in (
            ("answers adapted", [one.adapted for one in found], OUTPUT, "--"),
            ("similarity", [one.similarity for one in found], OUTPUT, "-"),
            ("next tokens right", [one.accuracy for one in found], OUTPUT, ":"),
            ("next tokens right, all exact", [one.exact_accuracy for one in found], MUTED, ":"),
        ):
            left.plot(rates, values, line, color=color, marker="o", markersize=3, label=label)
        left.set_ylim(0.0, 1.05)
        left.set_title("Accuracy, and answers adapted")
        for label, values, color in (
            ("some adapted", [one.adaptive.p95 for one in found], OUTPUT),
            ("all exact", [one.exact.p95 for one in found], MUTED),
        ):
            right.plot(rates, values, color=color, marker="o", markersize=3, label=label)
        right.set_ylim(bottom=0.0)
        right.set_title("Seconds to an answer, 95th percentile")
        for axes in (left, right):
            axes.set_xlabel("requests a second")
            axes.legend(fontsize=8)
        save(figure, path)


def _ladder(zoo: Zoo, name: str, text: str) -> Ladder:
    made = make_ladder(zoo, name, text, least=LEAST, threshold=THRESHOLD).made
    assert isinstance(made, Ladder)
    return made


def _load(
    names: Sequence[str], rate: float, seconds: float, ids: Mapping[str, Sequence[int]], seed: int
) -> list[Asked]:
    """Arrivals with prompts from each application's own text."""
    draws = random.Random(seed)
    load = []
    for one in make_load(names, rate, seconds, 4, seed):
        own = ids[one.application]
        start = draws.randrange(len(own) - len(one.prompt))
        load.append(replace(one, prompt=tuple(own[start : start + len(one.prompt)])))
    return load


def _judged(ladder: Ladder, chain: int) -> Fidelity:
    return ladder.chains[chain - 1].fidelity if chain else ladder.own


def _same(one: Answered, other: Answered) -> float:
    return fmean(a == b for a, b in zip(one.tokens, other.tokens, strict=True))


def _report(results: Results, name: str, found: LoadOutcome) -> None:
    results.figure(f"{name}.requests", found.rate, "a second")
    results.figure(f"{name}.adapted", found.adapted, "of the answers")
    results.figure(f"{name}.similarity", found.similarity, "of the chains that answered, cosine")
    results.figure(f"{name}.accuracy", found.accuracy, "next tokens that these have right")
    results.figure(f"{name}.accuracy.exact", found.exact_accuracy, "next tokens that exact chains have right")
    results.figure(f"{name}.same", found.same, "of an answer's tokens, beside the exact answer's")
    for kind, outcome in (("exact", found.exact), ("adaptive", found.adaptive)):
        results.figure(f"{name}.{kind}", outcome.rate, "tokens/s")
        results.figure(f"{name}.{kind}.p50", outcome.p50, "seconds")
        results.figure(f"{name}.{kind}.p95", outcome.p95, "seconds")
