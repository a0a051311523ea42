"""Handles: what a caller holds while an answer or a job is under way.

Iterating a handle drives the engine where nobody else does; handles of one engine can be iterated in
turn or from several threads.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coserve.core.events import StepDone, TokenEvent
from coserve.core.plan import TokenLogprobs, Updated
from coserve.core.request import FinishReason
from coserve.core.sequence import Sequence
from coserve.errors import ConfigError, CoserveError, OutOfMemory
from coserve.model.grammar import Grammar
from coserve.text.detokenize import TextStream
from coserve.train.state import TrainingState


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: text that is safe to show, and the token behind it (None for held-back text)."""

    text: str
    token: int | None = None
    logprobs: TokenLogprobs | None = None


class Completion:
    """One request's answer. Iterate it for deltas, or ask for its `result`; both raise what made it fail: its
    adapter could not be loaded, then `error` says why."""

    def __init__(
        self,
        sequence: Sequence,
        text: TextStream | None,
        drive: Callable[[], bool],
        cancel: Callable[[], None],
        grammar: Grammar | None = None,
    ) -> None:
        """`grammar` is what the answer has to match, held until it ends."""
        self.sequence = sequence
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.error: CoserveError | None = None
        self._stream = text
        self._drive, self._cancel = drive, cancel
        self._grammar = grammar
        self._deltas: deque[Delta] = deque()

    @property
    def tokens(self) -> list[int]:
        """Token ids of the answer so far."""
        return self.sequence.output

    def __iter__(self) -> Iterator[Delta]:
        while True:
            while self._deltas:
                yield self._deltas.popleft()
            if self.finish_reason is not None or not self._drive():
                while self._deltas:  # another thread may have driven to the end meanwhile
                    yield self._deltas.popleft()
                self._raise()
                return

    def result(self) -> "Completion":
        """Runs the engine until the answer is complete."""
        while self.finish_reason is None and self._drive():
            pass
        self._raise()
        return self

    def cancel(self) -> None:
        """Ends the answer; everything it held is free after one step."""
        self._cancel()

    def skip(self, tokens: Iterable[int]) -> bool:
        """Reads over tokens that the caller has; True if a stop string was among them."""
        if self._stream is None:
            return False
        for token in tokens:
            self._stream.push(token)
        return self._stream.stopped

    def take(self, event: TokenEvent) -> bool:
        """Takes a token in; True if a stop string was found, which ends the answer."""
        self.prompt_logprobs += event.prompt_logprobs
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.token is None:
            return False
        text = "" if self._stream is None else self._stream.push(event.token)
        self._add(Delta(text, event.token, event.logprobs))
        return self._stream is not None and self._stream.stopped

    def finish(self, reason: FinishReason, error: CoserveError | None = None) -> None:
        """No more tokens will come, because of `error` if there is one."""
        if self._stream is not None:
            self._add(Delta(self._stream.finish()))
        self.finish_reason, self.error = reason, error
        self._grammar = None

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _add(self, delta: Delta) -> None:
        self.text += delta.text
        if delta.text or delta.token is not None:
            self._deltas.append(delta)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which states of a job are worth keeping: after every `every` optimizer steps, and after the last.

    `take` gets them between two steps, so it should only pass them on.
    """

    every: int
    take: Callable[[TrainingState], None]

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"keeping.every must be at least 1 step, not {self.every}")


class FineTuning:
    """One fine-tuning job. Iterate it for its optimizer steps, or wait for its `result`; both raise what made
    it fail.

    `truncated` examples lost their ends to a maximum length; `dropped` ones had no label left. `status` is
    queued (then `reason` says what it waits for), running, and in the end succeeded, failed, cancelled or
    stopped. `notes` tell of what went otherwise than was asked for.
    """

    def __init__(
        self,
        job: str,
        adapter: str,
        steps: int,
        drive: Callable[[], bool],
        end: Callable[[str], None],
        save: Callable[[str | Path], None],
        state: Callable[[], TrainingState],
        truncated: int,
        dropped: int,
        keeping: Keeping | None = None,
    ) -> None:
        self.truncated, self.dropped = truncated, dropped
        self.job, self.adapter, self.steps = job, adapter, steps
        self.weight = 1.0  # share among jobs that train at the same time
        self.status = "queued"
        self.reason = ""
        self.notes: list[str] = []
        self.error: CoserveError | None = None
        self.history: list[Updated] = []
        self._drive, self._end, self._save = drive, end, save
        self._state, self._keeping = state, keeping
        self._read = 0

    def __iter__(self) -> Iterator[Updated]:
        while True:
            while self._read < len(self.history):
                self._read += 1
                yield self.history[self._read - 1]
            if not self.is_under_way or not self._drive():
                yield from self.history[self._read :]  # another thread may have driven to the end meanwhile
                self._read = len(self.history)
                self._raise()
                return

    def result(self) -> "FineTuning":
        """Runs the engine until the job has ended; raises what made it fail, or OutOfMemory where it waits
        for bytes that nothing under way will free."""
        while self.is_under_way and self._drive():
            pass
        self._raise()
        return self

    @property
    def is_under_way(self) -> bool:
        """Tells whether the job trains, or is going to."""
        return self.status in ("queued", "running")

    def cancel(self) -> None:
        """Stops the job; its last published version stays."""
        self._end("cancelled")

    def pause(self) -> TrainingState:
        """Stops the job, to be resumed from the state returned: `train.checkpoint` keeps it on disk."""
        state = self._state()
        self._end("stopped")
        return state

    def save(self, folder: str | Path) -> None:
        """Writes the adapter's newest version in PEFT's format."""
        self._save(folder)

    def take(self, event: StepDone) -> None:
        self.history.append(event.updated)
        step, keeping = event.updated.step, self._keeping
        if keeping is not None and (step == self.steps or step % keeping.every == 0):
            keeping.take(self._state())

    def wait(self, reason: str) -> None:
        """The job cannot begin yet."""
        self.reason = reason

    def begin(self) -> None:
        """The job trains from now on."""
        self.status, self.reason = "running", ""

    def end(self, status: str) -> None:
        """The job is over; who was told of its states need not be any more."""
        self.status, self.reason, self._keeping = status, "", None

    def fail(self, error: CoserveError) -> None:
        """The job cannot go on."""
        self.end("failed")
        self.error = error

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
        if self.status == "queued":
            raise OutOfMemory(f"job {self.job} {self.reason}")
