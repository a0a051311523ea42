"""Losses and their gradients beside plain computations in float64, without torch.

Each plain loss is written from its paper, token by token, with the derivative by hand. `w` is a token's
weight, `log p` is the
log-probability of a token, `log q` that under the policy that sampled it or the reference, r = p / q.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch

from coserve.train.losses import LOSSES

Numbers = Mapping[str, Sequence[float]]
Plain = Callable[[Sequence[float], Sequence[int], Numbers], tuple[float, list[float]]]
_LOW, _HIGH, _DRO, _DPO, _ORPO, _KTO = 0.8, 1.2, 0.05, 0.1, 0.1, 0.1  # settings by default
_EXAMPLES: Final = 32
_LENGTHS: Final = (1, 40)  # tokens of an example, fewest and most


def _cross_entropy(logs: Sequence[float], examples: Sequence[int], of: Numbers) -> tuple[float, list[float]]:
    """-w log p."""
    return -math.fsum(w * log for w, log in zip(of["weights"], logs, strict=True)), [
        -w for w in of["weights"]
    ]


def _importance_sampling(
    logs: Sequence[float], examples: Sequence[int], of: Numbers
) -> tuple[float, list[float]]:
    """-w r A, whose derivative by log p is itself."""
    terms = [-w * r * a for r, a, w in zip(_ratios(logs, of), of["advantages"], of["weights"], strict=True)]
    return math.fsum(terms), terms


def _ppo(logs: Sequence[float], examples: Sequence[int], of: Numbers) -> tuple[float, list[float]]:
    """-w min(r A, clip(r) A) (Schulman et al. 2017, equation 7)."""
    terms, gradient = [], []
    for r, a, w in zip(_ratios(logs, of), of["advantages"], of["weights"], strict=True):
        terms.append(-w * min(r * a, _clipped(r) * a))
        gradient.append(-w * r * a if r * a < _clipped(r) * a or r == _clipped(r) else 0.0)
    return math.fsum(terms), gradient


def _cispo(logs: Sequence[float], examples: Sequence[int], of: Numbers) -> tuple[float, list[float]]:
    """-w clip(r) A log p, the ratio constant (MiniMax-M1, equation 4)."""
    ratios = _ratios(logs, of)
    factors = [-w * _clipped(r) * a for r, a, w in zip(ratios, of["advantages"], of["weights"], strict=True)]
    return math.fsum(f * log for f, log in zip(factors, logs, strict=True)), factors


def _dro(logs: Sequence[float], examples: Sequence[int], of: Numbers) -> tuple[float, list[float]]:
    """-w (A log p - beta / 2 (log p - log q)^2) (Richemond et al. 2024)."""
    terms, gradient = [], []
    for log, q, a, w in zip(logs, of["logprobs"], of["advantages"], of["weights"], strict=True):
        terms.append(w * (_DRO / 2 * (log - q) ** 2 - a * log))
        gradient.append(w * (_DRO * (log - q) - a))
    return math.fsum(terms), gradient


def _gspo(logs: Sequence[float], examples: Sequence[int], of: Numbers) -> tuple[float, list[float]]:
    """PPO's terms with their weights, and the geometric mean of an example's ratios in the place of each
    (Zheng et al. 2025, equation 7)."""
    terms, gradient = [], [0.0] * len(logs)
    for begin, end in _spans(examples):
        mask = of["sequence_ratio_mask"][begin:end]
        distances = [logs[i] - of["logprobs"][i] for i in range(begin, end)]
        count = math.fsum(mask)
        r = math.exp(math.fsum(m * d for m, d in zip(mask, distances, strict=True)) / count)
        slope = 0.0
        for a, w in zip(of["advantages"][begin:end], of["weights"][begin:end], strict=True):
            terms.append(-w * min(r * a, _clipped(r) * a))
            slope += -w * r * a if r * a < _clipped(r) * a or r == _clipped(r) else 0.0
        for place, m in enumerate(mask, begin):
            gradient[place] = slope * m / count
    return math.fsum(terms), gradient


def _dpo(logs: Sequence[float], examples: Sequence[int], of: Numbers) -> tuple[float, list[float]]:
    """-log sigmoid(beta (gain of the preferred - gain of the other)) (Rafailov et al. 2023, equation 7)."""
    spans = _spans(examples)
    terms, gradient = [], [0.0] * len(logs)
    for preferred, other in zip(spans[::2], spans[1::2], strict=True):
        gains = [math.fsum(logs[i] - of["reference"][i] for i in range(*span)) for span in (preferred, other)]
        margin = _DPO * (gains[0] - gains[1])
        terms.append(max(-margin, 0.0) + math.log1p(math.exp(-abs(margin))))
        slope = _DPO / (1.0 + math.exp(margin)) if margin < 700 else 0.0
        for span, sign in ((preferred, -1.0), (other, 1.0)):
            for i in range(*span):
                gradient[i] = sign * slope
    return math.fsum(terms), gradient


def _orpo(logs: Sequence[float], examples: Sequence[int], of: Numbers) -> tuple[float, list[float]]:
    """-m - beta log sigmoid(o - o2), where m is the mean log p of the preferred answer's tokens, those whose
    `answers` is one, o = m - log(1 - e^m) its log odds, and o2 those of the other (Hong et al. 2024,
    equations 4 to 7)."""
    spans, own = _spans(examples), of["answers"]
    terms, gradient = [], [0.0] * len(logs)
    for pair in zip(spans[::2], spans[1::2], strict=True):
        counts = [math.fsum(own[begin:end]) for begin, end in pair]
        sums = [math.fsum(own[i] * logs[i] for i in range(begin, end)) for begin, end in pair]
        means = [total / count for total, count in zip(sums, counts, strict=True)]
        odds = [mean - math.log(-math.expm1(mean)) for mean in means]
        margin = odds[0] - odds[1]
        terms.append(-means[0] + _ORPO * (max(-margin, 0.0) + math.log1p(math.exp(-abs(margin)))))
        slope = _ORPO / (1.0 + math.exp(margin))
        by_mean = (-1.0 + slope / math.expm1(means[0]), -slope / math.expm1(means[1]))
        for (begin, end), one, count in zip(pair, by_mean, counts, strict=True):
            gradient[begin:end] = [mask * one / count for mask in own[begin:end]]
    return math.fsum(terms), gradient


def _kto(logs: Sequence[float], examples: Sequence[int], of: Numbers) -> tuple[float, list[float]]:
    """1 - sigmoid(beta g) of a desirable answer and 1 - sigmoid(-beta g) of another, where g is what it gains
    on the reference, at a divergence of 0 (Ethayarajh et al. 2024, equation 7)."""
    terms, gradient = [], [0.0] * len(logs)
    for begin, end in _spans(examples):
        sign = 1.0 if of["desirable"][begin] else -1.0
        gain = math.fsum(logs[i] - of["reference"][i] for i in range(begin, end))
        value = 1.0 / (1.0 + math.exp(sign * _KTO * gain))
        terms.append(value)
        gradient[begin:end] = [-sign * _KTO * value * (1.0 - value)] * (end - begin)
    return math.fsum(terms), gradient


PLAIN: Final[Mapping[str, Plain]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
    "dpo": _dpo,
    "orpo": _orpo,
    "kto": _kto,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Greatest differences of a loss from its plain twin: of the value, over the sum of the absolute terms'
    size, and of the gradient, over its greatest entry."""

    value: float
    gradient: float


