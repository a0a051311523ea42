"""Objectives of fine-tuning jobs: what their steps minimise, with its settings.

`supervised` learns examples, `distillation` what another adapter predicts in them, `dpo` and `orpo` learn
from pairs of answers of which one is preferred, `kto` from single answers that are desirable or not,
`reinforcement` from the rewards of answers that the model samples. An objective's name is that of OpenAI's
fine-tuning methods where it is one of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Literal, get_args

from coserve.core.ranges import check_choice, check_range, shown
from coserve.errors import ConfigError
from coserve.train.grading.asking import LabelModelGrader, ScoreModelGrader
from coserve.train.grading.graders import GRADERS, Grader, grader_from
from coserve.train.grading.http import HttpGrader
from coserve.train.grading.multi import MultiGrader
from coserve.train.grading.similarity import TextSimilarityGrader

MOST_TOP_K: Final = 64  # tokens of a teacher's distribution: every one of a row passes through plans
NllOn = Literal["all", "answer"]
ScaleRewards = Literal["group", "batch", "none"]
PolicyLoss = Literal["dapo", "bnpo", "grpo", "dr_grpo", "cispo"]


@dataclass(frozen=True, slots=True)
class Supervised:
    """Cross-entropy of the labels of examples."""

    name: ClassVar[str] = "supervised"
    group: ClassVar[int] = 1  # examples of a unit
    has_reference: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Distillation:
    """Kullback-Leibler divergence from a teacher at each label of examples, over the teacher's `top_k`
    likeliest tokens (Hinton et al. 2015, section 2), both at `temperature`, the mean over labels.

    `teacher` is the name of an adapter of the same base; None is the base alone. It stays as it is when the
    job starts.
    """

    name: ClassVar[str] = "distillation"
    group: ClassVar[int] = 1
    has_reference: ClassVar[bool] = False  # the teacher is no adapter that the job starts from
    teacher: str | None = None
    top_k: int = 16
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.teacher is not None and not isinstance(self.teacher, str):
            raise ConfigError(
                f"{self.name}.teacher must be the name of an adapter, not {shown(self.teacher)}"
            )
        check_range(f"{self.name}.top_k", self.top_k, 1, MOST_TOP_K, int)
        check_range(f"{self.name}.temperature", self.temperature, 0.1, 100.0)


@dataclass(frozen=True, slots=True)
class DPO:
    """Direct preference optimisation (Rafailov et al. 2023, equation 7), the mean over pairs. The reference
    is the model that the job starts from: the base, or the adapter that is trained further."""

    name: ClassVar[str] = "dpo"
    group: ClassVar[int] = 2
    has_reference: ClassVar[bool] = True
    beta: float = 0.1

    def __post_init__(self) -> None:
        _check_beta(self.name, self.beta)


@dataclass(frozen=True, slots=True)
class ORPO:
    """Odds ratio preference optimisation (Hong et al. 2024, equation 6): cross-entropy of the preferred
    answers, and `beta` times the loss of the odds ratio, the mean over pairs. It needs no reference.

    `nll_on` says what the cross-entropy is on: "all" is the mean over all tokens of a step's preferred
    answers and of their prompts, as TRL has it; "answer" the mean over each answer's own tokens, and then
    over pairs, as the paper has it.
    """

    name: ClassVar[str] = "orpo"
    group: ClassVar[int] = 2
    has_reference: ClassVar[bool] = False
    beta: float = 0.1
    nll_on: NllOn = "all"

    def __post_init__(self) -> None:
        _check_beta(self.name, self.beta)
        check_choice(f"{self.name}.nll_on", self.nll_on, get_args(NllOn))


@dataclass(frozen=True, slots=True)
class KTO:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, section 4), the mean over answers, each
    of which is desirable or not and weighed by that. The reference is as DPO's. The divergence from it is
    estimated in each step, on the step's prompts with answers to other prompts."""

    name: ClassVar[str] = "kto"
    group: ClassVar[int] = 2  # an answer, and another one to the same prompt for the estimate
    has_reference: ClassVar[bool] = True
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        _check_beta(self.name, self.beta)
        for field in ("desirable_weight", "undesirable_weight"):
            check_range(f"{self.name}.{field}", getattr(self, field), 0.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Reinforcement:
    """Group relative policy optimisation (GRPO; Shao et al. 2024) with the settings and defaults of TRL. Of
    the `group_size` answers to a prompt, of at most `max_tokens` tokens sampled at `temperature`, each has
    the advantage (reward - mean) / (std + 1e-4). The mean is that of its group. The std is the sample's
    (over n - 1): with `scale_rewards` "group" of its group, with "batch" of the whole step; with "none" the
    advantage is not divided.

    `loss_type` says how tokens are summed: "dapo" (Yu et al. 2025, equation 8) and "bnpo" over the number of
    all tokens of the step's answers; "grpo" over each answer's own, and then over answers; "dr_grpo" (Liu et
    al. 2025) over the number of answers times `max_tokens`; "cispo" (MiniMax-M1, equation 4) as "dapo", with
    the ratio as a constant weight of at most `clip_high`.

    The loss is PPO's, whose ratio to the policy that sampled is held between 1 - clip and 1 + clip_high,
    where `clip_high` is `clip` if it is not given; with `clip` None it is the policy gradient corrected by
    that ratio. There is no KL term. Answers match the `grammar`, if there is one.
    """

    name: ClassVar[str] = "reinforcement"
    group: ClassVar[int] = 1
    has_reference: ClassVar[bool] = False
    grader: Grader
    group_size: int = 8
    max_tokens: int = 256
    temperature: float = 1.0
    clip: float | None = 0.2
    clip_high: float | None = None
    loss_type: PolicyLoss = "dapo"
    scale_rewards: ScaleRewards = "group"
    grammar: str | None = None

    def __post_init__(self) -> None:
        check_choice(f"{self.name}.loss_type", self.loss_type, get_args(PolicyLoss))
        check_choice(f"{self.name}.scale_rewards", self.scale_rewards, get_args(ScaleRewards))
        if not isinstance(self.grammar, str | None):
            given = type(self.grammar).__name__
            raise ConfigError(f"{self.name}.grammar must be a text or None, not of type {given}")
        if self.clip_high is not None:
            check_range(f"{self.name}.clip_high", self.clip_high, 0.01, 100.0)
        check_range(f"{self.name}.group_size", self.group_size, 2, 128, int)
        check_range(f"{self.name}.max_tokens", self.max_tokens, 1, 1 << 20, int)
        check_range(f"{self.name}.temperature", self.temperature, 0.01, 5.0)
        if self.clip is not None:
            check_range(f"{self.name}.clip", self.clip, 0.01, 0.99)
        elif self.clip_high is None and self.loss_type == "cispo":
            raise ConfigError(f"{self.name}.clip_high is needed where the loss_type is 'cispo' and clip None")

    @property
    def loss(self) -> tuple[str, dict[str, float]]:
        """The loss of tokens, and its settings."""
        high = self.clip if self.clip_high is None else self.clip_high
        if self.loss_type == "cispo":
            assert high is not None, "it is checked"
            return "cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": high}
        if self.clip is None or high is None:
            return "importance_sampling", {}
        return "ppo", {"clip_low_threshold": 1.0 - self.clip, "clip_high_threshold": 1.0 + high}


