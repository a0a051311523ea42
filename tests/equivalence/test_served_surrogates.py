"""Surrogates in a running engine: a chain with one computes what transformers computes with such layers, also
from the middle of an answer on."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from coserve.adapters.replace import PrunedReplacement
from coserve.config import EngineConfig
from coserve.core.request import SamplingParams
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.errors import AdapterError
from coserve.model import replaced
from coserve.train.objectives import Distillation
from coserve.zoo.adding import add
from coserve.zoo.distilling import DistillationSettings
from coserve.zoo.profile import Machine
from coserve.zoo.store import Zoo
from coserve.zoo.surrogates import make_surrogate, surrogate_of
from coserve.zoo.views import Served, serve_from
from models import Exact, logits_of
from zoo_made import make_fine_tune, make_lora, make_model

PROMPT = [5, 17, 33, 8, 60, 2, 41, 77, 12, 9, 21, 50, 3]
TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 6
SHORT = DistillationSettings(epochs=1, batch_size=4, window=16, max_steps=1)
BLOCKS = {"base.L2": ("base", "L2"), "base.F3": ("base", "F3"), "tuned.A1": ("tuned", "A1"),
          "tuned.L2-3": ("tuned", "L2-3")}  # fmt: skip
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=20)
# In float32 kernels add up in another order than torch: 1.2e-5 was seen.
EXACT = {"float32": 3e-5, "float64": 1e-10}


@pytest.fixture(autouse=True)
def _worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced, "WORTH", 1)  # rows of so small a model are left together else


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """`base` of three layers, its full fine-tunes `tuned` and `other`, `lora`, and surrogates in the first
    two."""
    folder = tmp_path_factory.mktemp("surrogates")
    zoo = Zoo.create(folder / "zoo")
    base = make_model(folder / "base", num_hidden_layers=3)
    add(zoo, base, "base")
    add(zoo, make_fine_tune(folder / "tuned", base, {"layers": 0.3}), "tuned", "base")
    add(zoo, make_fine_tune(folder / "other", base, {"layers": 0.3}, seed=2), "other", "base")
    add(zoo, make_lora(folder / "lora", base), "lora", "base")
    for name, (model, block) in BLOCKS.items():
        make_surrogate(zoo, model, block, TEXT, Machine("one", 1, "2"), name, settings=SHORT)
    return zoo


@pytest.fixture(scope="module")
def served(zoo: Zoo) -> Served:
    return serve_from(zoo, least=0.0)


def make_engine(served: Served, clock: Callable[[], float] = time.monotonic, **config: Any) -> Engine:
    settings = {"calibrate": False, "cache_tokens": 1024, "page_size": 4, **config}
    engine = Engine(str(served.model), EngineConfig(**settings), clock=clock)
    folders = [served.adapters.items(), *(own.items() for own in served.chains.values())]
    for name, folder in chain.from_iterable(folders):
        assert folder is not None
        engine.adapters.register(name, folder)
    return engine


@contextmanager
def model_of(served: Served, zoo: Zoo, name: str, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """transformers' model, with the surrogate's layers or PEFT's adapter where `name` has some."""
    if name in BLOCKS:
        with surrogate_of(zoo, name, dtype) as (whole, layers), whole.swapped(layers):
            yield whole.model
        return
    folder = zoo.folder.parent / ("base" if name == "lora" else name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if name == "lora":
        model = PeftModel.from_pretrained(model, served.adapters[name])
    yield model.eval()


def check(answer: Completion, model: PreTrainedModel, tolerance: float) -> None:
    """The answer's log-probabilities are the model's, and its tokens the likeliest."""
    expected = torch.log_softmax(logits_of(model, [*PROMPT, *answer.tokens[:-1]]).double(), -1)
    for place, given in enumerate(answer.prompt_logprobs):
        for token, logprob in given.top:
            assert abs(expected[place, token] - logprob) < tolerance, place
    chosen = expected[len(PROMPT) - 1 :].max(-1).values
    own = expected[len(PROMPT) - 1 :].gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert (chosen - own).max() < tolerance


@pytest.mark.parametrize("dtype", EXACT)
def test_chains_with_surrogates_beside_other_applications(zoo: Zoo, served: Served, dtype: str) -> None:
    assert {name: set(own) for name, own in served.chains.items()} == {
        "base": {"base.L2", "base.F3"}, "tuned": {"tuned.A1", "tuned.L2-3"},
    }  # fmt: skip
    names = ["base", "tuned", "lora", *BLOCKS]
    with Exact() if dtype == "float64" else nullcontext():
        engine = make_engine(served, dtype=dtype)
        answers = {
            name: [engine.generate(PROMPT, None if name == "base" else name, SAMPLING) for _ in range(2)]
            for name in names
        }
        for one, two in answers.values():
            assert one.result().tokens == two.result().tokens
        for name in names:
            with model_of(served, zoo, name, torch.float64) as model:  # where both round, 3.4e-5 was seen
                check(answers[name][0], model, EXACT[dtype])


def test_a_step_s_rows_pass_a_surrogate_together(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, instead = list[int](), PrunedReplacement.instead

    def counting(own: PrunedReplacement, x: Tensor) -> Tensor:
        calls.append(len(x))
        return instead(own, x)

    engine = make_engine(served)
    engine.adapters.pin("base.F3", True)
    while engine.adapters.cache.tier("base.F3@0").name != "DEVICE":
        engine.step()
    monkeypatch.setattr(PrunedReplacement, "instead", counting)
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    for handle in [engine.generate(PROMPT, name, once) for name in ("base.F3", None, "base.F3")]:
        handle.result()
    assert len(calls) == 3 and min(calls) >= 2 * len(PROMPT), "gate, up and down, once for both prompts"


def test_the_rule_takes_surrogates(served: Served) -> None:
    chains = {name: list(own) for name, own in served.chains.items()}
    whole = make_engine(served)
    cost = {name: whole.adapters.bank.look(name).cost for name in ("tuned", *chains["tuned"])}
    smaller = [cost[name] for name in chains["tuned"]]
    assert max(smaller) < cost["tuned"]
    engine = make_engine(served, adapter_memory=cost["tuned"] + cost["tuned.L2-3"] + 1)
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    holding = engine.generate(PROMPT, "tuned.L2-3", long)
    while not holding.tokens:
        engine.step()
    answer = engine.generate(PROMPT, "tuned", SAMPLING, alternatives=chains["tuned"])
    assert answer.alternative == 0, "it fits beside the other"
    engine = make_engine(served, adapter_memory=cost["tuned"] + 1)
    holding = engine.generate(PROMPT, "tuned.L2-3", long)
    while not holding.tokens:
        engine.step()
    answer = engine.generate(PROMPT, "tuned", SAMPLING, alternatives=chains["tuned"])
    assert chains["tuned"][answer.alternative - 1] == "tuned.L2-3", "its weights alone are there"
    assert engine.generate(PROMPT, "tuned", SAMPLING).alternative == 0


@pytest.mark.parametrize(("running", "expected"), [(None, "base"), ("base.L2", "base.L2")])
def test_a_foundation_s_own_block_counts_where_no_row_passes_it(
    served: Served, running: str | None, expected: str
) -> None:
    """With the base's rows in the steps a surrogate is one more block to read; without them the base's is."""
    engine = make_engine(served, max_running=2, approximation_delay=0.0)
    other = engine.generate(PROMPT, running, SamplingParams(max_tokens=40, ignore_eos=True))
    while not other.tokens:
        engine.step()
    answer = engine.generate(PROMPT, None, SAMPLING, alternatives=["base.L2"])
    assert ["base", "base.L2"][answer.alternative] == expected


def test_nothing_is_trained_on_a_surrogate(served: Served, tmp_path: Path) -> None:
    engine = make_engine(served)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    for name in ("base.F3", "tuned.L2-3"):
        with pytest.raises(AdapterError, match="nothing is trained on an approximation"):
            engine.finetune(data, "mine", start_from=name)
        with pytest.raises(AdapterError, match="or learns from one"):
            engine.finetune(data, "mine", objective=Distillation(teacher=name))
        with pytest.raises(AdapterError, match="nothing is trained on an approximation"):
            engine.open_training("mine", from_adapter=name)
    assert not engine.has_work


def test_a_surrogate_is_written_and_read_back(served: Served, tmp_path: Path) -> None:
    engine = make_engine(served)
    expected = engine.generate(PROMPT, "base.L2", SAMPLING).result()
    engine.adapters.save("base.L2", tmp_path / "saved")
    engine.adapters.load("again", tmp_path / "saved")
    found = engine.generate(PROMPT, "again", SAMPLING).result()
    assert found.tokens == expected.tokens and found.prompt_logprobs == expected.prompt_logprobs


# A change of chain within an answer

EAGER: dict[str, Any] = {"approximation_delay": 0.0}  # else the machine's speed decides
LONG = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=5)


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def bring(engine: Engine, *names: str) -> None:
    """Has versions on the device."""
    for name in names:
        engine.generate(PROMPT, name, SamplingParams(max_tokens=1, ignore_eos=True), scope=None).result()


def answered(engine: Engine, handle: Completion, tokens: int) -> None:
    while len(handle.tokens) < tokens:
        engine.step()


def check_change(
    served: Served, zoo: Zoo, answer: Completion, names: list[str], sampling: SamplingParams = LONG
) -> None:
    """The answer is the first chain's until it changed, and from then on that of a fresh request which the
    second one continues; with likeliest tokens it is also transformers'."""
    before, after = names
    ((at, _),) = answer.changes
    assert 0 < at < sampling.max_tokens - 1 and len(answer.tokens) == sampling.max_tokens
    fresh = make_engine(served)
    whole, rest = (
        fresh.generate(PROMPT, None if name == "base" else name, sampling, continued=tokens).result()
        for name, tokens in ((before, []), (after, answer.tokens[:at]))
    )
    assert answer.tokens[:at] == whole.tokens[:at] and answer.tokens == rest.tokens
    for mine, theirs in zip(answer.logprobs, [*whole.logprobs[:at], *rest.logprobs], strict=True):
        assert abs(mine.chosen - theirs.chosen) < EXACT["float32"]
    with model_of(served, zoo, after, torch.float32) as model:
        logits = logits_of(model, [*PROMPT, *answer.tokens[:-1]])[len(PROMPT) - 1 :]
    expected = torch.log_softmax(logits.double(), -1)
    for place in range(at, len(answer.tokens)):
        own = expected[place, answer.tokens[place]]
        assert abs(own - answer.logprobs[place].chosen) < EXACT["float32"], place


SEEDED = SamplingParams(
    max_tokens=24, ignore_eos=True, logprobs=5, temperature=0.8, seed=11, repetition_penalty=1.2
)


@pytest.mark.parametrize(
    ("ahead", "sampling"), [(False, SEEDED), (True, LONG)], ids=["drawn", "planned ahead"]
)
def test_answers_leave_a_chain_whose_memory_others_wait_for(
    zoo: Zoo, served: Served, ahead: bool, sampling: SamplingParams
) -> None:
    cost = {name: make_engine(served).adapters.bank.look(name).cost for name in ("tuned", "tuned.L2-3")}
    clock, room = Clock(), sum(cost.values()) + 1
    engine = make_engine(served, adapter_memory=room, async_scheduling=ahead, **EAGER, clock=clock)
    bring(engine, "tuned.L2-3")
    answers = [engine.generate(PROMPT, "tuned", sampling, alternatives=["tuned.L2-3"]) for _ in range(2)]
    for answer in answers:
        assert answer.alternative == 0
        answered(engine, answer, 3)
    waiting = engine.generate(PROMPT, "other", SAMPLING)
    answered(engine, answers[0], 6)
    assert not answers[0].changes, "nobody has waited for longer than the bound"
    clock.now = 1.0
    engine.step()
    assert [answer.alternative for answer in answers] == [1, 1]
    waiting.result()
    for answer in answers:
        check_change_of(served, zoo, answer.result(), sampling)
    again = engine.generate(PROMPT, "tuned", SAMPLING).result()
    with model_of(served, zoo, "tuned", torch.float32) as model:
        check(again, model, EXACT["float32"])
    for name in ("tuned", "tuned.L2-3", "other"):
        assert not engine.adapters.cache._versions[f"{name}@0"].users, "nobody holds one for ever"
    assert not engine.has_work or engine.run() is None


def check_change_of(served: Served, zoo: Zoo, answer: Completion, sampling: SamplingParams) -> None:
    if sampling is LONG:
        check_change(served, zoo, answer, ["tuned", "tuned.L2-3"])
        return
    ((at, _),) = answer.changes
    rest = make_engine(served).generate(PROMPT, "tuned.L2-3", sampling, continued=answer.tokens[:at]).result()
    assert answer.tokens == rest.tokens


@pytest.mark.parametrize("held", [None, "exact", "behind"])
def test_nobody_changes_beside_one_who_stays(served: Served, held: str | None) -> None:
    """An exact answer holds the bytes anyway. One that comes later waits for them behind the first."""
    cost = {name: make_engine(served).adapters.bank.look(name).cost for name in ("tuned", "tuned.L2-3")}
    clock = Clock()
    engine = make_engine(served, adapter_memory=sum(cost.values()) + 1, **EAGER, clock=clock)
    bring(engine, "tuned.L2-3")
    answer = engine.generate(PROMPT, "tuned", LONG, alternatives=["tuned.L2-3"])
    answered(engine, answer, 2)
    if held == "exact":
        answered(engine, engine.generate(PROMPT, "tuned", LONG), 1)
    waiting = engine.generate(PROMPT, "other", SAMPLING)
    clock.now = 1.0
    if held == "behind":
        engine.generate(PROMPT, "tuned", SamplingParams(max_tokens=1), alternatives=["tuned.L2-3"])
    engine.step()
    engine.step()
    assert [alternative for _, alternative in answer.changes] == ([] if held == "exact" else [1])
    if held is None:
        answer.cancel()
        waiting.result()
    engine.run()
    pages = engine.pages
    assert pages.free_count == pages.pages and not engine.has_work


def test_behind_the_last_attention_pages_are_kept(zoo: Zoo, served: Served) -> None:
    """The last feed-forward's surrogate has the keys and values of the base: after a change, and in any other
    request for the same prompt, they are found."""
    clock = Clock()
    engine = make_engine(served, max_running=2, **EAGER, clock=clock)
    bring(engine, "base.F3", "tuned")  # else the answer may end while it is read
    answer = engine.generate(PROMPT, None, LONG, alternatives=["base.F3"])
    answered(engine, answer, 4)
    assert answer.alternative == 0
    answered(engine, engine.generate(PROMPT, "tuned", LONG), 1)
    waiting = engine.generate(PROMPT, "tuned", SAMPLING)
    clock.now, before = 1.0, engine.stats().recomputed_tokens
    waiting.result()
    assert [alternative for _, alternative in answer.changes] == [1]
    assert engine.stats().recomputed_tokens - before < engine.config.page_size
    check_change(served, zoo, answer.result(), ["base", "base.F3"])
    found = engine.stats().found_tokens
    shared = engine.generate(PROMPT, "base.F3", SamplingParams(max_tokens=2, ignore_eos=True)).result()
    assert engine.stats().found_tokens == found + 12 and shared.tokens
    engine.generate(PROMPT, "base.L2", SamplingParams(max_tokens=1, ignore_eos=True)).result()
    assert engine.stats().found_tokens == found + 12, "keys and values of another chain"
