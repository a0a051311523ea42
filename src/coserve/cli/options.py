"""Options that several commands share, and the client and configuration they select."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from coserve.cli.complete import complete_adapters, complete_jobs, complete_models
from coserve.config import EngineConfig
from coserve.core.setting import Flag, noted
from coserve.errors import ConfigError
from coserve.serve.settings import ServerSettings

if TYPE_CHECKING:
    from coserve.cli.client import Client

# Fields of a job that errors name, and the flags that give them.
FLAGS = {"optimizer.max_length": "--max-length", "optimizer.too_long": "--too-long"}
INTERRUPTED = 130  # exit status that a shell reports after Ctrl-C
Url = Annotated[
    str | None,
    typer.Option("--url", help="Address of the server, http://127.0.0.1:8000 by default.", metavar="URL"),
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", help="API key, where the server wants one.", metavar="KEY")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", help="Configuration file, instead of coserve.toml here or the user's own.", metavar="FILE"
    ),
]
JobId = Annotated[str, typer.Argument(help="Id of a job.", metavar="JOB", autocompletion=complete_jobs)]
AdapterName = Annotated[
    str, typer.Argument(help="Name of an adapter.", metavar="NAME", autocompletion=complete_adapters)
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="The base model or an adapter.", metavar="NAME", autocompletion=complete_models
    ),
]


def option_of(kind: type, field: str) -> Any:
    """The option of a setting that has a flag."""
    flag, default = noted(kind, Flag)[field], next(one.default for one in fields(kind) if one.name == field)
    name = flag.name or f"--{field.replace('_', '-')}"
    return typer.Option(name, help=flag.help.format(default=default), metavar=flag.metavar)


State = Annotated[Path | None, option_of(ServerSettings, "state")]
DatabaseUrl = Annotated[str | None, option_of(ServerSettings, "database")]
Artifacts = Annotated[str | None, option_of(ServerSettings, "artifacts")]


def with_flags(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces a command's parameter `flags` by an option for each setting of a server, or of its engine,
    that has a flag, or for those of these `names`. The command gets those that were given, in the structure
    of the file's table."""
    tables = {"": ServerSettings, "engine": EngineConfig}
    settings = [
        (table, kind, field)
        for table, kind in tables.items()
        for field in noted(kind, Flag)
        if not names or field in names
    ]
    options = [
        inspect.Parameter(
            field,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_type_on_line(kind, field) | None, option_of(kind, field)],
        )
        for _, kind, field in settings
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints, parameters = get_type_hints(command, include_extras=True), []
        for name, parameter in inspect.signature(command).parameters.items():
            own = parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
            parameters += options if name == "flags" else [own]

        @wraps(command)
        def call(**given: Any) -> None:
            flags: dict[str, Any] = {}
            for table, _, field in settings:
                if (value := given.pop(field)) not in (None, []):
                    (flags.setdefault(table, {}) if table else flags)[field] = value
            command(**given, flags=flags)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def _type_on_line(kind: type, field: str) -> Any:
    """The type of a setting's value on the command line, where all but numbers and switches is text."""
    hint = get_type_hints(kind)[field]
    return list[str] if get_origin(hint) is tuple else hint if hint in (bool, int, float) else str


class ListsAlone(TyperGroup):
    """Command group that runs `list` by default."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else "--"
        if first.startswith("-") and first not in ctx.help_option_names and not ctx.resilient_parsing:
            args = ["list", *args]
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class ServerOptions:
    """The options of a command that asks a server (`unfolded`)."""

    context: typer.Context
    url: Url = None
    api_key: ApiKey = None

    def connect(self) -> "Client":
        """A client of the server given by flags, the environment or the file, in this order."""
        from coserve.cli.client import Client
        from coserve.cli.config import load_client_settings

        flags = given(url=self.url, api_key=self.api_key)
        return Client(load_client_settings(flags, config_of(self.context)))


def tell_wait(reason: str) -> None:
    """Says for what a command waits, beside its output."""
    print(f"Waiting: {reason}", file=sys.stderr, flush=True)


def config_of(context: typer.Context) -> Path | None:
    """The configuration file given before the command."""
    found = context.find_root().obj
    return found if isinstance(found, Path) else None


def given(**flags: Any) -> dict[str, Any]:
    """Flags that were given, by name: those that are not None."""
    return {key: value for key, value in flags.items() if value is not None}


def in_flags(message: str) -> str:
    """A server's message with flags in place of the fields of a job that they give."""
    for field, flag in FLAGS.items():
        message = message.replace(field, flag)
    return message


def check_writable(flag: str, path: Path | None) -> None:
    """Raises ConfigError early where a flag's file could not be written after minutes of work."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{flag} {path}: expected a file in a folder that exists")


def unfolded(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each parameter that is a dataclass by the dataclass's fields, with their annotations and
    defaults, behind the other parameters, so that several commands can share a group of options."""
    hints = get_type_hints(command, include_extras=True)
    names = inspect.signature(command).parameters
    groups: dict[str, type[Any]] = {name: hints[name] for name in names if is_dataclass(hints[name])}
    own = {name: (one.default, hints[name]) for name, one in names.items() if name not in groups}
    for group in groups.values():
        types = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            own[field.name] = default, types[field.name]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, (default, hint) in own.items()
    ]

    @wraps(command)
    def call(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
        command(**options)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call
