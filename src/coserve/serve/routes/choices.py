"""Parts of chats and plain completions alike: from OpenAI's bodies to calls, and from answers to choices."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from time import time
from typing import Any

from coserve.core.request import FinishReason, SamplingParams
from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.answering.call import Call, CallUsage, TextForm
from coserve.serve.answering.replies import SMALL
from coserve.serve.answering.request_builder import RequestBuilder
from coserve.serve.http.json_replies import encoded, written
from coserve.serve.http.streams import DONE, EVENT_BEGIN, EVENT_END
from coserve.serve.schema.common import MOST_TOKEN_ID, FinishName, Generation, JsonObject
from coserve.serve.state import State
from coserve.serve.store.records import Tenant
from coserve.text import Text
from coserve.text.generation import OURS
from coserve.wire.messages import Hello


async def builder_for(state: State, tenant: Tenant, body: Generation, kind: str) -> RequestBuilder:
    """As `RequestBuilder.of`, for a body."""
    return await RequestBuilder.of(
        state,
        tenant,
        body.model,
        kind,
        tier=body.tier,
        salt=body.cache_salt,
        adaptive=body.adaptive,
        form=TextForm(
            by_token=bool(body.return_token_ids),
            has_special=body.skip_special_tokens is False,
            has_stop=bool(body.include_stop_str_in_output),
        ),
        stated=body.stated,
        truncation=body.truncate_prompt_tokens,
    )


def sampling_of(
    body: Generation,
    text: Text,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    defaults: SamplingParams = OURS,
) -> SamplingParams:
    """Sampling parameters of a body, but for `max_tokens`; `defaults` are those of what it leaves out."""
    biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    words = list(_spelled(body.bad_words or (), text))
    return SamplingParams(
        max_tokens=MOST_TOKEN_ID,  # `min_tokens` may be any number below the answer's, which is not known yet
        min_tokens=body.min_tokens or 0,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_k=defaults.top_k if body.top_k is None else max(body.top_k, 0),
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        repetition_penalty=body.repetition_penalty or defaults.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=biases | {tokens[0]: -math.inf for tokens in words if len(tokens) == 1},
        banned=tuple(tokens for tokens in words if len(tokens) > 1),
        seed=body.seed,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _spelled(words: Sequence[str], text: Text) -> Iterator[tuple[int, ...]]:
    """The tokens of words, at the beginning of a text and behind a space, as vLLM takes them."""
    for word in words:
        spelled = {tuple(text.encode(before + word, special=False)) for before in ("", " ")}
        yield from sorted(filter(None, spelled))


class ChoicesFormat(ABC):
    """Format of answers in OpenAI's API, as an `AnswerFormat`: a reply, or a chunk of a stream, has a list of
    choices."""

    def __init__(self, body: Generation, call: Call, hello: Hello, kind: str) -> None:
        """`kind` is the `object` of a reply, or of a chunk."""
        self.streams = bool(body.stream)
        self.call = call
        self.tells_ids = bool(body.return_token_ids)
        self.common: dict[str, Any] = {
            "id": call.asked.id,
            "object": kind,
            "created": int(time()),
            "model": call.model.name,
            "service_tier": body.tier,
            "system_fingerprint": fingerprint(hello),
        }
        self._tells_chain = bool(body.adaptive or call.model.chains)
        self._tells_usage = body.includes_usage

    @abstractmethod
    def chunks(self, piece: AnswerPiece) -> Iterator[JsonObject]:
        """Stream chunks of a piece, but for the `common` fields; called in order."""

    @abstractmethod
    def size(self, piece: AnswerPiece) -> int:
        """See `AnswerFormat`."""

    def events(self, piece: AnswerPiece) -> Iterator[bytes]:
        """See `AnswerFormat`."""
        no_usage: JsonObject = {"usage": None} if self._tells_usage else {}
        write = _event if self.size(piece) > SMALL else _small_event
        for chunk in self.chunks(piece):
            yield from write({**self.common, **no_usage, **chunk})

    def ending(self, usage: CallUsage) -> Iterator[bytes]:
        """See `AnswerFormat`."""
        if self._tells_usage or self.call.stated is not None:
            yield from _small_event({**self.common, "choices": [], "usage": self.usage(usage)})
        yield DONE

    def usage(self, usage: CallUsage) -> JsonObject:
        """The usage, with the outcome of the client's own bounds where it has stated some."""
        stated = self.call.stated
        slo = {} if stated is None else {"slo": {"kept": self.call.clock.kept(stated)}}
        return {**usage_of(usage), **slo}

    def choice(self, piece: AnswerPiece) -> JsonObject:
        """Fields of all choices; optional ones only where requested."""
        fields: JsonObject = {
            "index": piece.index,
            "finish_reason": None if piece.finish is None else finish_name(piece.finish),
        }
        if self.tells_ids:
            fields["token_ids"] = list(piece.tokens)
        if piece.chain and self._tells_chain:
            fields["chain"] = piece.chain
        return fields


def finish_name(reason: FinishReason) -> FinishName:
    """A finish reason in OpenAI's terms."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def usage_of(usage: CallUsage) -> JsonObject:
    """A usage in OpenAI's terms."""
    return {
        "prompt_tokens": usage.read,
        "completion_tokens": usage.written,
        "total_tokens": usage.read + usage.written,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def fingerprint(hello: Hello) -> str:
    """OpenAI's `system_fingerprint`: differs wherever answers to the same seed may differ."""
    parts = (
        hello.model, hello.dtype, hello.quantize, hello.device, hello.parameters, hello.vocabulary,
        hello.deterministic, hello.cache_dtype,
    )  # fmt: skip
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def _small_event(value: JsonObject) -> Iterator[bytes]:
    yield EVENT_BEGIN + encoded(value) + EVENT_END


def _event(value: JsonObject) -> Iterator[bytes]:
    yield EVENT_BEGIN
    yield from written(value)
    yield EVENT_END
