"""Answers that another engine began, and prompts that are only scored."""

import random
import threading
from dataclasses import replace

import pytest

from coserve import SLO, Engine, EngineConfig, SamplingParams
from coserve.core.plan import BasePlan, BaseResult
from coserve.core.request import FinishReason, Request
from coserve.errors import AdapterNotFound, ConfigError, PromptTooLong, RequestError
from models import letter_tokenizer, logits_of, prompts, tiny
from steps import run_steps_by

LENGTH = 24


def engine_of(**fields: object) -> Engine:
    config = {"calibrate": False, "cache_tokens": 1024, "page_size": 4, **fields}
    return Engine(tiny("llama"), EngineConfig(**config), tokenizer=letter_tokenizer())


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


SAMPLINGS = {
    "greedy": {},
    "drawn": {"temperature": 1.3, "seed": 5},
    "penalised": {"temperature": 0.8, "seed": 6, "presence_penalty": 1.0, "frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.7, "logit_bias": {7: 2.0}},
    "held": {"min_tokens": 12, "ignore_eos": False, "logit_bias": {0: 9.0}, "temperature": 1.5, "seed": 2},
    "logprobs": {"logprobs": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 8},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_the_rest_follows_wherever_the_answer_was_cut(engine: Engine, kind: str) -> None:
    prompt = [5, 9, 33, 2]
    params = SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, **SAMPLINGS[kind]})
    whole = engine.generate(prompt, sampling=params).result()
    assert len(whole.tokens) >= 12
    for cut in range(1, len(whole.tokens) + 1):
        rest = engine.generate(prompt, sampling=params, continued=whole.tokens[:cut])
        deltas = [delta.token for delta in rest if delta.token is not None]
        assert deltas == whole.tokens[cut:]
        assert rest.tokens == whole.tokens and rest.finish_reason is whole.finish_reason
        assert rest.text == letter_tokenizer().decode(whole.tokens[cut:], skip_special_tokens=True)
        for mine, theirs in zip(rest.logprobs, whole.logprobs[cut:], strict=True):
            assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-4)


def test_what_is_complete_already_ends_at_once(engine: Engine) -> None:
    cases = [
        (SamplingParams(max_tokens=3, ignore_eos=True), [1, 2, 3], FinishReason.LENGTH),
        (SamplingParams(max_tokens=9), [1, 2, 0], FinishReason.STOP),  # ends with an end of text
        (SamplingParams(max_tokens=9, stop_token_ids=(8,)), [1, 8], FinishReason.STOP),
        (SamplingParams(max_tokens=9, stop=("ab",), ignore_eos=True), [66, 67], FinishReason.STOP),
    ]
    for params, said, reason in cases:
        answer = engine.generate([5, 6], sampling=params, continued=said).result()
        assert (answer.tokens, answer.finish_reason, answer.text) == (said, reason, "")
    early = SamplingParams(max_tokens=5, min_tokens=4)
    assert len(engine.generate([5, 6], sampling=early, continued=[1, 0]).result().tokens) >= 4


def test_a_stop_string_that_began_before_the_cut(engine: Engine) -> None:
    params = SamplingParams(max_tokens=6, stop=("ab",), ignore_eos=True, logit_bias={67: 100.0})
    answer = engine.generate([5, 6], sampling=params, continued=[40, 66]).result()
    assert answer.tokens == [40, 66, 67] and answer.finish_reason is FinishReason.STOP and answer.text == ""


def test_a_prompt_scored_before_is_not_scored_again(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    whole = engine.generate([5, 6, 7], sampling=params).result()
    rest = engine.generate([5, 6, 7], sampling=params, continued=whole.tokens[:1]).result()
    assert len(whole.prompt_logprobs) == 2 and rest.prompt_logprobs == [] and rest.tokens == whole.tokens


def test_what_cannot_be_continued(engine: Engine) -> None:
    with pytest.raises(RequestError, match="96"):
        engine.generate([5], continued=[96])
    assert not engine.completions


def test_continued_and_preempted_answers_whose_last_chunk_is_one_row() -> None:
    """Few pages and few prompt rows a step: one row in the midst of an answer is no decode row."""
    tight = engine_of(cache_tokens=40, scheduler={"max_prefill_rows": 1, "min_prefill_rows": 1})
    roomy = engine_of()
    asked = prompts(random.Random("tight"), [3, 7, 2, 9, 1])
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=1.0, seed=3)
    wanted = [roomy.generate(prompt, sampling=params).result().tokens for prompt in asked]
    lonely: list[int] = []  # keys of answers that had one row in their midst run
    run = tight.executor.run

    def noting(plan: BasePlan) -> BaseResult:
        for segment in plan.inference:
            known = {one.sequence.key: one.sequence for one in answers}[segment.key]
            if segment.length == 1 and len(known.request.prompt) <= segment.start < known.length - 1:
                lonely.append(segment.key)
        return run(plan)

    run_steps_by(tight, noting)
    answers = [
        tight.generate(prompt, sampling=params, continued=tokens[:cut])
        for prompt, tokens, cut in zip(asked, wanted, (11, 6, 17, 3, 20), strict=True)
    ]
    tight.run()
    assert [answer.tokens for answer in answers] == wanted
    assert any(answer.sequence.preemptions for answer in answers)
    assert lonely


