"""Every error coserve raises on purpose.

    CoserveError
    ├── ModelError               the base cannot be loaded or driven
    │   ├── ModelNotFound        no such folder or hub name
    │   └── UnsupportedModel     loads, but the engine would not reproduce it (with the reason)
    ├── NotOffered               the base's weights lie where what is asked of them is not offered
    ├── AdapterError             an adapter is malformed or does not fit the base
    │   ├── AdapterNotFound      no adapter of that name is loaded
    │   └── AdapterMismatch      shapes or tensors do not fit, named one by one
    ├── RequestError             a request can never be served as it stands
    │   ├── EmptyPrompt
    │   ├── PromptTooLong        longer than the model's positions
    │   └── OutOfPages           needs more tokens than all pages hold
    ├── DataError                a training file or example is unusable (file, line, what was expected)
    ├── JobError                 a fine-tuning job cannot start or go on
    │   └── LossNotFinite        the loss became NaN or infinite; the last good version stays
    ├── OutOfMemory              needs more bytes than the budget has; says how many were missing
    ├── EngineLost               the engine's process is gone and did not come back in time
    ├── Quarantined              engines crashed at this very thing: it is not tried again
    ├── QuotaExceeded            a tenant has as much as it may have; says what to delete or to wait for
    ├── ConflictError            what is asked does not go with the state something is in
    ├── StateError               the server's state folder or database cannot be used
    ├── ServerError              the server cannot start or go on
    │   ├── StateInUse           another server holds the state folder
    │   └── Unreachable          no server answers at an address
    ├── InternalError            work for one caller failed in a way nobody foresaw; the log has more
    └── ConfigError              a setting is out of its range

Each carries one sentence that a person can act on. What is not in this tree is a bug. In work for one tenant
it ends that work, at the places that `core.contained` names and at no others; in a step, which computes for
all of them at once, it ends the process, and what was under way is on probation in the next one
(`serve.engine.probation`).
"""

_BEGIN, _END = 900, 300  # characters of a text that is longer than both


class CoserveError(Exception):
    """Base of every deliberate error; its text is one sentence meant for the caller.

    A text that quotes what a caller sent may be as long as that was: its middle is left out.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= _BEGIN + _END:
            return text
        left_out = len(text) - _BEGIN - _END
        return f"{text[:_BEGIN]} ... ({left_out:,} characters) ... {text[-_END:]}"


class ModelError(CoserveError):
    """The base model cannot be loaded or driven."""


class ModelNotFound(ModelError):
    """No such local folder, and no such name on the hub (or the hub cannot be reached)."""


class UnsupportedModel(ModelError):
    """The model loads, but the engine would not reproduce it; the text says why."""


class NotOffered(CoserveError):
    """The placement of a frozen linear does not offer what is asked of it; the text says what."""


class AdapterError(CoserveError):
    """An adapter's configuration or weights are unusable."""


class AdapterNotFound(AdapterError):
    """No adapter of that name is loaded."""


class AdapterMismatch(AdapterError):
    """The adapter does not fit the base: shapes differ, or a tensor is missing or would go unused."""


class RequestError(CoserveError):
    """The request can never be served as it stands."""


class EmptyPrompt(RequestError):
    """A prompt needs at least one token."""


class PromptTooLong(RequestError):
    """Prompt and answer do not fit into the model's positions."""


class OutOfPages(RequestError):
    """Prompt and answer together need more tokens than all pages hold."""


class DataError(CoserveError):
    """A training file or example is unusable; the text names file, line and what was expected."""


class JobError(CoserveError):
    """A fine-tuning job cannot start or go on."""


class LossNotFinite(JobError):
    """The loss became NaN or infinite: the job stops and its last good version stays published."""


class OutOfMemory(CoserveError):
    """A request or a job needs more bytes than there are; the text says how many are missing, and what would
    fit where something would."""


class EngineLost(CoserveError):
    """The engine's process is gone and did not come back in time, or dies of this very request."""


class Quarantined(CoserveError):
    """Engines crashed while they worked on this very thing: it is not tried again unless it is released."""


class QuotaExceeded(CoserveError):
    """A tenant has as many files, bytes or jobs as it may have; the text says how to make room."""


class ServerError(CoserveError):
    """The server cannot start or go on; the text says what ended, and how."""


class StateInUse(ServerError):
    """Another server holds the state folder; the text names its process."""


class Unreachable(ServerError):
    """No server answers at an address, or what answers is not coserve."""


class InternalError(CoserveError):
    """Work for one caller failed in a way that nobody foresaw: a bug, of which the log has the traceback."""


class ConfigError(CoserveError):
    """A setting is out of its range."""


class ConflictError(CoserveError):
    """An operation conflicts with the state of a file, a job or an adapter."""


class StateError(CoserveError):
    """The server's state folder or its database cannot be used; the text says why."""


def error_named(kind: str, text: str) -> CoserveError:
    """The error of class `kind` with this text, as another process told of it."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, CoserveError):
        return found(text)
    return CoserveError(f"{kind}: {text}")
