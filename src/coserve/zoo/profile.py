"""Profiles: seconds and bytes of each component of a model on one machine (BlockLLM, 6).

A profile is measured for components, the finest parts, so it stays valid however chains are cut into blocks:
a block's bytes and seconds are the sums of its components'. It is stored with the model's contents and the
machine; what was measured elsewhere says nothing here and is refused.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch
from transformers import PreTrainedModel

from coserve.adapters.sites import decoder_layers
from coserve.errors import ConfigError, ZooError
from coserve.zoo.chain import model_of
from coserve.zoo.disk import open_file, sync_folder
from coserve.zoo.export import loaded
from coserve.zoo.manifest import (
    MOST_PLACES,
    SUFFIX,
    Application,
    Component,
    Count,
    Key,
    Plain,
    names_in,
    read_manifest,
    write_manifest,
)
from coserve.zoo.outputs import feed_forward_of
from coserve.zoo.store import Zoo, check_unlocked

BATCHES: Final = (1, 2, 4, 8, 16, 32)  # sequences of one pass
TOKENS: Final = 32  # of each sequence
_MOST_BATCHES: Final = 64  # batch sizes of a profile
_ROUNDS: Final = 5  # of which the least counts, behind one that warms up
_OnBatch = Callable[[int], object]  # told of the batch size that is measured next


class Machine(msgspec.Struct, frozen=True):
    """Whatever seconds depend on besides the model: the device's name, torch's threads and its version."""

    device: Plain
    threads: Count
    torch: Plain

    @staticmethod
    def of(device: str) -> "Machine":
        """This machine, with the name of the device that computes."""
        return Machine(device, torch.get_num_threads(), str(torch.__version__))

    def __str__(self) -> str:
        return f"{self.device}, {self.threads} threads, torch {self.torch}"


class ComponentProfile(msgspec.Struct, frozen=True):
    """Of one component, by its key: bytes of its tensors, seconds to read these from the zoo's files into
    memory, and seconds of its part of a pass, for each batch size."""

    key: Annotated[str, msgspec.Meta(max_length=64)]
    nbytes: Count
    load_seconds: float
    seconds: Annotated[tuple[float, ...], msgspec.Meta(max_length=_MOST_BATCHES)]


class Profile(msgspec.Struct, frozen=True):
    """A model's profile. A pass has `batches[n]` sequences of `tokens` tokens each, without a cache."""

    digest: Key
    machine: Machine
    tokens: Count
    batches: Annotated[tuple[Count, ...], msgspec.Meta(max_length=_MOST_BATCHES)]
    components: Annotated[tuple[ComponentProfile, ...], msgspec.Meta(max_length=MOST_PLACES)]

    def __post_init__(self) -> None:
        if any(len(component.seconds) != len(self.batches) for component in self.components):
            raise ZooError("a component has not one time for each batch size")


class BlockProfile(msgspec.Struct, frozen=True):
    """A block's bytes and seconds: the sums of its components'. `seconds` are by batch size."""

    nbytes: int
    load_seconds: float
    seconds: dict[int, float]


def profile(
    zoo: Zoo,
    name: str,
    machine: Machine,
    batches: Sequence[int] = BATCHES,
    tokens: int = TOKENS,
    on_batch: _OnBatch = lambda size: None,
) -> Profile:
    """Measures a model's profile and stores it. Raises ZooError for an adapter, which runs within its
    parent's components, and while another process changes the zoo; ConfigError for sizes below 1 and for
    more tokens than the model has positions."""
    sizes = tuple(sorted(set(batches)))
    if not 1 <= len(sizes) <= _MOST_BATCHES or sizes[0] < 1 or tokens < 1:
        raise ConfigError(
            f"batch sizes and tokens of a profile must be at least 1, and there may be {_MOST_BATCHES} sizes"
        )
    application = model_of(zoo.application(name))
    check_unlocked(zoo)
    loads = [load_seconds(zoo, component) for component in application.chain]
    with loaded(zoo, name) as model:
        _check_positions(name, model, tokens)
        computed = []
        for size in sizes:
            on_batch(size)
            computed.append(component_seconds(model, size, tokens))
    components = tuple(
        ComponentProfile(component.key, nbytes_of(zoo, component), load, tuple(seconds))
        for component, load, seconds in zip(
            application.chain, loads, zip(*computed, strict=True), strict=True
        )
    )
    found = Profile(application.digest, machine, tokens, sizes, components)
    with zoo.writing(waits=True):
        write_manifest(_file(zoo, application), found)
        sync_folder(zoo.measured)
    return found


def read_profile(zoo: Zoo, application: Application, machine: Machine) -> Profile | None:
    """The stored profile of a model; None where there is none. Raises ZooError for one that is damaged, or
    stale: of other contents, or of another machine."""
    file = _file(zoo, application)
    if not os.path.lexists(file):
        return None
    again = f"`coserve zoo profile {application.name}` measures it again"
    try:
        found = read_manifest(file, Profile)
    except ZooError as error:
        raise ZooError(f"the profile of {application.name} is damaged ({error}); {again}") from error
    keys = [component.key for component in application.chain]
    if found.digest != application.digest or [one.key for one in found.components] != keys:
        raise ZooError(f"the profile of {application.name} is stale: {file} is of other weights; {again}")
    if found.machine != machine:
        raise ZooError(
            f"the profile of {application.name} is stale: it is of another machine ({found.machine}) than "
            f"this ({machine}); {again}"
        )
    return found


