"""Tables of hardware, and the seconds that counted work takes by them.

The second half of the simulator's cost model. Tables are TOML, those of the package in `hardware/`; a user's
own has the same fields. There are two kinds: a *roofline* of a device, for any model's shape, and *weights*
measured on one machine, for one shape: seconds per unit of the scheduler's features.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Annotated, Final

import msgspec

from coserve.errors import ConfigError
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.simulate.counting import PassKind, PassWork
from coserve.simulate.jitter import Jitter

_MOST: Final = 1e9  # of any number: a device of an exabyte, a step of a quarter of an hour; infinity is none
Positive = Annotated[float, msgspec.Meta(gt=0, le=_MOST)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_GIGA: Final = 1e9
_TERA: Final = 1e12
_MICRO: Final = 1e-6


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the peaks that kernels reach. `rows` are (rows of a product, share of the peak rate); between
    two the share goes with the logarithm of the rows."""

    rows: Annotated[tuple[tuple[Positive, Share], ...], msgspec.Meta(min_length=1)]
    bandwidth: Share
    attention: Share

    def __post_init__(self) -> None:
        for (before, _), (after, _) in pairwise(self.rows):
            if after <= before:
                raise ValueError(f"`rows` need to ascend; {after:g} comes after {before:g}")


class Overhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds beside all products: of a layer and pass, of an all-reduce, of an optimizer step, and of
    the host in each step (planning, launching, sampling)."""

    layer_us: NotNegative
    reduction_us: NotNegative
    update_us: NotNegative
    host_us: NotNegative


class Roofline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="roofline", tag_field="kind"):
    """A device: its peaks, links, and the efficiencies that are assumed. Gigabytes are 10^9 bytes.

    `link_gbs` is one direction of the link between devices of one host, 0 where they have none beside the
    host's; `host_link_gbs` that to the host's memory. `sources` says where each number is from.
    """

    name: str
    memory_gb: Positive
    bandwidth_gbs: Positive
    peak_tflops: Mapping[str, Positive]  # by type, without sparsity
    link_gbs: NotNegative
    host_link_gbs: Positive
    efficiency: Efficiency
    overhead: Overhead
    jitter: Jitter
    sources: Mapping[str, str]

    def seconds(self, work: Iterable[PassWork], dtype: str, degree: int = 1) -> float:
        """Seconds of a step's passes on `degree` devices, the host's time not included."""
        return sum(self._pass_seconds(one, self._peak(dtype), degree) for one in work)

    @property
    def host_seconds(self) -> float:
        """Seconds of the host in each step."""
        return self.overhead.host_us * _MICRO

    @property
    def memory_nbytes(self) -> float:
        """Bytes of memory."""
        return self.memory_gb * _GIGA

    def _peak(self, dtype: str) -> float:
        if dtype not in self.peak_tflops:
            known = ", ".join(self.peak_tflops)
            raise ConfigError(f"{self.name}: peak_tflops has no rate for {dtype}; it has {known}")
        return self.peak_tflops[dtype] * _TERA

    def _pass_seconds(self, work: PassWork, peak: float, degree: int) -> float:
        """Products, attention, adapters and reductions run one after the other, each for the longer of
        computing and moving bytes."""
        bandwidth = self.bandwidth_gbs * _GIGA * self.efficiency.bandwidth
        rate, attention = peak * _share(self.efficiency.rows, work.rows), peak * self.efficiency.attention
        overhead = (
            self.overhead.update_us if work.kind is PassKind.UPDATE else work.layers * self.overhead.layer_us
        )
        return (
            max(work.flops / rate, work.weight_bytes / bandwidth)
            + max(work.attention_flops / attention, work.cache_bytes / bandwidth)
            + max(work.adapter_flops / rate, work.adapter_bytes / bandwidth)
            + self._reducing(work, degree)
            + overhead * _MICRO
        )

    def _reducing(self, work: PassWork, degree: int) -> float:
        """Seconds of all-reduces over a ring: each device sends 2 (d - 1) / d of the bytes."""
        if not work.reductions:
            return 0.0
        link = (self.link_gbs or self.host_link_gbs) * _GIGA * self.efficiency.bandwidth
        sent = 2 * (degree - 1) / degree * work.reduced_bytes
        return work.reductions * self.overhead.reduction_us * _MICRO + sent / link


class MeasuredTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="weights", tag_field="kind"):
    """Seconds per unit of each of the scheduler's features (`schedule.cost`), for one shape on one
    machine."""

    name: str
    shape: str
    layers: Count
    cache_tokens: Count
    weights: Mapping[str, NotNegative]
    sources: Mapping[str, str]
    host_us: NotNegative = 0.0
    jitter: Jitter = Jitter()

    def __post_init__(self) -> None:
        if self.weights.keys() != DEFAULT_WEIGHTS.keys():
            wrong = sorted(self.weights.keys() ^ DEFAULT_WEIGHTS.keys())
            raise ValueError(
                f"`weights` needs exactly the features {', '.join(DEFAULT_WEIGHTS)}; see {wrong}"
            )

    @property
    def host_seconds(self) -> float:
        """Seconds of the host in each step, where the weights do not have them."""
        return self.host_us * _MICRO


Table = Roofline | MeasuredTable


@dataclass(frozen=True)
class _BuiltIn:
    """Tables of the package, by name."""

    @cached_property
    def paths(self) -> dict[str, Path]:
        folder = files("coserve.simulate") / "hardware"
        found = (Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".toml"))
        return {path.stem: path for path in sorted(found)}


_BUILT_IN: Final = _BuiltIn()


def hardware_names() -> tuple[str, ...]:
    """Names of the package's tables."""
    return tuple(_BUILT_IN.paths)


