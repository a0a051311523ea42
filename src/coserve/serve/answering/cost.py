"""Costs and limits of requests.

The unit is one prompt token through the model: 85 us of the embedded model on one core, and of larger ones on
larger machines. A generated token counts twice, as it takes a step of its own; log-probabilities, grammar
masks and biases count in proportion to their work. The cost is an upper bound known before queueing; fair
shares are charged with the work really done.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coserve.serve.errors import ApiError

PROMPT_TOKEN = 1.0
ANSWER_TOKEN = 2.0
SCORED_TOKEN = 0.3  # for each token with its log-probability: its row passes the head, 25 us
ALTERNATIVE = 0.03  # for each likely token beside it: found and packed 1.3 us, written as JSON 1.3 us
MASKED_TOKEN = 0.5  # for each token of an answer with a grammar
GRAMMAR_BYTE = 0.02  # for each byte of a grammar that is compiled
BIAS = 0.1

MOST_COST = 4_000_000.0
MOST_PROMPTS = 128
MOST_CHOICES = 4096  # of one prompt, whatever the settings: max_n bounds them, in Tinker's dialect max_queue
MOST_MESSAGES = 2048
MOST_TOOLS = 128  # that an answer may call
MOST_CALLS = 128  # of one message
MOST_VARIABLES = 32  # of a chat template
MOST_PARTS = 256  # of one message
MOST_FIELDS = 64  # of any object with named fields
MOST_STOPS = 16
LONGEST_STOP = 256  # characters
MOST_BIASES = 1024
MOST_ALTERNATIVES = 20
MOST_GRAMMAR_BYTES = 64 * 1024
MOST_HEADER_BYTES = 32 * 1024
MOST_URL_BYTES = 16 * 1024
MOST_BODY_BYTES = 8 * 2**20  # of requests for answers
MOST_SMALL_BODY_BYTES = 2**20  # of everything else but uploads
MOST_JSON_VALUES = 100_000  # strings, lists and objects in one body: 0.2 s to validate, beside the loop
MOST_JSON_NUMBERS = 2**20  # other values: token ids
MOST_CHARACTERS = 128  # longest token; a prompt with more for each position of the model is not tokenized
MOST_PROMPT_TOKENS = 2**20  # longest prompt that is checked; models take far fewer
LONGEST_NAME = 256  # characters, of a model


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of this server and its engine."""

    positions: int  # tokens of one sequence
    cache_tokens: int  # tokens of all running sequences on the device
    choices: int  # of one prompt
    sequences: int  # of one request: its prompts times its choices
    offloaded_tokens: int = 0  # of a sequence whose keys and values lie in slower memory


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Counts of a request that determine its cost; `max_tokens` is None where the request sets none."""

    prompts: Sequence[int] = ()  # tokens in each
    choices: int = 1
    max_tokens: int | None = None
    max_tokens_name: str = "max_tokens"
    alternatives: int | None = None  # beside each log-probability; None for none of either
    reads_prompt: bool = False
    stops: Sequence[str] = ()
    biases: int = 0
    grammar_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RequestCost:
    """The whole request's cost `total`; the `max_tokens` of an answer to each prompt; and what is charged as
    the work is done: for each of the `prompts`, and for each `token` of an answer."""

    total: float
    max_tokens: tuple[int, ...]
    prompts: tuple[float, ...]
    token: float


def request_cost(size: RequestSize, limits: RequestLimits) -> RequestCost:
    """Cost of a request. Raises ApiError 400, naming the parameter, for one that exceeds limits."""
    check_counts(size, limits)
    most = tuple(_most_tokens(length, size, limits) for length in size.prompts)
    scored = 0.0 if size.alternatives is None else SCORED_TOKEN + ALTERNATIVE * size.alternatives
    read = PROMPT_TOKEN + (scored if size.reads_prompt else 0.0)
    token = ANSWER_TOKEN + scored + (MASKED_TOKEN if size.grammar_bytes else 0.0)
    prompts = tuple(length * read for length in size.prompts)
    each = (sum(prompts) + sum(most) * token) + len(prompts) * BIAS * size.biases
    total = size.choices * each + GRAMMAR_BYTE * size.grammar_bytes
    if total > MOST_COST:
        message = (
            f"The request would cost {total:.0f} tokens' work and one may cost {MOST_COST:.0f}; split it."
        )
        raise ApiError(400, message, code="request_too_large")
    return RequestCost(total, most, prompts, token)


def check_counts(size: RequestSize, limits: RequestLimits) -> None:
    """Raises ApiError 400 for counts beyond the limits of one request."""
    sequences = len(size.prompts) * size.choices
    at_most("prompt", "prompts", len(size.prompts), MOST_PROMPTS)
    at_most("n", "choices", size.choices, limits.choices, "max_n")
    at_most("n", "choices of all prompts", sequences, limits.sequences, "max_queue_tenant")
    at_most("logprobs", "alternatives", size.alternatives or 0, MOST_ALTERNATIVES)
    at_most("stop", "stop strings", len(size.stops), MOST_STOPS)
    at_most("stop", "characters in a stop string", max(map(len, size.stops), default=0), LONGEST_STOP)
    at_most("logit_bias", "biases", size.biases, MOST_BIASES)
    at_most("response_format", "bytes of schema", size.grammar_bytes, MOST_GRAMMAR_BYTES)


def at_most(param: str, what: str, given: int, most: int, setting: str = "") -> None:
    """Raises ApiError 400, naming the parameter and the server's setting if there is one, for a count of
    things beyond a bound."""
    if given > most:
        of = f" (the server's {setting})" if setting else ""
        message = f"Invalid value for '{param}': {given} {what}; at most {most} are allowed{of}."
        raise ApiError(400, message, param=param, code="invalid_value")


def _most_tokens(length: int, size: RequestSize, limits: RequestLimits) -> int:
    """Most tokens of an answer to a prompt of `length` tokens: as requested, or as many as fit. Where the
    device's memory is too small the second tier counts."""
    wanted = max(size.max_tokens if size.max_tokens is not None else 1, 0 if size.reads_prompt else 1)
    most = min(limits.positions, limits.cache_tokens)
    if length + wanted > most:
        most = min(limits.positions, max(limits.cache_tokens, limits.offloaded_tokens))
    room = most - length
    if wanted > room:
        asked = f" and {size.max_tokens} of {size.max_tokens_name}" if size.max_tokens is not None else ""
        message = f"This model takes {most} tokens at most; the prompt has {length}{asked}. Shorten either."
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")
    return wanted if size.max_tokens is not None else room
