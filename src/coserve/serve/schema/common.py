"""Schemas that chats and plain completions share."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from coserve.core.request import SLO
from coserve.serve.answering.cost import (
    LONGEST_NAME,
    LONGEST_STOP,
    MOST_ALTERNATIVES,
    MOST_BIASES,
    MOST_BODY_BYTES,
    MOST_CHOICES,
    MOST_FIELDS,
    MOST_GRAMMAR_BYTES,
    MOST_STOPS,
)
from coserve.serve.answering.structure import Structure
from coserve.serve.errors import ApiError
from coserve.serve.schema.unsupported import without_unsupported_sampling

MOST_TOKEN_ID = 2**31 - 1
MOST_METADATA = 16
MOST_BAD_WORDS = 64
LONGEST_BAD_WORD = 64  # characters
LONGEST_BOUND = 86_400.0  # seconds
DEEPEST = 64  # levels of a value of any form: encoders give up at 200 or more
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKEN_ID)]
# pydantic looks only into strings with a bound: others may hold half a surrogate pair, which is no text.
Words = Annotated[str, Field(max_length=MOST_BODY_BYTES)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=LONGEST_BAD_WORD)]],
    Field(fail_fast=True, max_length=MOST_BAD_WORDS),
]
Alternatives = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)]
FinishName = Literal["stop", "length"]
Tier = Literal["default", "flex", "priority"]


class IdPage(BaseModel):
    """A page of a list, with the ids of its first and last member."""

    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: Sequence[Any], has_more: bool) -> Self:
        """The page with these members, which have ids."""
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=list(data), first_id=first, last_id=last, has_more=has_more)


class ListPage(IdPage):
    """A page as OpenAI's lists have them."""

    object: Literal["list"] = "list"


def at_most(most: int) -> Callable[[Any], Any]:
    """Refuses an object with more entries, or with a long name, before they are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict):
            if len(value) > most:
                raise ValueError(f"an object with {len(value)} entries; at most {most} are allowed")
            if (longest := max(map(len, value), default=0)) > LONGEST_NAME:
                raise ValueError(f"a name of {longest} characters; at most {LONGEST_NAME} are allowed")
        return value

    return check


class MostBytes:
    """Bound of a value of any form, which is kept or passed on: bytes of its JSON. Its place in the OpenAPI
    document has it as `x-most-bytes`."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "x-most-bytes": self.most}

    def _check(self, value: Any) -> Any:
        try:
            written = len(msgspec.json.encode(value))
        except (ValueError, RecursionError, OverflowError) as error:
            raise ValueError("it holds a value that cannot be kept, or is nested too deeply") from error
        if written > self.most:
            raise ValueError(f"it has {written} bytes; at most {self.most} are allowed")
        if _is_deep(value):
            raise ValueError(f"it is nested too deeply; at most {DEEPEST} levels are allowed")
        return value


def _is_deep(value: Any) -> bool:
    """Tells whether lists and objects lie in each other more than `DEEPEST` times."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return bool(level)


def tier_of(asked: str | None) -> Tier:
    """A service tier of OpenAI's, by coserve's three names."""
    match asked:
        case "priority" | "fast":
            return "priority"
        case "flex":
            return "flex"
    return "default"


class RequestBody(BaseModel):
    """Base of requests' bodies: unknown fields are an error, and a number is not a string.

    Validation stops early: pydantic collects every error, and a body of a few megabytes can have millions.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        return at_most(MOST_FIELDS)(value)


StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS)]
Biases = Annotated[
    dict[TokenName, Bias], Field(max_length=MOST_BIASES), BeforeValidator(at_most(MOST_BIASES))
]


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="One more chunk at the end tells the usage.")
    include_obfuscation: bool | None = Field(None, description="Accepted; chunks are never padded.")


_Bound = Annotated[float, Field(gt=0, le=LONGEST_BOUND)]


class StatedBounds(RequestBody):
    """Bounds of one request in seconds, in place of its tier's."""

    first_token: _Bound | None = None
    between_tokens: _Bound | None = None
    end_to_end: _Bound | None = None
    deferral: Annotated[float, Field(ge=0, le=LONGEST_BOUND)] | None = Field(
        None, description="The delay that training may cause in all."
    )


