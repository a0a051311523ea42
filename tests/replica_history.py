"""Checks what clients of several servers were told, in the way of Jepsen, against what each server shows once
all faults are over: nothing acknowledged is lost or doubled, nothing removed comes back, and one version of a
name has one content.

Each thing that a client asks for has a *mark* of its own, by which it is found again: the name of a file, the
metadata of a job, the name of an adapter.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["file", "job", "batch", "adapter", "key", "pin", "eval", "response", "run"]
SAME: Final = 0.02  # of figures of equal runs: sums in another order of rows differ
_ENDED: Final = {"job": "succeeded", "batch": "completed", "eval": "completed", "response": "completed"}


@dataclass
class Asked:
    """A thing that clients asked for. `ids` are those of the acknowledgements, `wanted` its content, or its
    number of steps, lines or items; without it nobody was told which of several contents it has."""

    kind: Kind
    mark: str
    wanted: str = ""
    ids: list[str] = field(default_factory=list)
    removal_asked: bool = False
    removed: bool = False


@dataclass(frozen=True)
class Shown:
    """A thing as a server shows it. `content` is its digest; of a job the name of its model, and `steps`
    those that were told, in order; of a batch the digest of its results, and the lines that have one; of an
    eval's run that of its outcomes, and the items that have one."""

    kind: Kind
    mark: str
    id: str
    content: str = ""
    status: str = ""
    steps: tuple[int, ...] = ()


class Notes:
    """A record of what clients of all threads asked for and were told."""

    def __init__(self) -> None:
        self.asked: dict[tuple[Kind, str], Asked] = {}
        self.versions: dict[str, set[str]] = defaultdict(set)  # that answers named, by the name of the model
        self.figures: dict[int, list[dict[str, float]]] = defaultdict(list)  # of `tinker` runs, by step
        self.wrong: list[str] = []  # what clients saw themselves
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def ask(self, kind: Kind, mark: str, wanted: str = "") -> Asked:
        """Notes a thing before it is asked for."""
        with self._lock:
            return self.asked.setdefault((kind, mark), Asked(kind, mark, wanted))

    def answer(self, model: str, version: str) -> None:
        with self._lock:
            self.versions[model].add(version)
            self.counts["answers"] += 1

    def figure(self, step: int, metrics: dict[str, float]) -> None:
        """Notes what a run's client was told of its step."""
        with self._lock:
            self.figures[step].append(metrics)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def refuse(self, sentence: str) -> None:
        with self._lock:
            self.wrong.append(sentence)


def contradictions(notes: Notes, views: Mapping[str, Sequence[Shown]]) -> list[str]:
    """Sentences about what must not be, of what each server shows in the end."""
    found = list(notes.wrong)
    contents: dict[tuple[Kind, str], set[tuple[str, str]]] = defaultdict(set)
    for server, view in views.items():
        counted = Counter((one.kind, one.mark) for one in view)
        for (kind, mark), asked in notes.asked.items():
            number, what = counted[kind, mark], f"{kind} {mark} on {server}"
            if number > 1:
                found.append(f"{what} is there {number} times")
            if asked.ids and not asked.removal_asked and not number:
                found.append(f"{what} was acknowledged and is lost")
            if asked.removed and number:
                found.append(f"{what} was removed and is there")
        for one in view:
            known = notes.asked.get((one.kind, one.mark))
            what = f"{one.kind} {one.mark} on {server}"
            if known is None:
                found.append(f"{what} was never asked for")
                continue
            if known.ids and set(known.ids) != {one.id}:
                found.append(f"{what} is {one.id}, acknowledged as {' and '.join(sorted(set(known.ids)))}")
            if one.kind in _ENDED:
                if one.status != _ENDED[one.kind]:
                    found.append(f"{what} is {one.status} in the end")
                if one.steps != tuple(range(1, int(known.wanted) + 1)):
                    found.append(f"{what} told the steps {one.steps}")
            elif known.wanted and one.content != known.wanted:
                found.append(f"{what} has another content than was sent")
            contents[one.kind, one.mark].add((one.id, one.content))
    found += [
        f"{kind} {mark} differs between servers" for (kind, mark), of in contents.items() if len(of) > 1
    ]
    for step, told in notes.figures.items():
        if any(one["step"] != step for one in told):
            found.append(f"step {step} of a run was told as {sorted(one['step'] for one in told)}")
        for name in ("loss:mean", "grad_norm"):
            values = [one[name] for one in told]
            if max(values) - min(values) > SAME * abs(max(values)):
                found.append(f"the {name} of step {step} differs between equal runs: {sorted(values)}")
    for model, versions in notes.versions.items():
        if len(versions) > 1:
            found.append(f"answers of {model} named the versions {' and '.join(sorted(versions))}")
    return found