Preferences = DPO | ORPO
Objective = Supervised | Distillation | DPO | ORPO | KTO | Reinforcement
SUPERVISED: Final = Supervised()
ALL_GRADERS: Final[Mapping[str, Callable[..., Grader]]] = {
    **GRADERS,
    **{
        kind.type: kind
        for kind in (TextSimilarityGrader, ScoreModelGrader, LabelModelGrader, HttpGrader, MultiGrader)
    },
}
OBJECTIVES: Final[Mapping[str, type[Objective]]] = {
    kind.name: kind for kind in (Supervised, Distillation, DPO, ORPO, KTO, Reinforcement)
}


def objective_of(
    given: str | Mapping[str, Any] | Objective, allowed_hosts: tuple[str, ...] = ()
) -> Objective:
    """An objective from itself, its name, or its `type` and settings. Graders reach the hosts named by the
    operator also where their addresses are not public. Raises ConfigError."""
    if isinstance(given, Objective):
        return given
    settings: dict[str, Any] = {"type": given} if isinstance(given, str) else dict(given)
    name = settings.pop("type", "supervised")
    if not isinstance(name, str) or (kind := OBJECTIVES.get(name)) is None:
        raise ConfigError(f"there is no training method {name!r}, only {', '.join(OBJECTIVES)}")
    known = [field.name for field in fields(kind)]
    if unknown := sorted(set(settings) - set(known)):
        raise ConfigError(
            f"the training method {name!r} has no setting {unknown[0]!r}, only {', '.join(known) or 'none'}"
        )
    if kind is Reinforcement:
        settings["grader"] = grader_from(settings.get("grader", {}), ALL_GRADERS, allowed_hosts=allowed_hosts)
    return kind(**settings)


def _check_beta(name: str, beta: float) -> None:
    check_range(f"{name}.beta", beta, 1e-6, 1000.0)
