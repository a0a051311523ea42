"""Packs examples of a training session into micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coserve.adapters.virtual import Virtual
from coserve.core.row_buckets import RowBuckets
from coserve.core.sequence import MicroBatch
from coserve.jobs.packing import pack
from coserve.model.base import Base
from coserve.train.example import IGNORED, Example


@dataclass(frozen=True, slots=True)
class Packing:
    """The constant part of a session's micro-batches. `layers` is the model's depth; `prefix` and `prompt`
    count the adapter's virtual tokens: those given as keys and values, and those that pass through the model
    as rows. Micro-batches are padded to the device's `buckets`."""

    job: str
    layers: int
    buckets: RowBuckets
    prefix: int = 0
    prompt: int = 0

    @classmethod
    def of(cls, job: str, base: Base, virtual: Virtual | None = None) -> "Packing":
        """That of a job on a base, with an adapter's virtual tokens, if any."""
        given, prompt = (0, 0) if virtual is None else (virtual.given_count, virtual.prompt_count)
        return cls(job, base.depth, base.row_buckets, given, prompt)

    def pack(self, lengths: Sequence[int], rows: int, group: int = 1) -> list[list[int]]:
        """Micro-batches of at most `rows` rows as indices into `lengths`. Each `group` of examples in a row
        stays together."""
        groups = [sum(lengths[i : i + group]) for i in range(0, len(lengths), group)]
        packs = pack(groups, max(rows - self.prompt, 1))
        return [[g * group + i for g in indices for i in range(group)] for indices in packs]

    def micro_batch(self, key: int, adapter: str, examples: Sequence[Example]) -> MicroBatch:
        """A micro-batch of these examples, from the version `adapter`; the caller sets its loss."""
        prompt, lengths = self.prompt, tuple(map(len, examples))
        padding = tuple(self._padding(lengths))
        return MicroBatch(
            key=key,
            job=self.job,
            adapter=adapter,
            lengths=(*[prompt] * bool(prompt), *lengths, *padding),
            layers=self.layers,
            padding=padding,
            prefix=self.prefix,
            prompt=prompt,
            tokens=(*[0] * prompt, *(t for e in examples for t in e.tokens), *[0] * sum(padding)),
            labels=(
                *[IGNORED] * prompt,
                *(label for e in examples for label in e.labels),
                *[IGNORED] * sum(padding),
            ),
        )

    def _padding(self, lengths: tuple[int, ...]) -> Iterator[int]:
        """Examples without labels that pad a micro-batch to a row count in use, none longer than the real
        ones: positions are bounded."""
        rows, longest = self.prompt + sum(lengths), max(lengths)
        whole, rest = divmod(self.buckets.pad_rows(rows) - rows, longest)
        yield from [longest] * whole
        if rest:
            yield rest
