"""Training of a base whose blocks are on a cluster: its jobs' weights, gradients and optimizers are here, and
their rows go through the same instances as answers' rows.

A micro-batch's rows come back here after each block, as its input is what the way back needs. A worker that
is lost loses nothing but the message under way, which goes to another instance; a gradient is added where its
message is answered, so once.
"""

import itertools
import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from msgspec import structs
from torch import Tensor

from coserve.cluster.fleet import ClusterFleet
from coserve.cluster.hosted import HostedBlock, Outcomes
from coserve.cluster.messages import RowsFailed, RowsReturned, TrainRows
from coserve.core.plan import TrainingSegment
from coserve.errors import CoserveError, InternalError, Unreachable, WeightsUnreadable
from coserve.train.activations import ActivationStore
from coserve.train.backward import BackwardWindow, JobWindow
from coserve.train.micro_batch import MicroBatchState
from coserve.train.shortage import Shortages
from coserve.train.window import Window
from coserve.train.window_group import ForwardWindow
from coserve.worker.training_passes import TrainingPasses

_ATTEMPTS: Final = 8  # of a message while workers are lost; then the plan waits


@dataclass(eq=False)
class _Trip:
    """A window on its way through `pieces`, layers of one block each, in the order of its direction. `send`
    makes the message for a piece, `take` takes what came back."""

    pieces: list[range]
    send: Callable[[range], tuple[TrainRows, list[Tensor]]]
    take: Callable[[range, Any, Sequence[Tensor]], None]
    rows: int
    attempts: int = 0
    error: CoserveError | None = None


