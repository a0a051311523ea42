"""Messages between a host and an executor's own process (`remote`, `service`).

There is a socket for steps (plans and commands in order, one answer each), one for signals (numbers of pauses
in, heartbeats out), and some for commands beside steps, one at a time each.

FAILED, with an error's class and text, says that a pass of the oldest plan has failed (`PassFailed`). It
stays the oldest, plans behind it wait, and nothing of them runs until the host sends AGAIN: for the plan as
it is, or for its `narrower` one.
"""

import struct
from typing import Final

import msgspec

from coserve.config import EngineConfig
from coserve.executors.executor import ExecutorSpec
from coserve.parallel.ranks import Rank

# First byte of a message on the steps' socket. After PLAN come the numbers of the last pause that was asked
# for and of the last that is withdrawn; after RESULT a digest of the tokens that were drawn, and the result
# unless it is the first rank's too.
PLAN, COMMAND, RESULT, REPLY = b"P", b"C", b"R", b"A"
FAILED, AGAIN = b"F", b"G"
AS_IT_IS, NARROWER = b"=", b"<"  # after AGAIN
ENDED = b"E"  # of a rank, which fails: when, by the machine's clock, why, and whether work may be to blame
NUMBER: Final = struct.Struct(">Q")
PAUSES: Final = struct.Struct(">QQ")
ASKED: Final = 0  # in place of the number of a pause: whether it waits for other ranks
ALIVE, WAITS, WORKS = b".", b"w", b"r"  # a heartbeat; and what ranks answer


class ExecutorStart(msgspec.Struct, frozen=True):
    """The first message: the model to open, or of it what `rank` has. `threads` are torch's; `tokenizer` is
    its folder, None without grammars."""

    model: str
    config: EngineConfig
    threads: int
    tokenizer: str | None = None
    rank: Rank = Rank(0, 1, "")


class ExecutorOpened(msgspec.Struct, frozen=True):
    """The answer: the executor's facts, or the class and text of the error that opening raised."""

    spec: ExecutorSpec | None = None
    fault: tuple[str, str] | None = None