def profiles(
    zoo: Zoo, applications: Mapping[str, Application], machine: Machine
) -> tuple[dict[str, Profile], list[str]]:
    """All profiles that hold on this machine, by model, and why others are refused."""
    found, refused = dict[str, Profile](), list[str]()
    for name, application in applications.items():
        try:
            if not application.is_adapter and (own := read_profile(zoo, application, machine)) is not None:
                found[name] = own
        except ZooError as error:
            refused.append(str(error))
    return found, refused


def damaged_profiles(zoo: Zoo) -> list[str]:
    """Problems of profiles, whose models may be gone; `profile` makes them again."""
    problems = []
    for name in names_in(zoo.measured):
        if "-" not in name:
            try:
                read_manifest(zoo.measured / f"{name}{SUFFIX}", Profile)
            except ZooError as error:
                problems.append(str(error))
    return problems


def profiled_components(found: Iterable[Profile]) -> dict[str, tuple[Profile, ComponentProfile]]:
    """Components by key, each with a profile that has it: applications share what was measured of a part
    that they share."""
    return {one.key: (own, one) for own in found for one in own.components}


def block_profile(
    keys: Sequence[str], known: Mapping[str, tuple[Profile, ComponentProfile]]
) -> BlockProfile | None:
    """The profile of a block with these components; None unless all of them were measured with the same
    number of tokens. `seconds` has the batch sizes that all have."""
    parts = [known[key] for key in keys if key in known]
    if len(parts) < len(keys) or len({own.tokens for own, _ in parts}) != 1:
        return None
    by_size = [dict(zip(own.batches, one.seconds, strict=True)) for own, one in parts]
    sizes = sorted(set.intersection(*map(set, by_size)))
    return BlockProfile(
        sum(one.nbytes for _, one in parts),
        sum(one.load_seconds for _, one in parts),
        {size: sum(seconds[size] for seconds in by_size) for size in sizes},
    )


@torch.no_grad()
def component_seconds(model: PreTrainedModel, batch: int, tokens: int) -> list[float]:
    """Seconds that each component takes in a pass of `batch` sequences of `tokens` tokens, by place: the
    least of several passes, as what other processes take is no property of a component. A norm between
    attention and feed-forward counts with the attention. A model whose feed-forward is no module of its own
    (OPT) has all of a layer's seconds at its attention."""
    ids = torch.arange(batch * tokens, device=model.device).reshape(batch, tokens)
    ids %= int(model.config.get_text_config().vocab_size)
    count = 2 * len(decoder_layers(model)) + 2
    passes = [_marks(model, ids, count) for _ in range(_ROUNDS + 1)][1:]
    return [min(taken) for taken in zip(*passes, strict=True)]


def _marks(model: PreTrainedModel, ids: torch.Tensor, count: int) -> list[float]:
    """Seconds of each component in one pass."""
    ends = [0.0] * count
    with ExitStack() as stack:
        for handle in _hooks(model, partial(_mark, model, ends)):
            stack.callback(handle.remove)
        _mark(model, ends, count - 1)
        start = ends[-1]
        model(input_ids=ids, use_cache=False)
        _mark(model, ends, count - 1)
    for place in range(1, count - 1, 2):
        ends[place] = ends[place] or ends[place + 1]
    return [end - before for before, end in zip([start, *ends], ends, strict=False)]


def _mark(model: PreTrainedModel, ends: list[float], place: int) -> None:
    """Writes down that the component at a place is done."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    ends[place] = time.perf_counter()


def _hooks(model: PreTrainedModel, mark: Callable[[int], None]) -> Iterator[Any]:
    for number, layer in enumerate(decoder_layers(model).values()):
        if number == 0:
            yield layer.register_forward_pre_hook(lambda *_: mark(0))
        if (middle := feed_forward_of(layer)) is not None:
            yield middle.register_forward_pre_hook(lambda *_, place=2 * number + 1: mark(place))
        yield layer.register_forward_hook(lambda *_, place=2 * number + 2: mark(place))


def load_seconds(zoo: Zoo, component: Component) -> float:
    """Seconds to read a component's tensors from the zoo's files into memory. The system's cached pages of
    these files are given up first, where it lets go of them. Raises ZooError."""
    keys = sorted(set(component.tensors.values()))
    for key in keys:
        for file in {zoo.tensors.path(key), zoo.tensors.path(zoo.tensors.root_of(key))}:
            _forget(file)
    start = time.perf_counter()
    for key in keys:
        bytearray(zoo.tensors.read(key).data)
    return time.perf_counter() - start


def nbytes_of(zoo: Zoo, component: Component) -> int:
    """Bytes of a component's tensors in memory. Raises ZooError."""
    return sum(zoo.tensors.read(key).data.nbytes for key in set(component.tensors.values()))


def _forget(file: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    handle = open_file(file)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _check_positions(name: str, model: PreTrainedModel, tokens: int) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest and tokens > longest:
        raise ConfigError(f"{name} has {longest} positions, and sequences of {tokens} tokens do not fit")


def _file(zoo: Zoo, application: Application) -> Path:
    """The file of a model's profile: named by one digest, where similarities are by two."""
    return zoo.measured / f"{application.digest}.json"
