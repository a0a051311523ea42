"""A base executor: computes the frozen linears of one model, and stores nothing between calls."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coserve.adapters.text_part import keep_text
from coserve.core.contained import contained
from coserve.errors import ConfigError, RequestError, UnsupportedModel
from coserve.model.batch import BatchCell
from coserve.model.contents import ModelContents
from coserve.model.legacy_attention import with_plain_linears
from coserve.model.load import load_model, usable_device
from coserve.model.native import use_native_kernels
from coserve.model.origin import configuration_digest, linears_digest
from coserve.model.placement import Offer, Placement, place_locally
from coserve.model.placing import place_linears
from coserve.split.attention_spans import attention_spans
from coserve.split.batching import BatchingConfig
from coserve.split.clients import ClientAccount
from coserve.split.cut_linears import LinearsOverRanks
from coserve.split.layer_spans import layer_spans
from coserve.split.layers import LayerChoice
from coserve.split.linears import digests_of, find_linears, grouped, shape_of
from coserve.split.messages import VERSION, BaseHello, Dtype, ExecutorStatus, GroupShape, Limits, LinearCall
from coserve.split.payload import DTYPES
from coserve.split.privacy.field import exponents_of, product, total
from coserve.split.queues import CallQueues
from coserve.split.shard import Shard
from coserve.split.spans import BaseSpan, compute, module_spans
from coserve.split.work import Outcome, Work

# At once: OpenMP threads of one product wait for each other while clients compute on the same cores. Four
# training clients on two cores had 276 tokens/s with two products of one thread, 243 with one of two.
_PRODUCTS: Final = 2


class BaseLinears:
    """Placements of a model's linears and spans of them, by path, and their description for clients."""

    _spans: Mapping[str, BaseSpan] = {}

    def __init__(
        self,
        model: PreTrainedModel,
        limits: Limits | None = None,
        choice: LayerChoice | None = None,
        shard: Shard | None = None,
        device: torch.device | None = None,
        contents: ModelContents | None = None,
        over: LinearsOverRanks | None = None,
    ) -> None:
        """Takes the model over; everything but the chosen linears, or the `shard` of each, is freed with it.
        They are computed on `device`, the CPU where it is None; calls' tensors are on the CPU. `contents` are
        known where the model was read from files; `over` says what this process has of it as one of several
        ranks. Raises ConfigError for a choice of none,
        UnsupportedModel."""
        self.device = device or torch.device("cpu")
        keep_text(model)
        with_plain_linears(model)
        self.name = Path(str(model.config.name_or_path)).name  # clients need not know a path
        every = {path: module for path, (_, module) in find_linears(model).items()}
        head = next((p for p, module in every.items() if module is model.get_output_embeddings()), None)
        found = {path: every[path] for path in (choice or LayerChoice()).chosen(every, head)}
        whole = {path: shape_of(module) for path, module in found.items()}
        weights: dict[str, Tensor] = {path: module.weight for path, module in found.items()}  # type: ignore[misc]
        exponents = exponents_of(weights) if over is None else over.exponents(weights)
        contents = contents or ModelContents(model)
        digests = digests_of(found, contents.of if over is None else over.contents(contents)) or {}
        contents.remember()
        shapes = whole if shard is None else _cut(whole, shard)
        self.hello = BaseHello(
            VERSION,
            linears_digest(digests),
            _dtype_of(model, [*weights.values()]),
            tuple(
                GroupShape(
                    shapes[paths[0]][1],
                    {path: shapes[path][0] for path in paths},
                    {path: digests[path] for path in paths if path in digests},
                    {path: exponents[path] for path in paths if path in exponents},
                    {} if shard is None else {path: whole[path][0] for path in paths},
                )
                for paths in grouped(shapes)
            ),
            limits or Limits(),
            shard=None if shard is None else shard.shape,
        )
        chosen, self._exponents = frozenset(shapes), exponents
        del every, found, weights
        self._placements: dict[str, Placement] = {}

        def place(path: str, weight: Tensor, bias: Tensor | None) -> Placement:
            if shard is not None:  # copies, as a view would keep the whole
                rows = shard.rows(len(weight))
                weight, bias = weight[rows].clone(), None if bias is None else bias[rows].clone()
            weight, bias = weight.to(self.device), None if bias is None else bias.to(self.device)
            if over is not None:
                self._placements[path], inside = over.placed(path, weight, bias)
                return inside
            self._placements[path] = place_locally(weight, bias, float32=False)
            return self._placements[path]

        configuration = configuration_digest(model.config)
        if over is not None:
            over.unwrap(model)
        place_linears(model, BatchCell(), place, chosen.__contains__)
        for path in chosen if over is not None else ():
            linear: Any = model.get_submodule(path)
            linear.out_features, linear.in_features = shapes[path]
        if shard is None:
            model.to(device=self.device)
            use_native_kernels(model, float32=False)  # scripts in float32 get the bits that torch gives them
            like = torch.empty(0, dtype=DTYPES[self.hello.dtype], device=self.device)
            finders = (module_spans, attention_spans, layer_spans)  # the last one replaces forwards
            self._spans = {span.shape.path: span for find in finders for span in find(model, chosen, like)}
            spans = tuple(span.shape for span in self._spans.values())
            configuration = configuration if spans else ""
            self.hello = msgspec.structs.replace(self.hello, spans=spans, configuration=configuration)

    @staticmethod
    def load(
        model: str | Path,
        dtype: str = "auto",
        limits: Limits | None = None,
        choice: LayerChoice | None = None,
        shard: Shard | None = None,
        device: str = "cpu",
    ) -> "BaseLinears":
        """Loads a folder or hub name, for `device`: cpu, cuda, cuda:N, or auto for what there is. Raises
        ConfigError, ModelError."""
        where, contents = device_named(device), ModelContents(model)
        return BaseLinears(load_model(model, dtype), limits, choice, shard, where, contents)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(placement.nbytes for placement in self._placements.values())

    @torch.no_grad()
    def compute(self, call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The answer's tensors, for those of a call that was checked, with any number of rows."""
        found = self._compute(call, [tensor.to(self.device) for tensor in tensors])
        return [tensor.cpu() for tensor in found]

    def _compute(self, call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        if call.dtype == "field":
            return self._compute_in_field(call, tensors)
        if call.paths[0] in self._spans:
            spans = [self._spans[path] for path in call.paths]
            return compute(spans, call.direction, tensors, call.lengths)
        placements = [self._placements[path] for path in call.paths]
        if call.direction == "forward":
            return [placement.forward(tensors[0]) for placement in placements]
        grad = placements[0].backward(tensors[0])
        for placement, given in zip(placements[1:], tensors[1:], strict=True):
            grad = grad + placement.backward(given)
        return [grad]

    def _compute_in_field(self, call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exact products of field elements, without biases. Raises RequestError, NotOffered."""
        weights = []
        for path in call.paths:
            if path not in self._exponents:
                raise RequestError(f"{path} has weights that are not finite, which the field does not have")
            self._placements[path].expect(Offer.WEIGHT, path)
            weights.append((self._placements[path].weight(), self._exponents[path]))
        if call.direction == "forward":
            return [product(tensors[0], weight, exponent) for weight, exponent in weights]
        grads = zip(tensors, weights, strict=True)
        return [total([product(grad, weight.t(), exponent) for grad, (weight, exponent) in grads])]


class BaseExecutor:
    """Computes queued calls, those that the batching policy takes together as one product."""

    def __init__(
        self,
        linears: BaseLinears,
        config: BatchingConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` has seconds that do not go back."""
        config, self._most_threads = config or BatchingConfig(), torch.get_num_threads()
        self.config = replace(config, products=config.products or min(_PRODUCTS, self._most_threads))
        limits = msgspec.structs.replace(linears.hello.limits, waiting_rows=self.config.client_rows)
        self.hello = msgspec.structs.replace(linears.hello, limits=limits)
        self._linears, self._clock, self._began = linears, clock, clock()
        self._queues = CallQueues(
            self.config, self.hello.groups, self.hello.limits.rows, clock, self.hello.spans
        )
        self._under_way: dict[int, float] = {}  # when the product that a thread computes began
        self._own = threading.local()
        self._threads = [
            threading.Thread(target=self._run, name="split-executor", daemon=True)
            for _ in range(self.config.products)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, name: str, key: str = "") -> ClientAccount:
        """Makes an account for a connection, whose calls name it; connections with the same key have one
        share of the seconds."""
        return self._queues.join(name, key)

    def leave(self, client: ClientAccount) -> None:
        """Forgets a connection that has ended, and drops its calls that wait."""
        self._queues.leave(client)

    @property
    def busy_seconds(self) -> float:
        """Seconds for which the product under way has been computed; 0 without one."""
        began = list(self._under_way.values())
        return self._clock() - min(began) if began else 0.0

    def submit(self, work: Work) -> None:
        """Queues a checked call of a client that has joined. It is computed at once where no other waits and
        it is short."""
        if works := self._queues.offer(work):
            self._compute(works)

    def status(self, asking: ClientAccount | None = None) -> ExecutorStatus:
        """Identity and counters so far; the connection that asks is left out."""
        now, queues = self._clock(), self._queues
        products, clients = queues.status(asking)
        return ExecutorStatus(
            model=self._linears.name + ("" if self.hello.shard is None else f" (shard {self.hello.shard})"),
            fingerprint=self.hello.fingerprint,
            dtype=self.hello.dtype,
            host=os.uname().nodename,
            process=os.getpid(),
            seconds=now - self._began,
            linears=sum(len(group.outputs) for group in self.hello.groups),
            weight_bytes=self._linears.nbytes,
            batching=self.config.mode,
            wait_factor=self.config.wait_factor,
            wait_cap=self.config.wait_cap,
            client_rows=self.config.client_rows,
            received_bytes=queues.received.total,
            sent_bytes=queues.sent.total,
            received_a_second=queues.received.a_second(now),
            sent_a_second=queues.sent.a_second(now),
            products=products,
            clients=clients,
        )

    def close(self, seconds: float | None = None) -> None:
        """Ends after the products under way, for which it waits so many seconds at most; calls that wait get
        no answer."""
        self._queues.close()
        until = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if until is None else max(until - time.monotonic(), 0.0))

    def _run(self) -> None:
        while works := self._queues.take():
            self._compute(works)
            del works  # keeps no tensors while it waits

    def _compute(self, works: Sequence[Work]) -> None:
        self._use_threads(1.0 if self._queues.is_last() else 1 / self.config.products)
        thread = threading.get_ident()
        self._under_way[thread] = self._clock()
        try:
            self._answer(works)
        finally:
            del self._under_way[thread]
            self._queues.done()

    def _use_threads(self, share: float) -> None:
        """Has this thread compute with a share of the cores: products side by side each have their part."""
        count = max(int(self._most_threads * share), 1)
        if getattr(self._own, "threads", None) != count:
            torch.set_num_threads(count)  # OpenMP's, of this thread and of threads to come
            self._own.threads = count

    def _answer(self, works: Sequence[Work]) -> None:
        now = self._clock()
        outcomes: dict[Work, Outcome] = {work: _late(work) for work in works if work.is_late(now)}
        if due := [work for work in works if work not in outcomes]:
            try:
                answers = self._together(due)
                nbytes = [sum(tensor.nbytes for tensor in answer) for answer in answers]
                self._queues.count(due, self._clock() - now, nbytes)
                outcomes |= zip(due, answers, strict=True)
            except Exception as error:
                outcomes |= dict.fromkeys(due, contained(error, "a product of frozen linears"))
        self._queues.answer(works)
        for work, outcome in outcomes.items():
            work.reply(outcome)

    def _together(self, works: Sequence[Work]) -> list[Sequence[Tensor]]:
        if len(works) == 1:
            return [self._linears.compute(works[0].call, works[0].tensors)]
        rows = [work.call.rows for work in works]
        joined = [torch.cat(parts) for parts in zip(*(work.tensors for work in works), strict=True)]
        lengths = tuple(length for work in works for length in work.call.lengths)
        call = msgspec.structs.replace(works[0].call, rows=sum(rows), lengths=lengths)
        answers = [torch.split(tensor, rows) for tensor in self._linears.compute(call, joined)]
        return list(zip(*answers, strict=True))


def _cut(shapes: Mapping[str, tuple[int, int]], shard: Shard) -> dict[str, tuple[int, int]]:
    """Widths of the parts that a shard has: not of linears with fewer outputs than there are shards."""
    rows = {path: shard.rows(out) for path, (out, _) in shapes.items()}
    return {
        path: (own.stop - own.start, shapes[path][1]) for path, own in rows.items() if own.stop > own.start
    }


def device_named(name: str) -> torch.device:
    """A device by its name, or what there is. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is none of auto, cpu, cuda and cuda:N")
    return usable_device(name, "--device")


def _late(work: Work) -> RequestError:
    return RequestError(f"the call waited longer than its deadline of {work.call.deadline} s")


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
