"""`coserve bench models --hybrid`: a model with recurrent layers beside attention, against a dense one of as
many bytes, PEFT, and itself without what prompts share."""

import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.core.checkout import measured_code
from coserve.core.events import TokenEvent
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import fixed_prompts, greedy, training_tokens
from coserve_benchmarks.machine import measure_machine, measure_state
from coserve_benchmarks.ours import examples, seconds_of_steps, warm_training
from coserve_benchmarks.peers import TorchTraining
from coserve_benchmarks.results import Bar, Results
from coserve_benchmarks.timing import alternate, speedup

BARS: Final[Mapping[str, Bar | None]] = {
    "hybrid.decode": Bar(1.2, at_most=True),
    "hybrid.training_vs_peft": Bar(1.2),
    "hybrid.shared_prompt": Bar(0.2, at_most=True),
}
_RANK: Final = 8
_ENDLESS: Final = 10**6


@dataclass(frozen=True, slots=True)
class HybridSizes:
    """Sizes of the models, and of the work of a round."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    state_heads: int = 6  # of recurrent layers; keys and values of 64
    intermediate: int = 2560
    vocabulary: int = 8192
    rows: int = 16  # sequences that decode
    prompt: int = 512
    steps: int = 16
    shared: int = 2000
    batch: tuple[int, int] = (8, 256)  # examples of a training step, and their length
    rounds: int = 7


QUICK: Final = HybridSizes(64, 4, 4, 2, 128, 256, 2, 20, 4, 80, (2, 16), 2)


def hybrid_model(sizes: HybridSizes) -> PreTrainedModel:
    """Three gated delta networks to each layer of attention, as Qwen 3.5."""
    return _built(
        "qwen3_5_text",
        sizes,
        intermediate_size=sizes.intermediate,
        linear_num_key_heads=sizes.state_heads,
        linear_num_value_heads=sizes.state_heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )


def dense_model(sizes: HybridSizes, nbytes: int) -> PreTrainedModel:
    """Layers of attention alone (Qwen 3), whose feed-forward layers make it `nbytes` large."""
    narrow = _nbytes(_built("qwen3", sizes, intermediate_size=64))
    column = 3 * 2 * sizes.hidden * sizes.layers  # bytes of one more neuron in each layer
    return _built("qwen3", sizes, intermediate_size=64 + max(round((nbytes - narrow) / column / 32), 0) * 32)


def run_hybrid(quick: bool = False, json_path: str | Path | None = None) -> dict[str, Any]:
    """Measures the keys of `BARS` and returns what `--json` writes."""
    sizes, machine = QUICK if quick else HybridSizes(), measure_machine(quick)
    header: dict[str, Any] = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "code": measured_code(),
        "date": machine.date,
        "machine": machine.as_dict(),
    }
    results = Results(header, json_path, BARS)
    _decode(sizes, results, machine.threads)
    _training(sizes, results, machine.threads)
    _shared_prompt(sizes, results, machine.threads)
    machine.states.append(measure_state(quick))
    header.update(ended=machine.states[-1].date, machine=machine.as_dict())
    results.save()
    return results.as_dict()


def print_hybrid(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Each key beside its bar, and the figures."""
    console = Console() if console is None else console
    for key, bar in results["bars"].items():
        low, high = results["spreads"][key]
        told = f"{key} {results[key]:.3f} ({low:.3f} to {high:.3f}), bar {bar}: {results['notes'][key]}"
        console.print(told, highlight=False)
    for name, figure in results["figures"].items():
        console.print(f"{name} {figure['value']:.4g} {figure['unit']}", highlight=False)


def _decode(sizes: HybridSizes, results: Results, threads: int) -> None:
    """Seconds of a decode step over those of the dense model."""
    hybrid = hybrid_model(sizes)
    nbytes = _nbytes(hybrid)
    dense = dense_model(sizes, nbytes)
    engines = {"hybrid": _engine(hybrid, sizes), "dense": _engine(dense, sizes)}
    found = alternate(
        {name: partial(_step_seconds, engine, sizes) for name, engine in engines.items()},
        sizes.rounds,
        threads,
    )
    for name, timing in found.items():
        results.figure(f"hybrid.step.{name}", timing.median, "s", (timing.low, timing.high))
    told = f"{nbytes / 1e6:.0f} and {_nbytes(dense) / 1e6:.0f} MB of weights in bfloat16"
    note = f"{sizes.rows} rows behind prompts of {sizes.prompt}, {told}, {sizes.rounds} rounds"
    results.ratio("hybrid.decode", speedup(found["dense"], found["hybrid"]), note)


