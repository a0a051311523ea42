"""Losses: functions of the log-probabilities of target tokens, and of per-token inputs.

A loss never sees logits or hidden states. It receives the log-probability of each labelled row's target, and
autograd computes its gradient for these; `train.tail` does the rest. To add a loss, write its function and
name it in `LOSSES`. A loss of `OF_CANDIDATES` receives log-probabilities of several tokens of each row; only
jobs have those.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.core.sequence import LossSpec
from coserve.errors import ConfigError

Numbers = Mapping[str, Tensor]
Settings = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Loss:
    """`function(logprobs, examples, inputs, settings)` returns the loss of each of n tokens [n] where it is
    `of_tokens`, else the sum [] over all of them.

    logprobs [n]; examples [n], the index of each token's example in the micro-batch; `inputs`, each [n], are
    those named in `inputs`, and `settings` those in `settings`, with their defaults. `defaults` are the
    numbers of inputs that a client may leave out. Where the loss `couples` tokens, n is the whole micro-batch
    and the tail is passed twice; else it may be any part of it. Each `group` of examples in a row is in one
    micro-batch. Of a loss of candidates logprobs, at the setting `temperature`, and inputs are [n, k].

    A loss `of_tokens` has the input `weights`, a factor of the loss of each token. A token of weight 0 counts
    as absent: its other numbers, which may be anything, reach neither the loss nor a gradient.
    """

    function: Callable[[Tensor, Tensor, Numbers, Settings], Tensor]
    inputs: tuple[str, ...] = ()
    settings: Mapping[str, float] | None = None
    couples: bool = False
    group: int = 1
    defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def of_tokens(self) -> bool:
        """Tells whether each token has a loss of its own."""
        return "weights" in self.inputs

    def temperature(self, settings: Settings) -> float:
        """The temperature of the log-probabilities of a loss of candidates."""
        return {**(self.settings or {}), **settings}.get("temperature", 1.0)

    def value(self, logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
        """The loss []."""
        if self.of_tokens:
            return self.token_values(logprobs, examples, inputs, settings).sum()
        return self.function(logprobs, examples, inputs, {**(self.settings or {}), **settings})

    def token_values(self, logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
        """The loss [n] of each token, of a loss `of_tokens`."""
        weights = inputs["weights"]
        counts = weights != 0
        # Zeros in place of numbers that do not count: times a weight of 0 an infinite ratio would be NaN.
        logprobs, inputs = logprobs.where(counts, 0.0), {k: x.where(counts, 0.0) for k, x in inputs.items()}
        return weights * self.function(logprobs, examples, inputs, {**(self.settings or {}), **settings})

    def gradient(
        self, logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        """(loss [], its gradient for logprobs [n])."""
        leaf = logprobs.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.value(leaf, examples, inputs, settings)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient


def _cross_entropy(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    return -logprobs


def _importance_sampling(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    """Policy gradient, corrected by the ratio to the policy that sampled."""
    return -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def _clipped(ratio: Tensor, settings: Settings) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _pessimistic(ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    """PPO's clipped objective (Schulman et al. 2017, equation 7), negated."""
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def _ppo(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    return _pessimistic((logprobs - inputs["logprobs"]).exp(), inputs["advantages"], settings)


def _cispo(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    """Policy gradient with a clipped ratio as a constant weight (MiniMax-M1, equation 4)."""
    ratio = _clipped((logprobs.detach() - inputs["logprobs"]).exp(), settings)
    return -ratio * logprobs * inputs["advantages"]


def _dro(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    """Direct reward optimisation (Richemond et al. 2024): a quadratic penalty on the distance from the policy
    that sampled."""
    distance = logprobs - inputs["logprobs"]
    return settings["beta"] / 2 * distance.square() - logprobs * inputs["advantages"]


def _gspo(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    """PPO with one ratio for all tokens of an example: the geometric mean of theirs (GSPO, Zheng et al. 2025,
    equation 7), over tokens whose `sequence_ratio_mask` is one."""
    mask = inputs["sequence_ratio_mask"]
    sums = logprobs.new_zeros(2, int(examples.max()) + 1)
    sums = sums.index_add(1, examples, torch.stack([mask * (logprobs - inputs["logprobs"]), mask]))
    ratio = (sums[0] / sums[1].clamp_min(1e-9)).exp()
    return _pessimistic(ratio[examples], inputs["advantages"], settings)


def _dpo(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    """Direct preference optimisation (Rafailov et al. 2023, equation 7). Example 2k is preferred to 2k + 1;
    `reference` are log-probabilities under the model that training starts from."""
    pairs = int(examples.max()) // 2 + 1
    gained = logprobs.new_zeros(2 * pairs).index_add(0, examples, logprobs - inputs["reference"])
    return -F.logsigmoid(settings["beta"] * (gained[0::2] - gained[1::2])).sum()


def _orpo(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    """Odds ratio preference optimisation (Hong et al. 2024, equations 4 to 7). Example 2k is preferred to
    2k + 1; an answer's probability is the geometric mean of its tokens', those whose `answers` is one.

    The likelihood of preferred examples is the sum over all their targets, the prompt's too, times
    `nll_weight`; if that is 0, the mean over each answer's own."""
    pairs, answers = int(examples.max()) // 2 + 1, inputs["answers"]
    sums = logprobs.new_zeros(2, 2 * pairs)
    sums = sums.index_add(1, examples, torch.stack([answers * logprobs, answers]))
    means = sums[0] / sums[1].clamp_min(1.0)
    # The odds of a probability of one are infinite: beyond 1 - 1e-6 they count as constant.
    bounded = means.clamp_max(-1e-6)
    log_odds = bounded - torch.log(-torch.expm1(bounded))
    ratio = F.logsigmoid(log_odds[0::2] - log_odds[1::2])
    weight = settings["nll_weight"]
    likelihood = weight * logprobs[examples % 2 == 0].sum() if weight else means[0::2].sum()
    return -(likelihood + settings["beta"] * ratio.sum())


def _kto(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, equation 7), as TRL computes it: what an
    answer gains on the `reference` beyond `kl`, an estimate of the divergence from it, is to be high where
    all of the example's `desirable` are 1, and low where they are 0."""
    numbers = torch.stack([logprobs - inputs["reference"], inputs["desirable"], torch.ones_like(logprobs)])
    gained, marked, tokens = logprobs.new_zeros(3, int(examples.max()) + 1).index_add(1, examples, numbers)
    desirable = (2 * marked > tokens).to(logprobs.dtype)
    weights = settings["desirable_weight"] * desirable + settings["undesirable_weight"] * (1 - desirable)
    margins = (2 * desirable - 1) * settings["beta"] * (gained - settings["kl"])
    losses: Tensor = weights * (tokens > 0) * torch.sigmoid(-margins)
    return losses.sum()


def _distillation(logprobs: Tensor, examples: Tensor, inputs: Numbers, settings: Settings) -> Tensor:
    """The Kullback-Leibler divergence of the student from the teacher over the teacher's likeliest tokens
    (Hinton et al. 2015, section 2, cut to k tokens): both at a temperature, times its square, which keeps the
    gradient's size; the teacher's probabilities sum to one over these tokens, and the student's over all.

    logprobs [n, k] of the student at the temperature; `teacher` [n, k] at temperature one."""
    temperature = settings["temperature"]
    wanted = (inputs["teacher"] / temperature).log_softmax(-1)
    return temperature**2 * (wanted.exp() * (wanted - logprobs)).sum()


_SAMPLED: Final = ("logprobs", "advantages", "weights")  # of the policy that sampled, and of what it sampled
_WEIGHTS: Final = {"weights": 1.0}
_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Final[Mapping[str, Loss]] = {
    "cross_entropy": Loss(_cross_entropy, inputs=("weights",), defaults=_WEIGHTS),
    "importance_sampling": Loss(_importance_sampling, _SAMPLED, defaults=_WEIGHTS),
    "ppo": Loss(_ppo, _SAMPLED, _CLIP, defaults=_WEIGHTS),
    "cispo": Loss(_cispo, _SAMPLED, _CLIP, defaults=_WEIGHTS),
    "dro": Loss(_dro, _SAMPLED, {"beta": 0.05}, defaults=_WEIGHTS),
    "gspo": Loss(
        _gspo,
        (*_SAMPLED, "sequence_ratio_mask"),
        _CLIP,
        couples=True,
        defaults={"sequence_ratio_mask": 1.0, **_WEIGHTS},
    ),
    "dpo": Loss(_dpo, inputs=("reference",), settings={"beta": 0.1}, couples=True, group=2),
    "orpo": Loss(
        _orpo,
        inputs=("answers",),
        settings={"beta": 0.1, "nll_weight": 0.0},
        couples=True,
        group=2,
        defaults={"answers": 1.0},
    ),
    "kto": Loss(
        _kto,
        inputs=("reference", "desirable"),
        settings={"beta": 0.1, "kl": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0},
        couples=True,
    ),
}

OF_CANDIDATES: Final[Mapping[str, Loss]] = {
    "distillation": Loss(_distillation, inputs=("teacher",), settings={"temperature": 1.0}),
}


def distillation_spec(tokens: Sequence[int], logprobs: Sequence[float], temperature: float) -> LossSpec:
    """Distillation in the form of plans: a teacher's likeliest tokens, k for each row of the micro-batch, and
    their log-probabilities."""
    settings = {"temperature": temperature}
    return LossSpec("distillation", {"teacher": tuple(logprobs)}, settings, candidates=tuple(tokens))


def find_loss(spec: LossSpec) -> Loss:
    """The loss that a micro-batch's plan names."""
    return (OF_CANDIDATES if spec.candidates else LOSSES)[spec.name]


def loss_spec(
    name: str, inputs: Mapping[str, tuple[float, ...]] | None = None, **settings: float
) -> LossSpec:
    """A loss in the form of plans. `inputs` are one number for each row of the micro-batch. Raises
    ConfigError for unknown or missing inputs and settings."""
    inputs = inputs or {}
    if (loss := LOSSES.get(name)) is None:
        raise ConfigError(f"there is no loss {name!r}, only {', '.join(LOSSES)}")
    if name == "cross_entropy" and not inputs:  # every label has weight one
        return LossSpec()
    if set(inputs) != set(loss.inputs):
        raise ConfigError(f"the loss {name!r} needs {', '.join(loss.inputs)} for each token")
    if unknown := set(settings) - set(loss.settings or {}):
        raise ConfigError(f"the loss {name!r} has no setting {', '.join(sorted(unknown))}")
    return LossSpec(name, dict(inputs), settings, loss.couples)
