"""Fine-tuning in the engine against PEFT with torch.optim.AdamW: same data, order and first weights."""

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import get_scheduler

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, SavePolicy, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.engine.finetuning import FineTuning
from coserve.train.example import Example, epochs
from models import VOCABULARY, Exact, logits_of, lora_parameters, make_eager, prompts, tiny, with_lora
from rounding import allowed, both_ways, error

STEPS = 50
Matrices = dict[str, tuple[Tensor, Tensor]]


def make_examples(seed: str, count: int, vocabulary: int = VOCABULARY) -> list[Example]:
    """Mixed lengths; a fifth of the rows predicts nothing. A few transitions are likelier, so there is
    something to learn."""
    draws = random.Random(seed)
    made = []
    for _ in range(count):
        tokens = [draws.randrange(1, vocabulary)]
        for _ in range(draws.randint(4, 40)):
            usual = tokens[-1] * 7 % (vocabulary - 1) + 1
            tokens.append(usual if draws.random() < 0.6 else draws.randrange(1, vocabulary))
        labels = [t if draws.random() < 0.8 else -100 for t in tokens[1:]]
        labels[-1] = tokens[-1]
        made.append(Example(tuple(tokens), (*labels, -100)))
    return made


def make_engine(name: str, dtype: torch.dtype, **scheduler: object) -> Engine:
    """Small windows and quanta, so that micro-batches are cut and put down often."""
    cuts = {"max_training_rows": 24, "min_training_rows": 3, "max_prefill_rows": 16, "min_prefill_rows": 4}
    config = EngineConfig(calibrate=False, cache_tokens=2048, page_size=8, scheduler={**cuts, **scheduler})
    return Engine(tiny(name, dtype), config)


def matrices(adapter: AdapterVersion) -> Matrices:
    return {path: (b.a.clone(), b.b.clone()) for path, b in adapter.bypasses.outputs.items()}


