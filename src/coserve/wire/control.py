"""The protocol between the supervisor and its children: lines of JSON on a child's stdin and stdout.

A child's first input line is its start order (`EngineStart`, or the server's `ApiStart`). Then the supervisor
sends an empty line twice a second, and to the API changed settings; at end of file the supervisor is gone,
and the child exits at once. Output lines are `Status`. Logging goes to stderr, which the supervisor writes to
a file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from coserve.config import EngineConfig, StitchedChain
from coserve.errors import ConfigError

T = TypeVar("T")
BEAT_SECONDS: Final = 0.5  # between two heartbeats, at least


class EngineStart(msgspec.Struct, frozen=True):
    """Start order of an engine's process: the model to load, further bases and chains of two bases by their
    ids, and the path of the Unix socket to listen on (a file there is replaced). A chain that cannot be
    opened is left out.
    `calibration` is the file of measured step costs; without one they are measured at every start. `crash`
    describes how the previous engine crashed; empty where there was none, or it was ended from outside."""

    model: str
    socket: str
    config: EngineConfig = EngineConfig()
    calibration: str | None = None
    log_level: str = "info"
    log_json: bool = False
    crash: str = ""
    bases: dict[str, str] = {}
    stitched: dict[str, StitchedChain] = {}


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status of a child.

    `standby`: imports are done, waiting for the start line. `loading`, then `measuring` where step costs are
    unknown, then `ready`: listening, with `seconds` since the start order. `text` is for people. `draining`:
    takes no new work. `drained`: done, and exiting. `failed`: a deliberate error, named by its class in
    `coserve.errors`; a restart will not help. `crashed`: a bug, whose exception `text` describes. `alive`: a
    heartbeat, which leaves the status unchanged.
    """

    state: Literal[
        "standby", "loading", "measuring", "ready", "draining", "drained", "failed", "crashed", "alive"
    ]
    text: str = ""
    seconds: float = 0.0
    kind: str = ""


def encode_line(message: Any) -> str:
    """A message or settings as one line of JSON, without the newline."""
    return msgspec.json.encode(message, enc_hook=to_plain).decode()


def decode_line(line: str | bytes, kind: type[T]) -> T:
    """Decodes a line of `encode_line`. Raises ConfigError for an invalid one."""
    try:
        return msgspec.json.decode(line, type=kind, dec_hook=decode_path)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"unreadable {kind.__name__}: {error}") from error


def decode_path(kind: type, value: Any) -> Any:
    """msgspec's decoding hook for paths."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} does not come over the wire")


def to_plain(value: Any) -> Any:
    """msgspec's encoding hook for paths and read-only mappings, the empty defaults of frozen dataclasses."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} does not go over the wire")
