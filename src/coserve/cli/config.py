"""Settings from flags, the environment and `coserve.toml`, in this order of precedence. Unknown keys are
errors.

    [server]                # fields of ServerSettings
    model = "Qwen/Qwen3-0.6B"
    [server.adapters]
    mine = "adapters/mine"  # paths in the file are relative to the file
    [server.engine]
    device = "cuda"
    [client]
    url = "http://127.0.0.1:8000"
    api_key = "sk-coserve-..."

In the environment the same fields are `COSERVE_PORT`, `COSERVE_ENGINE_DEVICE`, `COSERVE_SLO_FLEX_DEFERRAL`,
`COSERVE_URL` and so on; lists, such as `COSERVE_CORS_ORIGINS`, have commas in between. A variable that is
nearly a setting's is an error too, and `coserve serve` names the others that nothing reads.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_origin, get_type_hints

import msgspec

from coserve.config import EngineConfig
from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.schedule.config import SchedulerConfig
from coserve.serve.settings import DEFAULT_SLO, TIERS, ServerSettings
from coserve.split.credentials import EXECUTOR_KEY
from coserve.wire.control import decode_path

PREFIX = "COSERVE_"
FILE_NAME = "coserve.toml"
DEFAULT_URL = "http://127.0.0.1:8000"
EMBEDDED = "coserve-tiny"
OTHER_VARIABLES = ("COSERVE_CONFIG", "COSERVE_NATIVE", EXECUTOR_KEY)
# Variables of containers beside a Kubernetes service, or a linked container, called coserve.
_OF_SERVICE = re.compile(r"COSERVE_SERVICE_(HOST|PORT(_\w+)?)|COSERVE_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?")
MOST_NAMED = 5  # unread variables, or settings, in one sentence
CLOSE = 0.8  # likeness from which an unknown variable is taken for a slip of the pen
# Settings of names that are not known here, which no variable of the environment has.
_NAMED = ("bases", "adapters", "adapter_bases", "chains", "stitched", "policy_options", "scheduler")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The server that the other commands talk to."""

    url: str = DEFAULT_URL
    api_key: str | None = None


class _Places(TypedDict, total=False):
    """Server settings needed before all others are converted; they must be text."""

    model: str
    name: str
    state: str
    adapter_root: str
    bases: dict[str, str]
    adapters: dict[str, str]
    chains: dict[str, dict[str, str]]
    stitched: dict[str, dict[str, str]]


TABLES: Mapping[str, type] = {"server": ServerSettings, "client": ClientSettings}


