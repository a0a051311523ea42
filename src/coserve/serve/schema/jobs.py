"""`/v1/fine_tuning`."""

import json
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from coserve.serve.answering.cost import LONGEST_NAME
from coserve.serve.schema.chat import JsonSchemaFormat
from coserve.serve.schema.common import ListPage, Metadata, MostBytes, RequestBody
from coserve.train.lengths import TooLong
from coserve.train.objectives import MOST_TOP_K, NllOn, PolicyLoss, ScaleRewards

MOST_SEED: Final = 2**31 - 1
LONGEST_ID: Final = 64
MOST_SETTINGS_BYTES: Final = 1 << 16  # of one adapter method, and of all those of one adapter
MOST_PARTS: Final = 8  # methods of one adapter
HIGHEST_RANK: Final = 512
LARGEST: Final = 4096  # of other whole numbers: sizes, virtual tokens; memory grows with each
_TRAIN: Any = {
    "model": "coserve-tiny",
    "training_file": "file-abc123",
    "suffix": "my-first",
    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}},
    "peft": {"r": 16},
}

FileId = Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]
Share = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]
MethodName = Literal["supervised", "distillation", "dpo", "orpo", "kto", "reinforcement"]


class Named(RequestBody):
    """Base of bodies with many fields: an unknown field is refused with the name of the nearest one that
    exists."""

    @model_validator(mode="before")
    @classmethod
    def _suggest(cls, value: Any) -> Any:
        if isinstance(value, dict):
            known = cls._names()
            for name in value:
                if name not in known:
                    raise _unknown(str(name), known, cls._elsewhere())
        return value

    @classmethod
    def _elsewhere(cls) -> dict[str, str]:
        """Names that a person may look for here, and what they are."""
        return {}

    @classmethod
    def _names(cls) -> list[str]:
        """All names that fields may be given by."""
        names = []
        for name, field in cls.model_fields.items():
            alias = field.validation_alias
            names += [str(a) for a in alias.choices] if isinstance(alias, AliasChoices) else [name]
        return names


class Hyperparameters(Named):
    """OpenAI's three; "auto" follows the number of examples and the width of the model."""

    n_epochs: Auto | Annotated[int, Field(ge=1, le=100)] = "auto"
    batch_size: Auto | Annotated[int, Field(ge=1, le=1024)] = "auto"
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0, le=1000)] = "auto"


class SupervisedMethod(Named):
    hyperparameters: Hyperparameters | None = None


class PreferenceHyperparameters(Hyperparameters):
    beta: Auto | Annotated[float, Field(gt=0, le=1000)] = Field(
        default="auto", description="Weight of the preference; auto is 0.1."
    )


class PreferenceMethod(Named):
    hyperparameters: PreferenceHyperparameters | None = None


class OddsRatioHyperparameters(PreferenceHyperparameters):
    nll_on: Auto | NllOn = Field(
        default="auto",
        description="Tokens of the likelihood: of prompts and preferred answers, or of answers; auto is all.",
    )


class OddsRatioMethod(Named):
    hyperparameters: OddsRatioHyperparameters | None = None


class LabelledHyperparameters(PreferenceHyperparameters):
    desirable_weight: Auto | Annotated[float, Field(ge=0, le=1000)] = Field(
        default="auto", description="Of the loss of desirable answers; auto is 1."
    )
    undesirable_weight: Auto | Annotated[float, Field(ge=0, le=1000)] = Field(
        default="auto", description="Of the loss of undesirable answers; auto is 1."
    )


class LabelledMethod(Named):
    hyperparameters: LabelledHyperparameters | None = None


class DistillationHyperparameters(Hyperparameters):
    top_k: Auto | Annotated[int, Field(ge=1, le=MOST_TOP_K)] = Field(
        default="auto", description="Of the teacher's likeliest tokens at each place; auto is 16."
    )
    temperature: Auto | Annotated[float, Field(ge=0.1, le=100)] = Field(
        default="auto", description="Of both distributions; auto is 1."
    )


