"""The worker's side: a peer that reads orders as lines and answers in lines of JSON. Imports the standard
library only."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass(frozen=True)
class Load:
    """A closed batch: a checkpoint's folder as transformers writes it, prompts of one length, and how many
    greedy tokens answer each."""

    folder: str
    prompts: Sequence[Sequence[int]]
    answer: int


@dataclass(frozen=True)
class Answers:
    """Answers to a load, and the seconds until each prompt had its first token and from then to the last."""

    prefill: float
    decode: float
    tokens: list[list[int]]


class Worker(Protocol):
    """A peer with a load."""

    def answer(self) -> Answers:
        """Answers the load once."""

    def logprobs(self) -> list[list[float]]:
        """Log-probabilities of every token after each prompt."""


def serve(make: Callable[..., Worker]) -> None:
    """Serves one load, by `make(load, **settings)`, until standard input ends. What libraries print goes to
    standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load, settings = json.loads(sys.stdin.readline())
    worker = make(Load(**load), **settings)
    for order in sys.stdin:
        found = worker.logprobs() if order.strip() == "logprobs" else asdict(worker.answer())
        print(json.dumps(found), file=answers, flush=True)
