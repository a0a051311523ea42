"""A base over several ranks answers as transformers and PEFT do, and trains what one rank trains."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from test_training import make_examples

from bases import check_scored
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.ln_tuning import LNTuningConfig
from coserve.adapters.methods.p_tuning import PTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.adapters.settings import settings_of
from coserve.core.job_status import JobStatus
from coserve.core.training import ACCURACY
from coserve.engine.completion import Completion
from coserve.engine.finetuning import FineTuning
from coserve.errors import ConfigError, UnsupportedModel
from coserve.executors.remote import RemoteExecutor
from coserve.train.checkpoint import newest_checkpoint, read_checkpoint, write_checkpoint
from coserve.train.example import Example
from coserve.train.grading.graders import PythonGrader
from coserve.train.labelled import TokenAnswer
from coserve.train.objectives import DPO, KTO, ORPO, Distillation, Objective, Reinforcement
from coserve.train.pairs import TokenPair
from coserve.train.prompts import TokenPrompt
from forked_executors import fork_executors
from models import ARCHITECTURES, letter_tokenizer, logits_of, prompts, save, tiny, with_lora
from recurrent import SHAPES

pytestmark = pytest.mark.local
CUTS = {"max_training_rows": 24, "min_training_rows": 3, "max_prefill_rows": 16, "min_prefill_rows": 4}
TRAINING = TrainingConfig(
    learning_rate=1e-3, batch_size=3, epochs=9, max_steps=3, rows=64, max_grad_norm=0.05
)
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=2)
# Four ranks have a head each, and a quarter of the vocabulary, whose head is the embedding.
TIED: dict[str, Any] = {"num_key_value_heads": 4, "tie_word_embeddings": True}
# Beside what is cut by vocabulary too.
FURTHER = {
    "oft": {"block_size": 4},
    "road": {"group_size": 16},
    "vblora": {"num_vectors": 8, "vector_length": 16, "dropout": 0.2},
    "shira": {"rank": 1},
}
ENDS = "embed_tokens", "q_proj", "o_proj", "up_proj", "down_proj", "lm_head"
# Jobs that train together.
FEW: Mapping[str, Sequence[object]] = {
    "lora": [LoRAConfig(rank=4, dropout=0.1)],
    "dora": [LoRAConfig(rank=2, dora=True)],
    "ia3": [IA3Config()],
    "prefix": [PrefixTuningConfig(3, projection=True, hidden=8)],
    "bottleneck": [BottleneckConfig(width=6)],
    "norms": [LNTuningConfig()],
}
ALL: Mapping[str, Sequence[object]] = {
    **FEW,
    "two parts": [PrefixTuningConfig(2), LoRAConfig(rank=3, lora_bias=True, dropout=0.2)],
    "biases": [BitFitConfig("all")],
    "prompt": [PromptTuningConfig(3, start="SAMPLE_VOCAB")],
    "encoded prompt": [PTuningConfig(3)],
    "whole modules": [LoRAConfig(rank=2, bias="all", modules_to_save=("lm_head", "layers.1.mlp.down_proj"))],
    "tokens": [LoRAConfig(rank=1, tokens=(3, 60))],
    **{method: settings_of([{"type": method, **own}]) for method, own in FURTHER.items()},
}
IN_STAGES = {own: parts for own, parts in ALL.items() if own not in ("vblora", "tokens")}
AT_ENDS: Mapping[str, Sequence[object]] = {
    "lora": [LoRAConfig(rank=4, targets=ENDS, bias="all")],
    "norms": [LNTuningConfig()],
}
FOUR: Mapping[str, Sequence[object]] = {"lora": [LoRAConfig(rank=4)]}
CASES = [
    pytest.param("llama", 2, torch.float64, {}, ALL, id="llama in float64"),
    pytest.param("llama", 4, torch.float32, TIED, FOUR, id="llama on four ranks"),
    pytest.param("llama", 4, torch.float32, TIED, FEW, id="llama on four ranks", marks=pytest.mark.slow),
    pytest.param("gpt2", 2, torch.float32, {}, FEW, id="gpt2"),
    pytest.param("mixtral", 2, torch.float32, {}, FEW, id="mixtral"),
    pytest.param("gemma2", 2, torch.float32, {}, FEW, id="gemma2"),
    pytest.param("qwen3", 2, torch.float32, {"attention_bias": True}, AT_ENDS, id="qwen3 with biases"),
]


# Rows of 128 and 256 inputs, of which two ranks have whole blocks of four bits; a tied head's are in eight.
BLOCKS: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@contextmanager
def engine_of(folder: Path, ranks: int, **more: Any) -> Iterator[Engine]:
    settings: dict[str, Any] = {"cache_tokens": 1024, "page_size": 8, "scheduler": CUTS, **more}
    engine = Engine(folder, EngineConfig(calibrate=False, tensor_parallel=ranks, **settings))
    try:
        yield engine
    finally:
        if isinstance(engine.executor, RemoteExecutor):
            engine.executor.close()


def ask(engine: Engine, questions: list[list[int]], adapter: str | None = None) -> list[Completion]:
    return [engine.generate(question, adapter, SAMPLING) for question in questions]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "ranks", "dtype", "changes", "methods"), CASES)
def test_ranks_compute_what_one_does(
    name: str, ranks: int, dtype: torch.dtype, changes: dict[str, Any],
    methods: Mapping[str, Sequence[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Answers with and without adapters, beside training, in windows and slices that are paused."""
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    fork_executors(monkeypatch)
    folder = save(tiny(name, dtype, **changes), tmp_path / "model")
    questions = prompts(random.Random(name), [9, 3, 21])
    peft = with_lora(tiny(name, dtype, **changes), seed=1)
    peft.save_pretrained(str(tmp_path / "peft"))
    data, histories, tokens, adapters = make_examples(name, 9), {}, {}, {}
    for count in (1, ranks):
        with engine_of(folder, count) as engine:
            told = [engine.base.fingerprint, engine.executor.spec.cache_nbytes * count]
            engine.adapters.load("peft", tmp_path / "peft")
            mine = {own: engine.finetune(data, own, parts, TRAINING) for own, parts in methods.items()}
            answers = [*ask(engine, questions), *ask(engine, questions, "peft")]
            engine.run()
            own = [answer for job in mine for answer in ask(engine, questions[:1], job)]
            engine.run()
            histories[count] = {own: job.history for own, job in mine.items()}
            tokens[count] = told, [answer.tokens for answer in (*answers, *own)]
            adapters[count] = {own: engine.adapters.weights(own).parameters() for own in mine}
            for job in mine:
                engine.adapters.save(job, tmp_path / f"{job}-{count}")
        for model, answered in ((tiny(name, dtype, **changes), answers[:3]), (peft, answers[3:])):
            for question, answer in zip(questions, answered, strict=True):
                with torch.no_grad():
                    logits = logits_of(model, [*question, *answer.tokens[:-1]])
                check_scored(logits, question, answer, 1e-5 * float(logits.abs().max()))
    for found in zip(*tokens.values(), strict=True):  # the fingerprint, bytes of all ranks' pages, tokens
        assert found[0] == found[1]
    with engine_of(folder, 1) as engine:
        saved = {own: engine.adapters.load(own, tmp_path / f"{own}-{ranks}").parameters() for own in methods}
    for job in methods:
        one, several = histories[1][job], histories[ranks][job]
        assert len(one) == len(several) == TRAINING.max_steps
        for before, after in zip(one, several, strict=True):
            assert before.grad_norm > 0 and before.labels == after.labels
            assert after.loss == pytest.approx(before.loss, rel=tolerance, abs=0), job
            assert after.grad_norm == pytest.approx(before.grad_norm, rel=tolerance, abs=0), job
            assert after.metrics == before.metrics and before.metrics.keys() == {ACCURACY}
        assert adapters[1][job].keys() == adapters[ranks][job].keys()  # a file has no encoders
        for path, weight in adapters[1][job].items():
            for other in (adapters[ranks][job][path], saved[job].get(path, weight)):
                torch.testing.assert_close(other, weight, rtol=0, atol=tolerance, msg=f"{job}: {path}")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_deterministic_mode(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits alone, and beside traffic in engines of which one is killed."""
    fork_executors(monkeypatch)
    folder = save(tiny("llama", num_hidden_layers=2, num_key_value_heads=4), tmp_path / "model")
    questions, data = prompts(random.Random(ranks), [3, 21]), make_examples("bits", 9)
    settings = {"deterministic": True, "scheduler": {**CUTS, "training_window": 11}}
    parts = [LoRAConfig(rank=3, dora=True, dropout=0.1), BottleneckConfig(width=5)]
    with engine_of(folder, ranks, **settings) as engine:
        job = engine.finetune(data, "mine", parts, TRAINING).result()
        alone = [engine.generate(question, "mine", SAMPLING).result() for question in questions]
        weights = engine.adapters.weights("mine").parameters()
    with engine_of(folder, ranks, **settings) as engine:
        begun = engine.finetune(data, "mine", parts, TRAINING)
        ask(engine, questions)
        while len(begun.history) < 2:
            engine.step()
        state = begun.pause()
        assert isinstance(engine.executor, RemoteExecutor)
        engine.executor.workers[-1].process.kill()
    with engine_of(folder, ranks, **settings) as engine:
        resumed = engine.finetune(data, "mine", parts, TRAINING, resume=state)
        ask(engine, questions)
        engine.run()
        together = ask(engine, questions, "mine")
        engine.run()
        found = engine.adapters.weights("mine").parameters()
    assert [one.loss for one in resumed.history] == [one.loss for one in job.history[2:]]
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.prompt_logprobs == other.prompt_logprobs


def test_the_deterministic_mode_needs_widths_whose_rows_are_aligned_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has 50 inputs of each down projection."""
    x, a = torch.randn(16, 50), torch.randn(3, 50)
    if torch.equal(x.roll(1, 0) @ a.t(), (x @ a.t()).roll(1, 0)):
        pytest.skip("this machine's products of 50 numbers do not depend on a row's place")
    fork_executors(monkeypatch)
    folder = save(tiny("llama", intermediate_size=100), tmp_path / "model")
    with (
        pytest.raises(UnsupportedModel, match="an adapter's product of 50 inputs depend on a row's place"),
        engine_of(folder, 2, deterministic=True),
    ):
        pass


def compare(folder: Path, grid: tuple[int, int], *parts: object, near: float = 1e-5, **settings: Any) -> None:
    """Answers of the base and of a trained adapter, and its training: of one rank, and of so many in so many
    stages."""
    questions, found = prompts(random.Random(folder.name), [9, 3, 21]), []
    room = settings.pop("base_memory", None)  # of each of several ranks
    for ranks, stages in ((1, 1), grid):
        more = {} if room is None or (ranks, stages) == (1, 1) else {"base_memory": room}
        with engine_of(folder, ranks, pipeline_parallel=stages, **settings, **more) as engine:
            assert bool(more) == bool(engine.streaming and engine.streaming.plan.read_nbytes)
            job = engine.finetune(make_examples("ranks", 9), "mine", parts, TRAINING)
            answers = ask(engine, questions)
            engine.run()
            answers += ask(engine, questions, "mine")
            engine.run()
            numbers = [[x.chosen for x in (*answer.prompt_logprobs, *answer.logprobs)] for answer in answers]
            losses = [(step.loss, step.grad_norm) for step in job.history]
            found.append((engine.base.fingerprint, [answer.tokens for answer in answers], numbers, losses))
    (*same, numbers, losses), (*others, close, trained) = found
    assert same == others
    exact = numbers[: len(questions)] + losses[:1]  # the base, and the first gradients
    for before, after in zip(exact, close[: len(questions)] + trained[:1], strict=True):
        assert list(after) == pytest.approx(list(before), rel=1e-5, abs=1e-5)
    for before, after in zip([*numbers, *losses], [*close, *trained], strict=True):
        assert list(after) == pytest.approx(list(before), rel=near, abs=near)


Parts = Mapping[str, Sequence[object]]


def trained(engine: Engine, methods: Parts, steps: int, kept: Path) -> dict[str, Any]:
    """Jobs that train together, from checkpoints in `kept` where there are some: checkpoints behind so many
    steps, or at the end their weights and steps."""
    data, jobs = make_examples("resumed", 9), dict[str, FineTuning]()
    for own, parts in methods.items():
        newest = newest_checkpoint(kept / own)
        resume = newest and read_checkpoint(newest.path, own, engine.base, torch.float64)
        jobs[own] = engine.finetune(data, own, parts, TRAINING, resume=resume)
    if not steps:
        engine.run()
        assert all(job.status is JobStatus.SUCCEEDED for job in jobs.values())
        return {own: (engine.adapters.weights(own).parameters(), job.history) for own, job in jobs.items()}
    found: dict[str, Any] = {}
    while len(found) < len(jobs):
        engine.step()
        ripe = [own for own, job in jobs.items() if len(job.history) >= steps and own not in found]
        found |= {own: write_checkpoint(kept / own, jobs[own].pause()) for own in ripe}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "methods"),
    [
        ((2, 1), (1, 2), {own: FEW[own] for own in ("dora", "prefix", "norms")}),
        ((1, 1), (2, 1), ALL),
        ((2, 1), (1, 1), ALL),
        ((2, 2), (1, 3), IN_STAGES),
        ((1, 3), (2, 1), IN_STAGES),
    ],
)
def test_jobs_go_on_with_other_ranks(
    first: tuple[int, int],
    then: tuple[int, int],
    methods: Parts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights and optimizer state of every method are those of one rank, wherever they are resumed: with so
    many ranks in so many stages."""
    fork_executors(monkeypatch)
    folder = save(tiny("llama", torch.float64), tmp_path / "model")
    with engine_of(folder, 1) as engine:
        wanted = trained(engine, methods, 0, tmp_path)
    with engine_of(folder, first[0], pipeline_parallel=first[1]) as engine:
        trained(engine, methods, 1, tmp_path)
    with engine_of(folder, then[0], pipeline_parallel=then[1]) as engine:
        found = trained(engine, methods, 0, tmp_path)
    assert any(history for _, history in found.values()), "some have steps left; others end meanwhile"
    for job, (weights, history) in wanted.items():
        others, resumed = found[job]
        assert len(resumed) < len(history)
        for one, other in zip(history[len(history) - len(resumed) :], resumed, strict=True):
            assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-10, abs=0), job
        assert weights.keys() == others.keys()
        for path, weight in weights.items():
            torch.testing.assert_close(others[path], weight, rtol=0, atol=1e-10, msg=f"{job}: {path}")


LATENT: dict[str, Any] = {**ARCHITECTURES["deepseek_v3"], "first_k_dense_replace": 1}
LATENT |= {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "n_shared_experts": 1}
LORA, DORA = LoRAConfig(rank=3, dropout=0.1), LoRAConfig(rank=3, dora=True)
PREFIX, _LLAMA = PrefixTuningConfig(2), ARCHITECTURES["llama"]
BIASES, NORMS, IA3 = BitFitConfig("all"), LNTuningConfig(), IA3Config(targets=("in_proj", "out_proj"))
(OFT,) = settings_of([{"type": "oft", "block_size": 4, "targets": ["in_proj", "out_proj"]}])
EXPERTS = {**SHAPES["granitemoehybrid"], "num_local_experts": 4, "num_experts_per_tok": 2}
# Recurrent layers of which four ranks have heads; two of them share each group of B and C.
FOUR_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_key_value_heads": 4}
DELTA_ON_FOUR = {**SHAPES["qwen3_5_text"], **FOUR_HEADS}
GROUPS_ON_FOUR = {**SHAPES["mamba2"], "num_heads": 8, "head_dim": 12, "n_groups": 2}
WHOLE_GROUPS = {**SHAPES["nemotron_h"], "n_groups": 2, "mamba_proj_bias": True, "use_bias": True}
LORA_ON_HEAD = LoRAConfig(rank=3, targets=ENDS)
STREAMED, STREAMED_STATES = {"base_memory": "184KiB"}, {"base_memory": "200KiB", "quantize": "8bit"}
EIGHT, FOUR_BITS = {"quantize": "8bit"}, {"quantize": "4bit"}

# After an optimizer step, which divides gradients by their size, norms of recurrent layers' were up to 1.1e-4
# away; before it, within 1e-5.
NEARLY: Final[dict[str, Any]] = {"near": 2e-4}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "changes", "grid", "parts", "settings"),
    [
        pytest.param("llama", BLOCKS, (2, 1), [LORA], FOUR_BITS, id="four bits"),
        pytest.param("llama", TIED, (2, 1), [LORA], EIGHT, id="eight bits"),
        pytest.param("gemma2", {}, (2, 1), [LORA], EIGHT, id="eight bits of gemma2"),
        pytest.param("qwen3", {"attention_bias": True}, (2, 1), [LORA], EIGHT, id="eight bits and biases"),
        pytest.param("llama", BLOCKS, (1, 3), [LORA], FOUR_BITS, id="four bits in stages"),
        pytest.param("llama", TIED, (2, 2), [LORA], EIGHT, id="eight bits in stages on ranks"),
        pytest.param("llama", TIED, (2, 1), [DORA], STREAMED, id="streamed"),
        pytest.param(
            "granitemoehybrid", EXPERTS, (2, 1), [LORA], {**NEARLY, **STREAMED_STATES}, id="streamed states"
        ),
        pytest.param("olmo2", _LLAMA, (2, 1), [LORA, PREFIX], {}, id="queries that all ranks have"),
        pytest.param(
            "glm4", ARCHITECTURES["glm"], (2, 1), [DORA, PREFIX], {}, id="gates that all ranks have"
        ),
        pytest.param("deepseek_v2", LATENT, (2, 1), [LORA], {}, id="latent keys"),
        pytest.param("deepseek_v3", LATENT, (2, 1), [LORA], {}, id="attention that is not cut"),
        pytest.param("qwen3_5_text", SHAPES["qwen3_5_text"], (2, 1), [LORA], NEARLY, id="states"),
        pytest.param("qwen3_5_text", SHAPES["qwen3_5_text"], (1, 3), [LORA], NEARLY, id="states in stages"),
        pytest.param("qwen3_5_text", DELTA_ON_FOUR, (4, 1), [DORA], NEARLY, id="states on four ranks"),
        pytest.param("qwen3_next", SHAPES["qwen3_next"], (2, 1), [LORA, BIASES], NEARLY, id="heads by heads"),
        pytest.param("granitemoehybrid", EXPERTS, (2, 1), [LORA], NEARLY, id="states beside experts"),
        pytest.param("mamba2", SHAPES["mamba2"], (2, 1), [LORA, IA3], NEARLY, id="states alone"),
        pytest.param("mamba2", GROUPS_ON_FOUR, (4, 1), [OFT], NEARLY, id="groups that ranks share"),
        pytest.param("nemotron_h", WHOLE_GROUPS, (2, 1), [LORA, NORMS], NEARLY, id="groups of each rank"),
        pytest.param(
            "bamba", SHAPES["bamba"], (2, 1), [LORA], {**NEARLY, **EIGHT}, id="states in eight bits"
        ),
        pytest.param("granitemoehybrid", EXPERTS, (2, 2), [LORA], NEARLY, id="states in stages on ranks"),
    ],
)
def test_other_cuts(
    name: str, changes: dict[str, Any], grid: tuple[int, int], parts: list[object], settings: dict[str, Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Models whose plans have more than columns and rows, or whose layers have states; and quantized weights,
    of which each rank quantizes its own part. With so many ranks in so many stages."""
    fork_executors(monkeypatch)
    compare(save(tiny(name, **changes), tmp_path / name), grid, *parts, **settings)


def pairs_of(count: int) -> list[TokenPair]:
    draws = random.Random("pairs")

    def answered(asked: list[int]) -> Example:
        (answer,) = prompts(draws, [draws.randint(2, 9)])
        return Example((*asked, *answer), (*[-100] * (len(asked) - 1), *answer, -100))

    asked = prompts(draws, [draws.randint(2, 6) for _ in range(count)])
    return [TokenPair(answered(own), answered(own)) for own in asked]


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(4, 1), (2, 2)])
def test_objectives_over_a_vocabulary_that_ranks_share(
    grid: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of pairs, of answers, of a teacher's likeliest tokens, more than a rank's part has, and of
    answers that are sampled and rewarded while the others train; and answers that are drawn from all tokens,
    beside greedy ones and some that need whole logits."""
    fork_executors(monkeypatch)
    folder = save(tiny("gemma2", torch.float64, num_key_value_heads=4), tmp_path / "model")
    letter_tokenizer().save_pretrained(str(folder))
    pairs = pairs_of(6)
    answers = [TokenAnswer(own.chosen, number % 2 == 0) for number, own in enumerate(pairs)]
    jobs: dict[str, tuple[Any, Objective]] = {
        "dpo": (pairs, DPO()),
        "orpo": (pairs, ORPO()),
        "kto": (answers, KTO()),
        "distilled": ([own.chosen for own in pairs], Distillation(top_k=40, temperature=1.5)),
        "rewarded": (
            [TokenPrompt(own.chosen.tokens[:3], {}) for own in pairs],
            Reinforcement(PythonGrader(lambda answer, item: len({*answer}) / 8), group_size=4, max_tokens=8),
        ),
    }
    found = []
    for ranks, stages in ((1, 1), grid):
        with engine_of(folder, ranks, pipeline_parallel=stages) as engine:
            begun = [
                engine.finetune(data, name, LORA_ON_HEAD, TRAINING, objective=objective)
                for name, (data, objective) in jobs.items()
            ]
            asked = [
                engine.generate([5, 9, 2], None, SamplingParams(max_tokens=8, ignore_eos=True, **own))
                for own in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 4, "top_k": 5})
            ]
            engine.run()
            found.append(
                ([own.tokens for own in asked], [(s.loss, s.grad_norm) for job in begun for s in job.history])
            )
    (tokens, one), (others, several) = found
    assert tokens == others and len({*map(tuple, tokens)}) == 3
    assert len(one) == len(jobs) * TRAINING.max_steps and all(norm > 0 for _, norm in one)
    for before, after in zip(one, several, strict=True):
        assert after == pytest.approx(before, rel=1e-9, abs=1e-9)


def test_blocks_of_four_bits_are_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_executors(monkeypatch)
    folder = save(tiny("llama", torch.float32), tmp_path / "model")
    words = (
        "2 ranks would cut the blocks of 64 weights of model.layers.0.self_attn.o_proj, which has 64 inputs"
    )
    with pytest.raises(ConfigError, match=words), engine_of(folder, 2, quantize="4bit"):
        pass
