"""Answers that draft their next tokens are the ones without drafts, in fewer steps."""

import random
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from transformers import AutoTokenizer

import coserve
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.core.request import SLO, FinishReason
from coserve.engine.completion import Completion
from coserve.schedule.stats import Stats
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from models import prompts, tiny
from recurrent import build

TOKENIZER = AutoTokenizer.from_pretrained(Path(coserve.__file__).parent / "tiny" / "weights")
GRAMMAR = str(LLMatcher.grammar_from_regex(r"(ab|[a-c]x|one, ){4,40}"))
LOOKUP = {"num_speculative_tokens": 6, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ROOMS = {"roomy": 1024, "pressed": 96}

pytestmark = pytest.mark.usefixtures("guessed_costs")


def sampling(draws: random.Random) -> SamplingParams:
    """Any settings that go together; answers at low temperatures repeat themselves."""
    grammar = draws.choice((None, None, GRAMMAR))
    return SamplingParams(
        max_tokens=draws.randint(1, 30), temperature=draws.choice((0.0, 0.0, 0.05, 1.0)),
        seed=draws.randrange(1000), grammar=grammar, ignore_eos=grammar is None and draws.random() < 0.7,
        frequency_penalty=draws.choice((0.0, 0.0, 0.05)), repetition_penalty=draws.choice((1.0, 1.0, 1.05)),
        top_k=draws.choice((0, 0, 20)), top_p=draws.choice((1.0, 1.0, 0.8)),
        banned=draws.choice(((), ((40, 40), (41, 42, 43)))), logit_bias=draws.choice(({}, {7: 1.5})),
        stop=draws.choice(((), (), ("e",), ("th", "1"))), logprobs=draws.choice((None, 0, 2)),
        prompt_logprobs=draws.choice((None, None, 1)), stop_token_ids=draws.choice(((), (50,))),
    )  # fmt: skip


def run(seed: int, lookup: dict[str, int], tokens: int, **settings: Any) -> tuple[list[Completion], Stats]:
    """Answers with and without adapters to prompts that repeat themselves and one another, while a job
    trains, with room for so many tokens."""
    draws = random.Random(seed)
    config = EngineConfig(
        calibrate=False, cache_tokens=tokens, page_size=4, max_running=5, speculative_config=lookup,
        scheduler={"max_prefill_rows": 16, "min_prefill_rows": 8}, **settings,
    )  # fmt: skip
    dtype = torch.float32 if config.deterministic else torch.float64
    model = tiny("llama", dtype, vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    engine = Engine(model, config, tokenizer=TOKENIZER)
    engine.adapters.add(fresh_adapter(engine.base, "lora", LoRAConfig(rank=2), 1))
    engine.adapters.add(fresh_adapter(engine.base, "prefix", PrefixTuningConfig(6), 2))
    examples = [Example(tuple(x), (*x[1:], -100)) for x in prompts(random.Random(0), [11, 19])]
    engine.finetune(examples, "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=2, epochs=2))
    common = [draws.randrange(3, 200) for _ in range(9)]
    sure = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={7: 50.0}, logprobs=1)  # repeats itself
    drawn = replace(sure, temperature=1.0, seed=seed, logit_bias={7: 50.0, 8: 50.0})  # one of two tokens
    handles = [engine.generate([3, 4, 5, 6], "lora", one) for one in (sure, drawn)]
    for _ in range(6):
        own = [draws.randrange(3, 200) for _ in range(draws.randint(1, 5))]
        prompt = draws.choice((own, own * 4, common + own + common, common * 2))
        slo = draws.choice((SLO(), SLO(), SLO(between_tokens=0.02)))
        adapter = draws.choice((None, None, "lora", "prefix"))
        handles.append(engine.generate(prompt, adapter, sampling(draws), slo))
        for _ in range(draws.randint(0, 3)):
            engine.step()
    engine.run()
    assert engine.pages.free_count == engine.pages.pages and not engine.has_work
    return handles, engine.scheduler.stats


def compare(settings: dict[str, Any]) -> Stats:
    """Compares the answers with drafts and without; returns the counters with them."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    plain, _ = run(seed, {}, **settings)
    drafted, stats = run(seed, LOOKUP, **settings)
    for one, other in zip(plain, drafted, strict=True):
        assert other.tokens == one.tokens and other.text == one.text
        assert other.finish_reason is one.finish_reason
        assert len(other.logprobs) == len(one.logprobs)
        pairs = zip(
            (*one.logprobs, *one.prompt_logprobs), (*other.logprobs, *other.prompt_logprobs), strict=True
        )
        for wanted, found in pairs:
            if settings.get("deterministic"):
                assert found == wanted
            else:
                assert found.chosen == pytest.approx(wanted.chosen, abs=1e-9)
                assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
    assert stats.drafts and stats.draft_tokens >= stats.accepted_tokens
    return stats


@pytest.mark.sample(1)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float64"},
        {"dtype": "float64", "async_scheduling": True},
        {"dtype": "float64", "swap_space": "0", "prefix_sharing": False},
        {"dtype": "float32", "deterministic": True},
    ],
    ids=["plain", "ahead", "recomputed", "deterministic"],
)
def test_answers_are_those_without_drafts(settings: dict[str, Any], room: str) -> None:
    stats = compare({**settings, "tokens": ROOMS[room]})
    assert stats.preemptions == 0 or room == "pressed"


def test_a_copy_takes_fewer_steps() -> None:
    """An answer that repeats itself has most of its tokens from drafts, also where one sequence is all that
    may run."""
    engines = [
        Engine(tiny("llama", seed=3), EngineConfig(calibrate=False, speculative_config=lookup, max_running=1))
        for lookup in ({}, LOOKUP)
    ]
    steps, answers = list[int](), list[list[int]]()
    for engine in engines:
        sampling = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={9: 50.0})
        answers.append(engine.generate([5, 6, 7], sampling=sampling).result().tokens)
        steps.append(engine.scheduler.stats.steps)
    assert answers[0] == answers[1] and steps[0] >= 60
    stats = engines[1].scheduler.stats
    assert steps[1] == steps[0] - stats.accepted_tokens < 20
    assert stats.decode_tokens == engines[0].scheduler.stats.decode_tokens
    told = engines[1].stats()
    assert (told.drafts, told.draft_tokens, told.accepted_tokens) == (
        stats.drafts,
        stats.draft_tokens,
        stats.accepted_tokens,
    )


def test_an_answer_has_no_tokens_behind_a_stop_string() -> None:
    """Also where the step that completes it reaches the most tokens."""
    (letter,) = TOKENIZER("e", add_special_tokens=False)["input_ids"][-1:]
    text = TOKENIZER.decode([letter])
    model = tiny("llama", vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    engine = Engine(model, EngineConfig(calibrate=False, speculative_config=LOOKUP), tokenizer=TOKENIZER)
    for stop in range(14, 21):
        sampling = SamplingParams(
            max_tokens=21, ignore_eos=True, logit_bias={letter: 50.0}, stop=(text * stop,), logprobs=0
        )
        answer = engine.generate([5, 6, 7], sampling=sampling).result()
        assert answer.tokens == [letter] * stop and answer.text == ""
        assert answer.finish_reason is FinishReason.STOP and len(answer.logprobs) == stop
    assert engine.scheduler.stats.accepted_tokens > 50


def test_recurrent_layers_leave_it_off_in_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(build("mamba2"), EngineConfig(calibrate=False, speculative_config=LOOKUP))
    assert "speculative decoding is off: states of recurrent layers" in caplog.text
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    assert len(engine.generate([5, 6] * 8, sampling=sampling).result().tokens) == 20
    assert engine.scheduler.stats.drafts == 0
