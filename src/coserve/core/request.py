"""Requests for text, their sampling parameters and latency bounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from types import MappingProxyType
from typing import Final

import msgspec

from coserve.errors import ConfigError

BASE: Final = "base"  # id of an engine's first base, which is the only one in most engines
POOLINGS: Final = ("mean", "last")  # of a prompt's rows after the final norm: their mean, or the last row
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class FinishReason(StrEnum):
    """Reason that an answer ended, in OpenAI's terms (`cancelled` is coserve's)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SLO:
    """Service-level objective: bounds on a request's waits, in seconds; None is no bound.

    `deferral` is FineInfer's bound (algorithm 1): the total delay that training may cause this request,
    before admission and while it runs. `slowdown` is a ratio, at least 1: the time to the first token, and
    the mean time between tokens, over what they would be without training.
    """

    first_token: float | None = None
    between_tokens: float | None = None
    end_to_end: float | None = None
    deferral: float | None = None
    slowdown: float | None = None

    def __post_init__(self) -> None:
        for name in ("first_token", "between_tokens", "end_to_end", "deferral"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"slo.{name} must be a number of seconds >= 0, not {value}")
        if self.slowdown is not None and not self.slowdown >= 1:
            raise ConfigError(f"slo.slowdown must be a ratio >= 1, not {self.slowdown}")

    @property
    def states_bound(self) -> bool:
        """Tells whether the request is bound by anything."""
        return self != _UNBOUND

    @property
    def bounds_deferral_alone(self) -> bool:
        """Tells whether training may delay any single token, as long as all delays together keep a bound."""
        return self.deferral is not None and self == SLO(deferral=self.deferral)

    def bears(self, seconds: float) -> bool:
        """Tells whether a request that arrives during a step of so many seconds bears to wait for its end: it
        bounds its deferral alone, or the step is a small part of all that bounds its first token."""
        if self.bounds_deferral_alone:
            return True
        bounds = [x for x in (self.first_token, self.end_to_end, self.deferral) if x is not None]
        stated = self.slowdown is None and (self.first_token is not None or self.end_to_end is not None)
        return stated and seconds <= _SMALL * min(bounds)


_UNBOUND: Final = SLO()
# Part of a bound on the first token that a step may take. Where training stops for each arrival, at half of a
# GPU's capacity every second step loses its training (docs/LOG.md).
_SMALL: Final = 0.05


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of the next token. The defaults are greedy decoding of at most 256 tokens."""

    max_tokens: int = 256  # 0 only reads the prompt, with prompt_logprobs or pooling: no answer follows
    min_tokens: int = 0  # end-of-sequence and stop tokens are held back before this many
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0  # drops tokens below this fraction of the likeliest one's probability
    repetition_penalty: float = 1.0  # over prompt and answer, as transformers defines it
    presence_penalty: float = 0.0  # over the answer only, as OpenAI defines it
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    banned: tuple[tuple[int, ...], ...] = ()  # sequences of at least two tokens that no answer has
    seed: int | None = None  # None draws one when the request is made
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report beside the chosen token's own
    prompt_logprobs: int | None = None
    grammar: str | None = None  # an llguidance grammar that the whole answer must match
    pooling: str | None = None  # one of POOLINGS: an embedding is made of the prompt, and max_tokens is 0

    def __post_init__(self) -> None:
        self._check_kinds()
        checks = {
            "max_tokens": self.max_tokens > 0 or (self.prompt_logprobs, self.pooling) != (None, None),
            "min_tokens": 0 <= self.min_tokens <= self.max_tokens,
            "temperature": 0.0 <= self.temperature < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0.0 < self.top_p <= 1.0,
            "min_p": 0.0 <= self.min_p < 1.0,
            "repetition_penalty": 0.0 < self.repetition_penalty < float("inf"),
            "presence_penalty": isfinite(self.presence_penalty),
            "frequency_penalty": isfinite(self.frequency_penalty),
            "logit_bias": all(bias < float("inf") for bias in self.logit_bias.values()),  # NaN is not
            "banned": all(len(tokens) > 1 for tokens in self.banned),
            "logprobs": self.logprobs is None or 0 <= self.logprobs <= 20,
            "prompt_logprobs": self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20,
            "pooling": self.pooling is None or (self.pooling in POOLINGS and self.max_tokens == 0),
        }
        for name, holds in checks.items():
            if not holds:
                raise ConfigError(f"sampling.{name} is out of its range: {getattr(self, name)}")
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            raise ConfigError(
                "sampling.grammar excludes min_tokens and ignore_eos: it says itself where to end"
            )

    def _check_kinds(self) -> None:
        """Raises ConfigError for values of a wrong type, which would make a whole step fail later."""
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if type(value) is not int and (
                value is not None or name in ("max_tokens", "min_tokens", "top_k")
            ):
                raise ConfigError(f"sampling.{name} must be an integer, not {value!r}")
        if isinstance(self.stop, str) or not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ConfigError(f"sampling.stop must be some non-empty strings, not {self.stop!r}")
        banned = [token for tokens in self.banned for token in tokens]
        for name, tokens in (
            ("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias), ("banned", banned)
        ):  # fmt: skip
            if not all(type(token) is int for token in tokens):
                raise ConfigError(f"sampling.{name} must name tokens by integers")


class VersionTraits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties of the adapter version that answers, on which a sequence's pages depend.

    An adapter may have `virtual` tokens: they precede the prompt, at positions 0 to `virtual - 1`, and are
    not counted in other fields. The last `virtual_rows` of them pass through the model first; keys and values
    of the others are given. Keys and values are `of_base` where the adapter's modules all stand behind the
    last of them: these are the base's own, and shared with it. The adapter acts on the prompt's tokens from
    `active_from` on (aLoRA); those before are the base's.
    """

    virtual: int = 0
    virtual_rows: int = 0
    of_base: bool = False
    active_from: int = 0


class Request(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request for text: one record from the route, or the caller of `Engine`, to the device. On its way to
    an engine's process it is a message of its own (`wire.messages.Command`).

    `prompt` are token ids. `arrival` is in seconds, on the clock of the engine, and in a server on
    `time.monotonic`; in a message it is relative to the time of sending, and so negative, as the clocks of
    the two processes differ. `base` is the id of the base that answers: one engine may hold several.

    `continued` are the answer's first tokens if another engine generated them: they count as its beginning,
    and are not reported again.

    `adapter` is the name or the key of an adapter version, or in a server's request the id of a chain of two
    bases (`Hello.stitched`). Under load one of the `alternatives`, the most accurate first, may answer in its
    place; None is the base. The engine chooses when the request is submitted: from then on `adapter` is the
    key of the *version* that answers (`name@3`), and the fields that follow from it are set: `base` and
    `traits`.

    Requests of one `scope` and one adapter version share cached prefixes; None neither uses nor adds any. A
    server gives each tenant its own scope.

    A `newcomer` is a request of a tenant below its fair share: its first token has priority
    (`schedule/newcomers.py`). One in the `background` delays no other request (`schedule/background.py`).
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    adapter: str | None = None
    slo: SLO = SLO()
    arrival: float = 0.0
    base: str = BASE
    traits: VersionTraits = VersionTraits()
    scope: str | None = ""
    newcomer: bool = False
    background: bool = False
    alternatives: tuple[str | None, ...] = ()
    continued: tuple[int, ...] = ()
