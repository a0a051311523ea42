"""All errors that coserve raises deliberately.

    CoserveError
    ├── ModelError               the base cannot be loaded or driven
    │   ├── ModelNotFound        no such folder or hub name
    │   └── UnsupportedModel     loads, but the engine would not reproduce it (with the reason)
    ├── NotOffered               a placement of the base's weights lacks a requested operation
    ├── ZooError                 a zoo, or what is to be added to it, is damaged or does not fit
    ├── AdapterError             an adapter is malformed or does not fit the base
    │   ├── AdapterNotFound      no adapter of that name is loaded
    │   └── AdapterMismatch      shapes or tensors do not fit, named one by one
    ├── RequestError             a request can never be served as it stands
    │   ├── EmptyPrompt
    │   ├── PromptTooLong        longer than the model's positions
    │   └── OutOfPages           needs more tokens than all pages hold
    ├── DataError                a training file or example is unusable (file, line, what was expected)
    │   ├── TurnsRewritten       a chat template renders earlier turns differently
    │   └── ValidationDataError  one of a validation file
    ├── JobError                 a fine-tuning job cannot start or go on
    │   └── LossNotFinite        the loss became NaN or infinite; the last good version stays
    ├── LimitExceeded            work on foreign data took more than its time or memory; callers name the data
    ├── PassFailed               a pass of a plan failed, the plan is as it was: it runs again
    │   ├── WeightsUnreadable    weights that a pass needs cannot be read now; the next one may (a ModelError)
    │   └── TogetherFailed       a pass that several share ran out of memory; each passes alone then
    ├── OffloadFailed            keys and values in slower memory are lost; the request may be sent again
    ├── OutOfMemory              needs more bytes than the budget has; says how many were missing
    ├── EngineLost               the engine's process is gone and was not restarted in time
    ├── Quarantined              engines crashed on this work: it is not retried
    ├── QuotaExceeded            a tenant's quota is reached; says what to delete or to wait for
    ├── ConflictError            an operation conflicts with the state of a file, a job or an adapter
    │   └── LeaseLost            another server of the same database has taken over the work
    ├── StateError               the server's state folder or database cannot be used
    ├── ServerError              the server cannot start or go on
    │   ├── StateInUse           another server holds the state folder
    │   ├── Unreachable          no server answers at an address
    │   └── WrongAnswer          an executor's answer is not the product of its weights
    ├── InternalError            work for one caller failed with an unexpected exception; see the log
    └── ConfigError              a setting is out of its range

Each has one sentence that a person can act on. Any other exception is a bug. In work for one tenant it ends
that work, only at the places listed in `core.contained`, among them the passes of a step; elsewhere in a
step, which computes for all tenants, it ends the process, and work under way is on probation in the next one
(`serve.engine.probation`).
"""

_BEGIN, _END = 900, 300  # characters of a text that is longer than both


class CoserveError(Exception):
    """Base of every deliberate error; its text is one sentence meant for the caller.

    The middle of long texts, which may quote a caller's input, is left out.
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


class PassFailed(CoserveError):
    """A pass of a plan failed. What is under way is as it was: the plan stays the oldest, and its host has it
    run again."""


class TogetherFailed(PassFailed):
    """A pass that several share ran out of memory, and any of them may be the cause. The plan runs again with
    a pass for each."""


class WeightsUnreadable(ModelError, PassFailed):
    """A file of the base's weights is missing, short or changed, or cannot be read, or a base executor does
    not answer. A later pass may succeed: what is under way is as it was."""


class NotOffered(CoserveError):
    """The placement of a frozen linear does not offer a requested operation; the text names it."""


class ZooError(CoserveError):
    """A zoo, or a model or adapter that is to be added to it, is missing, damaged or does not fit."""


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
    """A training file or example is unusable; the text names file, line and the expected form."""


class TurnsRewritten(DataError):
    """A chat template renders a turn differently once more of the chat follows."""


class ValidationDataError(DataError):
    """A validation file or an example of it is unusable; the text begins with "validation"."""


class JobError(CoserveError):
    """A fine-tuning job cannot start or go on."""


class LossNotFinite(JobError):
    """The loss became NaN or infinite: the job stops and its last good version stays published."""


class LimitExceeded(CoserveError):
    """Work on foreign data in a sandbox took more than its time, memory or size, or ended its process.
    Callers turn it into an error that names the data."""


class OffloadFailed(CoserveError):
    """Slower memory failed with keys and values of one request; sent again it may succeed."""


class OutOfMemory(CoserveError):
    """A request or a job needs more bytes than there are; the text says how many are missing, and what would
    fit where something would."""


class EngineLost(CoserveError):
    """The engine's process is gone and was not restarted in time, or crashes on this request. `is_crash` is
    False where it was killed or stopped from outside: no work is suspected then."""

    def __init__(self, text: str, is_crash: bool = True) -> None:
        super().__init__(text)
        self.is_crash = is_crash


class Quarantined(CoserveError):
    """Engines crashed on this work: it is not retried unless it is released."""


class QuotaExceeded(CoserveError):
    """A tenant has as many files, bytes or jobs as it may have; the text says how to make room."""


class ServerError(CoserveError):
    """The server cannot start or go on; the text says what ended, and how."""


class StateInUse(ServerError):
    """Another server holds the state folder; the text names its process."""


class Unreachable(ServerError):
    """No server answers at an address, or a server other than coserve."""


class WrongAnswer(ServerError):
    """An executor's answer is not what the base's weights give: it computes with others, or lies."""


class InternalError(CoserveError):
    """Work for one caller failed with an unexpected exception: a bug, with its traceback in the log."""


class ConfigError(CoserveError):
    """A setting is out of its range."""


class ConflictError(CoserveError):
    """An operation conflicts with the state of a file, a job or an adapter."""


class LeaseLost(ConflictError):
    """Another server has taken over a piece of work: what this one would write about it is not written."""


class StateError(CoserveError):
    """The server's state folder or its database cannot be used; the text says why."""


def error_named(kind: str, text: str) -> CoserveError:
    """Recreates an error reported by another process: of class `kind` with this text."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, CoserveError):
        return found(text)
    return CoserveError(f"{kind}: {text}")