def difference(name: str, seed: int, dtype: torch.dtype = torch.float32) -> Difference:
    """Compares a loss in `dtype`, the type in which steps compute it, with its plain twin on drawn numbers.
    Both get the same numbers: those that `dtype` has."""
    draw = random.Random(f"{name}/{seed}")
    lengths = [draw.randint(*_LENGTHS) for _ in range(_EXAMPLES)]
    examples = [index for index, length in enumerate(lengths) for _ in range(length)]
    logs = [_in(dtype, -draw.expovariate(0.5)) for _ in examples]
    inputs = {
        wanted: [_in(dtype, one) for one in _drawn(wanted, logs, examples, draw)]
        for wanted in LOSSES[name].inputs
    }
    wanted, slope = PLAIN[name](logs, examples, inputs)
    tensors = {key: torch.tensor(values, dtype=dtype) for key, values in inputs.items()}
    value, gradient = LOSSES[name].gradient(
        torch.tensor(logs, dtype=dtype), torch.tensor(examples), tensors, {}
    )
    largest = max(map(abs, slope))
    apart = max(abs(one - other) for one, other in zip(gradient.double().tolist(), slope, strict=True))
    return Difference(abs(float(value) - wanted) / max(abs(wanted), largest), apart / largest)


def _drawn(name: str, logs: Sequence[float], examples: Sequence[int], draw: random.Random) -> list[float]:
    """Inputs of a loss as training has them: policies close to the present one, advantages around zero."""
    match name:
        case "logprobs" | "reference":
            return [log + draw.gauss(0.0, 0.2) for log in logs]
        case "advantages":
            return [draw.gauss(0.0, 1.0) for _ in logs]
        case "sequence_ratio_mask" | "answers":
            return [1.0] * len(logs)
        case "desirable":
            return [float(example % 2) for example in examples]
    return [draw.random() for _ in logs]


def _in(dtype: torch.dtype, value: float) -> float:
    return float(torch.tensor(value, dtype=dtype))


def _ratios(logs: Sequence[float], of: Numbers) -> list[float]:
    return [math.exp(log - q) for log, q in zip(logs, of["logprobs"], strict=True)]


def _clipped(ratio: float) -> float:
    return min(max(ratio, _LOW), _HIGH)


def _spans(examples: Sequence[int]) -> list[tuple[int, int]]:
    """First token of each example, and the one after its last."""
    begins = [i for i, one in enumerate(examples) if i == 0 or one != examples[i - 1]]
    return list(pairwise([*begins, len(examples)]))
