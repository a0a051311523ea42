"""The executor of a chain of two bases: its rows pass the layers of each beside that base's own rows
(BlockLLM, 4.3)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from coserve.core.plan import TrainingSegment
from coserve.executors.cuda_graphs import Record
from coserve.executors.executor import Executor
from coserve.executors.fused_pass import FusedPass
from coserve.executors.inference import InferenceBatch
from coserve.executors.local import LocalExecutor
from coserve.model.stitched import Leg, StitchedBase


class StitchedPass(FusedPass):
    """Takes inference rows through both legs of a chain: as guests in the pass of the leg's base, where that
    is still to come in this step, else in a pass of their own.

    `hosts` are the executors of the two bases. `run_host` runs the part that one of them has in the plan
    under way, if it has not run yet; None where this executor runs plans alone.
    """

    hosts: Sequence[LocalExecutor] = ()
    run_host: Callable[[Executor], object] | None = None

    def forward(
        self, batches: Sequence[InferenceBatch], kept: Sequence[TrainingSegment]
    ) -> list[TrainingSegment]:
        """See `FusedPass`."""
        assert not kept, "nothing trains on a chain of two bases"
        assert isinstance(self.base, StitchedBase)
        first, second = self.base.legs
        for batch in batches:
            self._pass(batch, first, self.hosts[0])
            batch.hidden = self.base.stitch.forward(batch.hidden)
            self._pass(batch, second, self.hosts[1])
        return []

    def _recorder(self) -> Record | None:
        return None  # the passes are the hosts'

    def _pass(self, batch: InferenceBatch, leg: Leg, host: LocalExecutor) -> None:
        """Takes rows through a leg, and leaves its output in `batch`."""
        batch.part.shift = leg.shift
        guest = replace(batch, calls=leg.calls(batch.calls), layers=leg.layers)
        if not leg.is_shared or not self._pass_with(guest, host):
            host.fused.forward([guest], [])
        batch.hidden = guest.hidden

    def _pass_with(self, guest: InferenceBatch, host: LocalExecutor) -> bool:
        """Takes rows through a pass of the host's, if it has one left in this step; tells whether it had."""
        if self.run_host is None:
            return False
        host.fused.guests, started = [guest], time.perf_counter()
        self.run_host(host)
        if host.fused.guests:
            host.fused.guests = []
            return False
        self.lent += time.perf_counter() - started - guest.seconds
        return True


class StitchedExecutor(LocalExecutor):
    """Runs the plans of a chain of two bases, both of this process."""

    pass_type = StitchedPass
    fused: StitchedPass

    def join(self, hosts: Sequence[LocalExecutor]) -> None:
        """Learns the executors of the two bases; no plan may have run."""
        self.fused.hosts = hosts

    def run_hosts_by(self, run_host: Callable[[Executor], object]) -> None:
        """Learns how the parts of plans that are its hosts' are run."""
        self.fused.run_host = run_host
