"""Makes calls of what routes ask for: token ids, checked parameters, a cost."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

from coserve.core.request import SLO, Request, SamplingParams
from coserve.errors import DataError
from coserve.serve.adapter_registry.catalog import Model
from coserve.serve.answering.call import IN_BACKGROUND, SEEDS, Call, TextForm
from coserve.serve.answering.chat import Chat, chat_grammar
from coserve.serve.answering.cost import (
    MOST_CHARACTERS,
    RequestLimits,
    RequestSize,
    check_counts,
    request_cost,
)
from coserve.serve.answering.structure import Structure
from coserve.serve.engine.link import CONNECTING
from coserve.serve.errors import ApiError
from coserve.serve.offload import Offload
from coserve.serve.state import State
from coserve.serve.store.records import Tenant
from coserve.text.generation import OURS
from coserve.text.infill import infill
from coserve.text.markup import PLAIN, Markup
from coserve.wire.messages import Hello

T = TypeVar("T")
_LONG = 2_000  # characters that are tokenized beside the event loop, not in it: 2 ms
_TURN = 32  # characters that a turn of a chat counts as, for the time that its template takes


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Builds the calls of one client for one model, whose ids begin with `kind`, of the service tier `tier`,
    with at most `most_choices` answers to a prompt. Those of one `salt` share the prompts' cache;
    approximations of the model may answer those that are `adaptive`. For `form` and `stated` see `Call`.
    Of prompts the last `truncation` tokens are kept, or for -1 as many as fit. `hello` is the engine's, with
    the properties of the model's base."""

    state: State
    tenant: Tenant
    model: Model
    hello: Hello
    arrived: float
    most_choices: int
    kind: str
    tier: str
    salt: str
    adaptive: bool
    form: TextForm
    stated: SLO | None
    truncation: int | None

    @classmethod
    async def of(
        cls,
        state: State,
        tenant: Tenant,
        model: str,
        kind: str = "",
        *,
        most_choices: int | None = None,
        tier: str = "default",
        salt: str | None = None,
        adaptive: bool | None = None,
        form: TextForm = TextForm(),
        stated: SLO | None = None,
        truncation: int | None = None,
    ) -> "RequestBuilder":
        """`most_choices` None is that of the settings. Raises ApiError 404 for an unknown model, 503 before
        the first engine has connected."""
        arrived = time.monotonic()
        hello = state.link.hello or await state.link.wait_ready(CONNECTING)
        found = await state.catalog.find(tenant, model)
        most, own = most_choices or state.settings.max_n, hello.of(found.base_id)
        served = kind, tier, salt or "", bool(adaptive), form
        return cls(state, tenant, found, own, arrived, most, *served, stated, truncation)

    @property
    def defaults(self) -> SamplingParams:
        """Sampling of requests for this model that say nothing."""
        return self.state.sampling.get(self.model.base, OURS)

    async def chat(self, chat: Chat, sampling: SamplingParams, size: RequestSize) -> Call:
        """Builds the call of a chat. `sampling` has stop strings, and `size` counts answers and their
        tokens, in place of `sampling.max_tokens`. Raises ApiError for an invalid call."""
        prompt = self._truncated(await self.chat_tokens(chat), size)
        markup = await self._markup(chat, prompt)
        if chat.callable or chat.structure is not None:
            grammar = await self.state.prompts.run(
                self.tenant.id, chat_grammar, chat, markup, self.state.text.markups
            )
            sampling = replace(sampling, grammar=grammar)
        return self._call([prompt], sampling, size, chat.is_continued, markup)

    async def completion(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams,
        size: RequestSize,
        structure: Structure | None = None,
    ) -> Call:
        """As `chat`, of texts or token ids that answers go on with, in the form of a `structure`."""
        if structure is not None:
            lark = self.state.text.markups.lark()
            grammar = await self.state.prompts.run(self.tenant.id, structure.grammar, lark)
            sampling = replace(sampling, grammar=grammar)
        reads = (sampling.prompt_logprobs, sampling.pooling) != (None, None)
        size = replace(size, reads_prompt=reads)
        tokens = await self._prompts(prompts, size)
        return self._call(tokens, sampling, size, goes_on=True)

    async def chat_tokens(self, chat: Chat) -> tuple[int, ...]:
        """Tokens of a chat with the generation prompt. Raises ApiError for one that is too long, or that the
        model's template refuses."""
        turns = chat.turns
        self._check_length(chat.length)
        if len(turns) > (most := self.state.settings.engine.max_chat_turns):
            message = f"A chat may have {most} messages (engine.max_chat_turns), not {len(turns)}."
            raise ApiError(400, message, param="messages", code="invalid_value")
        # Its template runs in a sandbox, which a thread waits for.
        is_long = chat.length + _TURN * len(turns) >= _LONG
        beside = self.state.prompts if is_long else self.state.chats
        return await self._tokens(self._encoded, chat, beside)

    async def text_tokens(self, text: str, special: bool = True) -> tuple[int, ...]:
        """Tokens of a text, with `special` ones at its ends. Raises ApiError for one that is too long."""
        self._check_length(len(text))
        beside = self.state.prompts if len(text) >= _LONG else None
        return await self._tokens(partial(self.state.text.encode, special=special), text, beside)

    async def infilled(self, begin: str | Sequence[int], end: str) -> tuple[int, ...]:
        """The prompt of the middle between a beginning and an end. Raises ApiError for a model that cannot
        fill it in."""
        text = self.state.text
        ids = await self.text_tokens(begin, special=False) if isinstance(begin, str) else begin
        try:
            return infill(text.tokenizer, text.firsts, ids, await self.text_tokens(end, special=False))
        except DataError as error:
            raise ApiError(400, str(error), param="suffix", code="unsupported_parameter") from error

    def _encoded(self, chat: Chat) -> tuple[int, ...]:
        return self.state.text.chat(chat.turns, chat.tools, chat.variables, chat.is_continued)

    async def _markup(self, chat: Chat, prompt: tuple[int, ...]) -> Markup:
        """The markup of answers. Raises ApiError where the model writes no calls that can be read."""
        markups = self.state.text.markups
        if not chat.callable:
            return markups.of(prompt)
        try:  # the first time the template writes a call, in its sandbox
            return await self.state.chats.run(self.tenant.id, markups.of, prompt, chat.callable)
        except DataError as error:
            raise ApiError(400, str(error), param="tools", code="unsupported_parameter") from error

    async def _prompts(
        self, prompts: Sequence[str | Sequence[int]], size: RequestSize
    ) -> list[tuple[int, ...]]:
        """Tokens of each prompt. Raises ApiError for an invalid one before the next is tokenized."""
        limits, found = self._limits(), list[tuple[int, ...]]()
        check_counts(replace(size, prompts=[0] * len(prompts)), limits)
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_length(len(prompt))
        is_long = sum(map(len, prompts)) >= _LONG  # many short ones take as long as a long one
        beside = self.state.prompts if is_long else None
        for prompt in prompts:
            if isinstance(prompt, str):
                tokens = await self._tokens(self.state.text.encode, prompt, beside)
            else:
                tokens = tuple(prompt)
            tokens = self._truncated(tokens, size)
            request_cost(replace(size, prompts=(len(tokens),)), limits)
            found.append(tokens)
        return found

    def _call(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        size: RequestSize,
        goes_on: bool = False,
        markup: Markup = PLAIN,
    ) -> Call:
        self._check_ids(prompts, sampling)
        size = replace(
            size,
            prompts=[len(prompt) for prompt in prompts],
            alternatives=sampling.prompt_logprobs if sampling.logprobs is None else sampling.logprobs,
            stops=sampling.stop,
            biases=len(sampling.logit_bias),
            grammar_bytes=len(sampling.grammar or ""),
        )
        cost = request_cost(size, self._limits())
        if sampling.min_tokens > min(cost.max_tokens):
            message = (
                f"Invalid value for 'min_tokens': the answer may have {min(cost.max_tokens)} tokens at most."
            )
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        if self.form.has_special:
            special = self.state.text.special
            markup = replace(markup, kept={**special, **markup.kept} if markup.kept else special)
        # A missing seed is drawn, so that another engine can continue the answer.
        seed = secrets.randbelow(SEEDS) if sampling.seed is None else sampling.seed % SEEDS
        asked = Request(
            id=self.kind + secrets.token_hex(12),
            prompt=(),
            sampling=replace(sampling, seed=seed, stop=()),
            adapter=self.model.key,
            slo=self._bounds(),
            arrival=self.arrived,
            base=self.model.base_id,
            scope=f"{self.tenant.id}/{self.salt}",  # prompts of one scope share the cache
            alternatives=tuple(chain.key for chain in self.model.chains) if self.adaptive else (),
            background=IN_BACKGROUND.get(),
        )
        return Call(
            asked=asked,
            prompts=prompts,
            tenant=self.tenant,
            model=self.model,
            cost=cost,
            choices=size.choices,
            tier=self.tier,
            stops=sampling.stop,
            goes_on=goes_on,
            form=self.form,
            stated=self.stated,
            markup=markup,
        )

    def _truncated(self, tokens: tuple[int, ...], size: RequestSize) -> tuple[int, ...]:
        """The last tokens of a prompt, as many as the client wants."""
        most = self.truncation
        if most is None:
            return tokens
        if most < 0:
            limits = self._limits()
            most = max(min(limits.positions, limits.cache_tokens) - (size.max_tokens or 1), 1)
        return tokens[-most:] if most else ()

    def _bounds(self) -> SLO:
        """The bounds of the tier, but for those that the client states."""
        of_tier = self.state.settings.slo["flex" if IN_BACKGROUND.get() else self.tier]
        stated = SLO() if self.stated is None else self.stated
        given = {one.name: value for one in fields(SLO) if (value := getattr(stated, one.name)) is not None}
        return replace(of_tier, **given)

    def _limits(self) -> RequestLimits:
        settings = self.state.settings
        sequences = min(settings.max_queue, settings.max_queue_tenant)
        hello = self.hello
        return RequestLimits(
            hello.positions, hello.cache_tokens, self.most_choices, sequences, hello.offloaded_tokens
        )

    def _check_length(self, characters: int) -> None:
        """Raises ApiError for prompts too long to fit, before they are tokenized."""
        if characters > MOST_CHARACTERS * self.hello.positions:
            message = (
                f"This model takes {self.hello.positions} tokens at most; "
                f"the prompt has {characters} characters."
            )
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")

    async def _tokens(
        self, encode: Callable[[T], Sequence[int]], prompt: T, beside: Offload | None
    ) -> tuple[int, ...]:
        """Tokenizes a prompt, on a thread of `beside` where that is given."""
        try:
            if beside is None:
                return tuple(encode(prompt))
            return tuple(await beside.run(self.tenant.id, encode, prompt))
        except DataError as error:
            param = "prompt" if isinstance(prompt, str) else "messages"
            raise ApiError(400, str(error), param=param, code="invalid_value") from error

    def _check_ids(self, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> None:
        most = self.hello.vocabulary
        named = [("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)]
        for param, ids in [*(("prompt", prompt) for prompt in prompts), *named]:
            if (wrong := max(ids, default=0)) >= most:
                message = f"Invalid value for '{param}': {wrong} is not one of the model's {most} tokens."
                raise ApiError(400, message, param=param, code="invalid_value")
        if not all(prompts):
            raise ApiError(400, "A prompt needs at least one token.", param="prompt", code="invalid_value")
