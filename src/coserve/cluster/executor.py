"""The executor of a base whose blocks are on a cluster: rows of several plans are under way at once."""

from coserve.cluster.worker import ClusterAnswers
from coserve.core.plan import BasePlan, BaseResult
from coserve.executors.local import LocalExecutor


class ClusterExecutor(LocalExecutor[ClusterAnswers]):
    """The transport to the base's ends, in this process. Rows of a plan are sent on their way as it is
    launched, or as soon as those before it have the tokens that it needs; results come in the order of
    launches."""

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`."""
        super().launch(plan)
        self.worker.begin(self._launched)

    def collect(self, wait: bool = True) -> BaseResult | None:
        """See `Executor`."""
        result = super().collect(wait)
        self.worker.begin(self._launched)
        return result
