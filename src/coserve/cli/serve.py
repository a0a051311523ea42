"""`coserve serve`: collects the settings and starts the supervisor."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coserve.cli.options import (
    BaseCa,
    BaseCertificate,
    BaseKey,
    BasePin,
    BasePrivacy,
    Config,
    State,
    config_of,
    given,
)  # fmt: skip
from coserve.core.request import SLO
from coserve.errors import ConfigError, ZooError
from coserve.serve.settings import TIERS

ZOO_TABLES = ("chains", "bases", "adapter_bases", "stitched")  # settings that a zoo has, beside adapters
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # NAME or OWNER/NAME


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
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 by default.")] = None,
    port: Annotated[int | None, typer.Option(help="8000 by default; 0 takes a free one.")] = None,
    state: State = None,
    name: Annotated[str | None, typer.Option(help="What clients call the base model.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda, cuda:1, ...")] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads that compute; 0: one for each processor allowed.", min=0),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16 or float64.")] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="Bits of the base's weights: 8bit or 4bit (4bit needs coserve[quantized])."),
    ] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(help="Keys and values held at once, in tokens over all sequences.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Bytes for everything, as 6GiB, or a share, as 0.5.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Base executors that compute the base's linears: unix:PATH, tcp:HOST:PORT or tls:HOST:PORT; "
            "several are separated by commas. Their key is read from COSERVE_EXECUTOR_KEY.",
        ),
    ] = None,
    base_ca: BaseCa = None,
    base_pin: BasePin = None,
    base_certificate: BaseCertificate = None,
    base_key: BaseKey = None,
    base_privacy: BasePrivacy = None,
    base_memory: Annotated[
        str | None,
        typer.Option(help="Of that, for the base's weights: what exceeds it is read from disk in each pass."),
    ] = None,
    adapter_memory: Annotated[
        str | None,
        typer.Option(help="Of that, for adapters from disk: bytes, a share, or auto: what is free."),
    ] = None,
    swap_space: Annotated[
        str | None,
        typer.Option(help="For keys and values of preempted answers, outside that: as 4GiB; 0 for none."),
    ] = None,
    offload: Annotated[
        bool | None,
        typer.Option("--offload", help="Optimizer state rests in slower memory between steps."),
    ] = None,
    max_running: Annotated[int | None, typer.Option(help="Answers that run at once; more wait.")] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(help="auto (the model's), or int8: half the bytes, a little less exact.")
    ] = None,
    prefix_sharing: Annotated[
        bool | None,
        typer.Option(
            "--prefix-sharing/--no-prefix-sharing",
            help="Compute what a tenant's prompts have in common once; on by default.",
        ),
    ] = None,
    max_jobs: Annotated[int | None, typer.Option(help="Jobs that train at once; more wait.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:OPTIONS]",
            help="How training is fitted between answers, such as adaptive or temporal:5; hybrid by default.",
        ),
    ] = None,
    slowdown: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TIER=]RATIO",
            help="How much longer training may make answers take, of all tiers or of one; may be repeated. "
            "By default priority=1.25, default=1.5, and any for flex.",
        ),
    ] = None,
    adapter_root: Annotated[
        Path | None, typer.Option(help="Folder that /v1/load_lora_adapter may read.", metavar="FOLDER")
    ] = None,
    drain_seconds: Annotated[
        float | None, typer.Option(help="What running answers get to finish when the server is stopped.")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic", help="Bitwise the same results, whatever else runs; slower."),
    ] = None,
    allow_special_tokens: Annotated[
        bool | None,
        typer.Option(
            "--allow-special-tokens",
            help="Control tokens spelled in prompts, messages and training data are such, not text.",
        ),
    ] = None,
    require_keys: Annotated[
        bool | None, typer.Option("--require-keys", help="Ask for API keys on loopback too.")
    ] = None,
    insecure_no_keys: Annotated[
        bool | None,
        typer.Option(
            "--insecure-no-keys", help="Serve everybody who reaches the address, while there is no key."
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A name that the server answers to without keys; may be repeated; * for any."
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="A web page's origin that may ask, as https://chat.example.org; may be repeated; * for any.",
        ),
    ] = None,
    no_standby: Annotated[
        bool, typer.Option("--no-standby", help="Keep no second engine waiting: saves some 400 MB.")
    ] = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
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
        model, name, stored = _from_zoo(zoo, model, name, adapters)
        adapters = stored["adapters"]
    flags: dict[str, Any] = given(
        model=model,
        host=host,
        port=port,
        state=None if state is None else str(state),
        name=name,
        max_jobs=max_jobs,
        adapter_root=None if adapter_root is None else str(adapter_root),
        drain_seconds=drain_seconds,
        require_keys=require_keys,
        allow_insecure=insecure_no_keys,
        allowed_hosts=allowed_host or None,
        cors_origins=cors_origin or None,
        standby=False if no_standby else None,
        log_level=log_level,
        adapters=adapters or None,
        **{table: stored.get(table) or None for table in ZOO_TABLES},
        slo=_slowdowns(slowdown) if slowdown else None,
        engine=given(
            device=device,
            threads=threads,
            dtype=dtype,
            quantize=quantize,
            cache_tokens=cache_tokens,
            memory=memory,
            base=base,
            base_ca=base_ca,
            base_pin=base_pin,
            base_certificate=base_certificate,
            base_key=base_key,
            base_privacy=base_privacy,
            base_memory=base_memory,
            adapter_memory=adapter_memory,
            swap_space=swap_space,
            offload=offload,
            max_running=max_running,
            cache_dtype=cache_dtype,
            prefix_sharing=prefix_sharing,
            policy=policy,
            deterministic=deterministic,
            allow_special_tokens=allow_special_tokens,
        )
        or None,
    )
    settings = load_server_settings(flags, config or config_of(context))
    _check_model(settings.model)
    if (told := unread()) is not None:
        print(f"coserve: warning: {told}", file=sys.stderr)
    if show_config:
        import json

        from coserve.wire.control import encode_line

        print_json(json.loads(encode_line(settings)))
        return
    from coserve.model.hub import check_hub
    from coserve.serve.processes.device import require_device

    # Before all that takes longer to import than to find these out.
    require_device(settings.engine.device)
    check_hub(settings.model)

    from rich.console import Console

    from coserve.serve.processes import supervisor

    raise typer.Exit(supervisor.serve(settings, Console(highlight=False)))


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