@pytest.mark.parametrize("length", [1, 4, 5, 60, 256])
def test_scoring_a_prompt_answers_nothing(length: int) -> None:
    engine = engine_of(cache_tokens=256, scheduler={"max_prefill_rows": 16})
    prompt = prompts(random.Random(length), [length])[0]
    answer = engine.generate(prompt, sampling=SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert list(answer) == [] and answer.tokens == [] and answer.finish_reason is FinishReason.LENGTH
    wanted = logits_of(tiny("llama"), prompt).log_softmax(-1)
    for i, logprobs in enumerate(answer.prompt_logprobs):
        assert logprobs.chosen == pytest.approx(float(wanted[i, prompt[i + 1]]), abs=1e-3)
        assert logprobs.top[0][0] == int(wanted[i].argmax())
    assert len(answer.prompt_logprobs) == length - 1
    engine.run()
    assert engine.stats().free_pages == engine.config.pages and not engine.has_work


def test_scoring_with_a_bound_on_the_whole_time(engine: Engine) -> None:
    slo = SLO(end_to_end=100.0, first_token=100.0)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert len(engine.generate([1, 2, 3], sampling=params, slo=slo).result().prompt_logprobs) == 2


def test_only_scoring_may_ask_for_no_token(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ConfigError, match="min_tokens"):
        SamplingParams(max_tokens=0, min_tokens=1, prompt_logprobs=0)
    with pytest.raises(PromptTooLong):
        engine.generate([1] * 257, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))


def test_without_text_the_tokens_stay_tokens(engine: Engine) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, stop=("x",))
    answer = engine.generate([5, 6], sampling=params, text=False).result()
    assert answer.text == "" and len(answer.tokens) == 5


def test_statistics_count_what_happened() -> None:
    engine = engine_of()
    before = engine.stats()
    assert (before.steps, before.running, before.adapters) == (0, 0, 0)
    answer = engine.generate([5] * 10, sampling=SamplingParams(max_tokens=6, ignore_eos=True))
    engine.step()
    during = engine.stats()
    assert (during.running, during.waiting, during.prefill_tokens) == (1, 0, 10)
    assert during.free_pages < during.pages == 256
    answer.result()
    after = engine.stats()
    assert (after.decode_tokens, after.running) == (5, 0)
    assert after.cost_error > 0
    counted = engine.scheduler.stats
    same = {name for name in after.__struct_fields__ if hasattr(counted, name)}
    assert len(same) == 22 and all(getattr(after, name) == getattr(counted, name) for name in same)


def test_a_request_that_is_made_already(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=1.0, seed=3)
    answer = engine.submit(Request("mine", (5, 9, 33), sampling)).result()
    assert answer.tokens == engine.generate([5, 9, 33], sampling=sampling).result().tokens
    assert answer.sequence.request.id == "mine" and answer.text == ""
    begun = tuple(answer.tokens[:2])
    rest = engine.submit(Request("rest", (5, 9, 33), sampling, continued=begun), text=True)
    assert rest.result().tokens == answer.tokens and rest.text
    drawn = engine.submit(Request("drawn", (5, 9, 33), replace(sampling, seed=None)))
    assert drawn.sequence.request.sampling.seed is not None
    with pytest.raises(AdapterNotFound):
        engine.submit(Request("bad", (5,), sampling, adapter="nobody's"))
    drawn.result()


def test_no_step_waits_while_a_text_is_tokenized(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    free = []

    def encode(_: str) -> tuple[int, ...]:
        def try_lock() -> None:
            free.append(engine.loop.lock.acquire(blocking=False))
            if free[-1]:
                engine.loop.lock.release()

        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return (5, 9)

    monkeypatch.setattr(engine.text, "encode", encode)
    engine.generate("ab", sampling=SamplingParams(max_tokens=1)).result()
    assert free == [True]
