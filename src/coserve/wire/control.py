"""The protocol between the supervisor and its children: lines of JSON on a child's stdin and stdout.

A child's first line in says what it has to do (`EngineStart`, or the server's `ApiStart`). Its stdin stays
open for as long as the supervisor lives, which then sends an empty line twice a second; end of file means
that it is gone, and the child ends at once. Lines out are `Status`. Logging goes to stderr, which the
supervisor keeps in a file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from coserve.config import EngineConfig
from coserve.errors import ConfigError

T = TypeVar("T")
BEAT_SECONDS: Final = 0.5  # between two heartbeats, at least


class EngineStart(msgspec.Struct, frozen=True):
    """Start order of an engine's process: the model to load, and the path of the Unix socket to listen on (a
    file there is replaced). `threads` are torch's; None is its own choice. `calibration` is the file that
    remembers what steps cost; without one they are measured at every start. `crash` is how the engine before
    this one brought itself down, in words; empty where there was none, or it was ended from outside."""

    model: str
    socket: str
    config: EngineConfig = EngineConfig()
    threads: int | None = None
    calibration: str | None = None
    log_level: str = "info"
    crash: str = ""


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status of a child.

    `standby`: everything is imported, waiting for the line that says what to load. `loading`, then
    `measuring` where the machine's speed is not known yet (`text` says so to people), then `ready`:
    listening, with `text` for people and `seconds` since the start was asked for. `draining`: takes no new
    work. `drained`: everything is in order, and it ends. `failed`: a deliberate error, named by its class
    in `coserve.errors`; starting again will not help. `crashed`: a bug, whose exception `text` describes.
    `alive` is a heartbeat, and changes nothing of where the child stands.
    """

    state: Literal[
        "standby", "loading", "measuring", "ready", "draining", "drained", "failed", "crashed", "alive"
    ]
    text: str = ""
    seconds: float = 0.0
    kind: str = ""


def encode_line(message: Any) -> str:
    """A message or settings as one line of JSON, without its end."""
    return msgspec.json.encode(message, enc_hook=_plain).decode()


def decode_line(line: str | bytes, kind: type[T]) -> T:
    """Raises ConfigError on anything that `encode_line` does not write for this kind."""
    try:
        return msgspec.json.decode(line, type=kind, dec_hook=decode_path)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"unreadable {kind.__name__}: {error}") from error


def decode_path(kind: type, value: Any) -> Any:
    """msgspec's hook for paths, which it does not know."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} does not come from JSON")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} does not go into JSON")
