"""Translates a client's request into the engine's: token ids, checked parameters, a cost."""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from llguidance import LLMatcher
from msgspec import structs

from coserve.core.request import Request, SamplingParams
from coserve.errors import DataError
from coserve.serve.adapter_registry.catalog import EXACT, Model
from coserve.serve.answering.cost import (
    MOST_CHARACTERS,
    MOST_GRAMMAR_BYTES,
    RequestCost,
    RequestLimits,
    RequestSize,
    check_counts,
    request_cost,
)
from coserve.serve.engine.link import CONNECTING
from coserve.serve.errors import ApiError
from coserve.serve.offload import Offload
from coserve.serve.schema.chat import ChatRequest, JsonObjectFormat, JsonSchemaFormat
from coserve.serve.schema.common import MOST_TOKEN_ID, Generation, JsonObject
from coserve.serve.schema.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from coserve.serve.state import State
from coserve.serve.store.records import Tenant
from coserve.wire.messages import Hello

T = TypeVar("T")
_SEEDS = 2**63
# With free white space an uncertain model may write blanks until its tokens are used up.
_COMPACT: Any = {"whitespace_flexible": False}
_LONG = 2_000  # characters that are tokenized beside the event loop, not in it: 2 ms
_TURN = 32  # characters that a turn of a chat counts as, for the time that its template takes


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked call, with `choices` answers to each of its prompts. Answers are numbered by prompt, then by
    choice. `body` is the call's, without its text. `asked` is what their requests have in common, with the
    call's id and without stop strings, which the server handles."""

    body: Generation
    asked: Request
    created: int
    tenant: Tenant
    model: Model
    prompts: Sequence[tuple[int, ...]]
    cost: RequestCost
    fingerprint: str

    def __len__(self) -> int:
        return len(self.prompts) * self.choices

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.body.n or 1

    @property
    def tells_chain(self) -> bool:
        """Tells whether answers name the chain that answered."""
        return bool(self.body.adaptive or self.model.chains)

    def chain(self, alternative: int) -> str:
        """The name of the chain that answers: of the model itself (0), or of its approximation of that
        number."""
        return self.model.chains[alternative - 1].name if alternative else EXACT

    def prompt(self, index: int) -> tuple[int, ...]:
        """The prompt of answer `index`."""
        return self.prompts[index // self.choices]

    def text_before(self, index: int) -> tuple[int, ...]:
        """Tokens of the text that answer `index` goes on with: in a plain completion, its prompt's."""
        return self.prompt(index) if isinstance(self.body, CompletionRequest) else ()

    def request(self, index: int, newcomer: bool = False) -> Request:
        """The request for answer `index`."""
        sampling, prompt = self.asked.sampling, index // self.choices
        assert sampling.seed is not None
        seed = (sampling.seed + index % self.choices) % _SEEDS
        sampling = replace(sampling, max_tokens=self.cost.max_tokens[prompt], seed=seed)
        return structs.replace(
            self.asked,
            id=f"{self.asked.id}-{index}",
            prompt=self.prompts[prompt],
            sampling=sampling,
            newcomer=newcomer,
        )


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Builds the requests of one client for one model, with at most `most_choices` answers to a prompt.
    `hello` is the engine's, with the properties of the model's base."""

    state: State
    tenant: Tenant
    model: Model
    hello: Hello
    arrived: float
    most_choices: int

    @classmethod
    async def of(
        cls, state: State, tenant: Tenant, model: str, most_choices: int | None = None
    ) -> "RequestBuilder":
        """`most_choices` None is that of the settings. Raises ApiError 404 for an unknown model, 503 before
        the first engine has connected."""
        arrived = time.monotonic()
        hello = state.link.hello or await state.link.wait_ready(CONNECTING)
        found = await state.catalog.find(tenant, model)
        most = most_choices or state.settings.max_n
        return cls(state, tenant, found, hello.of(found.base_id), arrived, most)

    async def chat(self, body: ChatRequest) -> GenerationRequest:
        """Builds the request of a chat. Raises ApiError for an invalid one."""
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens differ.", param="max_tokens")
        turns = [{"role": message.role, "content": message.text} for message in body.messages]
        length = sum(len(turn["content"]) for turn in turns)
        self._check_length(length)
        if len(turns) > (most := self.state.settings.engine.max_chat_turns):
            message = f"A chat may have {most} messages (engine.max_chat_turns), not {len(turns)}."
            raise ApiError(400, message, param="messages", code="invalid_value")
        # Its template runs in a sandbox, which a thread waits for.
        is_long = length + _TURN * len(turns) >= _LONG
        beside = self.state.prompts if is_long else self.state.chats
        prompt = await self._tokens(self.state.text.chat, turns, beside)
        grammar = await self._grammar(body)
        sampling = _sampling(body, (body.top_logprobs or 0) if body.logprobs else None, None, grammar)
        size = RequestSize(
            (len(prompt),),
            max_tokens=body.max_completion_tokens or body.max_tokens,
            max_tokens_name="max_completion_tokens" if body.max_tokens is None else "max_tokens",
            grammar_bytes=len(grammar or ""),
        )
        return self._wanted("chatcmpl", body, [prompt], sampling, size)

    async def completion(self, body: CompletionRequest) -> GenerationRequest:
        """Builds the request of a plain completion. Raises ApiError for an invalid one."""
        scores = body.logprobs if body.echo else None
        if body.max_tokens == 0 and scores is None:
            scores = 0  # an answer may be empty only where the prompt is scored
        most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = _sampling(body, body.logprobs, scores, None)
        size = RequestSize((), max_tokens=most, scores_prompt=scores is not None)
        prompts = await self._prompts(body, size)
        size = replace(size, prompts=[len(prompt) for prompt in prompts])
        return self._wanted("cmpl", body, prompts, sampling, size)

    async def _prompts(self, body: CompletionRequest, size: RequestSize) -> list[tuple[int, ...]]:
        """Tokens of each prompt. Raises ApiError for an invalid one before the next is tokenized."""
        limits, prompts = self._limits(), list[tuple[int, ...]]()
        check_counts(replace(size, prompts=[0] * len(body.prompts), choices=body.n or 1), limits)
        for prompt in body.prompts:
            if isinstance(prompt, str):
                self._check_length(len(prompt))
        length = sum(map(len, body.prompts))  # many short ones take as long as a long one
        for prompt in body.prompts:
            tokens = (
                tuple(prompt)
                if isinstance(prompt, list)
                else await self._tokens(
                    self.state.text.encode, prompt, self.state.prompts if length >= _LONG else None
                )
            )
            request_cost(replace(size, prompts=(len(tokens),)), limits)
            prompts.append(tokens)
        return prompts

    def _wanted(
        self,
        kind: str,
        body: Generation,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        size: RequestSize,
    ) -> GenerationRequest:
        self._check_ids(prompts, sampling)
        size = replace(
            size,
            choices=body.n or 1,
            alternatives=sampling.prompt_logprobs if sampling.logprobs is None else sampling.logprobs,
            stops=body.stops,
            biases=len(sampling.logit_bias),
        )
        cost = request_cost(size, self._limits())
        if sampling.min_tokens > min(cost.max_tokens):
            message = (
                f"Invalid value for 'min_tokens': the answer may have {min(cost.max_tokens)} tokens at most."
            )
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        asked = Request(
            id=f"{kind}-{secrets.token_hex(12)}",
            prompt=(),
            sampling=sampling,
            adapter=self.model.key,
            slo=self.state.settings.slo[body.tier],
            arrival=self.arrived,
            base=self.model.base_id,
            scope=f"{self.tenant.id}/{body.cache_salt or ''}",  # prompts of one scope share the cache
            alternatives=tuple(chain.key for chain in self.model.chains) if body.adaptive else (),
        )
        # Its text, which may have megabytes, is tokens by now: a stream need not hold it.
        text = "prompt" if isinstance(body, CompletionRequest) else "messages"
        return GenerationRequest(
            body=body.model_copy(update={text: []}),
            asked=asked,
            created=int(time.time()),
            tenant=self.tenant,
            model=self.model,
            prompts=prompts,
            cost=cost,
            fingerprint=fingerprint(self.hello),
        )

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

    async def _grammar(self, body: ChatRequest) -> str | None:
        """Grammar that the answer must match, in llguidance's format."""
        match body.response_format:
            case JsonObjectFormat():
                schema: JsonObject = {"type": "object"}
            case JsonSchemaFormat(json_schema=asked):
                schema = {} if asked.schema_ is None else asked.schema_
            case _:
                return None
        for param in ("min_tokens", "ignore_eos"):
            if getattr(body, param):
                message = f"'{param}' is not allowed with response_format, which says where an answer ends."
                raise ApiError(400, message, param=param, code="invalid_value")
        return await self.state.prompts.run(self.tenant.id, _compiled, schema)

    def _check_ids(self, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> None:
        most = self.hello.vocabulary
        named = [("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)]
        for param, ids in [*(("prompt", prompt) for prompt in prompts), *named]:
            if (wrong := max(ids, default=0)) >= most:
                message = f"Invalid value for '{param}': {wrong} is not one of the model's {most} tokens."
                raise ApiError(400, message, param=param, code="invalid_value")
        if not all(prompts):
            raise ApiError(400, "A prompt needs at least one token.", param="prompt", code="invalid_value")


def fingerprint(hello: Hello) -> str:
    """OpenAI's `system_fingerprint`: differs wherever answers to the same seed may differ."""
    parts = (
        hello.model, hello.dtype, hello.quantize, hello.device, hello.parameters, hello.vocabulary,
        hello.deterministic, hello.cache_dtype,
    )  # fmt: skip
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def _sampling(
    body: Generation, logprobs: int | None, prompt_logprobs: int | None, grammar: str | None
) -> SamplingParams:
    """Sampling parameters without `max_tokens`, which depends on the prompt. A missing seed is drawn, so that
    another engine can continue the answer."""
    return SamplingParams(
        max_tokens=MOST_TOKEN_ID,
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        seed=secrets.randbelow(_SEEDS) if body.seed is None else body.seed % _SEEDS,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def _compiled(schema: JsonObject) -> str:
    """A JSON schema as a grammar. May take seconds even for a small one."""
    try:
        written = json.dumps(schema)
    except RecursionError as error:
        raise _bad_schema("it is nested too deeply") from error
    if len(written) > MOST_GRAMMAR_BYTES:
        raise _bad_schema(f"it has {len(written)} bytes; at most {MOST_GRAMMAR_BYTES} are allowed")
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(written, overrides=_COMPACT)
    except ValueError as error:
        raise _bad_schema(str(error)) from error
    if reason := LLMatcher.validate_grammar(grammar):
        raise _bad_schema(reason.partition("\n")[0])
    return grammar


def _bad_schema(reason: str) -> ApiError:
    message = f"Invalid schema for response_format: {reason}"
    return ApiError(400, message, param="response_format", code="invalid_schema")
