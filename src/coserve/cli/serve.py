"""`coserve serve`: collects the settings and starts the supervisor."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coserve.cli.options import Config, config_of, given, with_flags
from coserve.core.request import SLO
from coserve.errors import ConfigError, ZooError
from coserve.serve.settings import TIERS, ServerSettings, shown

ZOO_TABLES = ("chains", "bases", "adapter_bases", "stitched")  # settings that a zoo has, beside adapters
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # NAME or OWNER/NAME


@with_flags()
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Folder or hub name of the base model; the embedded one if none is given."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A PEFT adapter to serve from the start; may be repeated."),
    ] = None,
    zoo: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A zoo: its foundations, or MODEL in it, and all adapters and full fine-tunes of these, "
            "each by its own name.",
        ),
    ] = None,
    *,
    flags: dict[str, Any],
    slowdown: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TIER=]RATIO",
            help="How much longer training may make answers take, of all tiers or of one; may be repeated. "
            "By default priority=1.25, default=1.5, and any for flex.",
        ),
    ] = None,
    config: Config = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the settings as JSON and end.")
    ] = False,
) -> None:
    """Serves a model, its adapters and fine-tuning jobs over OpenAI's API.

    Ctrl-C lets running answers finish and jobs write checkpoints; a second one stops at once.
    """
    from coserve.cli.config import load_server_settings, unread
    from coserve.cli.output import print_json

    adapters = _adapters(adapter) if adapter else {}
    stored: dict[str, Any] = {}
    if zoo is not None:
        model, flags["name"], stored = _from_zoo(zoo, model, flags.get("name"), adapters)
        adapters = stored["adapters"]
    flags |= given(
        model=model,
        adapters=adapters or None,
        **{table: stored.get(table) or None for table in ZOO_TABLES},
        slo=_slowdowns(slowdown) if slowdown else None,
    )
    file = config or config_of(context)

    def read() -> ServerSettings:
        return load_server_settings(flags, file)

    settings = read()
    _check_model(settings.model)
    if (told := unread()) is not None:
        print(f"coserve: warning: {told}", file=sys.stderr)
    if show_config:
        print_json(shown(settings))
        return
    from coserve.model.hub import check_hub
    from coserve.serve.processes.device import require_device

    # Before all that takes longer to import than to find these out.
    require_device(settings.engine.device)
    check_hub(settings.model)

    from rich.console import Console

    from coserve.serve.processes import supervisor

    raise typer.Exit(supervisor.serve(settings, Console(highlight=False), read_settings=read))


def _from_zoo(
    folder: Path, model: str | None, name: str | None, adapters: dict[str, str]
) -> tuple[str, str, dict[str, Any]]:
    """The model's folder, its name, and the settings of a zoo: adapters, with the given ones, further bases
    and chains. Raises ZooError, and ConfigError for an adapter whose name is in the zoo."""
    import json
    import subprocess

    # In a process of its own: the supervisor, which stays, then never loads torch.
    command = "from coserve.cli.app import main; main()"
    asked = ["zoo", "views", *([model] if model else []), "--zoo", str(folder)]
    ran = subprocess.run([sys.executable, "-c", command, *asked], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ZooError(ran.stderr.strip().removeprefix("coserve: ") or f"the zoo at {folder} cannot be read")
    served = json.loads(ran.stdout)
    for left, why in served["left_out"].items():
        print(f"{left} is not served: {why}", file=sys.stderr)
    if taken := adapters.keys() & {*served["adapters"], *served["bases"]}:
        raise ConfigError(f"--adapter {min(taken)}: the zoo has a model or an adapter of that name")
    settings: dict[str, Any] = {table: served[table] for table in ZOO_TABLES}
    settings["adapters"] = served["adapters"] | adapters
    called = name or served["name"]

    def named(of: str) -> str:
        return called if of == served["name"] else of

    settings["chains"] = {named(of): own for of, own in settings["chains"].items()}
    for chain in settings["stitched"].values():
        chain |= {place: named(chain[place]) for place in ("first", "second")}
    return served["model"], called, settings


def _check_model(model: str) -> None:
    """Raises ConfigError for a folder that is missing: the hub would report it as a malformed name."""
    if not Path(model).exists() and not HUB_NAME.fullmatch(model):
        raise ConfigError(f"there is no model folder {model}")


def _slowdowns(given: list[str]) -> dict[str, dict[str, float]]:
    """Bounds of the tiers, of which later ones count."""
    found: dict[str, dict[str, float]] = {}
    for written in given:
        tier, _, ratio = written.rpartition("=")
        if tier and tier not in TIERS:
            raise ConfigError(f"--slowdown {written}: there is no tier {tier!r}, only {', '.join(TIERS)}")
        try:
            bound = SLO(slowdown=float(ratio))
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"--slowdown {written}: expected a ratio of at least 1, as 1.5") from error
        assert bound.slowdown is not None, "it was given"
        found |= {one: {"slowdown": bound.slowdown} for one in ((tier,) if tier else TIERS)}
    return found


def _adapters(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in given:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--adapter {pair}: expected NAME=PATH")
        if name in found:
            raise ConfigError(f"--adapter {pair}: there are two adapters of that name")
        if not Path(path).expanduser().is_dir():
            raise ConfigError(f"--adapter {pair}: there is no folder {path}")
        found[name] = path
    return found
