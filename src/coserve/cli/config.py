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
from typing import Any, get_args, get_origin, get_type_hints

from coserve.config import EngineConfig
from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.schedule.config import SchedulerConfig
from coserve.serve.settings import DEFAULT_SLO, TIERS, ServerSettings
from coserve.split.credentials import CLUSTER_KEY, EXECUTOR_KEY

PREFIX = "COSERVE_"
FILE_NAME = "coserve.toml"
DEFAULT_URL = "http://127.0.0.1:8000"
EMBEDDED = "coserve-tiny"
OTHER_VARIABLES = ("COSERVE_CONFIG", "COSERVE_NATIVE", CLUSTER_KEY, EXECUTOR_KEY)
# Variables of containers beside a Kubernetes service, or a linked container, called coserve.
_OF_SERVICE = re.compile(r"COSERVE_SERVICE_(HOST|PORT(_\w+)?)|COSERVE_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?")
MOST_NAMED = 5  # unread variables, or settings, in one sentence
CLOSE = 0.8  # likeness from which an unknown variable is taken for a slip of the pen
# Settings of names that are not known here, which no variable of the environment has.
_NAMED = (
    "bases",
    "adapters",
    "adapter_bases",
    "chains",
    "stitched",
    "model_aliases",
    "policy_options",
    "scheduler",
)
# Names of types by the beginning of pydantic's kinds of errors.
_TYPES = {"int": "int", "float": "float", "bool": "bool", "string": "str", "path": "str", "tuple": "array"}
_TYPES |= dict.fromkeys(("dict", "mapping", "dataclass"), "object")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The server that the other commands talk to."""

    url: str = DEFAULT_URL
    api_key: str | None = None


TABLES: Mapping[str, type] = {"server": ServerSettings, "client": ClientSettings}


def load_server_settings(
    flags: Mapping[str, Any],
    config: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> ServerSettings:
    """All of a server's settings; without a model, or with its name, those of the embedded one.

    `flags` has the structure of the file's table, without flags not given. Raises ConfigError.
    """
    given = _validated(flags, config, environment)
    if given.setdefault("model", EMBEDDED) == EMBEDDED:
        from coserve import tiny

        given |= {"model": str(tiny.path()), "name": given.get("name", EMBEDDED)}
    given.setdefault("state", _default_state(given.get("name") or given["model"]))
    return ServerSettings(**given)


def load_client_settings(
    flags: Mapping[str, Any],
    config: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> ClientSettings:
    """Settings of a client: the server's address and the API key. Raises ConfigError."""
    from_environment = read_environment("client", environment)
    given = {**_from_file("client", config, environment), **from_environment, **flags}
    for key, value in given.items():
        if not isinstance(value, str):
            raise ConfigError(f"{key}: expected str, got {type(value).__name__}")
    return ClientSettings(**given)


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
    if "server" in tables:
        tables["server"] = _anchored(tables["server"], path.absolute().parent)
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


def _from_file(table: str, config: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    path = find_config(config, environment)
    found: dict[str, Any] = {} if path is None else read_config(path).get(table, {})
    return found


def _validated(
    flags: Mapping[str, Any], config: Path | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The given settings of a server, each of its type. Raises ConfigError."""
    # Only here: the import takes as long as a client's whole command, and 11 MiB.
    from pydantic import ValidationError, create_model
    from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

    file, variables = _from_file("server", config, environment), read_environment("server", environment)
    flags, variables = (_anchored(layer, Path.cwd()) for layer in (flags, variables))
    engine = file.get("engine")
    if isinstance(engine, dict) and any("policy" in layer.get("engine", {}) for layer in (flags, variables)):
        engine.pop("policy_options", None)  # of another policy
    bounds = {tier: _stated(slo) for tier, slo in DEFAULT_SLO.items()}  # those that no layer has
    layers = (variables, file, {"slo": bounds})

    class Layers(BaseSettings, extra="forbid", validate_default=False):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            *_: Any,
            **__: Any,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (init_settings, *(InitSettingsSource(settings_cls, layer) for layer in layers))

    hints = get_type_hints(ServerSettings, include_extras=True)
    definitions: dict[str, Any] = {name: (hint, None) for name, hint in hints.items()}
    try:
        found = create_model("Settings", __base__=Layers, **definitions)(**flags)
    except ValidationError as error:
        raise _misfit(error.errors()[0]) from error
    return {name: getattr(found, name) for name in found.model_fields_set}


def _misfit(error: Mapping[str, Any]) -> ConfigError:
    """The error for a value of another type than its setting's."""
    key = ".".join(str(part) for part in error["loc"] if part not in ("str", "int", "float"))
    expected = _TYPES.get(error["type"].partition("_")[0])
    told = f"expected {expected}, got {type(error['input']).__name__}" if expected else error["msg"]
    return ConfigError(f"{key}: {told}")


def _stated(slo: SLO) -> dict[str, float]:
    return {name: bound for name, bound in asdict(slo).items() if bound is not None}


def _check_keys(values: Mapping[str, Any], kind: type, where: str, prefix: str) -> None:
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            raise _unknown(key, hints, where.rstrip(": "), prefix)
        if isinstance(value, bool) and bool not in (hints[key], *get_args(hints[key])):
            raise ConfigError(f"{where}{prefix}{key}: expected no truth value, got {str(value).lower()}")
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


def _anchored(server: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A server's table with absolute paths instead of those relative to `folder`."""

    def path(value: object) -> object:
        return str(folder / Path(value).expanduser()) if isinstance(value, str) else value

    found = dict(server)
    for key in {"state", "adapter_root", "ssl_certfile", "ssl_keyfile", "webhook_secret_file"} & found.keys():
        found[key] = path(found[key])
    model = found.get("model")
    if isinstance(model, str) and model and (folder / Path(model).expanduser()).exists():
        found["model"] = str((folder / Path(model).expanduser()).resolve())
    for key in ("bases", "adapters"):
        if isinstance(named := found.get(key), dict):
            found[key] = {name: path(value) for name, value in named.items()}
    for key in ("chains", "stitched"):
        if isinstance(named := found.get(key), dict):
            found[key] = {
                name: {
                    part: path(value) if value and (key == "chains" or part == "folder") else value
                    for part, value in own.items()
                }
                if isinstance(own, dict)
                else own
                for name, own in named.items()
                if own
            }
    return found


def _default_state(name: str) -> Path:
    """Default state folder of a base model: jobs and adapters belong to one base each."""
    import platformdirs

    return platformdirs.user_data_path("coserve") / name.strip("/").replace("/", "--")
