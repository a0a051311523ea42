"""A client or a peer: python -m coserve_benchmarks.split.child.

Reads a `ClientOrder` from the first line of stdin, prints `Ready`, then answers each `RoundOrder` with a
`RoundReport` until stdin ends.
"""

import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from coserve.config import EngineConfig
from coserve.core.events import StepDone
from coserve.engine.engine import Engine
from coserve.memory.malloc import keep_freed_memory, keep_no_freed_memory, return_freed_memory
from coserve.split.attach import attach
from coserve.split.privacy.modes import Noise, Privacy, Shares
from coserve.workload.requests import TimedJob, fixed_prompts, greedy, training_tokens
from coserve_benchmarks.ours import start_job
from coserve_benchmarks.split.orders import ClientOrder, Ready, RoundOrder, RoundReport, Work

_EXAMPLES: Final = 8  # mini-batches before they repeat
_EPOCHS: Final = 100_000  # more than any run takes
_PRIVACY: Final[dict[str, Callable[[ClientOrder], Privacy | None]]] = {
    "": lambda _: None,
    "noise": lambda _: Noise(),
    "shares": lambda order: Shares(order.second),
}
Step = Callable[[], int]  # makes one step and returns its tokens


def main() -> None:
    """Answers orders until stdin ends."""
    order = msgspec.json.decode(sys.stdin.readline(), type=ClientOrder)
    torch.set_num_threads(order.threads)
    (keep_freed_memory if order.keeps_freed else keep_no_freed_memory)()
    torch.manual_seed(order.seed)
    steps = _engine_steps(order) if order.act == "engine" else _script_steps(order)
    first: Work = "train" if order.act == "train" else "decode" if order.act == "decode" else "decode1"
    steps(first)()
    return_freed_memory()
    _say(Ready(torch.multiprocessing.current_process().pid or 0))
    for line in sys.stdin:
        _say(_round(steps, msgspec.json.decode(line, type=RoundOrder)))


def _say(message: Ready | RoundReport) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)


def _round(steps: Callable[[Work], Step], order: RoundOrder) -> RoundReport:
    step, tokens, taken = steps(order.work), 0, list[float]()
    while not taken or sum(taken) < order.seconds:
        began = time.perf_counter()
        tokens += step()
        taken.append(time.perf_counter() - began)
    return RoundReport(tokens, tuple(taken))


def _script_steps(order: ClientOrder) -> Callable[[Work], Step]:
    """Steps of a script with transformers and PEFT."""
    model = _client(order) if order.address else _whole(order)
    lora = LoraConfig(r=order.rank, lora_alpha=2 * order.rank, target_modules=list(order.targets))
    adapted: Any = get_peft_model(model, lora)
    step = _training(adapted, order) if order.act == "train" else _decoding(adapted.eval(), order)
    return lambda work: step


def _whole(order: ClientOrder) -> nn.Module:
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(order.folder, dtype=getattr(torch, order.dtype))
    if not order.maps:
        for parameter in loaded.parameters():
            parameter.data = parameter.data.clone()
    return loaded


def _client(order: ClientOrder) -> nn.Module:
    """A model without its linears, which it never loads."""
    config = AutoConfig.from_pretrained(order.folder)
    config.dtype = getattr(torch, order.dtype)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    attach(model, order.address, privacy=_PRIVACY[order.privacy](order))
    own = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    model.load_state_dict(dict(_read(order, own)), strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model  # type: ignore[no-any-return]


def _read(order: ClientOrder, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    for path in Path(order.folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in names & set(file.keys()):
                yield name, file.get_tensor(name).to(getattr(torch, order.dtype))


def _training(model: Any, order: ClientOrder) -> Step:
    """Optimizer steps of `batch` examples, AdamW."""
    lengths = [order.length] * order.batch * _EXAMPLES
    rows = torch.tensor(training_tokens(lengths, order.vocabulary, order.seed))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    model.train()
    made = count()

    def step() -> int:
        at = next(made) % _EXAMPLES * order.batch
        ids = rows[at : at + order.batch]
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        return ids.numel()

    return step


def _decoding(model: Any, order: ClientOrder) -> Step:
    """Steps of a token for each of `batch` sequences, greedy; after `answer` tokens they begin anew."""
    prompts = torch.tensor(fixed_prompts(order.batch, order.prompt, order.vocabulary, order.seed))
    cache, ids = DynamicCache(), prompts

    @torch.no_grad()
    def step() -> int:
        nonlocal cache, ids
        if cache.get_seq_length() >= order.prompt + order.answer:
            cache, ids = DynamicCache(), prompts
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        return order.batch

    return step


def _engine_steps(order: ClientOrder) -> Callable[[Work], Step]:
    """Steps of coserve's engine; a decode step is a whole answer of each request."""
    base: dict[str, Any] = {"base": order.address} if order.address else {}
    config = EngineConfig(dtype=order.dtype, cache_tokens=4096, prefix_sharing=False, **base)
    engine = Engine(order.folder, config)

    def answers(requests: int) -> Step:
        prompts = fixed_prompts(requests, order.prompt, order.vocabulary, order.seed)

        def step() -> int:
            asked = [engine.generate(prompt, sampling=greedy(order.answer)) for prompt in prompts]
            return sum(len(one.result().tokens) for one in asked)

        return step

    def training() -> Step:
        rows = training_tokens([order.length] * order.batch * _EXAMPLES, order.vocabulary, order.seed)
        job = TimedJob(0.0, "bench", tuple(rows), order.batch, order.rank, order.targets, epochs=_EPOCHS)
        start_job(engine, job)

        def step() -> int:
            while not any(isinstance(event, StepDone) for event in engine.step()):
                pass
            return order.batch * order.length

        return step

    made: dict[Work, Callable[[], Step]] = {
        "decode1": lambda: answers(1),
        "decode16": lambda: answers(16),
        "train": training,
    }
    kept: dict[Work, Step] = {}

    def steps(work: Work) -> Step:
        if work not in kept:
            kept[work] = made[work]()
        return kept[work]

    return steps


if __name__ == "__main__":
    main()
