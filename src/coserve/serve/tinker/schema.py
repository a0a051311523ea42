"""JSON bodies of the `tinker` client's requests. Unknown fields are errors, as everywhere: they may change
what is computed."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from coserve.serve.answering.cost import (
    LONGEST_NAME,
    MOST_ALTERNATIVES,
    MOST_FIELDS,
    MOST_PROMPT_TOKENS,
    MOST_STOPS,
)
from coserve.serve.schema.common import (
    MOST_TOKEN_ID,
    Choices,
    MostBytes,
    RequestBody,
    StopString,
    TokenId,
    at_most,
)
from coserve.serve.schema.jobs import HIGHEST_RANK

LONGEST_TTL = 10 * 366 * 86400  # seconds
Id = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
Number = Annotated[int, Field(ge=0, lt=2**62)]
MOST_METADATA_BYTES = 16 * 1024  # of one session, run or checkpoint
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=256)], Any],
    BeforeValidator(at_most(MOST_FIELDS)),
    MostBytes(MOST_METADATA_BYTES),
]
Some = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]
LARGEST = 1e9  # of numbers that a loss or an optimizer computes with: float32 has room for their products
Factor = Annotated[float, Field(ge=0, le=LARGEST)]
SavedName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
Seconds = Annotated[int, Field(ge=3600, le=LONGEST_TTL)]
ModelName = Annotated[str, Field(min_length=1, max_length=2 * LONGEST_NAME)]


class TinkerBody(RequestBody):
    """Base of the bodies; their `type` repeats what the path says."""

    type: str | None = Field(None, max_length=64)


class ClientConfigRequest(TinkerBody):
    sdk_version: str = Field(max_length=64)


class CreateSessionRequest(TinkerBody):
    tags: list[Annotated[str, Field(max_length=256)]] = Field([], max_length=MOST_FIELDS)
    user_metadata: Metadata | None = None
    sdk_version: str = Field("", max_length=64)
    project_id: Id | None = None
    display_name: str | None = Field(None, max_length=LONGEST_NAME)


class SessionBody(TinkerBody):
    session_id: Id


class SessionEnd(RequestBody):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(TinkerBody):
    reason: SessionEnd
    detail: str | None = Field(None, max_length=4096)


class CreateSamplingSessionRequest(SessionBody):
    sampling_session_seq_id: Number
    base_model: ModelName | None = None
    model_path: ModelName | None = None


class RetrieveFutureRequest(TinkerBody):
    request_id: Id
    allow_metadata_only: bool = False


class CancelFutureRequest(TinkerBody):
    request_id: Id


class EncodedTextChunk(RequestBody):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_PROMPT_TOKENS)]


class ModelInput(RequestBody):
    """A prompt: its chunks one after the other. Images and sounds are not supported."""

    chunks: Annotated[list[EncodedTextChunk], Field(fail_fast=True, max_length=4096)]

    @property
    def length(self) -> int:
        """Its tokens, before a list is made of them."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class TinkerSampling(RequestBody):
    """`stop` None leaves the end-of-sequence tokens, an empty list nothing but `max_tokens`."""

    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKEN_ID)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: (
        StopString
        | Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_STOPS)]
        | Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS)]
        | None
    ) = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(-1, ge=-1, le=MOST_TOKEN_ID)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleRequest(TinkerBody):
    sampling_session_id: Id
    seq_id: Number
    num_samples: Choices = 1
    prompt: ModelInput
    sampling_params: TinkerSampling
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Some = 0
    topk_sample_logprobs: Some = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1, le=MOST_PROMPT_TOKENS)
    target_prompt_logprobs: None = Field(None, description="Not supported.")
    prompt_alt_tokens_k: Literal[0] = Field(0, description="Not supported.")
    record_stability_info: bool | None = None
    base_model: None = None
    model_path: None = None

    @field_validator("target_prompt_logprobs", "prompt_alt_tokens_k", mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if value not in (None, 0):
            raise ValueError("not supported by this server")
        return value

    @field_validator("record_stability_info", mode="before")
    @classmethod
    def _refuse_recording(cls, value: Any) -> Any:
        if value:
            raise ValueError("stability information is not recorded by this server")
        return value


class LoraConfig(RequestBody):
    rank: int = Field(ge=1, le=HIGHEST_RANK)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(RequestBody):
    type: Literal["adamw"] = "adamw"


class CreateModelRequest(SessionBody):
    model_seq_id: Number
    base_model: ModelName
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None


class ModelBody(TinkerBody):
    model_id: Id


class OrderedBody(ModelBody):
    """A request that takes its turn among those of its model, by `seq_id` from 1."""

    seq_id: Annotated[int, Field(ge=1, lt=2**31)]


class TinkerAdam(RequestBody):
    learning_rate: Factor = 0.0001
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: Factor = 1e-12
    weight_decay: Factor = 0.0
    grad_clip_norm: Factor = 0.0


class OptimStepRequest(OrderedBody):
    adam_params: TinkerAdam


class SaveWeightsRequest(OrderedBody):
    path: SavedName | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSamplerRequest(OrderedBody):
    """Without a `path` the weights are temporary, and the reply names a sampling session of them."""

    path: SavedName | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: Metadata | None = None


class SaveWeightsExternalRequest(OrderedBody):
    path: SavedName | None = None
    ttl_seconds: Seconds | None = None
    age_encryption_recipients: None = None


class LoadWeightsRequest(TinkerBody):
    """Into a model that is there (`model_id`, `seq_id`), or into a new one (`session_id`, `model_seq_id`)."""

    model_id: Id | None = None
    seq_id: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: ModelName | None = None
    user_metadata: Metadata | None = None
    path: ModelName
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = Field(None, max_length=4096)


class WeightsInfoRequest(TinkerBody):
    tinker_path: ModelName


class TtlRequest(TinkerBody):
    ttl_seconds: Seconds | None = None


class ProjectRequest(TinkerBody):
    project_id: Id


class CopyWeightsRequest(TinkerBody):
    session_id: Id | None = None
    model_seq_id: Number | None = None
    destination_project_id: Id | None = None
    source_path: ModelName
    ttl_seconds: Seconds | None = None
    weights_access_token: str | None = Field(None, max_length=4096)


class SearchCursor(RequestBody):
    last_created_at: str = Field(max_length=64)
    last_session_id: Id


class ActiveStatus(RequestBody):
    type: Literal["active"]


class FinishedStatus(RequestBody):
    """`reasons` are those that clients gave at the end of their sessions; None for any."""

    type: Literal["client_finished"]
    reasons: list[Annotated[str, Field(max_length=64)]] | None = Field(None, max_length=16)


class OtherStatus(RequestBody):
    """No session of this server ends so."""

    type: Literal["cancelled", "failed"]


Status = Annotated[ActiveStatus | FinishedStatus | OtherStatus, Field(discriminator="type")]


class SearchSessionsRequest(TinkerBody):
    session_id: Id | None = None
    project_ids: list[Id] | None = Field(None, max_length=MOST_FIELDS)
    user_metadata: Metadata = Field(default_factory=dict)
    display_name: str | None = Field(None, min_length=1, max_length=LONGEST_NAME)
    owner: Annotated[Any, MostBytes(LONGEST_NAME)] = None
    statuses: list[Status] | None = Field(None, min_length=1, max_length=16)
    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None
