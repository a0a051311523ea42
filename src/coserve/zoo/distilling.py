"""Trains and judges parts that stand in for others by the model's vocabulary distributions (BlockLLM, 4.4).

All that is trained here is small and lies between frozen parts: a stitching block, or the low-rank factors
that recover a pruned block. The engine cannot train these, as it trains adapters beside linears of one base,
on its own losses. So this is a plain loop of torch, as that of full fine-tuning (`zoo/finetune.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coserve.core.ranges import BELOW_ONE, MOST_COUNT, SMALLEST, check_range
from coserve.errors import LossNotFinite, ZooError
from coserve.text.tokenizer import load_tokenizer, token_ids
from coserve.train.example import epochs, steps_per_epoch
from coserve.zoo.alternatives import Fidelity
from coserve.zoo.export import exported
from coserve.zoo.manifest import Application
from coserve.zoo.store import Zoo

Student = Callable[[Tensor], Tensor]  # token ids [batch, tokens] to logits [batch · tokens, vocabulary]
OnStep = Callable[[int, int, float], object]  # told of the step, of how many, and its loss
MOST_EPOCHS: Final = 10_000
MOST_WINDOW: Final = 1 << 20  # tokens
_HELD_OUT: Final = 5  # one window of so many is held out, at least one


@dataclass(frozen=True, slots=True)
class DistillationSettings:
    """Settings of such training; batch sizes are windows of `window` tokens. `max_steps` bounds the optimizer
    steps of all epochs and stages together. Raises ConfigError."""

    epochs: int = 2
    batch_size: int = 8
    learning_rate: float = 1e-3
    window: int = 64
    max_steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("epochs", self.epochs, 1, MOST_EPOCHS, int)
        check_range("batch_size", self.batch_size, 1, MOST_COUNT, int)
        if self.max_steps is not None:
            check_range("max_steps", self.max_steps, 1, MOST_COUNT, int)
        check_range("learning_rate", self.learning_rate, SMALLEST, BELOW_ONE)
        check_range("seed", self.seed, -MOST_COUNT, MOST_COUNT, int)
        check_range("window", self.window, 2, MOST_WINDOW, int)


@dataclass(frozen=True, slots=True)
class Windows:
    """A text as token ids in whole windows, [count, window] each: those trained on, and those held out, which
    come later in the text."""

    trained: Tensor
    held_out: Tensor

    @property
    def tokens(self) -> int:
        """Number of all token ids."""
        return self.trained.numel() + self.held_out.numel()


def windows_of(zoo: Zoo, application: Application, text: str, window: int) -> Windows:
    """A text cut into windows for a model. Raises ZooError for a text with fewer than two windows, for tokens
    beyond the vocabulary, and for a model without a tokenizer."""
    if not application.tokenizer:
        raise ZooError(f"{application.name} has no tokenizer, and a text cannot be read without")
    with exported(zoo, application.name) as folder:
        ids = token_ids(load_tokenizer(folder), text)
    count = len(ids) // window
    if count < 2:
        raise ZooError(
            f"the text is too short: it has {len(ids)} tokens for {application.name}, and {2 * window} are "
            f"needed for two windows of {window}: one to train on, one held out"
        )
    if max(ids) >= application.vocabulary:
        raise ZooError(f"the text has tokens beyond the vocabulary of {application.name}")
    cut = torch.tensor(ids[: count * window]).reshape(count, window)
    held_out = max(1, count // _HELD_OUT)
    return Windows(cut[:-held_out], cut[-held_out:])


def distil(
    stages: Sequence[Student],
    teacher: Student,
    trained: Sequence[nn.Parameter],
    windows: Tensor,
    settings: DistillationSettings,
    on_step: OnStep = lambda step, steps, loss: None,
) -> int:
    """Trains parameters in place such that students' vocabulary distributions become the teacher's, and
    returns the number of steps: AdamW on
    the Kullback-Leibler divergence, with a rate that falls to zero along half a cosine. Each epoch goes
    through the stages in order. With `max_steps` all stages of all epochs have equal shares of these, one
    more or less, so that none is left out as long as there are enough. Raises LossNotFinite."""
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=0.0)
    shares = _shares(settings, len(stages), steps_per_epoch(len(windows), settings.batch_size))
    steps = sum(shares)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    done = 0
    for epoch in range(settings.epochs):
        for number, student in enumerate(stages):
            batches = epochs(len(windows), settings.batch_size, 1, settings.seed + epoch)
            for batch in islice(batches, shares[epoch * len(stages) + number]):
                tokens = windows[list(batch)]
                with torch.no_grad():
                    wanted = teacher(tokens).log_softmax(-1)
                optimizer.zero_grad()
                loss = F.kl_div(
                    student(tokens).log_softmax(-1), wanted, reduction="batchmean", log_target=True
                )
                done, value = done + 1, float(loss.detach())
                if not math.isfinite(value):
                    raise LossNotFinite(f"the loss of step {done} is {value}: try a smaller learning rate")
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                schedule.step()
                on_step(done, steps, value)
    return done


def _shares(settings: DistillationSettings, stages: int, longest: int) -> list[int]:
    """Optimizer steps of each stage of each epoch, at most `longest` each and `max_steps` together."""
    count = settings.epochs * stages
    most = count * longest if settings.max_steps is None else min(settings.max_steps, count * longest)
    return [most * (place + 1) // count - most * place // count for place in range(count)]


@torch.no_grad()
def fidelity(student: Student, teacher: Student, windows: Tensor, batch_size: int = 8) -> Fidelity:
    """Compares a student with its teacher and with the text itself, token by token."""
    sums = torch.zeros(4, dtype=torch.float64)
    for tokens in torch.split(windows, batch_size):
        ours, theirs = student(tokens).log_softmax(-1), teacher(tokens).log_softmax(-1)
        best = ours.argmax(-1)
        following = ours.reshape(*tokens.shape, -1)[:, :-1].flatten(0, 1)
        wanted = tokens[:, 1:].flatten()
        sums[0] += F.cosine_similarity(ours.exp(), theirs.exp(), dim=-1).sum()
        sums[1] += (best == theirs.argmax(-1)).sum()
        sums[2] += (following.argmax(-1) == wanted).sum()
        sums[3] += F.nll_loss(following, wanted, reduction="sum")
    rows, pairs = windows.numel(), windows.shape[0] * (windows.shape[1] - 1)
    similarity, agreement, accuracy, loss = sums.tolist()
    return Fidelity(similarity / rows, agreement / rows, accuracy / pairs, loss / pairs)
