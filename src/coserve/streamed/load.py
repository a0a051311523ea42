"""Loads a base of which a budget of memory holds a part; the other blocks are read for each pass.

The model is in memory as a whole at no time: one block is loaded after the other, converted, quantized and
packed as if it stayed, and stored in the form in which it is computed with. What files of the model have in
that form is read from them; the rest is written to a scratch file, which takes their space on the disk once
more, and no time of later passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from coserve.core.sequence import Direction
from coserve.kernels.cpu import multiplies_bfloat16
from coserve.memory.malloc import return_freed_memory
from coserve.model.base import Base
from coserve.model.block import Block, Residence, Resident
from coserve.model.contents import ModelContents
from coserve.model.load import adopt, complete, make_base, place_modules, usable_device
from coserve.model.origin import Origin, fingerprint_of, linear_paths
from coserve.model.parameters import held_bytes, parameters_of
from coserve.model.probe import Own, own_forward
from coserve.model.quantized.quantize import quantize_ends, quantize_layers, say_what_stays
from coserve.model.refusal import refusing
from coserve.model.sharded.contents import contents_over_ranks
from coserve.model.sharded.load import RankCut
from coserve.model.sharded.vocabulary import cut_logits
from coserve.model.sharded.whole import WholeFrame
from coserve.parallel.ranks import ALONE, Ranks
from coserve.streamed.copier import DeviceBuffer, PinnedBuffer, copier_for
from coserve.streamed.model_files import ModelFiles
from coserve.streamed.planner import (
    RING,
    ResidencePlan,
    Streaming,
    held_in_host,
    pass_rate,
    plan_residence,
    refuse_too_little,
)
from coserve.streamed.ring import Ring, Streamed
from coserve.streamed.scratch import ScratchFile
from coserve.streamed.stored import (
    BlockBuffer,
    Read,
    ReadBuffer,
    StoredBlock,
    aligned_bytes,
    store,
    tensors_of,
)


class Kept(Resident):
    """Parameters that stay in a buffer of their own."""

    def __init__(self, buffer: BlockBuffer) -> None:
        self.buffer = buffer


class _OneByOne:
    """Brings blocks in one at a time: at its first visit, until another block is visited."""

    def __init__(self, bring: Callable[[Block], None], put_away: Callable[[Block], None]) -> None:
        self._bring, self._put_away = bring, put_away
        self._there: Block | None = None

    def enter(self, block: Block) -> None:
        if block is not self._there:
            self.finish()
            self._bring(block)
            self._there = block

    def finish(self) -> None:
        """Puts the last block away."""
        there, self._there = self._there, None
        if there is not None:
            self._put_away(there)


class _Passing(Residence):
    """`Residence` of a block that is brought in one by one."""

    def __init__(self, blocks: _OneByOne, block: Block) -> None:
        self._blocks, self._block = blocks, block

    def enter(self, direction: Direction) -> None:
        self._blocks.enter(self._block)

    def leave(self) -> None:
        """Leaves it to the next block: other passes may visit this one."""

    def outside(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def load_streamed(
    model: str | Path,
    budget: int,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    quantize: str = "none",
    scratch: str = "",
    host_memory: int = 0,
    ranks: Ranks = ALONE,
) -> tuple[Base, Streaming]:
    """Loads a base as `load_base` does, within `budget` bytes of the device's memory for its weights. Of
    several `ranks` each loads and streams its part, within as many bytes; all call this together.

    `model` is a local folder or hub name with files of safetensors, `scratch` the folder of the scratch file.
    Beside a GPU blocks that do not stay are in pinned memory of the host, as far as `host_memory` goes.
    Raises the errors of `load_base`; ConfigError where the budget or the scratch folder is too small;
    WeightsUnreadable.
    """
    where = usable_device(device)
    contents, shards = ModelContents(model), RankCut(ranks, where)
    with refusing(repr(str(model)), "cannot be loaded"):
        files = ModelFiles(model, dtype, shards.cut)
    with refusing(files.model.config.model_type, "cannot be driven"):
        return _Loading(files, where, budget, host_memory, quantize, scratch, contents, shards, ranks).run()


class _Loading:
    """The load of one base. Its blocks are stored as the model has them, from where the model's own forward
    and the search for a place for linears read them; and once more where that changed them."""

    def __init__(
        self,
        files: ModelFiles,
        device: torch.device,
        budget: int,
        host_memory: int,
        quantize: str,
        scratch: str,
        contents: ModelContents,
        shards: RankCut,
        ranks: Ranks,
    ) -> None:
        self._shards, self._ranks = shards, ranks
        self._files, self._budget, self._quantize = files, budget, quantize
        self._device, self._host_memory, self._copier = device, host_memory, copier_for(device)
        self._buffer: Callable[[int], BlockBuffer] = (
            ReadBuffer if self._copier is None else self._copier.buffer
        )
        self._scratch = ScratchFile(scratch)
        model = files.model
        layers, self._cell = adopt(model), shards.cell
        self._origin = Origin.of(model, layers, quantize, device, "")
        self._linears = linear_paths(model)
        self._contents = contents
        there = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
        self._found = self._contents_of(there)
        inside = tuple(f"{path}." for path in layers)
        shards.take(model, lambda path: not f"{path}.".startswith(inside))
        if quantize != "none":
            quantize_ends(model, inside, self._origin, self._cell)
            say_what_stays(model, inside)
        shards.place(model, lambda path: not f"{path}.".startswith(inside))
        self._base = make_base(model, layers, self._origin, self._cell)
        for own in self._base.chain.ends.parameters().values():
            for tensor in own.tensors.values():
                tensor.data = tensor.data.to(device)

    def run(self) -> tuple[Base, Streaming]:
        base, blocks = self._base, self._base.chain.blocks
        ends = held_bytes(base.chain.ends.parameters().values()) + _packed_beside(base)
        if self._quantize == "none" and self._ranks.count == 1:  # else their bytes are not known yet
            sizes = [_nbytes_of(block) for block in blocks]
            refuse_too_little(sizes, ends, self._budget, list(map(self._most_stored, blocks)))
        own, stored = self._store_all()
        sizes = [one.nbytes for one in stored.values()]
        refuse_too_little(sizes, ends, self._budget)
        plan = plan_residence(sizes, self._budget - ends)
        for place in plan.resident:
            self._keep(blocks[place], stored.pop(place))  # nothing else may hold its buffer
        self._contents.remember()
        base.fingerprint = fingerprint_of(base.model.config, self._found, self._linears, self._quantize)
        base.shards = self._shards.adapters
        complete(base, own, lambda: self._placed(plan, stored))
        if self._ranks.count > 1:
            base.whole = WholeFrame(base, self._shards.plan, self._ranks)
            base.logits = cut_logits(base, self._ranks)
        return base, Streaming(plan, base.nbytes, self._rate)

    def _contents_of(self, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
        """Contents of tensors by their names in the model, also of those that are cut."""
        if self._ranks.count == 1:
            return self._contents.of(tensors)
        return dict(contents_over_ranks(tensors, self._contents, self._ranks))

    def _most_stored(self, block: Block) -> int:
        """Bytes that a block has at most once it is stored as it is, in the files or in the scratch file."""
        return max(self._files.nbytes_of(block), aligned_bytes(block.module.state_dict().values()))

    def _store_all(self) -> tuple[Own, dict[int, StoredBlock]]:
        """Loads and stores one block after the other, as the model's own forward comes to them. Blocks are
        by place."""
        blocks = self._base.chain.blocks
        given = ReadBuffer(max(map(self._files.nbytes_of, blocks)))
        buffer = given if self._copier is None else self._copier.buffer(given.nbytes)
        stored: dict[str, StoredBlock] = {}
        reads: Sequence[Read] = ()

        def bring(block: Block) -> None:
            nonlocal reads
            if block.path in stored:  # a model may come back to it
                buffer.fill(stored[block.path])
                stored[block.path].bind(buffer)
                return
            reads = self._files.load(block, given)
            state = block.module.state_dict()
            self._found |= self._contents_of({f"{block.path}.{name}": own for name, own in state.items()})
            self._shards.take(self._base.model, block.holds)
            if isinstance(buffer, DeviceBuffer):
                buffer.take_over(tensors_of(block), given)
            if self._quantize != "none":
                cuts = self._shards.plan.linears
                quantize_layers(self._base.model, self._origin, self._cell, block.holds, cuts, self._ranks)
            self._shards.place(self._base.model, block.holds)

        def put_away(block: Block) -> None:
            buffer.part()
            if block.path in stored:
                stored[block.path].release()
            else:
                stored[block.path] = store(block, buffer, reads, self._scratch)
                return_freed_memory()

        with self._one_by_one(blocks, bring, put_away):
            own = own_forward(self._base)
        for one in stored.values():
            one.forget()
        return own, {place: stored[block.path] for place, block in enumerate(blocks)}

    @contextmanager
    def _one_by_one(
        self, blocks: Sequence[Block], bring: Callable[[Block], None], put_away: Callable[[Block], None]
    ) -> Iterator[None]:
        """Context in which a pass brings blocks in, each once; in the end it has brought all."""
        seen: set[str] = set()

        def note(block: Block) -> None:
            seen.add(block.path)
            bring(block)

        one_by_one = _OneByOne(note, put_away)
        for block in blocks:
            block.residence = _Passing(one_by_one, block)
        yield
        for block in blocks:
            if block.path not in seen:
                one_by_one.enter(block)
        one_by_one.finish()
        for block in blocks:
            block.residence = Resident()

    def _stream(self, blocks: dict[int, StoredBlock]) -> None:
        self._rate = self._hold(blocks)
        self._ring = Ring(blocks, RING, self._buffer)
        self._ring.expect(self._rate)
        self._base.buffer_nbytes, self._base.reader = self._ring.nbytes, self._ring if blocks else None
        for place in blocks:
            self._base.chain.blocks[place].stream(Streamed(self._ring, place))

    def _hold(self, blocks: dict[int, StoredBlock]) -> float:
        """Brings blocks into the host's memory, where a device copies them from there and they fit; returns
        the bytes a second at which a pass has all of them."""
        stored, link, held = [*blocks.values()], float("inf"), frozenset[int]()
        sizes = [one.nbytes for one in stored]
        if self._copier is not None and stored:
            link, held = self._copier.rate(), held_in_host(sizes, self._host_memory)
        for number in held:
            host = PinnedBuffer(sizes[number], self._device)
            stored[number].read(host)
            stored[number].held = host
        disk = choose_modes([read for one in stored if one.held is None for read in one.reads])
        return pass_rate(sizes, held, link, disk)

    def _keep(self, block: Block, stored: StoredBlock) -> None:
        """Has a block stay in memory."""
        buffer = self._buffer(stored.nbytes)
        buffer.fill(stored)
        buffer.join()
        stored.bind(buffer)
        block.residence = Kept(buffer)

    @contextmanager
    def _placed(self, plan: ResidencePlan, streamed: dict[int, StoredBlock]) -> Iterator[None]:
        """Puts frozen linears in place, block by block as a pass comes to them, and stores what is
        streamed as it is then."""
        base = self._base
        blocks = base.chain.blocks
        place_modules(base, base.chain.ends.holds)
        for place in plan.resident:
            place_modules(base, blocks[place].holds)
            _release_unused(blocks[place])
        buffer = self._buffer(max((one.nbytes for one in streamed.values()), default=0))
        before = {one.block.path: one for one in streamed.values()}
        placed: dict[str, StoredBlock] = {}

        def bring(block: Block) -> None:
            one = placed.get(block.path, before[block.path])
            buffer.fill(one)
            buffer.join()
            one.bind(buffer)
            if block.path not in placed:
                place_modules(base, block.holds)

        def put_away(block: Block) -> None:
            buffer.part()
            if block.path in placed:
                placed[block.path].release()
                return
            one = before[block.path]
            one.forget()
            placed[block.path] = store(block, buffer, one.reads, self._scratch)
            return_freed_memory()

        with self._one_by_one([blocks[place] for place in streamed], bring, put_away):
            yield
        for one in placed.values():
            one.forget()
        self._stream({place: placed[blocks[place].path] for place in streamed})


def _packed_beside(base: Base) -> int:
    """Bytes of a head that is packed beside the embedding whose weight it shares."""
    head = base.model.get_output_embeddings()
    is_shared = type(head) is nn.Linear and head.weight is base.model.get_input_embeddings().weight
    return head.weight.nbytes if is_shared and multiplies_bfloat16(head.weight) else 0


def _nbytes_of(block: Block) -> int:
    return sum(tensor.nbytes for tensor in block.module.state_dict().values())


def choose_modes(reads: Sequence[Read]) -> float:
    """Chooses how files are read, for each disk by a trial; returns the bytes a second of the slowest."""
    disks: dict[int, list[Read]] = {}
    for read in reads:
        disks.setdefault(read.file.disk, []).append(read)
    rates = []
    for own in disks.values():
        most = max(own, key=lambda read: read.end - read.into)
        rates.append(most.file.choose_mode(most.start, most.start + most.end - most.into))
        for read in own:
            read.file.mode = most.file.mode
    return min(rates, default=0.0)


def _release_unused(block: Block) -> None:
    """Frees the buffer of a block whose linears are elsewhere by now."""
    residence = block.residence
    assert isinstance(residence, Kept)
    tensors = [tensor for own in parameters_of(block.module).values() for tensor in own.tensors.values()]
    inside = [tensor for tensor in tensors if residence.buffer.offset_of(tensor) is not None]
    if 2 * sum(tensor.nbytes for tensor in inside) < residence.buffer.nbytes:
        for tensor in inside:
            tensor.data = tensor.data.clone()
        block.residence = Resident()