class Generation(RequestBody):
    """Fields of both kinds of request. The last sixteen are not OpenAI's: fourteen are vLLM's, and `adaptive`
    and `slo` are coserve's own."""

    model: str = Field(min_length=1, max_length=LONGEST_NAME, description="The base model, or an adapter.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = Field(None, description="What is added to the logits of tokens, by token id.")
    n: Choices | None = Field(None, description="How many answers to each prompt.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="The same seed, the same answer.")
    stop: StopString | StopStrings | None = Field(
        None, description=f"Up to {MOST_STOPS} texts that end the answer and are not part of it."
    )
    stream: bool | None = Field(None, description="Whether to send the answer piece by piece.")
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; 1 unless given.")
    top_p: float | None = Field(None, gt=0, le=1)
    user: str | None = Field(None, max_length=4096, description="Accepted, not used.")
    service_tier: Literal["auto", "default", "flex", "priority", "fast"] | None = Field(
        None,
        description="How soon: `priority` before `default` before `flex`, whose answers may be put off.",
    )
    top_k: int | None = Field(
        None, ge=-1, le=MOST_TOKEN_ID, description="Keeps the likeliest k tokens; 0 and -1 keep all."
    )
    min_p: float | None = Field(None, ge=0, lt=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(
        None, ge=0, le=MOST_TOKEN_ID, description="No end before this many tokens."
    )
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    skip_special_tokens: bool | None = Field(
        None, description="False: special tokens are part of the text, as they are spelled."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="True: what stopped the answer, a string or a token, is part of its text."
    )
    return_token_ids: bool | None = Field(None, description="Tells the token ids of prompt and answer.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Shares what prompts have in common only with requests of the same salt.",
    )
    adaptive: bool | None = Field(
        None,
        description="Whether an approximate chain of the model may answer under load, if it has some; each "
        "answer then says which one did.",
    )
    prompt_logprobs: Alternatives | None = Field(
        None, description="Of how many of the likeliest tokens at each place of the prompt; not in streams."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MOST_TOKEN_ID, description="Keeps the last ones of the prompt; -1 as many as fit."
    )
    bad_words: BadWords | None = Field(None, description="Words that no answer has.")
    slo: StatedBounds | None = Field(
        None,
        description="Bounds for which training makes room. The usage tells whether they were kept.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported_sampling(cls, body: Any) -> Any:
        return without_unsupported_sampling(body)

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @model_validator(mode="after")
    def _streams_tell_no_prompt(self) -> "Generation":
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not allowed when stream is true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def tier(self) -> Tier:
        """The requested service tier, by coserve's three names."""
        return tier_of(self.service_tier)

    @property
    def stated(self) -> SLO | None:
        """The request's own bounds."""
        return None if self.slo is None else SLO(**self.slo.model_dump(exclude_none=True))

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


CHAIN = (
    "What answered: `exact`, or an approximate chain; of an answer that changed its chain all in order, "
    "with ` > ` between them. Where the model has some, or with adaptive."
)


class PromptTokensDetails(BaseModel):
    """Prompt tokens whose keys and values were in the cache already."""

    cached_tokens: int


class KeptBounds(BaseModel):
    """Outcome of a request's own bounds."""

    kept: bool


class Usage(BaseModel):
    """Tokens that were read and written, over all answers of a request."""

    slo: KeptBounds | None = Field(None, description="Of a request with slo.")

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MOST_METADATA),
    BeforeValidator(at_most(MOST_METADATA)),
]
JsonObject = dict[str, Any]
Schema = Annotated[JsonObject, MostBytes(MOST_GRAMMAR_BYTES)]
Ignored = Annotated[JsonObject, MostBytes(MOST_BODY_BYTES)]  # an object that is accepted and not used


MOST_OPTIONS: Final = 1024
_KINDS: Final = ("json", "regex", "choice", "grammar")
_Text = Annotated[str, Field(min_length=1, max_length=MOST_GRAMMAR_BYTES)]
Options = Annotated[list[_Text], Field(fail_fast=True, min_length=1, max_length=MOST_OPTIONS)]


class StructuredOutputs(RequestBody):
    """One form of the whole answer. `grammar` is Lark, or llama.cpp's GBNF."""

    json_: Schema | _Text | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: _Text | None = None
    choice: Options | None = None
    grammar: _Text | None = None


class StructuredGeneration(Generation):
    """A request whose answers may be held to a form."""

    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the whole answer has to be (vLLM's name)."
    )
    guided_json: Schema | _Text | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: _Text | None = Field(None, description="The older name of structured_outputs.regex.")
    guided_choice: Options | None = Field(None, description="The older name of structured_outputs.choice.")
    guided_grammar: _Text | None = Field(None, description="The older name of structured_outputs.grammar.")

    @model_validator(mode="after")
    def _ends_by_itself(self) -> "StructuredGeneration":
        if self.structure is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError("min_tokens and ignore_eos are not allowed where an answer's form says its end")
        return self

    @property
    def structure(self) -> Structure | None:
        """The form of answers, if one is asked for. Raises ApiError for several."""
        new = self.structured_outputs
        asked: list[tuple[str, Any, str]] = [
            (kind, getattr(self, f"guided_{kind}"), f"guided_{kind}") for kind in _KINDS
        ]
        if new is not None:
            values = {"json": new.json_, "regex": new.regex, "choice": new.choice, "grammar": new.grammar}
            asked += [(kind, values[kind], f"structured_outputs.{kind}") for kind in _KINDS]
            if new.json_object:
                asked.append(("json", {"type": "object"}, "structured_outputs.json_object"))
        found = [one for one in asked if one[1] is not None]
        if len(found) > 1 or (new is not None and not any(one[2].startswith("str") for one in found)):
            message = f"Exactly one form of the answer may be asked for, not {len(found)}."
            param = "structured_outputs" if new is not None else found[0][2]
            raise ApiError(400, message, param=param, code="invalid_value")
        if not found:
            return None
        kind, value, param = found[0]
        structure = Structure(kind, value, param)  # type: ignore[arg-type]
        if kind == "json" and isinstance(value, str):
            try:
                return Structure("json", msgspec.json.decode(value, type=dict[str, Any]), param)
            except (msgspec.DecodeError, RecursionError) as error:
                raise structure.bad(f"it is no JSON object: {error}") from error
        return structure
