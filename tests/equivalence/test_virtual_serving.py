"""Answers behind virtual tokens against PEFT, one adapter at a time; float32."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import PreTrainedModel

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.engine.completion import Completion
from coserve.errors import RequestError
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from models import Exact, logits_of, prompts, tiny, with_lora
from rounding import allowed, both_ways, error
from virtual import KINDS, logits_behind, own_logits, with_virtual

NAMES = ("llama", "gpt2", "gemma2", "mixtral")
PAGE = 4  # the adapters have 4 to 9 virtual tokens: a page, and pages with and without a rest
ADAPTERS = (None, "lora", *KINDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    made = {}
    for name in NAMES:
        for kind in KINDS:
            made[name, kind] = tmp_path_factory.mktemp("adapter")
            with torch.no_grad():
                with_virtual(tiny(name), kind).save_pretrained(str(made[name, kind]))
        made[name, "lora"] = tmp_path_factory.mktemp("adapter")
        with_lora(tiny(name), 1, 0.6).save_pretrained(str(made[name, "lora"]))
    return made


def engine_of(name: str, folders: dict[tuple[str, str], Path], **settings: object) -> Engine:
    options = {"calibrate": False, "page_size": PAGE, "cache_tokens": 2048, **settings}
    engine = Engine(tiny(name), EngineConfig(**options))
    for (architecture, kind), folder in folders.items():
        if architecture == name:
            engine.adapters.load(kind, folder)
    return engine


@cache
def logits(
    name: str, adapter: str, tokens: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[rows, vocabulary] of a sequence, by PEFT; exact in float64."""
    with torch.no_grad(), Exact():
        return own_logits(with_virtual(tiny(name, dtype), adapter), list(tokens))


@cache
def greedy(name: str, adapter: str | None, prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    model = tiny(name)
    if adapter == "lora":
        model = with_lora(model, 1, 0.6)
    elif adapter is not None:
        model = with_virtual(model, adapter)
    with torch.no_grad():
        for _ in range(count):
            found = logits_of(model, tokens) if adapter in (None, "lora") else own_logits(model, tokens)
            tokens.append(int(found[-1].argmax()))
    return tokens[len(prompt) :]


def check_scores(
    theirs: torch.Tensor, exact: torch.Tensor, prompt: tuple[int, ...], answer: Completion
) -> None:
    """Log-probabilities of the prompt's tokens and of the first one answered, against logits [rows,
    vocabulary] in float32 and in float64."""
    tokens = (*prompt, answer.tokens[0])
    theirs, exact = theirs.log_softmax(-1), exact.log_softmax(-1)
    got = torch.tensor([score.chosen for score in (*answer.prompt_logprobs, answer.logprobs[0])])
    assert error(got, exact[range(len(prompt)), tokens[1:]]) <= allowed(theirs, exact)


SCORED = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0, ignore_eos=True)


