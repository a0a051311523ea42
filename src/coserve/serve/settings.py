"""Settings of a server: frozen, and passed to its processes as one line of JSON."""

import hashlib
import ipaddress
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from coserve.config import EngineConfig, StitchedChain
from coserve.core.masking import masked_value
from coserve.core.request import BASE, POOLINGS, SLO
from coserve.core.setting import Flag, Hot, Range, Secret, check_ranges, noted
from coserve.errors import ConfigError
from coserve.schedule.config import SET_BY_ENGINE, SchedulerConfig
from coserve.schedule.policies import make_policy
from coserve.serve.artifacts.objects import check_place
from coserve.text.tools.formats import named_format
from coserve.wire.control import encode_line

LONGEST_SOCKET_PATH = 100  # bytes; the system takes 107
LEAST_WATCHDOG = 2.0  # seconds; processes beat twice in one
POSTGRES = ("postgresql", "postgres")  # schemes of a database's URL
LOG_LEVELS = ("debug", "info", "warning", "error")
ANY = "*"  # in lists of hosts and origins
# Experiment trackers by the name of their extra, and the module that shows whether it is installed.
REPORTERS: Mapping[str, str] = MappingProxyType(
    {"trackio": "trackio", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
)
TIERS = ("priority", "default", "flex")  # in the order in which a tenant's own requests go
DEFAULT_SLO: Mapping[str, SLO] = MappingProxyType(
    {
        "priority": SLO(first_token=0.5, between_tokens=0.1, slowdown=1.25),
        "default": SLO(first_token=2.0, between_tokens=0.25, slowdown=1.5),
        "flex": SLO(deferral=60.0),
    }
)
_HOST = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*|[0-9a-fA-F]*:[0-9a-fA-F:.]*")  # a name or an address
_URL = re.compile(r"https?://[!-~]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d+)?")

_Count = Annotated[int, Range(1)]
_HotCount = Annotated[int, Range(1), Hot()]
_HotLimit = Annotated[int, Range(0), Hot()]  # 0: none
_HotDays = Annotated[float, Range(0), Hot()]
_Seconds = Annotated[float, Range(0, above=True)]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server: models, address, access and limits.

    `bases` are folders of further base models by the name under which they are served, in the same engine.
    `adapters` are PEFT folders by theirs, and `adapter_bases` the names of their bases, of those that are not
    for `model`. `chains` are folders of approximations of some models and adapters, by the name of these and
    their own, the most accurate first; an empty folder is the base itself, or the chain of two bases that
    `stitched` has of this name, in which bases are named as in `base_names`. `model_aliases` are bases by
    further names, or beginnings of names that end in `*`, under which requests reach them. `slo` holds all
    three service tiers; missing entries keep their defaults. Raises ConfigError, naming the key.
    """

    model: str  # folder or hub name
    state: Annotated[Path, Flag("Folder of all that outlives the server.", "FOLDER")]
    # Empty: the model's hub name, or its folder's.
    name: Annotated[str, Flag("What clients call the base model.")] = ""
    # Empty: coserve.db in the state folder.
    database: Annotated[
        str, Flag("postgresql://user@host/name of several servers; a file of --state without.", "URL")
    ] = ""
    host: Annotated[str, Flag("Address to listen on; {default} by default.")] = "127.0.0.1"
    port: Annotated[int, Range(0, 65535), Flag("{default} by default; 0 takes a free one.")] = 8000
    bases: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    adapter_bases: Mapping[str, str] = field(default_factory=dict)
    chains: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stitched: Mapping[str, StitchedChain] = field(default_factory=dict)
    model_aliases: Mapping[str, str] = field(default_factory=dict)
    adapter_root: Annotated[Path | None, Flag("Folder that /v1/load_lora_adapter may read.", "FOLDER")] = None
    artifacts: Annotated[
        str,
        Flag(
            "Shared folder or s3://bucket/prefix of adapters, checkpoints and files of several servers.",
            "PLACE",
        ),
    ] = ""  # empty: the state folder alone has them
    max_artifact_bytes: Annotated[
        int, Range(1), Flag("Copies of shared artifacts that the state folder keeps, in bytes.")
    ] = 100 * 2**30
    require_keys: Annotated[bool, Flag("Ask for API keys on loopback too.")] = False
    allow_insecure: Annotated[
        bool,
        Flag("Serve everybody who reaches the address, while there is no key.", name="--insecure-no-keys"),
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Flag(
            "A name that the server answers to without keys; may be repeated; * for any.",
            "NAME",
            "--allowed-host",
        ),
    ] = ()  # beside its address and this machine's
    cors_origins: Annotated[
        tuple[str, ...],
        Flag(
            "A web page's origin that may ask, as https://chat.example.org; may be repeated; * for any.",
            "ORIGIN",
            "--cors-origin",
        ),
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        Flag(
            "A proxy's address or network, whose X-Forwarded-For and -Proto count; may be repeated.",
            "CIDR",
            "--trusted-proxies",
        ),
    ] = ()
    ssl_certfile: Annotated[
        Path | None, Flag("Certificate with its chain (PEM), to serve HTTPS; read again at SIGHUP.", "FILE")
    ] = None
    ssl_keyfile: Annotated[Path | None, Flag("The certificate's key (PEM).", "FILE")] = None
    webhook_urls: Annotated[
        tuple[str, ...],
        Flag("An address that alerts are posted to; may be repeated.", "URL", "--webhook-url"),
        Secret(),
    ] = ()
    webhook_secret_file: Annotated[
        Path | None, Flag("File with the secret that signs them: whsec_ and base64, or text.", "FILE")
    ] = None
    webhook_hosts: tuple[str, ...] = ()  # whose addresses need not be public
    tool_format: Annotated[
        str | None,
        Flag("How the model writes calls of tools, where its chat template does not tell.", "NAME"),
    ] = None
    ignore_hosted_tools: Annotated[
        bool,
        Flag(
            "Leave out what only OpenAI's or Anthropic's service runs, such as the tool web_search, in "
            "/v1/responses and /v1/messages: refused otherwise."
        ),
    ] = False
    generation_config: Annotated[
        str,
        Flag("auto: what requests leave out of sampling is as in the model's generation_config.json."),
    ] = "coserve"
    max_queue: _HotCount = 1024  # requests waiting, of all tenants; more are answered 429
    max_queue_tenant: _HotCount = 256  # requests waiting, of one tenant
    max_requests_minute: _HotLimit = 30_000  # of one tenant to /v1, as many at once; 0: any number
    max_bad_keys_minute: _HotLimit = 60  # requests without a right key, of one address; 0: any number
    max_files_tenant: _HotCount = 1000  # uploaded files and adapters that one tenant keeps
    max_bytes_tenant: _HotCount = 50 * 2**30  # of everything that is kept of one tenant: files and records
    max_records_tenant: _HotCount = 1_000_000  # of one tenant: jobs, events, sessions, samplers, checkpoints
    # For records of ended jobs without a model and unused sessions; 0: for ever.
    keep_days: _HotDays = 90.0
    keep_responses_days: _HotDays = 30.0  # and chat completions that are stored; 0: for ever
    keep_usage_days: Annotated[float, Range(1), Hot()] = 400.0  # for usage by hour
    keep_audit_days: Annotated[float, Range(1), Hot()] = 400.0  # for the audit log
    max_idempotency_keys: _HotCount = (
        10_000  # of one tenant that are remembered; then the oldest is forgotten
    )
    idempotency_seconds: _Seconds = 86_400.0  # for which a key of a request that created something is known
    max_jobs_tenant: _HotCount = 100  # jobs of one tenant that are not over
    max_connections: _Count = 1024  # at once; of those without a request the oldest makes room for a new one
    max_connections_address: _Count = 256  # of one address; this machine may have four times as many
    stall_seconds: _Seconds = 15.0  # for headers to come, and for a body or reader slower than 1 KiB/s
    max_jobs: Annotated[int, Range(1), Flag("Jobs that train at once; more wait.")] = 4
    max_file_bytes: _Count = 512 * 2**20  # largest upload
    max_n: _HotCount = 16  # most choices of one request
    drain_seconds: Annotated[
        float, Range(0), Flag("What running answers get to finish when the server is stopped.")
    ] = 30.0
    # Seconds of silence after which a hanging process is replaced; at least 2, or 0 for never.
    watchdog_seconds: float = 8.0
    engine_wait_seconds: _Seconds = 120.0  # most seconds that requests and checks wait for a missing engine
    checkpoint_steps: _Count = 50  # optimizer steps between two checkpoints of a job
    report_to: tuple[str, ...] = ()  # experiment trackers that all jobs are reported to
    report_project: str = "coserve"  # their project or experiment
    slo: Annotated[Mapping[str, SLO], Hot()] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    # An imported engine waits: a restart is seconds faster.
    standby: Annotated[
        bool, Flag("Keep no second engine waiting: saves some 400 MB.", name=" /--no-standby")
    ] = True
    # Of embeddings, by vLLM's names: MEAN of all tokens' hidden states, or the LAST one's.
    pooling_type: Annotated[str, Flag("How /v1/embeddings pools: MEAN or LAST.")] = "MEAN"
    log_level: Annotated[str, Flag("debug, info, warning or error."), Hot()] = "info"
    log_json: Annotated[bool, Flag("Logs as JSON, one object a line.")] = False
    otel: Annotated[bool, Flag("Send traces of requests and jobs by OpenTelemetry (OTEL_* variables).")] = (
        False
    )
    access_log: Annotated[bool, Flag("Log each request: path, status, seconds, tenant, tokens, version.")] = (
        False
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model must be a folder or a hub name, not empty")
        check_ranges(self)
        if self.artifacts:
            check_place(self.artifacts)
        check_url(self.database)
        if self.watchdog_seconds and not LEAST_WATCHDOG <= self.watchdog_seconds < float("inf"):
            raise ConfigError(
                f"watchdog_seconds must be a number of seconds >= {LEAST_WATCHDOG:g}, or 0 for no watchdog, "
                f"not {self.watchdog_seconds}"
            )
        if unknown_reporters := set(self.report_to) - set(REPORTERS):
            raise ConfigError(f"report_to has {min(unknown_reporters)!r}; there are {', '.join(REPORTERS)}")
        if self.pooling not in POOLINGS:
            raise ConfigError(f"pooling_type must be MEAN or LAST, not {self.pooling_type!r}")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, not {self.log_level!r}")
        if self.generation_config not in ("auto", "coserve"):
            told = f"not {self.generation_config!r}"
            raise ConfigError(f"generation_config must be auto (the model's), or coserve (OpenAI's), {told}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile belong together: one of them is missing")
        if self.webhook_urls and self.webhook_secret_file is None:
            raise ConfigError("webhook_urls need a webhook_secret_file, whose secret signs what is sent")
        for number, url in enumerate(self.webhook_urls, 1):  # which may have a secret in it
            if not _URL.fullmatch(url) or not _has_host(url):
                raise ConfigError(f"webhook_urls has no http or https address as its number {number}")
            if "@" in urlsplit(url).netloc:
                raise ConfigError(
                    f"webhook_urls has a user or a password in its number {number}, which are not sent: the "
                    "signature shows the receiver who it is"
                )
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy, strict=False)
            except ValueError as error:
                raise ConfigError(
                    f"trusted_proxies has {proxy!r}: expected an address or a network"
                ) from error
        if self.tool_format is not None:
            named_format(self.tool_format)
        for table, names in (("adapters", self.adapters), ("bases", self.bases)):
            for each in names:
                if not each or each != each.strip():
                    told = f"{table} has the name {each!r}"
                    raise ConfigError(f"{told}: it may not be empty or edged by spaces")
            if self.base_name in names:
                raise ConfigError(f"{table} has the name {self.base_name!r}, which is the base model's")
        if BASE in self.bases:
            raise ConfigError(f"bases has the name {BASE!r}, which is the engine's for its first base")
        if twice := set(self.bases) & set(self.adapters):
            raise ConfigError(f"adapters has the name {min(twice)!r}, which is a base model's")
        if strange := set(self.adapter_bases) - set(self.adapters):
            raise ConfigError(f"adapter_bases has {min(strange)!r}, which is none of the adapters")
        if strange := set(self.adapter_bases.values()) - set(self.bases):
            raise ConfigError(f"adapter_bases names {min(strange)!r}, which is none of the bases")
        if strange := set(self.chains) - {self.base_name, *self.bases, *self.adapters}:
            raise ConfigError(f"chains has {min(strange)!r}, which is no model and none of the adapters")
        self._check_stitched()
        if strange := set(self.model_aliases.values()) - {*self.base_names}:
            raise ConfigError(f"model_aliases names {min(strange)!r}, which is none of the bases")
        if bad := [one for one in self.model_aliases if "*" in one[:-1] or one in ("", "*")]:
            raise ConfigError(f"model_aliases has {bad[0]!r}: expected a name, or the beginning of one and *")
        if unknown := set(self.slo) - set(TIERS):
            raise ConfigError(f"slo.{min(unknown)} is no service tier; there are {', '.join(TIERS)}")
        self._check_policy()
        self._check_scheduler()
        self._check_hosts_and_origins()
        object.__setattr__(self, "slo", {**DEFAULT_SLO, **self.slo})

    def _check_stitched(self) -> None:
        """Checks the chains of two bases, whose names are ids of bases to the engine."""
        if taken := set(self.stitched) & {BASE, *self.base_names, *self.adapters}:
            raise ConfigError(f"stitched has the name {min(taken)!r}, which is a model's or an adapter's")
        for name, chain in self.stitched.items():
            if strange := {chain.first, chain.second} - {*self.base_names}:
                raise ConfigError(f"stitched.{name} names {min(strange)!r}, which is none of the bases")

    def _check_policy(self) -> None:
        """Checks the policy early: the engine's process would load its model first."""
        try:
            make_policy(self.engine.policy, **self.engine.policy_options)
        except ConfigError as error:
            raise ConfigError(f"engine.policy: {error}") from error

    def _check_scheduler(self) -> None:
        """Checks the scheduler's settings, assuming the smallest model for those that depend on it."""
        told = self.engine.scheduler_settings
        if taken := SET_BY_ENGINE & told.keys():
            raise ConfigError(f"engine.scheduler.{min(taken)} follows from the model or another setting")
        try:
            msgspec.convert({"layers": 1, "max_positions": 1, **told}, SchedulerConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine.scheduler: {error}") from error

    def _check_hosts_and_origins(self) -> None:
        for host in self.allowed_hosts:
            if host != ANY and not _HOST.fullmatch(host):
                raise ConfigError(
                    f"allowed_hosts has {host!r}: expected a name or an address, without scheme and port, "
                    "such as chat.example.org, *.example.org or *"
                )
        for origin in self.cors_origins:
            if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins has {origin!r}: expected scheme://host[:port] and nothing behind it, "
                    "such as https://chat.example.org, or *"
                )

    @property
    def pooling(self) -> str:
        """Pooling of embeddings, by the engine's name."""
        return self.pooling_type.lower()

    @property
    def base_name(self) -> str:
        """Name of the base model for clients."""
        return self.name or (Path(self.model).resolve().name if Path(self.model).exists() else self.model)

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names of all base models for clients, the first one's first."""
        return self.base_name, *self.bases

    def base_id(self, name: str) -> str:
        """The engine's id of the base model of this name."""
        return BASE if name == self.base_name else name

    @property
    def is_loopback(self) -> bool:
        """Tells whether only this machine can reach the server."""
        return is_loopback(self.host.strip("[]"))

    @property
    def database_file(self) -> Path:
        """The database without a `database` elsewhere."""
        return self.state / "coserve.db"

    @property
    def files(self) -> Path:
        return self.state / "files"

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def scratch(self) -> Path:
        """Folder for data too large for engines' memory, not needed after they end."""
        return self.state / "scratch"

    @property
    def calibration(self) -> Path:
        """File of measured step costs of this machine."""
        return self.state / "calibration.json"

    @property
    def socket(self) -> Path:
        """Path of the engine's socket: in the state folder, or in a short private one if that path is too
        long for a socket."""
        path = self.state.absolute() / "engine.sock"
        if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
            return path
        short = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        folder = Path(runtime) if runtime else Path(tempfile.gettempdir(), f"coserve-{os.getuid()}")
        return folder / f"coserve-{short}.sock"


def check_url(url: str) -> None:
    """Raises ConfigError for a database's URL that is none, without its password."""
    if not url:
        return
    scheme, _, rest = url.partition("://")
    if scheme not in POSTGRES or not rest.partition("?")[0].rpartition("/")[2] or "/" not in rest:
        raise ConfigError("database must be a URL as postgresql://user@host:5432/name")


def _has_host(url: str) -> bool:
    """Tells whether a URL has a host's name and, if any, a port that there is."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Tells whether an address (without brackets) or a name is a loopback one."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a host name: it may mean anything
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def shown(settings: ServerSettings) -> dict[str, Any]:
    """The settings as JSON for people and for logs, without what is secret in them."""
    secret, values = noted(ServerSettings, Secret), json.loads(encode_line(settings))
    return {name: masked_value(value, name in secret) for name, value in values.items()}


def hot_changes(old: ServerSettings, new: ServerSettings) -> tuple[dict[str, Any], list[str]]:
    """The values of settings that differ and are hot, and the names of those that differ and are not."""
    differing = [one.name for one in fields(old) if getattr(old, one.name) != getattr(new, one.name)]
    hot = noted(ServerSettings, Hot)
    return {name: getattr(new, name) for name in differing if name in hot}, [
        name for name in differing if name not in hot
    ]


@dataclass(frozen=True, slots=True)
class ApiStart:
    """Start line of the API's process: the settings, and an inherited listening socket.

    The supervisor owns the socket, so connections wait while the API restarts, and the port stays.
    """

    settings: ServerSettings
    listen_fd: int