class DistillationMethod(Named):
    teacher: str = Field(
        min_length=1, max_length=LONGEST_NAME, description="The model to learn from: an adapter, or the base."
    )
    hyperparameters: DistillationHyperparameters | None = None


class ReinforcementHyperparameters(Hyperparameters):
    """OpenAI's, of which `batch_size` counts prompts, and those of GRPO, this server's own."""

    compute_multiplier: Auto | Annotated[float, Field(gt=0, le=16)] = Field(
        default="auto", description="Of the answers to each prompt: `group_size` is 8 times as many."
    )
    eval_interval: Auto | Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        default="auto", description="Optimizer steps between validations, and checkpoints."
    )
    eval_samples: Auto | Annotated[int, Field(ge=1, le=10)] = Field(
        default="auto",
        description="Accepted, and not used: a validation has one greedy answer to each prompt.",
    )
    reasoning_effort: Literal["default", "low", "medium", "high"] = Field(
        default="default", description="Accepted, and not used, as an event of the job says."
    )

    group_size: Auto | Annotated[int, Field(ge=2, le=128)] = Field(
        default="auto", description="Answers to each prompt; auto is 8."
    )
    max_tokens: Auto | Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default="auto", description="Of an answer; auto is 256."
    )
    temperature: Auto | Annotated[float, Field(ge=0.01, le=5)] = Field(
        default="auto", description="At which answers are sampled; auto is 1."
    )
    clip: Auto | Annotated[float, Field(ge=0.01, le=0.99)] | None = Field(
        default="auto",
        description="PPO's, TRL's epsilon; auto is 0.2, null the policy gradient with importance sampling.",
    )
    clip_high: Auto | Annotated[float, Field(ge=0.01, le=100)] = Field(
        default="auto", description="Above one, TRL's epsilon_high, of cispo the most; auto is `clip`."
    )
    loss_type: Auto | PolicyLoss = Field(
        default="auto", description="How the loss sums tokens, as in TRL; auto is dapo."
    )
    scale_rewards: Auto | ScaleRewards = Field(
        default="auto", description="Whose deviation advantages are divided by, as in TRL; auto is group."
    )


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses values that msgpack or JSON cannot represent, and values too large for any machine."""
    try:
        msgspec.msgpack.encode(value)
        json.dumps(value, allow_nan=False)
    except (ValueError, OverflowError, RecursionError) as error:
        raise PydanticCustomError("not_plain", "Settings hold a value that no field takes.") from error
    for name, number in value.items():
        most = HIGHEST_RANK if name in ("r", "rank") else LARGEST
        if isinstance(number, int) and number > most:
            raise PydanticCustomError(
                "too_large", f"Settings: {{name}} may be {most} at most.", {"name": name}
            )
    return value


# The engine knows which fields there are: each adapter method is one file of its own.
Settings = Annotated[dict[str, Any], AfterValidator(_plain), MostBytes(MOST_SETTINGS_BYTES)]


Methods = Annotated[
    list[Settings], Field(min_length=1, max_length=MOST_PARTS), MostBytes(MOST_SETTINGS_BYTES)
]


class ReinforcementMethod(Named):
    grader: Settings = Field(
        description="One of OpenAI's but `python`, or this server's `regex`, `json_schema` or `http`."
    )
    hyperparameters: ReinforcementHyperparameters | None = None
    response_format: JsonSchemaFormat | None = Field(
        default=None, description="A JSON schema that the sampled answers match."
    )


class FineTuneMethod(Named):
    """Training method; `orpo`, `kto` and `distillation` are this server's own."""

    type: MethodName
    supervised: SupervisedMethod | None = None
    distillation: DistillationMethod | None = None
    dpo: PreferenceMethod | None = None
    orpo: OddsRatioMethod | None = None
    kto: LabelledMethod | None = None
    reinforcement: ReinforcementMethod | None = None

    @model_validator(mode="after")
    def _one(self) -> "FineTuneMethod":
        for name in get_args(MethodName):
            if name != self.type and getattr(self, name) is not None:
                raise PydanticCustomError(
                    "other_method",
                    "the type is {type}: {name} is of another.",
                    {"type": self.type, "name": name},
                )
        if self.type == "reinforcement" and self.reinforcement is None:
            raise PydanticCustomError(
                "no_grader", "the type reinforcement needs 'reinforcement' with a grader."
            )
        if self.type == "distillation" and self.distillation is None:
            raise PydanticCustomError(
                "no_teacher", "the type distillation needs 'distillation' with a teacher."
            )
        return self

    @property
    def settings(self) -> "MethodSettings | None":
        """The settings of its type."""
        found: MethodSettings | None = getattr(self, self.type)
        return found


