"""A client's forward or forward_backward as micro-batches, and their outputs in the order of its data."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coserve.adapters.activation import last_invocation, listed_tokens
from coserve.core.plan import MicroBatchOutput
from coserve.core.ranges import check_range
from coserve.core.sequence import MicroBatch
from coserve.core.training import Datum, PassOutput
from coserve.errors import RequestError
from coserve.train.example import IGNORED, Example
from coserve.train.losses import LOSSES, loss_spec
from coserve.train.packing import Packing

MOST_SETTING: Final = 1e9  # of a loss, in size: beyond it float32 loses what it is added to or multiplied by
_MOST_INPUT: Final = 1e30  # of a loss's inputs; float32 ends at 3.4e38


@dataclass(frozen=True, slots=True)
class DataLimits:
    """Limits of a session's data: the model's `vocabulary` and `positions`, the adapter's `virtual` tokens
    before each datum, and the `rows` of its largest micro-batch without its prompt's. An adapter that does
    not act on all rows acts from the tokens of its `invocation` on, which each datum has."""

    vocabulary: int
    positions: int
    virtual: int
    rows: int
    invocation: tuple[int, ...] = ()


class ClientPass:
    """One forward, or forward_backward, over `data`. `settings` are the loss's."""

    def __init__(
        self,
        data: Sequence[Datum],
        loss: str,
        settings: Mapping[str, float],
        backward: bool,
        limits: DataLimits,
    ) -> None:
        """Raises RequestError for data that no pass can take, ConfigError for an unknown loss or setting."""
        self._loss, self._settings, self._backward = loss, dict(settings), backward
        for name, value in settings.items():
            check_range(
                f"the setting {name!r} of the loss", value, -MOST_SETTING, MOST_SETTING, error=RequestError
            )
        loss_spec(loss, {name: () for name in LOSSES[loss].inputs} if loss in LOSSES else {}, **settings)
        group = LOSSES[loss].group
        if not data or len(data) % group:
            wanted = "at least one datum" if group == 1 else f"data in groups of {group}"
            raise RequestError(f"the loss {loss!r} needs {wanted}, not {len(data)}")
        self.data = [self._complete(number, datum, limits) for number, datum in enumerate(data, 1)]
        self.labels = sum(label != IGNORED for datum in self.data for label in datum.targets)
        if not self.labels:
            raise RequestError("none of the data has a target")
        self._indices: dict[int, list[int]] = {}  # of the data in each micro-batch, by key
        self._made: list[tuple[list[int], MicroBatch]] = []  # by `prepare`, with the data in each
        self._rows = 0  # of the largest of these

    def micro_batches(
        self, packing: Packing, adapter: str, rows: int, keys: Iterator[int], number: int, seed: int
    ) -> list[MicroBatch]:
        """The pass's micro-batches, of at most `rows` rows, as pass `number` of its session. Called again it
        starts over."""
        self._indices.clear()
        if not self._made or self._rows != rows:
            self.prepare(packing, rows)
        made, self._made = self._made, []
        for index, (indices, batch) in enumerate(made):
            batch.key, batch.adapter, batch.pass_number = next(keys), adapter, number
            batch.dropout_seed = f"{seed}/{number}/{index}"
            self._indices[batch.key] = indices
        return [batch for _, batch in made]

    def prepare(self, packing: Packing, rows: int) -> None:
        """Makes the micro-batches, but for what is known once the pass's turn has come."""
        lengths = [len(datum.tokens) for datum in self.data]
        packs = packing.pack(lengths, rows, LOSSES[self._loss].group)
        self._made, self._rows = [(indices, self._micro_batch(packing, indices)) for indices in packs], rows

    def _micro_batch(self, packing: Packing, indices: Sequence[int]) -> MicroBatch:
        chosen = [self.data[i] for i in indices]
        batch = packing.micro_batch(0, "", [Example(datum.tokens, datum.targets) for datum in chosen])
        before, after = (0.0,) * packing.prompt, (0.0,) * sum(batch.padding)
        inputs = {
            name: (*before, *(x for datum in chosen for x in datum.inputs[name]), *after)
            for name in LOSSES[self._loss].inputs
        }
        batch.loss = loss_spec(self._loss, inputs, **self._settings)
        batch.forward_only, batch.reports = not self._backward, True
        return batch

    def output(self, packing: Packing, outputs: Mapping[int, MicroBatchOutput]) -> PassOutput:
        """The pass's outcome from those of its micro-batches."""
        logprobs: list[tuple[float, ...]] = [()] * len(self.data)
        losses = list(logprobs)
        for key, indices in self._indices.items():
            of_rows, begin = outputs[key], packing.prompt
            for i in indices:
                own = slice(begin, begin := begin + len(self.data[i].tokens))
                logprobs[i], losses[i] = of_rows.logprobs[own], of_rows.losses[own]
        loss = math.fsum(output.loss for output in outputs.values())
        return PassOutput(
            loss,
            tuple(logprobs),
            {"loss:sum": loss, "tokens": float(self.labels)},
            tuple(losses) if LOSSES[self._loss].of_tokens else (),
        )

    def _complete(self, number: int, datum: Datum, limits: DataLimits) -> Datum:
        """The datum with all inputs of the loss. Raises RequestError."""
        loss, length = LOSSES[self._loss], len(datum.tokens)
        if not length or len(datum.targets) != length:
            raise RequestError(
                f"datum {number} has {length} tokens and {len(datum.targets)} targets: each token needs one"
            )
        if length + limits.virtual > limits.positions:
            raise RequestError(
                f"datum {number} has {length} tokens, which come after {limits.virtual} of the adapter's, "
                f"and the model {limits.positions} positions"
            )
        if length > limits.rows:
            raise RequestError(
                f"datum {number} has {length} tokens, more than the {limits.rows} that the session has "
                "memory for: open it with more rows"
            )
        for tokens in (datum.tokens, [target for target in datum.targets if target != IGNORED]):
            if (wrong := _not_among(tokens, limits.vocabulary)) is not None:
                raise RequestError(
                    f"datum {number} has the token {wrong}, which is not one of the model's "
                    f"{limits.vocabulary}"
                )
        if limits.invocation and last_invocation(datum.tokens, limits.invocation) is None:
            raise RequestError(
                f"datum {number} has none of the tokens from which on the adapter acts "
                f"({listed_tokens(limits.invocation)})"
            )
        if unknown := sorted(set(datum.inputs) - set(loss.inputs)):
            known = ", ".join(loss.inputs)
            raise RequestError(
                f"datum {number} has {', '.join(unknown)}, which the loss {self._loss!r} does not take: only "
                f"{known}"
            )
        inputs = {name: (value,) * length for name, value in loss.defaults.items()} | dict(datum.inputs)
        if missing := [name for name in loss.inputs if name not in inputs]:
            raise RequestError(
                f"datum {number} lacks {' and '.join(missing)}, which the loss {self._loss!r} needs"
            )
        for name in loss.inputs:
            if len(inputs[name]) != length:
                raise RequestError(
                    f"datum {number} has {length} tokens and {len(inputs[name])} numbers as {name}"
                )
            if not _are_numbers(inputs[name]):
                raise RequestError(
                    f"datum {number} has a number in {name} that is not finite, or beyond {_MOST_INPUT:g}"
                )
        return Datum(tuple(datum.tokens), tuple(datum.targets), inputs)


def _are_numbers(values: Sequence[float]) -> bool:
    """Tells whether all are finite numbers that float32 holds."""
    try:
        return all(map(math.isfinite, values)) and max(map(abs, values)) <= _MOST_INPUT
    except (TypeError, OverflowError):  # no number, or a whole one beyond all floats
        return False


def _not_among(tokens: Sequence[int], vocabulary: int) -> object:
    """The first that is no token id; None if all are. Whole columns at a time: a pass may have a million
    tokens, and steps wait for it."""
    allowed = range(vocabulary)
    if (
        set(map(type, tokens)) <= {int}
        and min(tokens, default=0) in allowed
        and max(tokens, default=0) in allowed
    ):
        return None
    return next(token for token in tokens if type(token) is not int or token not in allowed)
