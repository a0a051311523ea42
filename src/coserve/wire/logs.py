"""Log records as lines of text or of JSON, with the work that each belongs to. No line holds a secret that
`core/masking.py` knows."""

import json
import logging
import os
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from coserve.core.masking import masked

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ORIGINS: Final = ("request_id", "answer", "tenant", "key", "job")


@dataclass(slots=True, eq=False)
class WorkContext:
    """Work that runs in a context: a request of a tenant by one of its keys, or a job. The counts are of the
    tokens that it has read and been answered so far, and `version` is the one that answered last."""

    request_id: str = ""
    answer: str = ""  # id of what it is answered, also in the engine
    tenant: str = ""  # its name
    key: str = ""  # its prefix, which may be shown
    job: str = ""
    address: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    version: str = ""


CONTEXT: ContextVar[WorkContext] = ContextVar("CONTEXT")


def context() -> WorkContext:
    """The present context; an empty one outside of any."""
    return CONTEXT.get(None) or WorkContext()


class TextFormatter(logging.Formatter):
    """Lines of text."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, process, message, the ids of the work that it is
    about, the record's own `fields`, and the traceback of an exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        told = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": told.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        work = context()
        line |= {name: value for name in _ORIGINS if (value := getattr(work, name))}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return masked(json.dumps(line, default=str))


def configure_logs(process: str, level: str, as_json: bool) -> None:
    """Has this process log to stderr, from a level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if as_json else TextFormatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(as_json)
