"""The attention backend protocol: the layout of cached keys and values, and attention over them.

An executor describes the rows of a pass in plain data: block tables and lengths. Only the backend knows where
a token's keys and values are, and which masks, padding and kernels are used. `memory.pages` assigns pages to
owners; here a page is an index.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from torch import Tensor

from coserve.attention.states import Core, PassStates
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.row_tiles import RowTiles


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Keys and values of one layer: `groups` heads, `key` and `value` widths, the sliding `window` in
    positions (None is unlimited). A layer that `reads` another's cache has none of its own."""

    groups: int
    key: int
    value: int
    window: int | None = None
    reads: int | None = None

    @property
    def width(self) -> int:
        """Numbers that a token takes in this layer's cache; 0 where it reads another layer's."""
        return 0 if self.reads is not None else self.groups * (self.key + self.value)


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """Rows of one pass, sequence after sequence, for any backend.

    `block_table` [sequences, pages] has each sequence's pages in order, padded with `padding_page`.
    `positions` [rows] are the rows' positions. `query_lens` are each sequence's rows, `seq_lens` its
    positions including them: the rows are the last positions. The first `num_decodes` sequences have one row
    each. Of rows in `tiles` the device alone knows the sequences, and the lists on the host say nothing.
    """

    block_table: Tensor
    positions: Tensor
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    num_decodes: int = 0
    tiles: RowTiles | None = None


class PageCopy(NamedTuple):
    """The first `tokens` tokens of page `source`, to be copied into page `target`."""

    source: int
    target: int
    tokens: int


Metadata = TypeVar("Metadata")


class AttentionBackend(Protocol[Metadata]):
    """Keys and values of all layers in `padding_page` pages of `page_size` tokens, and attention over them.

    `padding_page` is the index that pads block tables: one past the last page. `is_capturable` tells whether
    a graph can hold the attention of decode rows and of rows in tiles: it reads only what `build` was given
    and the pages, and does not wait for the device.
    """

    page_size: int
    padding_page: int
    is_capturable: ClassVar[bool]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        ...

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page, in all layers."""
        ...

    def clean(self, pages: Sequence[int]) -> None:
        """Makes the old contents of pages for a new owner harmless, NaN included."""
        ...

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copies the first tokens of pages into other pages, in every layer."""
        ...

    def fill(self, layer: int, pages: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Writes k [groups, n, dk] and v [groups, n, dv] as the first n positions of `pages`."""
        ...

    def read_pages(self, pages: Sequence[int], into: Tensor) -> None:
        """Copies the bytes of pages, all layers', to `into` uint8 [len(pages), page_nbytes]."""
        ...

    def write_pages(self, pages: Sequence[int], data: Tensor) -> None:
        """Fills pages with the bytes in `data`, as `read_pages` copied them from others."""
        ...

    def build(self, common: CommonAttentionMetadata) -> Metadata:
        """Makes the metadata shared by all layers of one pass, from block tables and lengths."""
        ...

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: Metadata, spec: AttentionSpec
    ) -> Tensor:
        """Writes the rows' keys and values into their pages, and attends to all up to each row's position.

        q [1, heads, rows, dk], k [1, groups, rows, dk], v [1, groups, rows, dv], with rotary embedding
        applied; returns [1, rows, heads, dv]. Rows beyond those that `metadata` was built for are padding:
        they give zeros and are not cached. A layer that reads another's keys and values (`spec.reads`) writes
        none.
        """
        ...


class InferenceRows:
    """The inference rows of one pass, `count` with padding: a `BatchPart` of a fused run. In `backend` the
    layers are `shift` further on than in the pass. `states` are those of their sequences in recurrent
    layers."""

    keeper = None

    def __init__(
        self,
        backend: AttentionBackend[Any],
        common: CommonAttentionMetadata,
        count: int,
        states: PassStates | None = None,
    ) -> None:
        self.count, self.shift = count, 0
        self.backend, self.metadata = backend, backend.build(common)
        self.states = states

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return self.backend.attend(layer + self.shift, q, k, v, self.metadata, spec)

    def mix(self, core: Core, start: int) -> Tensor:
        assert self.states is not None and start == 0, "rows of answers come first"
        return self.states.mix(core, self.count)
