"""The worker of a chain of two bases (BlockLLM, 4.3): its rows pass the layers of one, the stitching block,
and the layers of the other."""

from collections.abc import Sequence
from dataclasses import replace

from coserve.model.stitched import Leg, StitchedBase
from coserve.worker.cuda_graphs import Record
from coserve.worker.fused_pass import FusedPass, ThroughLayers, Traveller
from coserve.worker.inference import InferenceBatch
from coserve.worker.worker import Worker


class StitchedPass(FusedPass):
    """Takes inference rows through both legs of a chain, by the passes of the two bases (`legs`)."""

    legs: Sequence[FusedPass] = ()

    def _through(self) -> ThroughLayers:
        return self._through_legs

    def _through_legs(self, travellers: Sequence[Traveller], layers: range | None = None) -> None:
        assert isinstance(self.base, StitchedBase)
        first, second = zip(self.base.legs, self.legs, strict=True)
        for batch in travellers:
            assert isinstance(batch, InferenceBatch), "nothing trains on a chain of two bases"
            _pass(batch, *first)
            batch.hidden = self.base.stitch.forward(batch.hidden)
            _pass(batch, *second)

    def recorder(self) -> Record | None:
        return None  # the passes are those of the two bases


def _pass(batch: InferenceBatch, leg: Leg, own: FusedPass) -> None:
    """Takes rows through a leg, and leaves its output in `batch`."""
    batch.part.shift = leg.shift
    rows = replace(batch, calls=leg.calls(batch.calls), layers=leg.layers)
    own.forward([rows])
    batch.hidden = rows.hidden


class StitchedWorker(Worker):
    """Runs the plans of a chain of two bases, both of this process."""

    pass_type = StitchedPass
    fused: StitchedPass

    def join(self, legs: Sequence[Worker]) -> None:
        """Learns the workers of the two bases; no plan may have run."""
        self.fused.legs = [worker.fused for worker in legs]
