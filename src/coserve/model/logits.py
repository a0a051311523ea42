"""Computations with logits of rows: losses, their gradients, the likeliest tokens."""

from collections.abc import Callable

from torch import Tensor

from coserve.kernels import loss
from coserve.model.batch import Rows
from coserve.model.sampling_table import SamplingTable

Tail = Callable[[Tensor, Rows | None], Tensor]  # as `Base.tail`


class Logits:
    """Logits of the whole vocabulary. `cut_logits` has those of which a rank has some tokens' (`is_cut`)."""

    is_cut = False

    def of(self, tail: Tail, hidden: Tensor, rows: Rows | None = None) -> Tensor:
        """Logits [rows, tokens here] of hidden [1, rows, width], in the current graph if there is one."""
        return tail(hidden, rows)

    def cross_entropy(self, logits: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """See `kernels.loss`, here and below; gradients are those for the logits here."""
        return loss.cross_entropy(logits, labels, weight)

    def target_logprobs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Log-probabilities of labels."""
        return loss.target_logprobs(logits, labels)

    def logprob_vjp(self, logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
        """The gradient for logits."""
        return loss.logprob_vjp(logits, labels, gradient)

    def top_logprobs(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens."""
        return loss.top_logprobs(logits, k)

    def candidate_logprobs(self, logits: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """Log-probabilities of candidates."""
        return loss.candidate_logprobs(logits, candidates, temperature)

    def candidate_vjp(
        self, logits: Tensor, candidates: Tensor, gradient: Tensor, temperature: float
    ) -> Tensor:
        """The gradient for logits."""
        return loss.candidate_vjp(logits, candidates, gradient, temperature)

    def likeliest(self, logits: Tensor) -> Tensor:
        """The token [rows] with the largest logit."""
        return logits.argmax(-1)

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor, table: SamplingTable) -> Tensor:
        """The next tokens [rows] of slots [rows] that are plain (`SamplingTable.are_plain`)."""
        raise AssertionError("whole logits are drawn from by `sample`")
