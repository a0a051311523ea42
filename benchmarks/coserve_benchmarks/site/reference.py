"""Pages of reference that are made from the code: commands, settings, metrics, endpoints, the Python API."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Final, get_type_hints

from fastapi.routing import APIRoute
from prometheus_client.metrics import MetricWrapperBase
from typer.core import TyperOption
from typer.main import get_command

from coserve.adapters.methods import methods
from coserve.adapters.methods.lora import LoRAConfig
from coserve.cli.app import app
from coserve.config import EngineConfig
from coserve.core.setting import Flag, Range, noted
from coserve.metrics import Metrics
from coserve.schedule.config import SchedulerConfig
from coserve.serve.app import ROOMS
from coserve.serve.settings import ServerSettings
from coserve.serve.tinker import routes as tinker

# Tables of `coserve.toml`, and where their settings are: those without a flag are in the file alone.
TABLES: Final[Mapping[str, type]] = {
    "server": ServerSettings,
    "server.engine": EngineConfig,
    "server.engine.scheduler": SchedulerConfig,
}
# The public Python API by what it is for, in the order in which a reader meets it.
API: Final[Mapping[str, Sequence[str]]] = {
    "Imported from `coserve`": (
        "coserve.engine.engine.Engine",
        "coserve.config.EngineConfig",
        "coserve.core.request.SamplingParams",
        "coserve.core.request.SLO",
        "coserve.core.request.FinishReason",
        "coserve.train.config.TrainingConfig",
        "coserve.adapters.methods.lora.LoRAConfig",
        "coserve.train.save_policy.SavePolicy",
        "coserve.core.training.AdamParams",
        "coserve.core.training.Datum",
    ),
    "What an engine's methods return": (
        "coserve.engine.completion.Completion",
        "coserve.engine.completion.Delta",
        "coserve.engine.finetuning.FineTuning",
        "coserve.engine.adapters.EngineAdapters",
        "coserve.engine.training_client.TrainingClient",
        "coserve.engine.training_client.Operation",
    ),
    "Settings of adapter methods": tuple(
        sorted(
            {
                f"{method.config.__module__}.{method.config.__qualname__}"
                for method in methods().values()
                if method.config is not LoRAConfig
            }
        )
    ),
    "Split execution": (
        "coserve.split.attach.attach",
        "coserve.split.tls.ClientTls",
        "coserve.split.privacy.modes.Noise",
        "coserve.split.privacy.modes.Shares",
    ),
    "Errors": ("coserve.errors",),
}


def commands() -> str:
    """Every command of the command line, with its arguments and options."""
    lines = ["# Commands", "", "`coserve COMMAND --help` prints the same."]
    for words, command in _commands(get_command(app), ("coserve",)):
        lines += ["", f"## {' '.join(words)}", "", command.help or "", ""]
        options = [one for one in command.params if isinstance(one, TyperOption) and not one.hidden]
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        for argument in arguments:
            name = argument.metavar or (argument.name or "").upper()
            lines += [f"`{name}`: {getattr(argument, 'help', '') or ''}", ""]
        if options:
            lines += ["| option | |", "|---|---|"]
            lines += [f"| {_option(one)} | {_cell(one.help or '')} |" for one in options]
    return "\n".join(lines) + "\n"


def settings(example: Path) -> str:
    """Every setting of a server: its key, default, range and flag, and a file that has all of them."""
    lines = ["# Settings", "", "A flag wins over a `COSERVE_` variable, and that over `coserve.toml`."]
    for table, kind in TABLES.items():
        flags, ranges = noted(kind, Flag), noted(kind, Range)
        prefix = "COSERVE_" + "".join(f"{word.upper()}_" for word in table.split(".")[1:])
        lines += ["", f"## [{table}]", "", f"As a variable: `{prefix}` and the key in capitals.", ""]
        lines += ["| key | type | default | range | flag | |", "|---|---|---|---|---|---|"]
        types = get_type_hints(kind)
        for field in fields(kind):
            flag = flags.get(field.name)
            default = "required" if field.default is MISSING else f"`{field.default!r}`"
            shown = "a table" if field.default_factory is not MISSING else default
            name = "" if flag is None else f"`{(flag.name or '--' + field.name.replace('_', '-')).strip()}`"
            said = "" if flag is None else flag.help.format(default=field.default)
            cells = (
                f"`{field.name}`",
                f"`{_type(types[field.name])}`",
                shown,
                str(ranges.get(field.name, "")),
            )
            lines.append("| " + " | ".join(_cell(one) for one in (*cells, name, said)) + " |")
    lines += ["", "## A file with every key", "", "```toml", example.read_text().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Every metric of `/metrics`."""
    lines = [
        *("# Metrics", ""),
        "`/metrics` is in Prometheus's format. Names and units are vLLM's where vLLM has the metric.",
        *("", "| metric | type | labels | |", "|---|---|---|---|"),
    ]
    for metric in Metrics().registry._collector_to_names:
        assert isinstance(metric, MetricWrapperBase)
        name = metric._name + ("_total" if metric._type == "counter" else "")
        labels = ", ".join(f"`{one}`" for one in metric._labelnames)
        lines.append(f"| `{name}` | {metric._type} | {labels} | {_cell(metric._documentation)} |")
    return "\n".join(lines) + "\n"


def endpoints() -> str:
    """Every HTTP endpoint, by its group."""
    lines = [
        *("# HTTP endpoints", ""),
        "A server shows the same with all schemas at `/docs`, and as OpenAPI at `/openapi.json`.",
    ]
    for group, routes in groupby(served(), key=lambda one: (one.tags or ["Pages"])[0]):
        lines += ["", f"## {group}", "", "| | |", "|---|---|"]
        for route in routes:
            said = _cell((route.description or route.summary or "").split("\n\n")[0])
            lines += [f"| `{method} {route.path}` | {said} |" for method in sorted(route.methods or ())]
    return "\n".join(lines) + "\n"


def served() -> list[APIRoute]:
    """The routes of a server, of all dialects."""
    routers = (*(room.router for room in ROOMS), *tinker.ROUTERS)
    return [one for router in routers for one in router.routes if isinstance(one, APIRoute)]


def python_api() -> str:
    """Directives from which mkdocstrings makes the reference of the Python API."""
    lines = ["# Python"]
    for group, names in API.items():
        lines += ["", f"## {group}"]
        for name in names:
            lines += ["", f"::: {name}"]
    return "\n".join(lines) + "\n"


def pages(docs: Path) -> dict[str, Callable[[], str]]:
    """The text of each page that is made, by its path below `docs`."""
    return {
        "reference/commands.md": commands,
        "reference/settings.md": lambda: settings(docs / "coserve.toml"),
        "reference/metrics.md": metrics,
        "reference/endpoints.md": endpoints,
        "reference/python.md": python_api,
    }


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    nested = getattr(command, "commands", None)
    if nested is None:
        yield words, command
        return
    for name, inner in nested.items():
        if not inner.hidden:
            yield from _commands(inner, (*words, name))


def _option(option: TyperOption) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return f"{names} {option.metavar}" if option.metavar else names


def _type(hint: Any) -> str:
    return re.sub(r"\b[\w.]+\.(\w+)", r"\1", hint.__name__ if isinstance(hint, type) else str(hint))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
