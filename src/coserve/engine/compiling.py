"""Requests whose grammar is not compiled yet: a thread does that, and no step waits for it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from coserve.engine.background import Background, Outcome
from coserve.errors import CoserveError, RequestError
from coserve.executors.executor import CompileGrammar, Executor
from coserve.model.grammar import Grammar, Grammars
from coserve.wire.messages import Submit

SECONDS: Final = 10.0  # that compiling may take; the largest that a server lets through take 0.3
_THREADS: Final = 2  # so that one that takes long stands in nobody's way
_TOO_LONG: Final = f"compiling the grammar takes longer than {SECONDS:.0f} s: use a smaller schema"


@dataclass(slots=True)
class _Compiling:
    """One grammar, and the requests that wait for it with their arrivals."""

    waiting: dict[str, tuple[Submit, float]] = field(default_factory=dict)
    began: float | None = None  # when a thread took it up


class Compiling:
    """Keeps requests until their grammar is compiled; all but the compiling itself runs on the loop's thread.

    `submit` takes on a request whose grammar is there, with its arrival on the engine's clock; `refuse` ends
    one whose grammar cannot be compiled.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        executor: Executor,
        background: Background,
        submit: Callable[[Submit, float], None],
        refuse: Callable[[Submit, BaseException], None],
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

    def keep(self, command: Submit, arrival: float) -> bool:
        """Keeps a request whose grammar is not compiled, and tells whether it did."""
        text = command.sampling.grammar
        if text is None or self._grammars is None or self._grammars.find(text) is not None:
            return False
        if text not in self._under_way:
            self._under_way[text] = compiling = _Compiling()
            self._background.do(
                "compiling the grammar",
                partial(self._compile, self._grammars, text, compiling),
                partial(self._compiled, text, compiling),
            )
        self._under_way[text].waiting[command.id] = (command, arrival)
        return True

    def cancel(self, id: str) -> None:
        """Nobody wants this request any more."""
        for compiling in self._under_way.values():
            compiling.waiting.pop(id, None)

    def clear(self) -> None:
        """Nobody wants any of them any more."""
        for compiling in self._under_way.values():
            compiling.waiting.clear()

    def end_overdue(self) -> None:
        """Refuses those whose grammar takes too long. Its thread goes on until the compiler gives up, and
        whoever asks for the same meanwhile is refused as well."""
        latest = time.monotonic() - SECONDS
        for compiling in self._under_way.values():
            if compiling.began is not None and compiling.began < latest:
                self._refuse_all(compiling, RequestError(_TOO_LONG))

    # Inside

    def _compile(self, grammars: Grammars, text: str, compiling: _Compiling) -> Grammar | None:
        """On a thread; None where nobody waits any more."""
        if not compiling.waiting:
            return None
        compiling.began = time.monotonic()
        grammar = grammars.compile(text)
        self._executor.call(CompileGrammar(text))
        return grammar

    def _compiled(self, text: str, compiling: _Compiling, outcome: Outcome[Grammar | None]) -> None:
        """Holds the grammar until each request holds it itself."""
        del self._under_way[text]
        if isinstance(outcome, CoserveError):
            self._refuse_all(compiling, outcome)
        for command, arrival in compiling.waiting.values():
            try:
                if not self.keep(command, arrival):  # else it came when the thread had looked for somebody
                    self._submit(command, arrival)
            except BaseException as error:
                self._refuse(command, error)

    def _refuse_all(self, compiling: _Compiling, error: CoserveError) -> None:
        for command, _ in compiling.waiting.values():
            self._refuse(command, error)
        compiling.waiting.clear()