MethodSettings = (
    SupervisedMethod
    | DistillationMethod
    | PreferenceMethod
    | OddsRatioMethod
    | LabelledMethod
    | ReinforcementMethod
)


class OptimizerSettings(Named):
    """Settings of AdamW, the learning rate's schedule, and the examples."""

    learning_rate: float | None = Field(default=None, gt=0, le=1, description="Instead of a multiplier.")
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt"] = Field(
        default="linear", validation_alias=AliasChoices("schedule", "lr_scheduler_type")
    )
    warmup_ratio: float = Field(default=0.03, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0, le=10_000_000, description="Instead of warmup_ratio.")
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, le=1024, description="An optimizer step has so many times batch_size examples."
    )
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    betas: Annotated[list[Share], Field(fail_fast=True, min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999]
    )
    epsilon: float = Field(default=1e-8, gt=0, le=1, validation_alias=AliasChoices("epsilon", "adam_epsilon"))
    max_grad_norm: float | None = Field(default=1.0, gt=0, le=1e9, description="null does not clip.")
    max_steps: int | None = Field(default=None, ge=1, le=10_000_000, description="Ends before n_epochs do.")
    max_length: int | None = Field(
        default=None,
        ge=2,
        le=10_000_000,
        description="Most tokens of an example; null is what the model takes.",
    )
    too_long: TooLong = Field(
        default="error",
        description="What becomes of longer examples: the job is refused, they are left out, or cut at their "
        "ends, of pairs within the answers. Plain texts are cut into pieces.",
    )
    loss_on: Literal["assistant", "all"] = "assistant"
    rows: int = Field(
        default=2048, ge=1, le=1_000_000, description="Tokens trained at once; fewer take less memory."
    )
    keep: Literal["inputs", "pruned", "everything"] | Annotated[int, Field(ge=1, le=1 << 50)] = Field(
        default="inputs",
        description="What is kept for the way back, or how many bytes of it: more is faster to train.",
    )
    save_steps: int | None = Field(
        default=None, ge=1, le=10_000_000, description="Optimizer steps between checkpoints, and validations."
    )
    load_best_model_at_end: bool = Field(
        default=False,
        description="The adapter is that of the checkpoint with the lowest validation loss, or the highest "
        "reward.",
    )
    early_stopping_patience: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Ends after so many validations in a row without a lower loss, or a higher reward, with "
        "the best checkpoint.",
    )
    early_stopping_threshold: float = Field(
        default=0.0, ge=0, le=1e6, description="By which a loss has to be lower to count."
    )


class WandbIntegration(RequestBody):
    project: str = Field(min_length=1, max_length=LONGEST_NAME)
    name: str | None = Field(default=None, max_length=LONGEST_NAME)
    entity: str | None = Field(default=None, max_length=LONGEST_NAME)
    tags: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=50)] | None = None


class Integration(RequestBody):
    """Accepted. The operator decides where jobs are reported, as an event of the job says."""

    type: Literal["wandb"]
    wandb: WandbIntegration


