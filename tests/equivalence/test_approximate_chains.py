"""Approximate chains beside exact ones: each computes what a whole model with such layers computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coserve.config import EngineConfig
from coserve.core.request import SamplingParams
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.errors import AdapterNotFound
from coserve.zoo.adding import add
from coserve.zoo.alternatives import Ladder
from coserve.zoo.equivalence import evaluate
from coserve.zoo.ladders import make_ladder
from coserve.zoo.layered import LayeredModel
from coserve.zoo.store import Zoo
from coserve.zoo.views import Served, serve_from
from models import logits_of
from zoo_made import make_fine_tune, make_model, mixed_layers

PROMPT = [5, 17, 33, 8, 60, 2, 41, 77, 12, 9, 21, 50, 3]
TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 6
TOLERANCE = 1e-6  # in float64; log-probabilities are told in float32
LAYERS = 3
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of `base` and of two full fine-tunes of it, `one` and `two`."""
    folder = tmp_path_factory.mktemp("chains")
    base = make_model(folder / "base", num_hidden_layers=LAYERS)
    for seed, name in enumerate(("one", "two")):
        make_fine_tune(folder / name, base, {"layers": 0.05, "layers.2.mlp": 1.0}, seed)
    return folder


@pytest.fixture(scope="module")
def made(folder: Path) -> tuple[Served, dict[str, Ladder]]:
    """A server's folders of the applications, with ladders of two chains each."""
    zoo, ladders = Zoo.create(folder / "zoo"), dict[str, Ladder]()
    add(zoo, folder / "base", "base")
    for name in ("one", "two"):
        add(zoo, folder / name, name, "base")
        evaluate(zoo, "base", name, TEXT)
        ladder = make_ladder(zoo, name, TEXT, most=2, least=0.1, threshold=0.9, window=16).made
        assert isinstance(ladder, Ladder)
        ladders[name] = ladder
    return serve_from(zoo), ladders


def make_engine(served: Served, **config: Any) -> Engine:
    settings = {"calibrate": False, "cache_tokens": 1024, "page_size": 4, "dtype": "float64", **config}
    engine = Engine(str(served.model), EngineConfig(**settings))
    for name, own in served.adapters.items():
        engine.adapters.register(name, own)
    for chains in served.chains.values():
        for name, own_folder in chains.items():
            assert own_folder is not None
            engine.adapters.register(name, own_folder)
    return engine


def cost(engine: Engine, name: str) -> int:
    return engine.adapters.bank.look(name).cost


@contextmanager
def swapped(folder: Path, ladder: Ladder, chain: int) -> Iterator[PreTrainedModel]:
    """A full fine-tune with the base's components of one of its chains."""
    tuned, base = (
        AutoModelForCausalLM.from_pretrained(folder / one, dtype=torch.float64).eval()
        for one in (ladder.model, ladder.foundation)
    )
    with LayeredModel(tuned).swapped(mixed_layers(tuned, base, ladder.chains[chain].places)):
        yield tuned


def check(answer: Completion, model: PreTrainedModel) -> None:
    """The answer's log-probabilities are the model's, and its tokens the likeliest."""
    expected = torch.log_softmax(logits_of(model, [*PROMPT, *answer.tokens[:-1]]).double(), -1)
    for place, given in enumerate(answer.prompt_logprobs):
        for token, logprob in given.top:
            assert abs(expected[place, token] - logprob) < TOLERANCE, place
    chosen = expected[len(PROMPT) - 1 :].max(-1).values
    own = expected[len(PROMPT) - 1 :].gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert (chosen - own).max() < TOLERANCE


