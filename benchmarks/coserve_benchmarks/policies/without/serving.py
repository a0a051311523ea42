"""transformers as a server: requests come while others are being answered, and every token has its time."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from coserve.errors import ServerError
from coserve.workload.requests import TimedRequest
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.policies.without.messages import Serving

_MOST_AT_ONCE = 16  # requests in a static batch
_BATCH_TOKENS = 512  # rows in a pass of continuous batching; attention costs their square
_PAGE = 64
_CACHED_AT_ONCE = 64  # requests that the cache of continuous batching has room for
_WARM = 4  # requests, of so many tokens each


@dataclass(slots=True)
class TimedAnswer:
    """A greedy answer of exactly the tokens asked for; `stamps` are their times, by `time.monotonic`."""

    request: TimedRequest
    tokens: list[int] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.tokens) == self.request.answer

    def add(self, token: int, stamp: float) -> None:
        self.tokens.append(token)
        self.stamps.append(stamp)


class Server(Protocol):
    """Answers requests while `serve` is called. `open` are those submitted and not yet answered whole."""

    @property
    def open(self) -> int: ...

    def submit(self, request: TimedRequest) -> TimedAnswer:
        """The reply fills while the server serves."""

    def serve(self, patience: float) -> None:
        """Goes on; returns when something was answered, or after about `patience` seconds."""

    def close(self) -> None: ...


def make_server(serving: Serving, shape: ModelShape, requests: Sequence[TimedRequest]) -> Server:
    """A server of a fresh model for such requests, past its first answers."""
    server: Server
    if serving is Serving.STATIC:
        server = StaticBatchServer(shape)
    else:
        server = ContinuousBatchServer(shape, requests, "sdpa" if serving is Serving.SDPA else "paged|eager")
    with ExitStack() as stack:
        stack.callback(server.close)
        for request in requests[:_WARM]:
            server.submit(TimedRequest(0.0, request.prompt, min(_WARM, request.answer)))
        while server.open:
            server.serve(1.0)
        stack.pop_all()
    return server


class StaticBatchServer:
    """`generate` on everything that waits, padded on the left; who comes meanwhile waits until its end."""

    def __init__(self, shape: ModelShape) -> None:
        self._model: Any = shape.build()
        self._waiting: deque[TimedAnswer] = deque()

    @property
    def open(self) -> int:
        return len(self._waiting)

    def submit(self, request: TimedRequest) -> TimedAnswer:
        reply = TimedAnswer(request)
        self._waiting.append(reply)
        return reply

    @torch.no_grad()
    def serve(self, patience: float) -> None:
        if not self._waiting:
            time.sleep(patience)
            return
        batch = [self._waiting.popleft() for _ in range(min(_MOST_AT_ONCE, len(self._waiting)))]
        longest = max(len(reply.request.prompt) for reply in batch)
        padding = [longest - len(reply.request.prompt) for reply in batch]
        rows = list(zip(padding, batch, strict=True))
        ids = torch.tensor(
            [[0] * pad + list(reply.request.prompt) for pad, reply in rows]
        )  # [batch, longest]
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])  # [batch, longest]
        self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(reply.request.answer for reply in batch),
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([_TokenWatch(batch)]),
        )
        assert all(reply.is_complete for reply in batch), "every answer has full length"

    def close(self) -> None:
        """Nothing is left running."""


class _TokenWatch(StoppingCriteria):  # type: ignore[misc]
    """Is shown every step of `generate`: notes the new tokens of the answers that still lack some."""

    def __init__(self, batch: Sequence[TimedAnswer]) -> None:
        self._batch = batch

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """`input_ids` are [batch, tokens so far]; says of each row whether it has all its tokens."""
        now = time.monotonic()
        for reply, token in zip(self._batch, input_ids[:, -1].tolist(), strict=True):
            if not reply.is_complete:
                reply.add(token, now)
        return torch.tensor([reply.is_complete for reply in self._batch])


class ContinuousBatchServer:
    """transformers' continuous batching: its manager has a thread of its own and takes requests at any time.

    Its cache is made to measure and nothing is shared between prompts, as in `coserve_benchmarks.peers`.
    """

    def __init__(self, shape: ModelShape, requests: Sequence[TimedRequest], attention: str) -> None:
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        model: Any = shape.build()
        model.set_attn_implementation(attention)
        longest = max((len(request.prompt) + request.answer for request in requests), default=_PAGE)
        at_once = min(_CACHED_AT_ONCE, max(1, len(requests)))
        self._stack = ExitStack()
        self._manager: Any = self._stack.enter_context(
            model.continuous_batching_context_manager(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=_PAGE,
                    num_blocks=at_once * (-(-longest // _PAGE) + 1),
                    max_batch_tokens=_BATCH_TOKENS,
                    allow_block_sharing=False,
                ),
            )
        )
        self._open: dict[str, TimedAnswer] = {}
        self._count = 0
        # It stamps tokens with the other clock.
        self._clocks_apart = time.monotonic() - time.perf_counter()

    @property
    def open(self) -> int:
        return len(self._open)

    def submit(self, request: TimedRequest) -> TimedAnswer:
        self._count += 1
        name, reply = str(self._count), TimedAnswer(request)
        self._open[name] = reply
        self._manager.add_request(
            list(request.prompt), name, max_new_tokens=request.answer, record_timestamps=True
        )
        return reply

    def serve(self, patience: float) -> None:
        result = self._manager.get_result(timeout=patience)
        if result is None:
            if not self._manager.is_running():
                raise ServerError("the thread of transformers' continuous batching has died")
            return
        if result.error is not None:
            raise ServerError(f"transformers' continuous batching failed a request: {result.error}")
        reply = self._open.pop(result.request_id)
        for token, stamp in zip(result.generated_tokens, result.timestamps, strict=True):
            reply.add(token, stamp + self._clocks_apart)
        assert reply.is_complete, "every answer has full length"

    def close(self) -> None:
        """Ends its thread and gives its cache back."""
        self._stack.close()