def by_peft(
    name: str,
    dtype: torch.dtype,
    start: Matrices,
    lora: LoRAConfig,
    config: TrainingConfig,
    data: list[Example],
) -> Matrices:
    """The same training as anyone would write it with PEFT: one example at a time, whole sequences."""
    model = tiny(name, dtype)
    model.set_attn_implementation("eager")
    fields = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": list(start),
    }
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields)).eval()
    found = lora_parameters(adapted)
    assert found.keys() == start.keys()
    with torch.no_grad():
        for path, (a, b) in found.items():
            a.copy_(start[path][0])
            b.copy_(start[path][1])
    flat = [p for pair in found.values() for p in pair]
    optimizer = torch.optim.AdamW(
        flat,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )
    steps = config.max_steps
    assert steps is not None
    warmup = -(-round(config.warmup_ratio * steps * 100) // 100)
    rates = get_scheduler(config.schedule, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    batches = list(epochs(len(data), config.batch_size, config.epochs, config.seed))[:steps]
    assert len(batches) == steps
    for batch in batches:
        count = sum(data[i].label_count for i in batch)
        for example in (data[i] for i in batch):
            logits = adapted(input_ids=torch.tensor([example.tokens]), use_cache=False).logits[0]
            labels = torch.tensor(example.labels)
            (F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / count).backward()
        if config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(flat, config.max_grad_norm)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return {path: (a.detach(), b.detach()) for path, (a, b) in found.items()}


def worst_error(got: Matrices, wanted: Matrices) -> float:
    """The largest difference of a matrix in its norm, relative to the norm."""
    assert got.keys() == wanted.keys()
    return max(
        float((g.double() - w.double()).norm() / w.double().norm())
        for path in wanted
        for g, w in zip(got[path], wanted[path], strict=True)
    )


def run_beside_inference(engine: Engine, jobs: list[FineTuning], draws: random.Random, steps: int) -> None:
    """Steps until the jobs have ended; requests for the base and the adapters in training keep coming."""
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    while any(job.status == "running" for job in jobs):
        if len(engine.completions) < 4:
            (prompt,) = prompts(draws, [draws.randint(1, 40)])
            engine.generate(
                prompt, adapter=draws.choice([None, *(job.adapter for job in jobs)]), sampling=sampling
            )
        engine.step()
    engine.run()
    assert engine.scheduler.stats.fused_steps > steps
    for job in jobs:
        assert job.status == "succeeded" and [u.step for u in job.history] == list(range(1, steps + 1))


JOBS = (
    (
        LoRAConfig(rank=4, alpha=8.0),
        TrainingConfig(
            learning_rate=3e-3, batch_size=4, epochs=7, max_steps=STEPS, weight_decay=0.1, warmup_ratio=0.1,
            max_grad_norm=0.5, rows=64, keep=SavePolicy.EVERYTHING, seed=3,
        ),
    ),
    (
        LoRAConfig(rank=3, alpha=2.0, rslora=True, targets=("q_proj", "v_proj", "down_proj")),
        TrainingConfig(
            learning_rate=1e-2, schedule="cosine", batch_size=2, epochs=4, max_steps=STEPS, warmup_ratio=0.0,
            max_grad_norm=None, rows=256, seed=4, betas=(0.8, 0.95),
        ),
    ),
)  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "dtype", "steps", "tolerance"),
    [
        ("llama", torch.float64, 8, 1e-10),
        ("gemma2", torch.float64, 5, 1e-10),
        ("llama", torch.float32, 10, 1e-4),
        pytest.param("llama", torch.float64, STEPS, 1e-10, marks=pytest.mark.slow),
        pytest.param("gemma2", torch.float64, STEPS, 1e-10, marks=pytest.mark.slow),
        pytest.param("llama", torch.float32, STEPS, 1e-4, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_peft(name: str, dtype: torch.dtype, steps: int, tolerance: float) -> None:
    """Two different jobs at once, beside inference, each against its own run of PEFT.

    The bounds are relative to each matrix's norm: float64 leaves room for rounding that AdamW's division
    by the root of the second moment magnifies, float32 likewise.
    """
    data = [make_examples(f"{name}/{i}", 32) for i in range(2)]
    with Exact() if dtype == torch.float64 else nullcontext():
        engine = make_engine(name, dtype)
        jobs, starts = [], []
        asked = [(lora, replace(training, max_steps=steps)) for lora, training in JOBS]
        for i, (lora, training) in enumerate(asked):
            jobs.append(engine.finetune(data[i], f"tuned-{i}", lora, training))
            starts.append(matrices(engine.adapters.weights(f"tuned-{i}")))
        run_beside_inference(engine, jobs, random.Random(f"beside/{name}"), steps)
        for i, (lora, training) in enumerate(asked):
            wanted = by_peft(name, dtype, starts[i], lora, training, data[i])
            got = matrices(engine.adapters.weights(f"tuned-{i}"))
            assert worst_error(got, wanted) <= tolerance
            assert worst_error(starts[i], wanted) > 0.01, "nothing was learnt, so nothing was shown"
            # It learns: the mean loss of the last ten steps is below that of the first ten.
            losses = [update.loss for update in jobs[i].history]
            assert steps < STEPS or sum(losses[-10:]) < 0.95 * sum(losses[:10])


def all_logprobs(engine: Engine, prompt: list[int], adapter: str | None) -> Tensor:
    """The engine's log-probabilities [rows - 1, vocabulary] after each token but the last."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=20)
    scored = engine.generate(prompt, adapter, sampling).result().prompt_logprobs
    found = torch.full((len(prompt) - 1, 20), float("nan"))
    for row, of_row in enumerate(scored):
        for token, logprob in of_row.top:
            found[row, token] = logprob
    return found


def engine_of(name: str) -> Engine:
    """A vocabulary of 20, so that `prompt_logprobs=20` reports all of it."""
    return Engine(tiny(name, vocab_size=20), EngineConfig(calibrate=False, cache_tokens=512))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_peft_loads_a_saved_adapter_and_gives_what_was_served(name: str, tmp_path: Path) -> None:
    """In float32, but for rounding; the answers without the adapter are far from that."""
    draws = random.Random(f"saved/{name}")
    prompt = [draws.randrange(1, 20) for _ in range(30)]
    engine = engine_of(name)
    training = TrainingConfig(learning_rate=1e-2, batch_size=4, max_steps=6, warmup_ratio=0.0)
    job = engine.finetune(
        make_examples(f"saved/{name}", 24, 20), "mine", LoRAConfig(rank=5, alpha=7.0), training
    )
    job.result().save(tmp_path)
    served = all_logprobs(engine, prompt, "mine")
    base = tiny(name, vocab_size=20)
    make_eager(base)
    adapted = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    theirs, exact = both_ways(adapted, lambda it: logits_of(it, prompt)[:-1].log_softmax(-1))
    assert error(served, exact) <= allowed(theirs, exact)
    assert error(all_logprobs(engine, prompt, None), exact) > 1e-2
    # And so does an engine that reads what the other wrote.
    again = engine_of(name)
    again.adapters.load("mine", tmp_path)
    assert error(all_logprobs(again, prompt, "mine"), exact) <= allowed(theirs, exact)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"r": 1, "lora_alpha": 3}),
        ("llama", {"r": 9, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
        ("llama", {"r": 4, "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}}),
        ("gpt2", {"r": 4, "lora_dropout": 0.3, "target_modules": ["c_attn", "c_proj"]}),
        ("qwen3", {"r": 3, "layers_to_transform": [1], "target_modules": ["v_proj", "gate_proj"]}),
        ("deepseek_v3", {"r": 3, "target_modules": ["kv_b_proj", "q_a_proj"]}),
    ],
)  # fmt: skip
def test_an_adapter_that_peft_saved_serves_peft_s_logits(
    name: str, fields: dict[str, object], tmp_path: Path
) -> None:
    draws = random.Random(f"peft/{name}/{fields}")
    prompt = [draws.randrange(1, 20) for _ in range(25)]
    base = tiny(name, vocab_size=20)
    make_eager(base)
    adapted = with_lora(base, seed=5, **fields)
    adapted.save_pretrained(str(tmp_path))
    engine = engine_of(name)
    engine.adapters.load("theirs", tmp_path)
    theirs, exact = both_ways(adapted, lambda it: logits_of(it, prompt)[:-1].log_softmax(-1))
    assert error(all_logprobs(engine, prompt, "theirs"), exact) <= allowed(theirs, exact)
    assert error(all_logprobs(engine, prompt, None), exact) > 1e-2


def train_with_dropout(dropout: float, beside: bool, keep: SavePolicy, **scheduler: object) -> Matrices:
    engine = make_engine("llama", torch.float64, **scheduler)
    config = TrainingConfig(
        learning_rate=3e-3, batch_size=3, max_steps=STEPS // 10, warmup_ratio=0.0, rows=60, keep=keep
    )
    job = engine.finetune(make_examples("dropout", 30), "mine", LoRAConfig(rank=4, dropout=dropout), config)
    draws = random.Random("dropout/beside")
    while job.status == "running":
        if beside and len(engine.completions) < 3:
            engine.generate(prompts(draws, [20])[0], "mine", SamplingParams(max_tokens=9, ignore_eos=True))
        engine.step()
    job.result()
    return matrices(engine.adapters.weights("mine"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", SavePolicy)
def test_dropout_does_not_depend_on_windows_or_company(keep: SavePolicy) -> None:
    """The same masks whatever the batches look like: float64, 5 steps, 1e-10."""
    with Exact():
        alone = train_with_dropout(0.4, False, SavePolicy.INPUTS, max_training_rows=512, quantum=10.0)
        beside = train_with_dropout(0.4, True, keep, max_training_rows=11)
        assert worst_error(beside, alone) <= 1e-10
        assert worst_error(train_with_dropout(0.0, False, SavePolicy.INPUTS), alone) > 1e-3


def test_training_goes_on_from_an_adapter(tmp_path: Path) -> None:
    """`start_from` begins with the loaded matrices and its configuration: the first loss is PEFT's."""
    adapted = with_lora(tiny("llama"), seed=6, r=3, target_modules=["q_proj", "v_proj"])
    adapted.save_pretrained(str(tmp_path))
    data = make_examples("go-on", 4)
    count = sum(example.label_count for example in data)
    wanted = 0.0
    for example in data:
        logits = logits_of(adapted, example.tokens)
        wanted += float(
            F.cross_entropy(logits, torch.tensor(example.labels), ignore_index=-100, reduction="sum")
        )
    engine = make_engine("llama", torch.float32)
    loaded = engine.adapters.load("first", tmp_path)
    before = matrices(loaded)
    job = engine.finetune(data, "second", training=TrainingConfig(batch_size=4), start_from="first").result()
    assert job.history[0].loss == pytest.approx(wanted / count, rel=1e-5)
    assert engine.adapters.weights("second").parts[0].config == loaded.parts[0].config
    assert worst_error(matrices(engine.adapters.weights("first")), before) == 0.0