def _step_seconds(engine: Engine, sizes: HybridSizes) -> float:
    """Seconds of a step in which every sequence gets a token."""
    prompts = fixed_prompts(sizes.rows, sizes.prompt, sizes.vocabulary)
    handles = [engine.generate(prompt, sampling=greedy(4 * sizes.steps)) for prompt in prompts]
    while not all(handle.tokens for handle in handles):
        engine.step()
    started = time.perf_counter()
    for _ in range(sizes.steps):
        events = engine.step()
        assert sum(isinstance(event, TokenEvent) for event in events) == sizes.rows, "everybody decodes"
    seconds = (time.perf_counter() - started) / sizes.steps
    for handle in handles:
        handle.cancel()
    engine.run()
    return seconds


def _training(sizes: HybridSizes, results: Results, threads: int) -> None:
    """Seconds of PEFT's optimizer step over those of ours, both with adapters in the base's type. Ours has
    all rows in one window and keeps all products, as PEFT does where memory allows (`tune` tries less)."""
    from peft import LoraConfig, get_peft_model

    count, length = sizes.batch
    base: Any = hybrid_model(sizes)
    names = sorted({path.rpartition(".")[2] for path, m in base.named_modules() if _is_linear(path, m)})
    lora = LoraConfig(r=_RANK, lora_alpha=16, target_modules=names)
    tokens = training_tokens([length] * count, sizes.vocabulary)
    peer = TorchTraining(
        base, get_peft_model(base, lora, autocast_adapter_dtype=False), tokens, sizes.vocabulary
    )
    engine = _engine(hybrid_model(sizes), sizes, scheduler={"training_window": count * length})
    settings = TrainingConfig(
        schedule="constant", warmup_ratio=0.0, batch_size=count, epochs=_ENDLESS, max_steps=_ENDLESS,
        keep=SavePolicy.EVERYTHING,
    )  # fmt: skip
    job = engine.finetune(examples(tokens), "own", LoRAConfig(rank=_RANK, targets=tuple(names)), settings)
    warm_training(engine, [job])
    peer.tune(False, threads)
    work = {"ours": lambda: seconds_of_steps(engine), "peft": lambda: peer.step(False)}
    found = alternate(work, sizes.rounds, threads)
    for name, timing in found.items():
        spread = (count * length / timing.high, count * length / timing.low)
        results.figure(f"hybrid.training.{name}", count * length / timing.median, "tokens/s", spread)
    best = peer.settings(False).describe()
    what = f"{count} examples of {length} tokens in one window, rank {_RANK} on {', '.join(names)}"
    note = f"{what}; PEFT at its best: {best}"
    results.ratio("hybrid.training_vs_peft", speedup(found["ours"], found["peft"]), note)


def _shared_prompt(sizes: HybridSizes, results: Results, threads: int) -> None:
    """Seconds to the first token of a prompt that begins as an earlier one, over those where all of it is
    computed."""
    sharing, computing = (_engine(hybrid_model(sizes), sizes, prefix_sharing=on) for on in (True, False))
    rounds = iter(range(_ENDLESS))
    beginning = fixed_prompts(1, sizes.shared, sizes.vocabulary)[0]
    sharing.generate(beginning, scope="bench", sampling=greedy(1)).result()

    def seconds(engine: Engine) -> float:
        own = fixed_prompts(1, 16, sizes.vocabulary, 1 + next(rounds))[0]
        started = time.perf_counter()
        engine.generate([*beginning, *own], scope="bench", sampling=greedy(1)).result()
        return time.perf_counter() - started

    found = alternate(
        {"shared": lambda: seconds(sharing), "computed": lambda: seconds(computing)}, sizes.rounds, threads
    )
    for name, timing in found.items():
        results.figure(f"hybrid.first_token.{name}", timing.median, "s", (timing.low, timing.high))
    note = f"{sizes.shared} tokens of {sizes.shared + 16}, {sizes.rounds} rounds"
    results.ratio("hybrid.shared_prompt", speedup(found["computed"], found["shared"]), note)


def _engine(
    model: PreTrainedModel, sizes: HybridSizes, prefix_sharing: bool = False, **settings: Any
) -> Engine:
    tokens = sizes.rows * (sizes.prompt + 8 * sizes.steps) + 2 * sizes.shared
    config = EngineConfig(
        calibrate=False,
        cache_tokens=tokens,
        max_running=sizes.rows,
        prefix_sharing=prefix_sharing,
        **settings,
    )
    return Engine(model, config)


def _built(name: str, sizes: HybridSizes, **fields: Any) -> PreTrainedModel:
    common = {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": max(sizes.heads // 3, 1),
        "head_dim": sizes.hidden // sizes.heads,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **common, **fields))
    return model.to(torch.bfloat16).eval()


def _nbytes(model: PreTrainedModel) -> int:
    return sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())


def _is_linear(path: str, module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) and "lm_head" not in path
