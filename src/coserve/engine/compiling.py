"""Compiles grammars on threads while their requests wait outside the scheduler; steps go on."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from coserve.core.request import Request
from coserve.engine.background import Background, Outcome
from coserve.errors import CoserveError, RequestError
from coserve.executors.executor import CompileGrammar, Executor
from coserve.model.grammar import Grammar, Grammars

SECONDS: Final = 10.0  # limit of one compilation; the largest grammar that a server accepts takes 0.3
_THREADS: Final = 2  # so that a long compilation does not delay the others
_TOO_LONG: Final = f"compiling the grammar takes longer than {SECONDS:.0f} s: use a smaller schema"


@dataclass(slots=True)
class _Compiling:
    """One grammar, and the requests that wait for it, by id."""

    waiting: dict[str, Request] = field(default_factory=dict)
    began: float | None = None  # time at which a thread began it


class Compiling:
    """Holds requests until their grammar is compiled. Only the compiling runs on other threads.

    `submit` takes on a request whose grammar is there; `refuse` ends one whose grammar cannot be compiled.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        executor: Executor,
        background: Background,
        submit: Callable[[Request], None],
        refuse: Callable[[Request, BaseException], None],
    ) -> None:
        self._executor, self._grammars, self._background = (
            executor,
            grammars,
            background.another(_THREADS, "grammars"),
        )
        self._submit, self._refuse = submit, refuse
        self._under_way: dict[str, _Compiling] = {}

    def __contains__(self, id: str) -> bool:
        return any(id in compiling.waiting for compiling in self._under_way.values())

    def __bool__(self) -> bool:
        """Tells whether any request waits."""
        return any(compiling.waiting for compiling in self._under_way.values())

    def __iter__(self) -> Iterator[str]:
        """Ids of the requests that wait."""
        for compiling in self._under_way.values():
            yield from compiling.waiting

    def keep(self, request: Request) -> bool:
        """Holds a request if its grammar is not compiled; True if so."""
        text = request.sampling.grammar
        if text is None or self._grammars is None or self._grammars.find(text) is not None:
            return False
        if text not in self._under_way:
            self._under_way[text] = compiling = _Compiling()
            self._background.do(
                "compiling the grammar",
                partial(self._compile, self._grammars, text, compiling),
                partial(self._compiled, text, compiling),
            )
        self._under_way[text].waiting[request.id] = request
        return True

    def cancel(self, id: str) -> None:
        """Drops a request."""
        for compiling in self._under_way.values():
            compiling.waiting.pop(id, None)

    def clear(self) -> None:
        """Drops all requests."""
        for compiling in self._under_way.values():
            compiling.waiting.clear()

    def end_overdue(self) -> None:
        """Refuses requests whose grammar has compiled for more than `SECONDS`. The thread goes on until the
        compiler gives up; requests for the same grammar are refused until then."""
        latest = time.monotonic() - SECONDS
        for compiling in self._under_way.values():
            if compiling.began is not None and compiling.began < latest:
                self._refuse_all(compiling, RequestError(_TOO_LONG))

    # Inside

    def _compile(self, grammars: Grammars, text: str, compiling: _Compiling) -> Grammar | None:
        """Compiles on a background thread; None if no request waits for the grammar."""
        if not compiling.waiting:
            return None
        compiling.began = time.monotonic()
        grammar = grammars.compile(text)
        self._executor.call(CompileGrammar(text))
        return grammar

    def _compiled(self, text: str, compiling: _Compiling, outcome: Outcome[Grammar | None]) -> None:
        """Submits or refuses the waiting requests. Its frame refers to the grammar until each request
        does."""
        del self._under_way[text]
        if isinstance(outcome, CoserveError):
            self._refuse_all(compiling, outcome)
        for request in compiling.waiting.values():
            try:
                if not self.keep(request):  # else it came after the thread had looked
                    self._submit(request)
            except BaseException as error:
                self._refuse(request, error)

    def _refuse_all(self, compiling: _Compiling, error: CoserveError) -> None:
        for request in compiling.waiting.values():
            self._refuse(request, error)
        compiling.waiting.clear()
