"""Settings of an adapter's methods from the fields of a request or command line."""

import dataclasses
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, TypeVar

import msgspec

from coserve.adapters.decodable import decodable
from coserve.adapters.linears import LinearConfig
from coserve.adapters.method import Method
from coserve.adapters.methods import method_named, method_of_type
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.sites import Frame, Kind
from coserve.errors import ConfigError

_T = TypeVar("_T")
_ALL: Final = "all-linear"  # PEFT's word for targets that are not chosen


def settings_of(fields: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
    """One method's settings, or those of several that are one adapter.

    `peft_type` is the method's name in PEFT, `type` in coserve; without either it is LoRA. Other fields have
    their names in the method's settings or in PEFT's. Raises ConfigError, or AdapterError from the method.
    """
    if not isinstance(fields, Mapping):
        if not fields:
            raise ConfigError("peft: a list of methods has at least one")
        return tuple(_settings(own, f"peft.{number}") for number, own in enumerate(fields))
    return (_settings(fields, "peft"),)


def left_untrained(frame: Frame, methods: Sequence[object]) -> str:
    """A sentence about fused experts that a fresh adapter at "all linears" leaves as they are, though a
    caller may expect them among these (PEFT trains those of bases that it can convert); else empty."""
    asks_all = any(
        isinstance(one, LoRAConfig | IA3Config | LinearConfig) and one.targets == () for one in methods
    )
    fused = [path for path in frame.modules.paths if path in frame.modules.fused]
    reaches = any(isinstance(one, BottleneckConfig) or getattr(one, "parameters", ()) for one in methods)
    if not (asks_all and fused) or reaches:
        return ""
    number = f"{len(fused)} modules such as {fused[0]}" if len(fused) > 1 else fused[0]
    nearest = "a bottleneck after the mixture ({'type': 'bottleneck'}) is nearest"
    if any(site.kind is Kind.EXPERTS for site in frame.sites.values()):
        nearest = "LoRA reaches them by name ({'target_parameters': ['experts.down_proj', ...]})"
    return (
        f"The adapter stands at all linears and leaves the fused experts untrained ({number}): each of their "
        f"weights is one tensor, which no targets reach; {nearest}"
    )


def convert(fields: Mapping[str, Any], kind: type[_T], what: str) -> _T:
    """A settings dataclass from plain fields. Raises ConfigError naming an unknown or invalid field."""
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(fields) - known):
        near = get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
        raise ConfigError(f"{what} has no field {unknown[0]!r}; {hint}")
    try:
        found: _T = msgspec.convert(dict(fields), decodable(kind))
        return found
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: {error}") from error


def _settings(fields: Mapping[str, Any], what: str) -> object:
    method = _method(fields)
    own: dict[str, Any] = {}
    for name, value in fields.items():
        if name in ("type", "peft_type"):
            continue
        ours = method.aliases.get(name, name)
        if ours in own:
            raise ConfigError(f"{what} gives {ours} twice")
        own[ours] = () if ours == "targets" and value == _ALL else value
    return convert(own, method.config, f"{what} ({method.name})")


def _method(fields: Mapping[str, Any]) -> Method:
    if "type" in fields and "peft_type" in fields:
        raise ConfigError("peft: give either type or peft_type")
    if "peft_type" in fields:
        return method_of_type(fields["peft_type"])
    return method_named(fields.get("type", "lora"))