class JobRequest(Named):
    """A fine-tuning job. `peft` and `optimizer` are this server's own."""

    model_config = ConfigDict(json_schema_extra={"examples": [_TRAIN]})

    model: str = Field(
        min_length=1, max_length=LONGEST_NAME, description="The base, or an adapter to go on from."
    )
    training_file: FileId
    validation_file: FileId | None = None
    suffix: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Part of the name."
    )
    seed: int | None = Field(default=None, ge=0, le=MOST_SEED)
    hyperparameters: Hyperparameters | None = Field(
        default=None, description="OpenAI's older place for them."
    )
    method: FineTuneMethod | None = None
    metadata: Metadata | None = None
    integrations: Annotated[list[Integration], Field(max_length=5)] | None = None
    peft: Settings | Methods | None = Field(
        default=None,
        description="The adapter, in PEFT's words or in ours: `peft_type`, `r`, `target_modules` and so on; "
        "LoRA where no type is given. A list of methods is one adapter.",
    )
    optimizer: OptimizerSettings | None = None

    @classmethod
    def _elsewhere(cls) -> dict[str, str]:
        return {name: f"optimizer.{name}" for name in OptimizerSettings._names()}


class FineTuningJobError(BaseModel):
    code: str
    message: str
    param: str | None


class HyperparametersUsed(BaseModel):
    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float


class SettingsUsed(BaseModel):
    hyperparameters: dict[str, Any]
    grader: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    teacher: str | None = None


class MethodUsed(BaseModel):
    type: MethodName
    supervised: SettingsUsed | None = None
    distillation: SettingsUsed | None = None
    dpo: SettingsUsed | None = None
    orpo: SettingsUsed | None = None
    kto: SettingsUsed | None = None
    reinforcement: SettingsUsed | None = None


class ExamplesUsed(BaseModel):
    """The training file's examples, by what became of them."""

    trained: int = Field(description="Examples, pairs or prompts, pieces of plain texts counted each.")
    truncated: int = Field(description="Of these, those that were too long and lost their ends.")
    skipped: int = Field(description="Left out because they are too long.")
    dropped: int = Field(description="Left out because there is nothing to learn in them.")


class StepProgress(BaseModel):
    """Optimizer steps of a job that has begun."""

    step: int
    total_steps: int | None
    seconds_per_step: float | None
    seconds_left: float | None = Field(description="Of a running job, by its mean time for a step.")


class JobObject(BaseModel):
    """A fine-tuning job, with every "auto" replaced by what was chosen."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    model: str
    status: Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
    waiting_for: str | None = Field(
        default=None, description="Why a queued job has not begun, or a running one gets no time to train."
    )
    waiting_since: int | None = Field(default=None, description="When such a running job trained last.")
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    progress: StepProgress | None = Field(default=None, description="Once training has begun.")
    stopping: bool = Field(default=False, description="Whether it ends as soon as it is saved.")
    slowdown: float | None = Field(
        default=None,
        description="Of a running job that has made a step: how much longer recent answers took because of "
        "all training.",
    )
    fine_tuned_model: str | None
    organization_id: str
    training_file: str
    validation_file: str | None
    result_files: list[str]
    hyperparameters: HyperparametersUsed
    method: MethodUsed
    seed: int
    trained_tokens: int | None
    examples: ExamplesUsed | None = Field(default=None, description="Once training has begun.")
    error: FineTuningJobError | None
    metadata: dict[str, str] | None
    integrations: list[Any] = []
    user_provided_suffix: str | None
    peft: dict[str, Any] | list[dict[str, Any]] | None = Field(description="As asked for.")
    optimizer: dict[str, Any] | None = Field(description="As asked for.")


class RecordCounts(BaseModel):
    total: int | None
    read: int
    all_read: bool = Field(description="Whether counts are of the whole file; a long one is read for 20 s.")


class LengthBin(BaseModel):
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    first: int = Field(alias="from")
    to: int
    count: int


class LengthFigures(BaseModel):
    """Tokens of examples as they came; of a pair of its longer answer."""

    total: int
    min: int
    p50: int
    p90: int
    p99: int
    max: int
    histogram: list[LengthBin]


class LengthCheck(BaseModel):
    """Examples beyond the limit, and what becomes of them. Plain texts are cut into pieces."""

    count: int
    limit: int | None
    setting: TooLong
    longest: str | None = Field(description="The place of the longest one.")
    split_texts: int
    pieces: int


class PieceOfText(BaseModel):
    text: str
    trained: bool


class ExampleShown(BaseModel):
    """An example's first 512 tokens."""

    tokens: list[PieceOfText]
    total_tokens: int
    rejected: bool = Field(description="Whether it is the other answer of the pair before it.")