def hardware_named(name: str) -> Table:
    """The table called `name`, or in the file of that path. Raises ConfigError, with the field at fault."""
    if name in _BUILT_IN.paths:
        return read_hardware(_BUILT_IN.paths[name])
    if Path(name).suffix == ".toml" or Path(name).is_file():
        return read_hardware(Path(name))
    known = ", ".join(hardware_names())
    raise ConfigError(
        f"there is no hardware {name!r}; there are {known}, and tables of your own (a .toml file)"
    )


def read_hardware(path: Path) -> Table:
    """A table in a file. Raises ConfigError, with the field at fault."""
    try:
        text = path.read_text(encoding="utf-8")
        table: Table = msgspec.toml.decode(text, type=Table)
        return table
    except OSError as error:
        raise ConfigError(f"{path}: expected a table of hardware: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8: {error}") from error
    except msgspec.ValidationError as error:
        line = line_of_field(text, str(error))
        raise ConfigError(f"{path}{f', line {line}' if line else ''}: {error}") from error
    except msgspec.DecodeError as error:  # has the line itself
        raise ConfigError(f"{path}: {error}") from error


def line_of_field(text: str, said: str) -> int | None:
    """The line of a TOML file with the field that a validation error of msgspec names, or that of the table
    which lacks it. None where the file does not have it on a line of its own."""
    place, name = re.search(r" - at `\$\.?([^`]*)`", said), re.search(r"field `(\w+)`", said)
    parts = re.sub(r"\[[^\]]*\]", "", place[1]).split(".") if place and place[1] else []
    wanted = [*parts, *([name[1]] if name else [])]
    table: list[str] = []
    headers: dict[tuple[str, ...], int] = {(): 1}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([\w.\- ]+)\]", line):
            table = header[1].replace(" ", "").split(".")
            headers.setdefault(tuple(table), number)
        elif (key := re.match(r"\s*\"?([\w\-]+)\"?\s*=", line)) and [*table, key[1]] == wanted:
            return number
    return headers.get(tuple(wanted)) or headers.get(tuple(parts))


def _share(points: tuple[tuple[float, float], ...], rows: float) -> float:
    """The share of the peak at `rows`: linear in the logarithm between the points, constant beyond them."""
    place = bisect_right(points, rows, key=lambda point: point[0])
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (low, least), (high, most) = points[place - 1], points[place]
    return least + (most - least) * (log(rows) - log(low)) / (log(high) - log(low))
