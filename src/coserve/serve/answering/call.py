"""A call for answers: what routes make of their bodies, and what is answered, in no dialect."""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Final

import msgspec

from coserve.core.request import SLO, Request
from coserve.serve.adapter_registry.catalog import EXACT, Model
from coserve.serve.answering.cost import RequestCost
from coserve.serve.answering.timing import CallClock
from coserve.serve.store.records import Tenant
from coserve.text.markup import PLAIN, Markup

SEEDS: Final = 2**63
# Whether calls that are built in this context delay no other: those of a batch.
IN_BACKGROUND: Final = ContextVar("IN_BACKGROUND", default=False)


class TextForm(msgspec.Struct, frozen=True):
    """The form in which an answer's text is told: `by_token`, each token by itself, even one without text;
    with special tokens as they are spelled; with what stopped it, a string or a token."""

    by_token: bool = False
    has_special: bool = False
    has_stop: bool = False


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A checked call of a tenant, with `choices` answers to each of its prompts. Answers are numbered by
    prompt, then by choice. `asked` is what their requests have in common, with the call's id.

    `stops` end the text of an answer, which the server handles. An answer that `goes_on` continues the text
    of its prompt; `markup` is what its text holds beside what it says, and `form` how it is told. The client
    has `stated` bounds of its own, if any; the `clock` has the times of the answers.
    """

    asked: Request
    prompts: Sequence[tuple[int, ...]]
    tenant: Tenant
    model: Model
    cost: RequestCost
    choices: int = 1
    tier: str = "default"
    stops: tuple[str, ...] = ()
    goes_on: bool = False
    form: TextForm = TextForm()
    markup: Markup = PLAIN
    stated: SLO | None = None
    clock: CallClock = msgspec.field(default_factory=CallClock)

    def __len__(self) -> int:
        return len(self.prompts) * self.choices

    def prompt(self, index: int) -> tuple[int, ...]:
        """The prompt of answer `index`."""
        return self.prompts[index // self.choices]

    def chain(self, alternative: int) -> str:
        """The name of the chain that answers: of the model itself (0), or of its approximation of that
        number."""
        return self.model.chains[alternative - 1].name if alternative else EXACT

    def request(self, index: int, newcomer: bool = False) -> Request:
        """The request for answer `index`."""
        sampling, prompt = self.asked.sampling, index // self.choices
        assert sampling.seed is not None
        seed = (sampling.seed + index % self.choices) % SEEDS
        sampling = replace(sampling, max_tokens=self.cost.max_tokens[prompt], seed=seed)
        return msgspec.structs.replace(
            self.asked,
            id=f"{self.asked.id}-{index}",
            prompt=self.prompts[prompt],
            sampling=sampling,
            newcomer=newcomer,
        )


class CallMeter:
    """Counts the tokens of a call while its answers come. A prompt counts once one of its answers has a
    token."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._cached = dict[int, int]()  # by answer
        self.written = 0

    def take(self, index: int, tokens: int, cached: int) -> None:
        """Counts a piece of answer `index`."""
        self._cached[index] = self._cached.get(index, 0) + cached
        self.written += tokens

    def usage(self) -> "CallUsage":
        """The tokens that were read and written so far."""
        by_prompt = dict[int, int]()
        for index, cached in self._cached.items():
            prompt = index // self._call.choices
            by_prompt[prompt] = min(cached, by_prompt.get(prompt, cached))
        read = sum(len(self._call.prompts[prompt]) for prompt in by_prompt)
        return CallUsage(read, self.written, sum(by_prompt.values()))


class CallUsage(msgspec.Struct, frozen=True):
    """Tokens of a call that were read and written; `cached` of those read were in the cache already."""

    read: int
    written: int
    cached: int

    @classmethod
    def of(cls, call: Call, written: int, cached: Sequence[int]) -> "CallUsage":
        """`cached` has the number of each answer. A prompt with several answers counts once, with the fewest
        cached tokens."""
        found = sum(min(cached[i : i + call.choices]) for i in range(0, len(cached), call.choices))
        return cls(sum(map(len, call.prompts)), written, found)
