"""Containment: turns any exception in work for one tenant into an error of that work.

`contained` is called only where such work runs: `engine.background` (reading on threads),
`engine.served_engine` (commands), `engine.served_sessions` (commands that waited), `engine.jobs`,
`engine.training` and `engine.sessions` (a job or a session between two steps), `memory.exhausted` (rows of a
step: of several, which are computed apart then, and of one alone), `adapters.paging.reader` (weights),
`split.executor` (a client's call), and the server's `training.controller` (news of a job). Other exceptions
of a step, which computes for all tenants, end the process, as do those of its device.
"""

import logging

from coserve.errors import CoserveError, InternalError

_log = logging.getLogger(__name__)
_LONGEST = 200  # characters of what an unforeseen error says


def contained(error: BaseException, what: str, kind: type[CoserveError] = InternalError) -> CoserveError:
    """Returns a deliberate error unchanged; any other one as a `kind` that names it, with its traceback in
    the log.

    Raises exceptions for the process: the end of the interpreter, or of a coroutine. Panics of Rust libraries
    are no `Exception`, so callers use `except BaseException`.
    """
    if isinstance(error, CoserveError):
        return error
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    _log.error("%s failed in a way that nobody foresaw", what, exc_info=error)
    said = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())  # no paths
    shown = f"{type(error).__name__}: {said[:_LONGEST]}" if said else type(error).__name__
    return kind(f"{what} failed: {shown}")