def load_server_settings(
    flags: Mapping[str, Any],
    config: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> ServerSettings:
    """All of a server's settings; without a model, or with its name, those of the embedded one.

    `flags` has the structure of the file's table, without flags not given. Raises ConfigError.
    """
    merged = _layers("server", flags, config, environment)
    _convert(merged, _Places)
    if isinstance(tiers := merged.get("slo"), dict):  # a tier's other bounds stay those by default
        merged["slo"] = _merge({tier: _stated(slo) for tier, slo in DEFAULT_SLO.items()}, tiers)
    if merged.get("model", EMBEDDED) == EMBEDDED and not Path(EMBEDDED).exists():
        from coserve import tiny

        merged |= {"model": str(tiny.path()), "name": merged.get("name", EMBEDDED)}
    elif merged["model"] and Path(merged["model"]).expanduser().exists():
        merged["model"] = str(Path(merged["model"]).expanduser().resolve())
    if "state" not in merged:
        merged["state"] = str(_default_state(merged.get("name") or merged["model"]))
    for key in ("state", "adapter_root"):
        if key in merged:
            merged[key] = str(Path(merged[key]).expanduser().absolute())
    for table in ("bases", "adapters"):
        merged[table] = {
            name: str(Path(path).expanduser().absolute()) for name, path in merged.get(table, {}).items()
        }
    merged["chains"] = {
        name: {chain: path and str(Path(path).expanduser().absolute()) for chain, path in own.items()}
        for name, own in merged.get("chains", {}).items()
        if own
    }
    merged["stitched"] = {
        name: {
            key: str(Path(one).expanduser().absolute()) if key == "folder" else one
            for key, one in own.items()
        }
        for name, own in merged.get("stitched", {}).items()
        if own
    }
    return _convert(merged, ServerSettings)


def load_client_settings(
    flags: Mapping[str, Any],
    config: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> ClientSettings:
    """Settings of a client: the server's address and the API key. Raises ConfigError."""
    return _convert(_layers("client", flags, config, environment), ClientSettings)


def find_config(given: Path | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The configuration file: the one given, `./coserve.toml`, or the user's own; never several."""
    import platformdirs

    if given is None and (named := environment.get("COSERVE_CONFIG")):
        given = Path(named)
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"there is no configuration file {given}")
        return given
    candidates = (Path(FILE_NAME), platformdirs.user_config_path("coserve") / FILE_NAME)
    return next((path for path in candidates if path.is_file()), None)


def read_config(path: Path) -> dict[str, Any]:
    """The file's tables, with its paths made absolute. Raises ConfigError with the place of the error."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for table, content in tables.items():
        if table not in TABLES:
            raise _unknown(table, TABLES, str(path))
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: [{table}] must be a table")
        _check_keys(content, TABLES[table], f"{path}: ", f"{table}.")
    _anchor(tables.get("server", {}), path.absolute().parent)
    return tables


def read_environment(table: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings of one table from the environment.

    Empty variables are ignored. An unknown variable similar to a setting is an error; others are ignored (see
    `unread`), as are those of a service called coserve.
    """
    known = _variables()
    mine = set(_paths(TABLES[table]))
    lists = {name for name, hint in get_type_hints(TABLES[table]).items() if get_origin(hint) is tuple}
    found: dict[str, Any] = {}
    for variable, value in environment.items():
        if _is_of_service(variable, value):
            continue
        if variable in known:
            if value and (path := known[variable]) in mine:
                is_list = path[0] in lists
                _put(found, path, [one.strip() for one in value.split(",")] if is_list else value)
        elif close := _meant(variable, known):
            raise ConfigError(f"the environment has an unknown {variable}: did you mean {close}?")
    return found


def unread(environment: Mapping[str, str] = os.environ) -> str | None:
    """A sentence about the `COSERVE_` variables that nothing reads, None if there are none. Their values,
    which may be secret, are not in it."""
    known = {*_variables(), *OTHER_VARIABLES}
    found = sorted(
        variable
        for variable, value in environment.items()
        if variable.startswith(PREFIX) and variable not in known and not _is_of_service(variable, value)
    )
    if not found:
        return None
    named = found[:MOST_NAMED] + ([f"{len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else [])
    told = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
    return f"nothing reads {told} of the environment; `coserve serve --show-config` prints all settings"


def _variables() -> dict[str, tuple[str, ...]]:
    """The settings by their variables."""
    return {PREFIX + "_".join(path).upper(): path for kind in TABLES.values() for path in _paths(kind)}


def _is_of_service(variable: str, value: str) -> bool:
    has_address = variable == f"{PREFIX}PORT" and value.startswith(("tcp://", "udp://", "sctp://"))
    return has_address or _OF_SERVICE.fullmatch(variable) is not None


def _meant(variable: str, known: Mapping[str, tuple[str, ...]]) -> str | None:
    """The variable that an unknown one is nearly: in another case, with the table's name, without
    `ENGINE_`, or with a slip of the pen."""
    plain = _plain(variable).upper()
    if not plain.startswith(PREFIX) or variable in OTHER_VARIABLES:
        return None
    rest = plain.removeprefix(PREFIX)
    for table in TABLES:
        rest = rest.removeprefix(f"{table.upper()}_")
    for close in (PREFIX + rest, f"{PREFIX}ENGINE_{rest}"):
        if close in known:
            return close
    return next(iter(difflib.get_close_matches(PREFIX + rest, known, 1, CLOSE)), None)


def _plain(key: str) -> str:
    return key.lower().replace("-", "_")


def _layers(
    table: str, flags: Mapping[str, Any], config: Path | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    path = find_config(config, environment)
    from_file = read_config(path).get(table, {}) if path is not None else {}
    return _merge(_merge(from_file, read_environment(table, environment)), flags)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if isinstance(value, Mapping) and isinstance(lower, Mapping):
            if key == "engine" and "policy" in value:  # whose options are its own, not those of one below
                lower = {name: one for name, one in lower.items() if name != "policy_options"}
            merged[key] = _merge(lower, value)
        else:
            merged[key] = value
    return merged


def _stated(slo: SLO) -> dict[str, float]:
    return {name: bound for name, bound in asdict(slo).items() if bound is not None}


def _convert(values: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(
            values, kind, strict=False, dec_hook=decode_path
        )  # the environment is all text
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        key = place.rstrip("`") or kind.__name__
        raise ConfigError(f"{key}: {reason[:1].lower()}{reason[1:].replace('`', '')}") from error


def _check_keys(values: Mapping[str, Any], kind: type, where: str, prefix: str) -> None:
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            raise _unknown(key, hints, where.rstrip(": "), prefix)
        if not isinstance(value, dict):
            continue
        if is_dataclass(hints[key]):
            _check_keys(value, hints[key], where, f"{prefix}{key}.")
        elif key == "scheduler":
            _check_keys(value, SchedulerConfig, where, f"{prefix}{key}.")
        elif key == "slo":
            for tier, bounds in value.items():
                if tier in TIERS and isinstance(bounds, dict):  # other tiers are refused with the values
                    _check_keys(bounds, SLO, where, f"{prefix}{key}.{tier}.")


def _unknown(key: str, known: Mapping[str, Any] | Sequence[str], where: str, prefix: str = "") -> ConfigError:
    close = [f"{prefix}{_plain(key)}"] if _plain(key) in known else []
    close = close or [place for place in _places() if place.endswith(f".{_plain(key)}")]
    close = close or [prefix + one for one in difflib.get_close_matches(_plain(key), list(known), 1)]
    some = ", ".join([*list(known)[:MOST_NAMED], *(["..."] if len(known) > MOST_NAMED else [])])
    hint = f"did you mean {close[0]}?" if close else f"there are {some}"
    return ConfigError(f"{where} has an unknown key {prefix}{key}: {hint}")


def _paths(kind: type) -> Iterator[tuple[str, ...]]:
    """The settings of a class that one variable can hold, as paths of keys."""
    hints = get_type_hints(kind)
    for one in fields(kind):
        hint = hints[one.name]
        if hint is EngineConfig:
            yield from ((one.name, *path) for path in _paths(EngineConfig))
        elif one.name == "slo":
            yield from ((one.name, tier, bound.name) for tier in TIERS for bound in fields(SLO))
        elif one.name not in _NAMED:
            yield (one.name,)


def _places() -> list[str]:
    """The settings and tables of the file, as `server.engine.device`."""
    own = {f"{table}.{one.name}" for table, kind in TABLES.items() for one in fields(kind)}
    paths = {".".join((table, *path)) for table, kind in TABLES.items() for path in _paths(kind)}
    engine = {f"server.engine.{one.name}" for one in fields(EngineConfig)}
    return sorted(own | paths | engine, key=lambda place: (place.count("."), place))


def _put(into: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
    into[path[-1]] = value


def _anchor(server: dict[str, Any], folder: Path) -> None:
    """Resolves a table's paths relative to its file's folder."""
    for key in ("state", "adapter_root"):
        if isinstance(server.get(key), str):
            server[key] = str(folder / Path(server[key]).expanduser())
    model = server.get("model")
    if isinstance(model, str) and model and (folder / Path(model).expanduser()).exists():
        server["model"] = str(folder / Path(model).expanduser())
    within = [server.get("chains"), server.get("stitched")]
    named = server.get("bases"), server.get("adapters")
    tables: list[Any] = [*named, *(own for each in within if isinstance(each, dict) for own in each.values())]
    for paths in tables:
        for name, path in paths.items() if isinstance(paths, dict) else ():
            if path and isinstance(path, str) and name not in ("first", "second"):
                paths[name] = str(folder / Path(path).expanduser())


def _default_state(name: str) -> Path:
    """Default state folder of a base model: jobs and adapters belong to one base each."""
    import platformdirs

    return platformdirs.user_data_path("coserve") / name.strip("/").replace("/", "--")