@pytest.mark.sample(1, per="kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_peft_s(name: str, kind: str, folders: dict[tuple[str, str], Path]) -> None:
    engine = engine_of(name, folders)
    for length in (1, 6, 31):
        prompt = tuple(prompts(random.Random(length), [length])[0])
        theirs, exact = (logits(name, kind, prompt, dtype) for dtype in (torch.float32, torch.float64))
        check_scores(theirs, exact, prompt, engine.generate(prompt, kind, SCORED).result())


@pytest.mark.parametrize("kind", ["prompt", "p-tuning"])
def test_prompts_of_embeddings_that_are_narrower_than_layers(kind: str, tmp_path: Path) -> None:
    """PEFT has to be told the width, and what is exported tells it."""
    tokens = tuple(prompts(random.Random(kind), [6])[0])

    def model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        return tiny("opt", dtype, word_embed_proj_dim=32)

    with torch.no_grad(), Exact():
        theirs = with_virtual(model(), kind, token_dim=32)
        exact = own_logits(with_virtual(model(torch.float64), kind, token_dim=32), list(tokens))
        theirs.save_pretrained(str(tmp_path / "theirs"))
        engine = Engine(model(), EngineConfig(calibrate=False, page_size=PAGE, cache_tokens=256))
        engine.adapters.load(kind, tmp_path / "theirs")
        answer = engine.generate(tokens, kind, SCORED).result()
        check_scores(own_logits(theirs, list(tokens)), exact, tokens, answer)
        engine.adapters.save(kind, tmp_path / "ours")
        again = PeftModel.from_pretrained(model(), str(tmp_path / "ours")).eval()
        assert torch.equal(own_logits(again, list(tokens)), own_logits(theirs, list(tokens)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_prefix_prompt_and_lora_are_one_adapter(
    name: str, deterministic: bool, folders: dict[tuple[str, str], Path]
) -> None:
    """The prompt stands behind the prefix and is changed by the LoRA, like any token; some pages and a rest,
    and more rows of a prompt than one pass of the deterministic mode has."""
    scheduler = {"training_window": 16} if deterministic else {}
    engine = engine_of(name, folders, deterministic=deterministic, scheduler=scheduler)
    configs = (PrefixTuningConfig(5), PromptTuningConfig(18))
    adapter = fresh_adapter(engine.base, "both", configs, 7)
    lora = engine.adapters.weights("lora").parts
    engine.adapters.add(AdapterVersion("both", 0, (*adapter.parts, *lora)))
    prefix, prompt = adapter.parameters().values()
    oracle = with_lora(tiny(name), 1, 0.6)
    for length in (1, 6, 31):
        tokens = prompts(random.Random(length), [length])[0]
        theirs, exact = both_ways(
            oracle, lambda it, of=tokens: logits_behind(it, prefix.to(it.dtype), prompt.to(it.dtype), of)
        )
        check_scores(theirs, exact, tuple(tokens), engine.generate(tokens, "both", SCORED).result())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "pages"), [("gemma2", 500), ("gemma2", 22), ("gpt2", 22)])
def test_any_mix_is_one_at_a_time(name: str, pages: int, folders: dict[tuple[str, str], Path]) -> None:
    """All methods and the base in the same steps, while a prefix and a prompt train beside them; with few
    pages sequences are preempted, and virtual tokens freed and filled again."""
    cuts = {"max_prefill_rows": 24, "min_prefill_rows": 4, "max_training_rows": 24, "min_training_rows": 3}
    engine = engine_of(name, folders, cache_tokens=pages * PAGE, scheduler={**cuts, "slowdown": None})
    draws = random.Random(f"mix/{name}")
    data = [
        Example(tuple(p), (*p[1:], -100)) for p in prompts(draws, [draws.randint(2, 50) for _ in range(16)])
    ]
    for job, method in (("a", PrefixTuningConfig(5)), ("b", [LoRAConfig(rank=2), PromptTuningConfig(6)])):
        engine.finetune(data, job, method, TrainingConfig(batch_size=4, epochs=500, learning_rate=1e-3))
    asked = [
        (tuple(prompt), ADAPTERS[n % len(ADAPTERS)], draws.randint(2, 12))
        for n, prompt in enumerate(prompts(draws, [draws.randint(1, 30) for _ in range(21)]))
    ]
    answers = []
    for prompt, adapter, count in asked:
        answers.append(engine.generate(prompt, adapter, SamplingParams(max_tokens=count, ignore_eos=True)))
        engine.step()
    for answer in answers:
        answer.result()
    assert [a.tokens for a in answers] == [greedy(name, adapter, p, n) for p, adapter, n in asked]
    stats = engine.scheduler.stats
    assert (stats.preemptions > 0) is (pages < 100) and stats.fused_steps > 5 and stats.backward_rows > 0


def test_an_answer_goes_on_where_another_engine_left_it(folders: dict[tuple[str, str], Path]) -> None:
    engine = engine_of("llama", folders)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4, min_tokens=9)
    for kind in ("prefix", "prompt"):
        whole = engine.generate([5, 9, 33], kind, params).result().tokens
        for cut in (1, 7, len(whole) - 1):
            assert engine.generate([5, 9, 33], kind, params, continued=whole[:cut]).result().tokens == whole


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_nan_in_virtual_tokens_harms_nobody_else(
    deterministic: bool, folders: dict[tuple[str, str], Path]
) -> None:
    """Not while they are in use, and not in the pages that they leave behind."""
    scheduler = {"training_window": 16} if deterministic else {}
    engine = engine_of("llama", folders, cache_tokens=48, deterministic=deterministic, scheduler=scheduler)
    for kind in ("prefix", "prompt"):
        broken = engine.adapters.weights(kind)
        nan = {name: torch.full_like(tensor, float("nan")) for name, tensor in broken.parameters().items()}
        engine.adapters.add(broken.with_parameters(nan))
    prompt = (3, 1, 4, 1, 5)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    asked = ["prefix", None, "p-tuning", "prompt", "lora", "p-tuning", None, "p-tuning by LSTM", "lora"]
    answers = [engine.generate(prompt, adapter, sampling) for adapter in asked]
    for adapter, answer in zip(asked, answers, strict=True):
        if adapter in ("prefix", "prompt"):
            with pytest.raises(RequestError, match="numbers that are not finite"):
                answer.result()
        else:
            assert answer.result().tokens == greedy("llama", adapter, prompt, 6)


@pytest.mark.parametrize("deterministic", [False, True])
def test_pages_that_held_nan_are_good_for_virtual_tokens(
    deterministic: bool, folders: dict[tuple[str, str], Path]
) -> None:
    """A pass of the deterministic mode multiplies what is masked too, and 0 x NaN is NaN."""
    scheduler = {"training_window": 16} if deterministic else {}
    engine = engine_of("llama", folders, deterministic=deterministic, scheduler=scheduler)
    prompt, sampling = (3, 1, 4, 1, 5), SamplingParams(max_tokens=4, ignore_eos=True)
    for kind in KINDS:
        spoil(engine)
        assert engine.generate(prompt, kind, sampling).result().tokens == greedy("llama", kind, prompt, 4)


def spoil(engine: Engine) -> None:
    """NaN in every page; nobody uses any."""
    pages = range(engine.config.pages)
    for layer, shape in enumerate(engine.base.caches):
        nan = torch.full((shape.groups, len(pages) * PAGE, shape.key), float("nan"))
        engine.executor.worker.attention.fill(layer, pages, nan, nan[..., : shape.value])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_what_is_written_peft_reads(
    name: str, kind: str, folders: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    engine = engine_of(name, folders)
    engine.adapters.save(kind, tmp_path)
    assert set(load_file(tmp_path / "adapter_model.safetensors")) == {"prompt_embeddings"}
    read = PeftModel.from_pretrained(tiny(name), str(tmp_path)).eval()
    tokens = [7, 2, 50, 3, 3, 8]
    with torch.no_grad():
        found = own_logits(read, tokens)
    exact = logits(name, kind, tuple(tokens), torch.float64)
    assert error(found, exact) <= allowed(logits(name, kind, tuple(tokens)), exact)
