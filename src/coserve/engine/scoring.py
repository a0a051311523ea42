"""Validation loss of an adapter version.

Each example is a request that only scores its prompt (`max_tokens=0`). So validation is ordinary inference:
it shares steps with answers and training, respects other requests' latency bounds, and uses the given
version, whatever has been published since. A few examples are under way at a time, so that a long validation
file never takes all running slots.
"""

from collections import deque
from collections.abc import Sequence

from coserve.core.request import FinishReason, SamplingParams
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.errors import DataError
from coserve.train.example import IGNORED, Example

_UNDER_WAY = 2
_SCORE = SamplingParams(max_tokens=0, prompt_logprobs=0, ignore_eos=True)


def check_lengths(engine: Engine, examples: Sequence[Example], virtual: int) -> None:
    """Raises DataError for an example too long to be scored by an adapter with `virtual` virtual tokens."""
    size = engine.config.page_size
    template = virtual % size > 0  # an adapter's page that sequences copy
    most = min(engine.base.max_positions, (engine.config.pages - template) * size) - virtual
    for number, example in enumerate(examples, 1):
        if len(example) > most:
            raise DataError(
                f"validation example {number} has {len(example)} tokens; this engine can read {most} at once"
            )


class Scoring:
    """Mean loss per label of the adapter `version`, a key, on `examples`. Advances between steps."""

    def __init__(self, engine: Engine, version: str, examples: Sequence[Example]) -> None:
        self.loss: float | None = None  # until all examples are through
        self._engine = engine
        self._version = version
        engine.cache.acquire(version, self)
        self._waiting = deque(examples)
        self._under_way: list[tuple[Example, Completion]] = []
        self._sum, self._labels = 0.0, 0
        self.advance()

    def advance(self) -> bool:
        """Collects finished examples and submits the next; True once the loss is known."""
        if self.loss is not None:
            return True
        for example, completion in self._under_way:
            if completion.finish_reason is FinishReason.LENGTH:
                self._count(example, completion)
        self._under_way = [(e, c) for e, c in self._under_way if c.finish_reason is None]
        while self._waiting and len(self._under_way) < _UNDER_WAY:
            example = self._waiting.popleft()
            # Never repeated, so other prompts get the prefix cache.
            answer = self._engine.generate(example.tokens, self._version, _SCORE, text=False, scope=None)
            self._under_way.append((example, answer))
        if self._under_way:
            return False
        self.loss = self._sum / self._labels
        self._engine.cache.release(self._version, self)
        return True

    def cancel(self) -> None:
        """Stops scoring; there is no loss."""
        if self.loss is None:
            self._waiting.clear()
            for _, completion in self._under_way:
                completion.cancel()
            self._engine.cache.release(self._version, self)

    def _count(self, example: Example, completion: Completion) -> None:
        """Adds an example's loss: the log-probability of token i + 1 is that of the label of row i."""
        for label, logprobs in zip(example.labels[:-1], completion.prompt_logprobs, strict=True):
            if label != IGNORED:
                self._sum -= logprobs.chosen
                self._labels += 1
