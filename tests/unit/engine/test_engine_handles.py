"""Handles of answers and jobs: iterated, cancelled, from several threads."""

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.errors import LossNotFinite
from coserve.train.example import Example
from models import greedy, letter_tokenizer, prompts, save, tiny, with_lora


@pytest.fixture
def engine() -> Engine:
    scheduler = {"max_prefill_rows": 16, "max_training_rows": 24, "min_training_rows": 4}
    config = EngineConfig(calibrate=False, cache_tokens=1024, page_size=4, scheduler=scheduler)
    return Engine(tiny("llama"), config, tokenizer=letter_tokenizer())


@pytest.fixture(scope="module")
def own() -> object:
    return tiny("llama")


def answer_of(tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **fields)


def examples(seed: str, count: int) -> list[Example]:
    draws = random.Random(seed)
    return [
        Example(tuple(p), (*p[1:], -100))
        for p in prompts(draws, [draws.randint(2, 40) for _ in range(count)])
    ]


def free_pages(engine: Engine) -> int:
    """Pages that a request could get, seen from outside: how large a prompt enters at once."""
    held = sum(len(sequence.pages) for sequence in engine.scheduler.requests.running)
    return engine.config.pages - held


def test_two_answers_iterated_in_turn(engine: Engine, own: object) -> None:
    asked = prompts(random.Random("turn"), [9, 30])
    answers = [engine.generate(prompt, sampling=answer_of(10)) for prompt in asked]
    streams = [iter(answer) for answer in answers]
    seen: list[list[int]] = [[], []]
    open_streams = {0, 1}
    while open_streams:
        for i in sorted(open_streams):
            delta = next(streams[i], None)
            if delta is None:
                open_streams.remove(i)
            elif delta.token is not None:
                seen[i].append(delta.token)
    wanted = [greedy(own, prompt, 10) for prompt in asked]
    assert seen == wanted == [answer.tokens for answer in answers]
    for answer, tokens in zip(answers, wanted, strict=True):
        assert answer.text == letter_tokenizer().decode(tokens, skip_special_tokens=True)
        assert answer.finish_reason == "length"
    assert not engine.completions and free_pages(engine) == engine.config.pages


