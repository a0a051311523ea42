"""Programs of graders, judged in sandboxes: a pattern of twenty characters may take seconds for an answer."""

import os
from functools import cache
from typing import Final

from coserve.errors import ConfigError, JobError, LimitExceeded
from coserve.sandbox.pool import SandboxPool

SECONDS: Final = 2.0  # of processor time for an answer, or to compile a program
_MEMORY: Final = 256 * 2**20
_AT_ONCE: Final = 16  # as many as the threads of four jobs' graders


def check_program(kind: str, program: str) -> None:
    """Raises ConfigError for a program that cannot be used, or takes too long to be compiled."""
    try:
        _judges(os.getpid()).call(kind, program, None, seconds=SECONDS)
    except (LimitExceeded, UnicodeEncodeError) as error:
        raise ConfigError(f"the grader {kind!r} cannot be used: {error}") from error


def accepts(kind: str, program: str, text: str) -> bool:
    """Tells whether the program accepts a text (`judge.judge`). Raises JobError where that takes too long."""
    try:
        return bool(_judges(os.getpid()).call(kind, program, text, seconds=SECONDS))
    except LimitExceeded as error:
        raise JobError(
            f"the grader {kind!r} cannot grade an answer of {len(text)} characters: {error}"
        ) from error


@cache
def _judges(_: int) -> SandboxPool:
    """The judges of this process; of a fork's parent none can be used."""
    return SandboxPool("coserve.train.grading.judge:judge", _AT_ONCE, _MEMORY)
