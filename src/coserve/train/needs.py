"""Estimates the peak bytes of a job before any of them is allocated.

The estimate is an upper bound, whichever examples the steps draw: an admitted job never lacks memory.
`TrainingSession.held` is the actual size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import exact_type
from coserve.attention.states import state_nbytes
from coserve.core.row_buckets import RowBuckets
from coserve.memory.ledger import Account
from coserve.model.base import Base
from coserve.schedule.config import SchedulerConfig
from coserve.train.config import TrainingConfig
from coserve.train.pruning.plan import fates_of, input_bytes
from coserve.train.save_policy import SavePolicy
from coserve.train.states import STATE_ROWS
from coserve.train.tail import loss_rows

_MOMENTS: Final = 2  # of AdamW, for each number
_VERSIONS: Final = 2  # of an adapter in training, at once
# A layer's row on its way back holds the inputs and outputs of its linears, the same again as
# gradients, and about as much of norms and products in between. An estimate: `ledger.error` of the bench says
# how good the whole is.
_REPLAYED: Final = 3


@dataclass(frozen=True, slots=True)
class Steps:
    """Limits of a job's work under way at once: micro-batches, and rows of one training window (None is a
    whole micro-batch). `offloaded` moments rest in slower memory."""

    in_flight: int
    window: int | None
    offloaded: bool = False


@dataclass(frozen=True, slots=True)
class JobNeeds:
    """Bytes of one job: `own` by account for its whole life, `shared` only while its rows or its update
    pass."""

    own: dict[Account, int]
    shared: int

    @property
    def total(self) -> int:
        return sum(self.own.values()) + self.shared

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by purpose."""
        own = {account.value: nbytes for account, nbytes in self.own.items()}
        return {**own, Account.WORKSPACES.value: self.shared}


def job_needs(
    base: Base,
    adapter: AdapterVersion,
    lengths: Sequence[int],
    config: TrainingConfig,
    steps: Steps,
    accumulates: bool = False,
    reference: AdapterVersion | None = None,
) -> JobNeeds:
    """Bytes of a job, from its examples' `lengths` in tokens. The adapter may be shapes alone. One that
    `accumulates` gradients of several passes has them twice during all but the first. Two versions of the
    adapter, in the base's type, are there for a moment at each optimizer step, and the `reference`, which
    examples pass too, all the time."""
    beside = [adapter.virtual] if reference is None else [adapter.virtual, reference.virtual]
    prompt, given = max(v.prompt_count for v in beside), max(v.given_count for v in beside)
    largest, at_once = rows_at_once(lengths, config, steps.in_flight, prompt, base.row_buckets)
    numbers, published = _adapter_bytes(adapter, base.dtype)
    held = 0 if reference is None else _adapter_bytes(reference, base.dtype)[1]
    exact = exact_type(base.dtype).itemsize * numbers
    moments = _MOMENTS * exact
    keeps_inputs = config.keep is SavePolicy.INPUTS and not base.makes_calls
    kept = 0.0 if keeps_inputs else fates_of(base, adapter, config.keep, largest).nbytes
    own = {
        # Master weights and their gradients are always there.
        Account.OPTIMIZERS: (2 + accumulates) * exact + (0 if steps.offloaded else moments),
        Account.ADAPTERS: _VERSIONS * published + held,
        Account.ACTIVATIONS: activation_bytes(base, at_once, kept, given),
    }
    window = largest if steps.window is None else min(steps.window, largest)
    # A state where each window ends and every so many rows, and what one of them is owed.
    kept_states = at_once // STATE_ROWS + (at_once // window if window % STATE_ROWS else 0)
    own[Account.ACTIVATIONS] += (kept_states + 1 + steps.in_flight) * state_nbytes(base.mixers)
    back = backward_bytes(base, window) + bypass_bytes(base, adapter, window)
    shared = max(back, moments if steps.offloaded else 0)
    return JobNeeds(own, shared)


