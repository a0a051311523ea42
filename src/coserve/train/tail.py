"""Passes training windows through the tail: log-probabilities of targets, the loss, and its gradient for the
last layer's output."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.activation import ActiveBypasses
from coserve.adapters.bypass import Bypasses
from coserve.core.row_buckets import RowBuckets
from coserve.core.sequence import CROSS_ENTROPY, Direction, LossSpec
from coserve.errors import WeightsUnreadable
from coserve.memory.fake_tensors import unlike
from coserve.model.graph import GraphRows
from coserve.train.activations import ActivationStore
from coserve.train.losses import Numbers, Settings, find_loss
from coserve.train.window import Window

# Logits of one chunk of the loss, by device. On a CPU 16 MiB in float32 stay in the caches and below
# malloc's mmap threshold (a fresh mapping costs a page fault per 4 KiB). A GPU reads the whole head for each
# chunk, 1 GB at a vocabulary of 128,256 and a width of 4,096: for 1,046 rows instead of 32 in 0.5 GiB.
_LOGITS_PER_CHUNK: Final = {"cpu": 1 << 22, "cuda": 1 << 27}


class Tail:
    """The final norm, the head and the loss of one micro-batch, in chunks of few logits. Only rows with a
    label pass.

    A loss that couples tokens needs two passes: `logprobs` for all windows, then `loss` for all. Others need
    one. Without a gradient `logprobs` is the only one, and `evaluate` follows. A tail that `scores` knows all
    log-probabilities afterwards, and with `top_k` each labelled row's likeliest tokens. `leaves` are the
    parameters that train in the tail; `accumulate(leaves, gradients)` receives their gradients. `weight`
    scales the gradient: one over the labels of the whole optimizer step.
    """

    def __init__(
        self,
        store: ActivationStore,
        leaves: Sequence[Tensor],
        weight: float,
        accumulate: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None],
        spec: LossSpec = CROSS_ENTROPY,
        scores: bool = False,
        top_k: int = 0,
    ) -> None:
        self._store, self._base = store, store.base
        self._leaves, self._weight, self._accumulate = leaves, weight, accumulate
        self._spec, self._loss, self._scores = spec, find_loss(spec), scores
        device, exact = store.labels.device, torch.promote_types(store.base.dtype, torch.float32)
        self._inputs = {name: torch.tensor(x, dtype=exact, device=device) for name, x in spec.inputs.items()}
        self._candidates: Tensor | None = None  # [rows, k], as the inputs of such a loss
        if spec.candidates:
            self._candidates = torch.tensor(spec.candidates, device=device).view(store.rows, -1)
            self._inputs = {name: x.view(store.rows, -1) for name, x in self._inputs.items()}
        self._top_k = top_k
        self._top_tokens = torch.zeros(store.rows, top_k, dtype=torch.long, device=device)
        self._top_logprobs = torch.full((store.rows, top_k), torch.nan, dtype=exact, device=device)
        # NaN until known, so that a loss of all of them is NaN if one is missing.
        self._logprobs = torch.full(
            (store.rows if spec.couples or scores else 0,), torch.nan, dtype=exact, device=device
        )
        # Of a job's labels; the rows of a client's own pass, of a pair or of an answer have other figures.
        self._counts_hits = bool(spec.candidates) or (spec == CROSS_ENTROPY and not scores)
        self._coupled: Tensor | None = None  # the loss's gradient for all log-probabilities
        # Of rows whose window's pass has failed since: for the last layer's output, [rows, width].
        self._begun: Tensor | None = None
        self._is_done = torch.zeros(store.rows, dtype=torch.bool, device=device)

    def logprobs(self, window: Window, bypasses: Bypasses) -> None:
        """Computes the log-probabilities of the targets of the window's rows, without a loss."""
        hidden = self._store.hidden.last(window)[0]
        for chunk in self._chunks(window):
            with torch.no_grad():
                _, logits = self._logits(hidden[chunk], _of_rows(bypasses, chunk))
            rows, logits = chunk + window.start, logits[: len(chunk)]
            self._logprobs[rows] = self._base.logits.target_logprobs(logits, self._store.labels[rows])
            if self._top_k:
                self._top_tokens[rows], self._top_logprobs[rows] = self._base.logits.top_logprobs(
                    logits, self._top_k
                )

    def evaluate(self) -> None:
        """Adds the loss of all rows, which must be known, to the store's, without a gradient."""
        rows = self._labelled
        if self._spec == CROSS_ENTROPY:
            self._store.loss -= self._logprobs[rows].sum()
        else:
            self._store.loss += self._loss.value(self._logprobs[rows], *self._numbers(rows))

    @property
    def known_logprobs(self) -> Tensor:
        """Log-probabilities [rows] of the labels, 0 where a row has none."""
        return self._logprobs.where(self._store.labels >= 0, 0.0)

    @property
    def token_losses(self) -> Tensor | None:
        """The loss [rows] of each row, 0 where it has no label; None for a loss that has none for each."""
        if not self._loss.of_tokens or self._spec == CROSS_ENTROPY:
            return None
        rows, found = self._labelled, torch.zeros_like(self._logprobs)
        found[rows] = self._loss.token_values(self._logprobs[rows], *self._numbers(rows))
        return found

    @property
    def top(self) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of the labelled rows, and their log-probabilities, both [labels, k]."""
        return self._top_tokens[self._labelled], self._top_logprobs[self._labelled]

    def loss(self, window: Window, bypasses: Bypasses) -> None:
        """Adds the loss of the window's rows to the store's, and stores its gradient for the last layer's
        output. Where that raises WeightsUnreadable after some chunks, the next call goes on with the rest."""
        hidden = self._store.hidden.last(window)[0]
        gradient = torch.zeros_like(hidden) if self._begun is None else self._begun[window.span].clone()
        done: list[Tensor] = []
        try:
            for chunk in self._chunks(window):
                gradient[chunk] = self._chunk_gradient(
                    hidden[chunk], chunk + window.start, _of_rows(bypasses, chunk)
                )
                done.append(chunk)
        except WeightsUnreadable:
            if self._begun is None:
                self._begun = hidden.new_zeros(self._store.rows, hidden.shape[1])
            self._begun[window.span] = gradient
            for chunk in done:
                self._is_done[chunk + window.start] = True
            raise
        self._store.hidden.save_gradient(window, gradient[None])

    def _chunk_gradient(self, hidden: Tensor, rows: Tensor, bypasses: Bypasses) -> Tensor:
        """Adds the loss of rows [n] of the micro-batch, and its gradients for the leaves; returns that for
        hidden [n, width]. Adds nothing where it raises."""
        count = len(rows)
        with self._base.chain.ends.visit(Direction.BACKWARD):
            with torch.enable_grad():
                leaf, logits = self._logits(hidden, bypasses)
            loss, found = self._logits_gradient(logits.detach()[:count], rows)
            if count < len(logits):
                found = F.pad(found, (0, 0, 0, len(logits) - count))
            of_leaf, *of_leaves = torch.autograd.grad(logits, [leaf, *self._leaves], found, allow_unused=True)
        if loss is not None:
            self._store.loss += loss
        if self._counts_hits:
            hits = (self._base.logits.likeliest(logits.detach()[:count]) == self._store.labels[rows]).sum()
            self._store.hits = hits if self._store.hits is None else self._store.hits + hits
        self._accumulate(self._leaves, of_leaves)
        gradient: Tensor = of_leaf[0, :count]
        return gradient

    def _chunks(self, window: Window) -> Sequence[Tensor]:
        """Rows of the window that have a label and are not done, counted from its first, a few at a time."""
        is_due = (self._store.labels[window.span] >= 0) & ~self._is_done[window.span]
        rows = is_due.nonzero().squeeze(1)
        most = loss_rows(self._base.vocabulary, self._base.row_buckets, self._base.device)
        return unlike(torch.split(rows, most)) if len(rows) else ()

    def _logits(self, hidden: Tensor, bypasses: Bypasses) -> tuple[Tensor, Tensor]:
        """(hidden as a leaf [1, padded rows, width], logits [padded rows, vocabulary])."""
        rows = self._base.row_buckets.pad_rows(len(hidden))
        leaf = F.pad(hidden, (0, 0, 0, rows - len(hidden)))[None].requires_grad_()
        return leaf, self._base.logits.of(self._base.tail, leaf, GraphRows([bypasses], [rows]))

    def _logits_gradient(self, logits: Tensor, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """The loss of rows [n] of the micro-batch, None if it has been added, and its gradient for their
        logits [n, vocabulary]."""
        labels = self._store.labels[rows]
        if self._spec == CROSS_ENTROPY and not self._scores:
            return self._base.logits.cross_entropy(logits, labels, self._weight)
        if self._candidates is not None:
            return self._candidates_gradient(logits, rows, self._candidates[rows])
        loss = None
        if self._spec.couples:
            by_logprobs = self._coupled_gradient()[rows]
        else:
            logprobs = self._base.logits.target_logprobs(logits, labels)
            if self._scores:
                self._logprobs[rows] = logprobs
            loss, by_logprobs = self._gradient(logprobs, rows)
        return loss, self._base.logits.logprob_vjp(logits, labels, by_logprobs * self._weight)

    def _candidates_gradient(
        self, logits: Tensor, rows: Tensor, candidates: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """The loss of candidates [n, k] of rows [n], and its gradient for their logits."""
        temperature = self._loss.temperature(self._spec.settings)
        logprobs = self._base.logits.candidate_logprobs(logits, candidates, temperature)
        loss, by_logprobs = self._gradient(logprobs, rows)
        return loss, self._base.logits.candidate_vjp(
            logits, candidates, by_logprobs * self._weight, temperature
        )

    def _coupled_gradient(self) -> Tensor:
        """The loss's gradient for the log-probabilities of all rows, which must be known."""
        if self._coupled is None:
            rows = self._labelled
            self._coupled = torch.zeros_like(self._logprobs)
            loss, self._coupled[rows] = self._gradient(self._logprobs[rows], rows)
            self._store.loss += loss
        return self._coupled

    @property
    def _labelled(self) -> Tensor:
        """Rows that have a label."""
        return (self._store.labels >= 0).nonzero().squeeze(1)

    @cached_property
    def _examples(self) -> Tensor:
        """Index of each row's example, [rows]; -1 for the prompt's."""
        lengths, device = self._store.lengths, self._store.labels.device
        numbers = torch.arange(len(lengths), device=device) - int(self._store.prompt > 0)
        return numbers.repeat_interleave(torch.tensor(lengths, device=device))

    def _gradient(self, logprobs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._loss.gradient(logprobs, *self._numbers(rows))

    def _numbers(self, rows: Tensor) -> tuple[Tensor, Numbers, Settings]:
        """The loss's arguments for these rows, beside their log-probabilities."""
        inputs = {name: x[rows] for name, x in self._inputs.items()}
        return self._examples[rows], inputs, self._spec.settings


class AbsentTail(Tail):
    """The tail of a pipeline's stage before the last one, which alone computes the loss."""

    def logprobs(self, window: Window, bypasses: Bypasses) -> None:
        """Computes nothing."""

    def evaluate(self) -> None:
        """Adds nothing."""

    def loss(self, window: Window, bypasses: Bypasses) -> None:
        """Computes nothing; the gradient comes from the next stage."""


def _of_rows(bypasses: Bypasses, rows: Tensor) -> Bypasses:
    """The bypasses for some of the rows, whose numbers ascend."""
    return bypasses.chosen(rows.tolist()) if isinstance(bypasses, ActiveBypasses) else bypasses


def loss_rows(vocabulary: int, buckets: RowBuckets, device: torch.device) -> int:
    """Rows of one chunk of the loss on a device."""
    most = _LOGITS_PER_CHUNK.get(device.type, _LOGITS_PER_CHUNK["cpu"])
    return max(16, buckets.whole_rows(most // vocabulary))