def test_adapted_answers_beside_exact_ones(folder: Path, made: tuple[Served, dict[str, Ladder]]) -> None:
    served, ladders = made
    engine = make_engine(served)
    chains = {name: [chain.name for chain in ladder.chains] for name, ladder in ladders.items()}
    assert [set(chain.places) for chain in ladders["one"].chains] == [{3, 4, 5}, {1, 2, 3, 4, 5}]
    exact = {name: engine.generate(PROMPT, name, SAMPLING, alternatives=chains[name]) for name in ladders}
    direct = {name: [engine.generate(PROMPT, other, SAMPLING) for other in chains[name]] for name in ladders}
    plain = engine.generate(PROMPT, None, SAMPLING)
    for answer in (*exact.values(), *chain.from_iterable(direct.values()), plain):
        answer.result()
    for name in ladders:
        assert exact[name].alternative == 0
        check(exact[name], AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval())
        for number, answer in enumerate(direct[name]):
            with swapped(folder, ladders[name], number) as model:
                check(answer, model)
    check(plain, AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64).eval())


def test_without_room_a_chain_answers_and_who_does_not_allow_it_waits(
    folder: Path, made: tuple[Served, dict[str, Ladder]]
) -> None:
    served, ladders = made
    whole = make_engine(served)
    small = cost(whole, ladders["two"].chains[1].name)
    room = cost(whole, "one") + small + 1
    assert cost(whole, "two") > small + 1
    engine = make_engine(served, adapter_memory=room)
    chains = [chain.name for chain in ladders["two"].chains]
    holding = engine.generate(PROMPT, "one", SamplingParams(max_tokens=40, ignore_eos=True))
    while not holding.tokens:
        engine.step()
    adapted = engine.generate(PROMPT, "two", SAMPLING, alternatives=chains)
    exact = engine.generate(PROMPT, "two", SAMPLING)
    assert (adapted.alternative, exact.alternative) == (2, 0)
    assert adapted.sequence.request.adapter == engine.adapters.bank.look(chains[1]).key
    adapted.result()
    assert holding.finish_reason is None and not exact.tokens, "it waits for its own weights"
    with swapped(folder, ladders["two"], 1) as model:
        check(adapted, model)
    exact.result()
    check(exact, AutoModelForCausalLM.from_pretrained(folder / "two", dtype=torch.float64).eval())
    again = engine.generate(PROMPT, "two", SAMPLING, alternatives=chains)
    assert again.alternative == 0, "it is there now"
    again.result()


def test_with_all_places_taken_the_base_may_answer(made: tuple[Served, dict[str, Ladder]]) -> None:
    served, ladders = made
    chains = [chain.name for chain in ladders["one"].chains]
    settings: list[tuple[dict[str, Any], int]] = [
        ({}, 0), ({"approximation_delay": 0.0}, 3), ({"approximation_delay": 0.0, "deterministic": True}, 0),
    ]  # fmt: skip
    for config, expected in settings:
        engine = make_engine(served, max_running=2, **config)
        answers = [engine.generate(PROMPT, None, SAMPLING)]
        answers.append(engine.generate(PROMPT, "one", SAMPLING, alternatives=[*chains, None]))
        assert answers[1].alternative == expected, config
        assert (answers[1].sequence.request.adapter is None) == (expected == 3)
        tokens = [answer.result().tokens for answer in answers]
        assert (tokens[0] == tokens[1]) == (expected == 3)


def test_pages_of_one_chain_are_no_other_chains(made: tuple[Served, dict[str, Ladder]]) -> None:
    """Each of them computes the whole prompt once; the second time it finds its own pages."""
    served, ladders = made
    engine = make_engine(served)
    names = [None, "one", *(chain.name for chain in ladders["one"].chains)]
    for name in names:
        before = engine.stats().found_tokens
        engine.generate(PROMPT, name, SamplingParams(max_tokens=1)).result()
        assert engine.stats().found_tokens == before, name
    for name in names:
        before = engine.stats().found_tokens
        engine.generate(PROMPT, name, SamplingParams(max_tokens=1)).result()
        assert engine.stats().found_tokens == before + 12, name


def test_unknown_alternatives_are_refused(made: tuple[Served, dict[str, Ladder]]) -> None:
    engine = make_engine(made[0])
    with pytest.raises(AdapterNotFound, match="no adapter 'three'"):
        engine.generate(PROMPT, "one", SAMPLING, alternatives=["three"])
    assert not engine.has_work