def test_handles_from_several_threads(engine: Engine, own: object) -> None:
    """Eight answers and a job, each driven by a thread of its own."""
    asked = prompts(random.Random("threads"), [3, 17, 25, 8, 40, 1, 12, 30])
    job = engine.finetune(examples("threads", 12), "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=4))
    found: dict[int, list[int]] = {}
    steps: list[int] = []

    def ask(i: int) -> None:
        answer = engine.generate(asked[i], sampling=answer_of(12))
        found[i] = [delta.token for delta in answer if delta.token is not None]

    def train() -> None:
        steps.extend(update.step for update in job)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
    threads.append(threading.Thread(target=train))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert found == {i: greedy(own, prompt, 12) for i, prompt in enumerate(asked)}
    assert steps == [1, 2, 3] and job.status == "succeeded"


def test_a_cancelled_answer_frees_its_pages_within_one_step(engine: Engine) -> None:
    running, waiting = (
        engine.generate(p, sampling=answer_of(200)) for p in prompts(random.Random("c"), [20, 20])
    )
    for _ in range(5):
        engine.step()
    assert free_pages(engine) < engine.config.pages
    running.cancel()
    waiting.cancel()
    engine.step()
    assert free_pages(engine) == engine.config.pages
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    running.cancel()  # once more is nothing
    engine.run()
    assert not engine.scheduler.has_work and not engine.completions
    assert [d.token for d in running if d.token is not None] == running.tokens


def test_cancelling_one_leaves_the_others(engine: Engine, own: object) -> None:
    asked = prompts(random.Random("others"), [10, 20, 30])
    answers = [engine.generate(prompt, sampling=answer_of(15)) for prompt in asked]
    for _ in range(6):
        engine.step()
    answers[1].cancel()
    engine.run()
    for i in (0, 2):
        assert answers[i].tokens == greedy(own, asked[i], 15)
    assert len(answers[1].tokens) < 15


def test_stop_strings_and_tokens_cut_the_answer(engine: Engine, own: object) -> None:
    (prompt,) = prompts(random.Random("stop"), [12])
    tokens = greedy(own, prompt, 30)
    text = letter_tokenizer().decode(tokens)
    stop = next(text[i : i + 2] for i in range(3, 28) if text.index(text[i : i + 2]) == i)
    answer = engine.generate(prompt, sampling=answer_of(30, stop=(stop,))).result()
    assert answer.text == text[: text.index(stop)] and answer.finish_reason == "stop"
    assert "".join(d.text for d in answer) == answer.text
    end = tokens[5]
    answer = engine.generate(prompt, sampling=answer_of(30, stop_token_ids=(end,))).result()
    assert answer.tokens == tokens[: tokens.index(end) + 1] and answer.finish_reason == "stop"
    assert free_pages(engine) == engine.config.pages


def test_text_and_chats_are_tokenized(engine: Engine, own: object) -> None:
    tokenizer = letter_tokenizer()
    chat = [{"role": "user", "content": "Hi there"}]
    for prompt, text in (("Hi there", "Hi there"), (chat, "u: Hi there\na: ")):
        wanted = greedy(own, tokenizer(text)["input_ids"], 5)
        assert engine.generate(prompt, sampling=answer_of(5)).result().tokens == wanted


def test_a_job_is_followed_step_by_step(engine: Engine) -> None:
    job = engine.finetune(
        examples("follow", 10), "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=4, epochs=2)
    )
    assert job.steps == 6 and job.status == "running"
    updates = list(job)
    assert [u.step for u in updates] == list(range(1, 7)) and updates == job.history
    assert [u.version for u in updates] == [f"mine@{i}" for i in range(1, 7)]
    assert all(u.loss > 0 and u.grad_norm > 0 and u.labels > 0 for u in updates)
    assert job.status == "succeeded" and job.result() is job
    assert not engine.scheduler.has_work


def test_a_cancelled_job_keeps_its_last_version(engine: Engine) -> None:
    job = engine.finetune(examples("cancel", 40), "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=2))
    while len(job.history) < 3:
        engine.step()
    job.cancel()
    engine.run()
    assert job.status == "cancelled" and not engine.scheduler.has_work
    assert engine.adapters.weights("mine").key == job.history[-1].version
    assert engine.generate([1, 2, 3], "mine", answer_of(3)).result().finish_reason == "length"
    engine.adapters.unload("mine")


def test_a_job_that_diverges_stops_and_nobody_else_notices(engine: Engine, own: object) -> None:
    """A learning rate of 1e20 overflows: the last good version stays, the other job and the answers go on."""
    bad = engine.finetune(
        examples("bad", 40), "bad", LoRAConfig(rank=2),
        TrainingConfig(batch_size=2, learning_rate=1e20, warmup_ratio=0.0, schedule="constant"),
    )  # fmt: skip
    good = engine.finetune(examples("good", 12), "good", LoRAConfig(rank=2), TrainingConfig(batch_size=4))
    (prompt,) = prompts(random.Random("notice"), [20])
    answer = engine.generate(prompt, sampling=answer_of(30))
    engine.run()
    assert answer.tokens == greedy(own, prompt, 30)
    assert good.status == "succeeded" and len(good.history) == 3
    assert bad.status == "failed" and isinstance(bad.error, LossNotFinite)
    with pytest.raises(LossNotFinite, match=r"bad@\d+"):
        bad.result()
    last = engine.adapters.weights("bad")
    assert last.key == (bad.history[-1].version if bad.history else "bad@0") and last.key in str(bad.error)
    assert all(torch.isfinite(p).all() for p in last.parameters().values())
    assert not engine.scheduler.has_work


def test_unloading_while_an_answer_runs_keeps_the_answer(engine: Engine, tmp_path: Path) -> None:
    adapted = with_lora(tiny("llama"), 1)
    adapted.save_pretrained(str(tmp_path))
    engine.adapters.load("mine", tmp_path)
    (prompt,) = prompts(random.Random("unload"), [15])
    answer = engine.generate(prompt, "mine", answer_of(20))
    for _ in range(4):
        engine.step()
    engine.adapters.unload("mine")
    assert answer.result().tokens == greedy(adapted, prompt, 20)
    assert engine.adapters.bank.names == [] and sum(engine.adapters.cache.nbytes()) == 0


def test_a_new_version_under_an_old_name(engine: Engine, tmp_path: Path) -> None:
    """Loading again while an answer runs: the running one stays, the next one gets the new adapter."""
    adapted = [with_lora(tiny("llama"), seed, 0.8) for seed in (1, 2)]
    for i, model in enumerate(adapted):
        model.save_pretrained(str(tmp_path / str(i)))
    (prompt,) = prompts(random.Random("again"), [15])
    engine.adapters.load("mine", tmp_path / "0")
    before = engine.generate(prompt, "mine", answer_of(20))
    for _ in range(4):
        engine.step()
    engine.adapters.load("mine", tmp_path / "1")
    after = engine.generate(prompt, "mine", answer_of(20))
    engine.run()
    assert before.tokens == greedy(adapted[0], prompt, 20)
    assert after.tokens == greedy(adapted[1], prompt, 20)


def test_calibration_leaves_nothing_behind(tmp_path: Path, own: object) -> None:
    folder = save(tiny("llama"), tmp_path)
    engine = Engine(folder, EngineConfig(cache_tokens=2048))
    assert engine.adapters.bank.names == [] and not engine.scheduler.has_work
    (prompt,) = prompts(random.Random("calibrate"), [40])
    assert engine.generate(prompt, sampling=answer_of(10)).result().tokens == greedy(own, prompt, 10)


def test_a_job_says_how_many_examples_were_cut_and_what_was_not_read(engine: Engine) -> None:
    data = [{"prompt": "a", "completion": "bc", "id": 1}, {"prompt": "ab", "completion": "cdefghij"}]
    cut = TrainingConfig(max_length=6, max_steps=1, too_long="truncate")
    job = engine.finetune(data, "cut", training=cut)
    assert (job.truncated, job.skipped, job.dropped, job.ignored) == (1, 0, 0, ("id",))
    job.cancel()
    job = engine.finetune(data, "cut", training=replace(cut, too_long="skip"))
    assert (job.truncated, job.skipped, job.dropped) == (0, 1, 0)
    job.cancel()
    engine.run()