def _adapter_bytes(adapter: AdapterVersion, dtype: torch.dtype) -> tuple[int, int]:
    """Counts trained numbers, and the bytes of one published version on a base in `dtype`."""
    trained, nbytes = dict[int, int](), dict[int, int]()  # by tensor, as bypasses may share one
    made = 0
    for _, bypass in adapter.placed():
        own = exact_type(dtype) if bypass.exact else dtype
        trained |= {id(tensor): tensor.numel() for tensor in bypass.parameters().values()}
        for tensor in (*bypass.parameters().values(), *bypass.fixed):
            width = own.itemsize if tensor.is_floating_point() else tensor.itemsize
            nbytes[id(tensor)] = tensor.numel() * width
        made += bypass.made
    return sum(trained.values()), sum(nbytes.values()) + made


def rows_at_once(
    lengths: Sequence[int], config: TrainingConfig, in_flight: int, prompt: int, buckets: RowBuckets
) -> tuple[int, int]:
    """The most rows of one micro-batch, and of all under way at once, padding included.

    No optimizer step is longer than the `batch_size` longest examples together.
    """
    longest_first = sorted(lengths, reverse=True)
    longest, step = longest_first[0], sum(longest_first[: config.batch_size])
    largest = buckets.pad_rows(min(max(config.rows, longest + prompt), step + prompt))
    if step + prompt <= max(config.rows, longest + prompt):
        return largest, largest
    packs = min(in_flight, config.batch_size)
    return largest, min(packs * largest, step + packs * (prompt + buckets.most_padding))


def activation_bytes(base: Base, rows: int, kept: float, given: int = 0) -> int:
    """The most bytes of the activations of so many rows, beside `given` virtual tokens: a store's when every
    layer is there and windows end within examples. `kept` is the bytes a row saved from inside layers
    (`Fates.nbytes`)."""
    exact = exact_type(base.dtype).itemsize
    owed = sum(cache.width for cache in base.caches) * exact
    return math.ceil(rows * (input_bytes(base) + kept)) + given * owed


def step_bytes(base: Base, config: SchedulerConfig, pages: int) -> int:
    """The most bytes of a step's inference while it runs: its rows inside a layer, one layer's keys and
    values gathered from `pages` bytes of them, and the logits for sampling."""
    width, exact = base.dtype.itemsize, exact_type(base.dtype).itemsize
    rows = config.max_prefill_rows + config.sampled_rows
    widest = max(sum(_wide(base, block.path)) for block in base.chain)
    logits = config.sampled_rows * base.vocabulary * 2 * (width + exact)
    return rows * widest * width + pages // sum(cache.reads is None for cache in base.caches) + logits


def _wide(base: Base, layer: str) -> tuple[int, int]:
    """Number of inputs and outputs of a row's linears in one layer."""
    inside = [linear for path, linear in base.linears.items() if path.startswith(f"{layer}.")]
    return sum(linear.in_features for linear in inside), sum(linear.out_features for linear in inside)


def backward_bytes(base: Base, window: int) -> int:
    """The most bytes of one piece of backward: a chunk of logits with its gradient, or a window's rows in the
    graph of the widest layer. Pieces never overlap."""
    width, exact = base.dtype.itemsize, exact_type(base.dtype).itemsize
    rows = min(loss_rows(base.vocabulary, base.row_buckets, base.device), base.row_buckets.pad_rows(window))
    loss = rows * base.vocabulary * (2 * width + exact)
    return max(loss, replayed_bytes(base, window))


def bypass_bytes(base: Base, adapter: AdapterVersion, window: int) -> int:
    """The most bytes that an adapter's bypasses in one layer take beside that for a window's rows."""
    layers: dict[int, int] = {}
    for place, bypass in adapter.placed():
        stage = base.sites[place.path].stage
        layers[stage] = layers.get(stage, 0) + bypass.replayed(window, base.dtype)
    return max(layers.values(), default=0)


def replayed_bytes(base: Base, window: int) -> int:
    """The most bytes of a window's rows in the graph of the widest layer, with what recurrent mixers keep
    there and as much again for gradients."""
    widest = max(sum(_wide(base, block.path)) for block in base.chain)
    kinds = {tuple(mixer.shapes): mixer for mixer in base.mixers}.values()
    mixed = max((2 * mixer.graph_nbytes(window) for mixer in kinds), default=0)
    return window * _REPLAYED * widest * base.dtype.itemsize + mixed
