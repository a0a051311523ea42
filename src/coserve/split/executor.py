"""A base executor: computes the frozen linears of one model, and stores nothing between calls."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coserve.core.contained import contained
from coserve.errors import CoserveError, RequestError, UnsupportedModel
from coserve.model.batch import BatchCell
from coserve.model.load import load_model
from coserve.model.origin import linears_digest
from coserve.model.placement import Placement, place_locally
from coserve.model.placing import place_linears
from coserve.split.linears import digests_of, find_linears, grouped, shape_of
from coserve.split.messages import VERSION, BaseHello, Dtype, GroupShape, Limits, LinearCall
from coserve.split.payload import DTYPES
from coserve.split.queues import Batching, CallQueues, Outcome, Work


class BaseLinears:
    """Placements of a model's linears by path, and what clients are told of them."""

    def __init__(self, model: PreTrainedModel, limits: Limits | None = None) -> None:
        """Takes the model over; everything but its linears is freed with it. Raises UnsupportedModel."""
        found = {path: module for path, (_, module) in find_linears(model).items()}
        shapes = {path: shape_of(module) for path, module in found.items()}
        digests = digests_of(found) or {}
        self.hello = BaseHello(
            VERSION,
            linears_digest(digests),
            _dtype_of(model, [module.weight for module in found.values()]),  # type: ignore[misc]
            tuple(
                GroupShape(
                    shapes[paths[0]][1],
                    {path: shapes[path][0] for path in paths},
                    {path: digests[path] for path in paths if path in digests},
                )
                for paths in grouped(shapes)
            ),
            limits or Limits(),
        )
        del found
        self._placements: dict[str, Placement] = {}

        def place(path: str, weight: Tensor, bias: Tensor | None) -> Placement:
            self._placements[path] = place_locally(weight, bias)
            return self._placements[path]

        place_linears(model, BatchCell(), place)

    @staticmethod
    def load(model: str | Path, dtype: str = "auto", limits: Limits | None = None) -> "BaseLinears":
        """Loads a folder or hub name. Raises ModelError."""
        return BaseLinears(load_model(model, dtype), limits)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(placement.nbytes for placement in self._placements.values())

    @torch.no_grad()
    def compute(self, call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The answer's tensors, for those of a call that was checked, with any number of rows."""
        placements = [self._placements[path] for path in call.paths]
        if call.direction == "forward":
            return [placement.forward(tensors[0]) for placement in placements]
        grad = placements[0].backward(tensors[0])
        for placement, own in zip(placements[1:], tensors[1:], strict=True):
            grad = grad + placement.backward(own)
        return [grad]


class BaseExecutor:
    """Computes queued calls on a thread of its own, those that wait at the same linears together."""

    def __init__(self, linears: BaseLinears, batching: Batching = "waiting") -> None:
        self.hello = linears.hello
        self._linears = linears
        self._queues = CallQueues(batching, linears.hello.limits.rows)
        self._thread = threading.Thread(target=self._run, name="split-executor", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Queues a call that was checked."""
        self._queues.put(work)

    def close(self) -> None:
        """Ends after the products under way; calls that wait get no answer."""
        self._queues.close()
        self._thread.join()

    def _run(self) -> None:
        while works := self._queues.take():
            self._answer(works)
            del works  # nothing is kept while it waits

    def _answer(self, works: Sequence[Work]) -> None:
        due = [work for work in works if not _is_late(work)]
        for work in works:
            if work not in due:
                work.reply(
                    RequestError(f"the call waited longer than its deadline of {work.call.deadline} s")
                )
        outcomes: Sequence[Outcome] = []
        try:
            if due:
                outcomes = self._together(due)
        except Exception as error:
            failure: CoserveError = contained(error, "a product of frozen linears")
            outcomes = [failure] * len(due)
        for work, outcome in zip(due, outcomes, strict=True):
            work.reply(outcome)

    def _together(self, works: Sequence[Work]) -> list[Sequence[Tensor]]:
        if len(works) == 1:
            return [self._linears.compute(works[0].call, works[0].tensors)]
        rows = [work.call.rows for work in works]
        joined = [torch.cat(parts) for parts in zip(*(work.tensors for work in works), strict=True)]
        answers = [torch.split(tensor, rows) for tensor in self._linears.compute(works[0].call, joined)]
        return list(zip(*answers, strict=True))


def _is_late(work: Work) -> bool:
    return work.call.deadline is not None and time.monotonic() - work.came > work.call.deadline


def _dtype_of(model: PreTrainedModel, weights: Sequence[Tensor]) -> Dtype:
    """The one type of all linears. Raises UnsupportedModel."""
    kinds = {weight.dtype for weight in weights}
    for name, dtype in DTYPES.items():
        if kinds == {dtype}:
            return name
    shown = ", ".join(sorted(str(kind) for kind in kinds)) or "none"
    raise UnsupportedModel(
        f"{model.config.model_type}'s linears have the types {shown}: "
        f"split execution needs one of {', '.join(DTYPES)}"
    )