class ExpectedMemory(BaseModel):
    """Bytes."""

    needed: int
    available: int


class JobValidation(BaseModel):
    """A job with this body, as it would be. `error` is what its creation would answer, or end with."""

    object: Literal["fine_tuning.validation"] = "fine_tuning.validation"
    valid: bool
    error: FineTuningJobError | None
    model: str
    training_file: str
    filename: str
    container: str | None
    format: str | None
    records: RecordCounts
    tokens: LengthFigures | None
    examples: ExamplesUsed
    too_long: LengthCheck
    ignored: list[str] = Field(description="Keys of the records that are not read, the first of them.")
    first_example: list[PieceOfText] = Field(description="As it is rendered, its first 2,048 tokens.")
    first_rejected: list[PieceOfText] | None = Field(description="The other answer of the first pair.")
    shown: list[ExampleShown] = Field(description="The first examples token by token, where asked for.")
    method: MethodUsed
    steps: int
    expected_seconds: float | None = Field(
        description="Of training with nothing else to do; null where that is unknown."
    )
    memory: ExpectedMemory | None


class JobList(BaseModel):
    object: Literal["list"] = "list"
    data: list[JobObject]
    has_more: bool


class JobChoices(BaseModel):
    object: Literal["fine_tuning.choices"] = "fine_tuning.choices"
    models: list[str] = Field(description="The bases; adapters are to be had from /v1/adapters.")
    methods: list[str] = Field(description="Training methods: the `type` of a job's `method`.")
    adapters: list[str] = Field(description="Adapter methods: the `type` in a job's `peft`.")
    schedules: list[str] = Field(description="Of the learning rate.")


class MoveJob(RequestBody):
    """The new place of a queued job among its tenant's others."""

    before: str | None = Field(
        max_length=LONGEST_ID, description="The queued job that begins after it; null for the end."
    )


class StepFigures(BaseModel):
    """An optimizer step. Further figures are those of the training method."""

    model_config = ConfigDict(extra="allow")

    step: int
    created_at: int
    train_loss: float | None = None
    valid_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    seconds: float | None = None


class FigureList(BaseModel):
    object: Literal["list"] = "list"
    data: list[StepFigures]


class EventObject(BaseModel):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] | None


class EventList(BaseModel):
    object: Literal["list"] = "list"
    data: list[EventObject]
    has_more: bool


class CheckpointObject(BaseModel):
    """An adapter after some step; requests can have its name as `model`."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: dict[str, Any]
    step_number: int


class CheckpointList(ListPage):
    data: list[CheckpointObject]


def _unknown(name: str, known: list[str], elsewhere: dict[str, str]) -> PydanticCustomError:
    near = [elsewhere[name]] if name in elsewhere else get_close_matches(name, known, 1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}."
    shown = name.encode(errors="backslashreplace").decode()  # JSON may hold half a surrogate pair
    return PydanticCustomError("unknown_parameter", "{hint}", {"name": shown, "hint": hint})
