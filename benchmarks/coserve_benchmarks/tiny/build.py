"""Rebuild coserve-tiny from nothing: ``python -m coserve_benchmarks.tiny.build``.

The recipe is the block of constants below. Training runs on the CPU: the rows of a step are shared out among
single-threaded workers that pull small batches from a queue, so a core that is busy with something else slows
its own worker and not the others. The sum of the gradients does not depend on who computed what, except for
the order of floating-point additions.
"""

import argparse
import copy
import json
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM

from coserve.tiny import WEIGHTS
from coserve.tiny.world import KINDS, questions
from coserve_benchmarks.tiny.corpus import EARLY, FINAL, LATE
from coserve_benchmarks.tiny.tokens import (
    MAX_POSITIONS,
    PAD,
    Encoder,
    save_tokenizer,
    special_ids,
    train_tokenizer,
)

SEED: Final = 2026
LAYERS: Final = 6
HIDDEN: Final = 256
FEED_FORWARD: Final = 704
HEADS: Final = 4
KEY_VALUE_HEADS: Final = 2

STEPS: Final = 2600
STEP_TOKENS: Final = 8192
MICRO_TOKENS: Final = 2048
ROW_TOKENS: Final = 256
LONG_ROW_TOKENS: Final = 512  # for a while rows are longer, so that longer conversations work too
LONG_STEPS: Final = range(2400, 2500)  # steps with long rows
LATE_FROM: Final = 1500  # step from which questions about several people come more often
FINAL_FROM: Final = 1900  # step from which each question of the counted kinds is about one person
PEAK_RATE: Final = 2e-3
WARMUP_STEPS: Final = 100
COOL_FROM: Final = 1900  # step from which the rate falls along a cosine
LOWEST_RATE: Final = 1e-4  # where it stops falling
WEIGHT_DECAY: Final = 0.05
BETAS: Final = (0.9, 0.95)
CLIP_NORM: Final = 1.0
CHECKPOINT_EVERY: Final = 100
LOG_EVERY: Final = 10


def learning_rate(step: int) -> float:
    """Warm up, hold, then cool down: holding lets a run be judged before its length is fixed."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    if step < COOL_FROM:
        return PEAK_RATE
    done = (step - COOL_FROM) / (STEPS - COOL_FROM)
    return max(LOWEST_RATE, PEAK_RATE * 0.5 * (1.0 + math.cos(math.pi * done)))


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Plain causal attention: on short bfloat16 rows the fused CPU kernel is about three times slower."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length = query.shape[2]
    hidden = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2) + hidden
    return (torch.softmax(scores, -1) @ value).transpose(1, 2).contiguous(), None


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The untrained model."""
    pad, begin, end = special_ids(tokenizer)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=pad,
        bos_token_id=begin,
        eos_token_id=end,
    )
    return LlamaForCausalLM(config)


