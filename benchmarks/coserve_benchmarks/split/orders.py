"""Orders to the processes of the bench, and their reports; one JSON line each."""

from typing import Literal

import msgspec

Act = Literal["train", "decode", "engine"]
Work = Literal["train", "decode1", "decode16", "decode"]


class ClientOrder(msgspec.Struct, frozen=True):
    """A process's place in the bench, read once.

    `train` and `decode` are scripts with transformers and PEFT, `engine` is coserve's engine. With an
    `address` the frozen linears are those of the executor there, without one the process has its own.
    `privacy` is "", "noise" or "shares", for which there is a `second` executor. Without `maps` a base of
    its own is in memory of the process's own, as on a GPU; with it pages of the file are shared by all. With
    `keeps_freed` the C library keeps freed memory, which is faster; without it what a process holds is what
    it uses.
    """

    act: Act
    folder: str  # of the model
    dtype: str
    address: str = ""
    privacy: str = ""
    second: str = ""
    maps: bool = True
    keeps_freed: bool = True
    threads: int = 1
    seed: int = 0
    vocabulary: int = 0
    rank: int = 8
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    batch: int = 1  # examples of an optimizer step, or sequences that decode at once
    length: int = 256  # tokens of an example
    prompt: int = 8
    answer: int = 64  # tokens after which a sequence begins anew


class RoundOrder(msgspec.Struct, frozen=True):
    """One round: whole steps until `seconds` have passed, at least one."""

    work: Work
    seconds: float


class Ready(msgspec.Struct, frozen=True):
    """A process has its model and has made one step."""

    pid: int


class RoundReport(msgspec.Struct, frozen=True):
    """Outcome of a round: tokens (trained, or answered), and the seconds of each step."""

    tokens: int
    steps: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / sum(self.steps)
