"""Orders to a process with limited memory, and its answers."""

from typing import Literal

import msgspec

Act = Literal["size", "control", "coserve", "share", "long", "swap", "accelerate", "mapped"]


class StreamedOrder(msgspec.Struct, frozen=True):
    """`size` says how much memory the imports take; `control` loads the model as a whole; `coserve` measures
    all of ours, `share` its rates alone; `long` answers a long prompt with few pages and with many; `swap`
    moves pages of preempted sequences of `swapped` tokens and computes them again, in tiers that pause for a
    page by so many times what computing it takes; `accelerate` and `mapped` are peers. Bytes, seconds and
    tokens; `memory` is what is left of the limit for the engine, `base_memory` what of it weights may
    take."""

    act: Act
    folder: str
    scratch: str
    threads: int
    seed: int
    vocabulary: int
    memory: int = 0
    base_memory: int = 0
    prompts: int = 4  # of a round, at once
    prompt: int = 32
    answer: int = 5
    rank: int = 4
    batch: int = 2
    length: int = 32
    steps: int = 5  # optimizer steps of a round
    rounds: int = 5
    bound_rounds: int = 3  # of a load with deferral bounds
    load: float = 20.0  # its seconds, in passes over the weights
    gap: float = 8.0  # the greatest between two of its requests, in passes
    bound: float = 8.0  # on a request's deferral, in passes
    long: int = 480  # tokens of a prompt that is answered with pages for a quarter of them
    swapped: tuple[int, ...] = (64, 256)
    pauses: tuple[float, ...] = (0.0, 2.0)


class Round(msgspec.Struct, frozen=True):
    """A round of two contestants in turn."""

    ours: float
    theirs: float


class Rates(msgspec.Struct, frozen=True):
    """Tokens a second of one round: of answers alone, of training alone, and of both in shared passes."""

    answers: float
    training: float
    both: float


class SwapCase(msgspec.Struct, frozen=True):
    """A sequence of so many tokens that was preempted, and whether the scheduler would have moved its pages.
    Seconds of each round: `moving` of its pages, written and read; `computing` of the steps that passed its
    tokens again; `moved` and `computed` until its next token. `nbytes` are those written and read to move
    its pages once."""

    tokens: int
    pause: float
    chosen: bool
    moving: tuple[float, ...]
    computing: tuple[float, ...]
    moved: tuple[float, ...]
    computed: tuple[float, ...]
    pages: int
    nbytes: tuple[int, ...]


class StreamedReport(msgspec.Struct, frozen=True):
    """`imports` in bytes. Rates are bytes a second: `disk` before and after, `decoding` of each round of
    answers alone. `deferral` has the fine-tuning tokens a second of algorithm 2 and of algorithm 1, `turns`
    the seconds of a round in turns and shared, of `tokens`; `rates` those of `share`; `peer` the seconds of a
    round of a peer's. `long` are the seconds of a long prompt with few pages and with many, `differs` the
    largest difference of its log-probabilities, and `long_nbytes` what was read.
    `swapped` are the cases of `swap`."""

    imports: int = 0
    loading: float = 0.0
    pass_nbytes: int = 0
    pass_seconds: float = 0.0
    free_rows: int = 0
    described: str = ""
    disk: tuple[float, ...] = ()
    decoding: tuple[float, ...] = ()
    deferral: tuple[Round, ...] = ()
    attained: tuple[Round, ...] = ()  # shares of requests that were deferred no longer than their bounds
    requests: int = 0
    turns: tuple[Round, ...] = ()
    tokens: int = 0  # trained and answered in a round of `turns`, or of a peer
    peer: tuple[float, ...] = ()
    rates: tuple[Rates, ...] = ()
    long: Round | None = None
    differs: float = 0.0
    long_nbytes: int = 0
    swapped: tuple[SwapCase, ...] = ()