def batch_loss(model: nn.Module, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the next-token losses of a batch of rows."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    guesses, targets = logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    losses = nn.functional.cross_entropy(guesses, targets, reduction="none")
    return (losses * weights[:, 1:].flatten()).sum()


Progress = tuple[int, list[dict[str, float]], float]  # step, loss curve, seconds spent


class Workers:
    """Replicas that share the parameters of one model but own their gradients, one for each core."""

    def __init__(self, model: LlamaForCausalLM, count: int) -> None:
        self.parameters = list(model.parameters())
        self.replicas: list[LlamaForCausalLM] = []
        for _ in range(count):
            replica = copy.deepcopy(model)
            for mine, shared in zip(replica.parameters(), self.parameters, strict=True):
                mine.data = shared.data
            self.replicas.append(replica)
        self._free = list(self.replicas)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(count)

    def _one(self, batch: tuple[Tensor, Tensor, float]) -> float:
        ids, weights, total = batch
        with self._lock:
            replica = self._free.pop()
        loss = batch_loss(replica, ids, weights) / total
        torch.autograd.backward(loss)
        with self._lock:
            self._free.append(replica)
        return float(loss.detach())

    def gradients(self, ids: Tensor, weights: Tensor) -> float:
        """Put the gradient of the mean loss of all rows on the parameters, and return that loss."""
        rows = MICRO_TOKENS // ids.shape[1]
        total = float(weights[:, 1:].sum())
        pairs = zip(torch.split(ids, rows), torch.split(weights, rows), strict=True)
        batches = [(i, w, total) for i, w in pairs]
        loss = sum(self._pool.map(self._one, batches))
        for at, parameter in enumerate(self.parameters):
            found = [p.grad for p in (list(r.parameters())[at] for r in self.replicas) if p.grad is not None]
            parameter.grad = torch.stack(found).sum(0) if len(found) > 1 else found[0].clone()
        for replica in self.replicas:
            replica.zero_grad()
        return loss


def step_rows(encoder: Encoder, step: int) -> tuple[Tensor, Tensor]:
    """The rows of one step, from the seed and the step alone, so that a resumed run sees the same text."""
    length = LONG_ROW_TOKENS if step in LONG_STEPS else ROW_TOKENS
    course = EARLY if step < LATE_FROM else LATE if step < FINAL_FROM else FINAL
    rows = list(islice(encoder.rows(f"{SEED}/{step}", length, course), STEP_TOKENS // length))
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([weights for _, weights in rows])


def held_out_rows(encoder: Encoder) -> Iterator[tuple[Tensor, Tensor]]:
    """A few held-out questions of every kind, padded, weighing only the answer."""
    for kind in KINDS:
        docs = [encoder.encode(list(q.messages)) for q in questions(kind, "held_out", 8, SEED)]
        longest = max(len(ids) for ids, _ in docs)
        pad = encoder.id[PAD]
        ids = torch.tensor([i + [pad] * (longest - len(i)) for i, _ in docs])
        weights = torch.tensor([[float(x == 1.0) for x in w] + [0.0] * (longest - len(w)) for _, w in docs])
        yield ids, weights


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Mean loss of the answers to held-out questions."""
    total = sum(float(batch_loss(model, ids, weights)) for ids, weights in batches)
    return total / sum(float(weights[:, 1:].sum()) for _, weights in batches)


def save_checkpoint(
    file: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Weights, optimizer state and progress in one file, which replaces the one before in one move."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    fresh = file.with_suffix(".new")
    save_file(tensors, fresh, metadata={"progress": json.dumps(progress)})
    os.replace(fresh, file)


def load_checkpoint(
    file: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer | None = None
) -> Progress:
    """Fills the model, and the optimizer if there is one; returns the progress that was saved with them."""
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        step, log, seconds = json.loads(stored.metadata()["progress"])
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[f"model.{name}"])
    if optimizer is not None:
        state: dict[int, dict[str, Tensor]] = {}
        for key in (key for key in tensors if key.startswith("optimizer.")):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = tensors[key]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return step, log, seconds


def train(work: Path, workers: int) -> None:
    """Train, or go on from the last checkpoint in ``work``."""
    AttentionInterface.register("tiny-causal", causal_attention)
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer_file, checkpoint = work / "tokenizer.json", work / "checkpoint.safetensors"
    if not tokenizer_file.exists():
        train_tokenizer(SEED).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    encoder = Encoder(tokenizer)
    model = new_model(tokenizer)
    model.set_attn_implementation("tiny-causal")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    first, log, spent = 0, list[dict[str, float]](), 0.0
    if checkpoint.exists():
        first, log, spent = load_checkpoint(checkpoint, model, optimizer)
    team, validation = Workers(model, workers), list(held_out_rows(encoder))
    start, mean = time.monotonic() - spent, 0.0
    for step in range(first, STEPS):
        ids, weights = step_rows(encoder, step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        mean += team.gradients(ids, weights) / LOG_EVERY
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        done = step + 1
        if done % LOG_EVERY == 0:
            spent = time.monotonic() - start
            entry = {"step": done, "tokens": done * STEP_TOKENS, "loss": round(mean, 4)}
            entry["seconds"], mean = round(spent), 0.0
            if done % CHECKPOINT_EVERY == 0 or done == STEPS:
                entry["held_out_loss"] = round(held_out_loss(model, validation), 4)
            log.append(entry)
            print(json.dumps(entry), flush=True)
        if done % CHECKPOINT_EVERY == 0 or done == STEPS:
            save_checkpoint(checkpoint, model, optimizer, (done, log, spent))


def export(work: Path, folder: Path) -> None:
    """Write the files of the last checkpoint to ``folder``, swapping the whole folder in at once."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    pad, begin, end = special_ids(tokenizer)
    model = new_model(tokenizer)
    _, log, _ = load_checkpoint(work / "checkpoint.safetensors", model)
    model.bfloat16()
    greedy = {"do_sample": False, "max_new_tokens": 128}
    ends = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    model.generation_config = GenerationConfig.from_dict(greedy | ends)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".weights-"))
    fresh.chmod(0o755)
    model.save_pretrained(fresh)
    save_tokenizer(tokenizer, fresh)
    parameters = sum(p.numel() for p in model.parameters())
    report = {"parameters": parameters, "planned_steps": STEPS, "seed": SEED, "log": log}
    (fresh / "loss.json").write_text(json.dumps(report, indent=1) + "\n")
    for file in fresh.iterdir():
        file.chmod(0o644)
    if folder.exists():
        old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".old-")) / "weights"
        folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old.parent)
    else:
        fresh.rename(folder)


def main() -> None:
    """Train (or resume) and export."""
    parser = argparse.ArgumentParser(description="Rebuild coserve-tiny.")
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="folder of checkpoints")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="folder of the finished weights")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="one for each core to use")
    parser.add_argument("--export-only", action="store_true", help="export the last checkpoint, do not train")
    options = parser.parse_args()
    if not options.export_only:
        train(options.work, options.workers)
    export(options.work, options.out)


if __name__ == "__main__":
    main()