class ClusterTraining(TrainingPasses):
    """Runs windows, which are whole micro-batches, through the blocks of `fleet`."""

    fleet: ClusterFleet

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._micro_batches: WeakKeyDictionary[ActivationStore, MicroBatchState] = WeakKeyDictionary()
        self._stored: WeakKeyDictionary[ActivationStore, set[int]] = WeakKeyDictionary()
        self._rows: dict[int, int] = {}  # of training, under way at instances

    def forward(self, windows: Sequence[ForwardWindow], layers: range) -> None:
        """Takes windows forward through layers. Raises WeightsUnreadable while workers are lost, with windows
        where they have come to, and the error of a worker that computes and fails."""
        trips = [self._forth(window, layers) for window in windows]
        self._travel(trips)
        for trip in trips:
            if trip.error is not None:
                raise trip.error

    def backward(
        self,
        layers: range,
        windows: Sequence[JobWindow],
        rows: int,
        short: Shortages,
        check: Callable[[], object],
    ) -> None:
        """See `TrainingPasses`: each window passes alone, those of several jobs at a time."""
        trips = [(job, self._back(window, layers)) for job, window in windows if job not in short]
        try:
            self._travel([trip for _, trip in trips])
        finally:
            for job, trip in trips:
                if trip.error is not None:
                    with short.of(job):
                        raise trip.error

    def _window(self, segment: TrainingSegment) -> tuple[MicroBatchState, Window]:
        micro_batch, window = super()._window(segment)
        assert window.rows == micro_batch.store.rows, "workers keep no keys and values of other windows"
        self._micro_batches[micro_batch.store] = micro_batch
        return micro_batch, window

    def _forth(self, window: ForwardWindow, layers: range) -> _Trip:
        store = window.store
        first = max(layers.start, window.layers.start, window.reached)
        pieces = self._pieces(range(first, min(layers.stop, window.layers.stop)), store)

        def send(piece: range) -> tuple[TrainRows, list[Tensor]]:
            return self._message(store, piece), [window.input(piece.start)[0]]

        def take(piece: range, _: object, tensors: Sequence[Tensor]) -> None:
            (hidden,) = tensors
            window.take(piece.stop - 1, hidden[None].to(store.base.device))
            self._stored.setdefault(store, set()).add(piece.stop)

        return _Trip(pieces, send, take, window.window.rows)

    def _back(self, window: BackwardWindow, layers: range) -> _Trip:
        store = window.backward.store
        lowest = max(layers.stop, window.layers.stop) + 1
        highest = min(layers.start, window.layers.start)
        pieces = self._pieces(range(lowest, highest + 1), store)[::-1]
        leaves = self._micro_batches[store].adapter.parameters()
        stored = {0, *self._stored.get(store, ())}

        def send(piece: range) -> tuple[TrainRows, list[Tensor]]:
            first = max(layer for layer in stored if layer <= piece.start)
            asked = self._message(
                store,
                range(first, piece.stop),
                bottom=piece.start,
                needs_input=window.needs_input_grad(piece.start),
            )
            return asked, [window.input(first)[0], window.gradient[0]]

        def take(piece: range, message: RowsReturned, tensors: Sequence[Tensor]) -> None:
            found = [x.to(store.base.device) for x in tensors]
            if window.needs_input_grad(piece.start):
                window.gradient = found.pop(0)[None]
            own = [leaves[name] for name in message.parameters]
            if own:
                parts = torch.split(found[0][0], [leaf.numel() for leaf in own])
                gradients = [part.view_as(leaf) for part, leaf in zip(parts, own, strict=True)]
                window.backward.accumulate(own, gradients)
            window.reached = piece.start

        return _Trip(pieces, send, take, window.window.rows)

    def _message(self, store: ActivationStore, layers: range, **back: Any) -> TrainRows:
        """A message whose number and instance are still to come."""
        micro_batch = self._micro_batches[store]
        adapter, active = micro_batch.adapter, micro_batch.active
        is_base = next(adapter.placed(), None) is None
        return TrainRows(
            0,
            self.fleet.id,
            0,
            layers.start,
            layers.stop,
            store.lengths,
            "" if is_base else adapter.key,
            micro_batch.seed,
            active=None if active is None else tuple((one.start, one.stop) for one in active),
            **back,
        )

    def _pieces(self, layers: range, store: ActivationStore) -> list[range]:
        """Layers cut where blocks begin, and below the lowest that trains, whose input the way back needs."""
        if not layers:
            return []
        borders = {span.first for span in self.fleet.settings.spans} | {store.saved.fates.lowest}
        cuts = [
            layers.start,
            *sorted(one for one in borders if layers.start < one < layers.stop),
            layers.stop,
        ]
        return [range(first, last) for first, last in itertools.pairwise(cuts)]

    def _travel(self, trips: Sequence[_Trip]) -> None:
        """Takes windows through all their pieces, each at its own pace. Those that a worker's error stops
        have it. Raises WeightsUnreadable, once nothing is under way, where others are left."""
        outcome: Outcomes = queue.SimpleQueue()
        going: dict[int, tuple[_Trip, HostedBlock]] = {}
        missing: CoserveError | None = None

        def start(trip: _Trip) -> None:
            nonlocal missing
            try:
                if trip.pieces and trip.attempts < _ATTEMPTS:
                    self._send(trip, outcome, going)
            except CoserveError as error:
                missing = error

        for trip in trips:
            start(trip)
        while going:
            found = outcome.get()
            message, (trip, one) = found.message, going.pop(found.number)
            self._rows[one.number] -= trip.rows
            if message is None or isinstance(message, RowsFailed):
                trip.error = self.fleet.failed(found.number, message, [one])
                trip.attempts += 1
            else:
                try:
                    trip.take(trip.pieces[0], message, found.tensors)
                    trip.pieces.pop(0)
                except (ValueError, KeyError, RuntimeError, IndexError) as error:
                    trip.error = InternalError(
                        f"the worker at {one.worker.address} sent other tensors than were asked for: {error}"
                    )
            if trip.error is None:
                start(trip)
        if any(trip.pieces and trip.error is None for trip in trips):
            told = "workers of the cluster go away faster than their blocks are loaded again"
            raise WeightsUnreadable(told if missing is None else str(missing))

    def _send(self, trip: _Trip, outcome: Outcomes, going: dict[int, tuple[_Trip, HostedBlock]]) -> None:
        """Sends a window's next piece to the instance with the fewest rows. Raises the error of workers that
        cannot load its block."""
        piece = trip.pieces[0]
        block = self.fleet.settings.block_of(piece.start)
        if not (there := self.fleet.instances(block)):
            self.fleet.place()
            there = self.fleet.instances(block)
        if not there:
            raise WeightsUnreadable(f"no worker of the cluster has block {block}")
        one = min(there, key=lambda own: (self._rows.get(own.number, 0) + own.rows, own.number))
        message, tensors = trip.send(piece)
        number = self.fleet.start([one], outcome)
        going[number] = trip, one
        self._rows[one.number] = self._rows.get(one.number, 0) + trip.rows
        with suppress(Unreachable):  # told as an outcome
            one.worker.send(
                structs.replace(message, number=number, instance=one.number), [x.cpu() for x in tensors]
            )
