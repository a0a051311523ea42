"""Chains of two bases in one engine: each computes what the zoo's stitched model computes, beside answers and
training of the bases that it shares, and is refused where it is none."""

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from test_training import make_examples
from torch import Tensor
from transformers import PreTrainedModel

import coserve.tiny
from bases import CHAIN, SMALL, WIDE, bases_with, check_scored, draw_stitch, planned, wide_model, write_stitch
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.config import StitchedChain
from coserve.core.plan import StepResult
from coserve.engine.completion import Completion
from coserve.errors import AdapterMismatch, AdapterNotFound, ConfigError
from coserve.executors.local import LocalExecutor
from coserve.memory.ledger import Account
from coserve.model.stitched import Stitch, StitchedBase
from coserve.text.tokenizer import load_tokenizer
from coserve.worker.page_store import PageStore
from coserve.zoo.layered import LayeredModel
from coserve.zoo.stitching import Point, Stitched, StitchingBlock
from forked_executors import fork_executors
from models import Exact, letter_tokenizer, prompts, tiny

pytestmark = pytest.mark.local
POSITION = 0.4
SCORED = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=5)
# Models of both widths, the layers in front of the stitch and the one that it enters.
PAIRS: dict[str, tuple[str, str, int, int]] = {
    "llama to llama": ("llama", "llama", 2, 1),
    "gpt2 to llama": ("gpt2", "llama", 1, 1),
    "llama to gpt2": ("llama", "gpt2", 3, 0),
    "local and global layers": ("gemma3_text", "llama", 6, 1),
    "narrower again": ("wide", "llama", 1, 2),
}


def config(**more: Any) -> EngineConfig:
    cuts = {"max_prefill_rows": 16, "min_prefill_rows": 4, "slowdown": None}
    settings = {"cache_tokens": 1024, "page_size": 8, "scheduler": cuts, **more}
    return EngineConfig(calibrate=False, executor="local", **settings)


def models(pair: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedModel]:
    first, second, _, _ = PAIRS[pair]
    if first == "wide":
        return wide_model("llama", dtype), tiny(second, dtype)
    return tiny(first, dtype), wide_model(second, dtype)


def stitched(
    pair: str, folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[Path, Callable[[Tensor], Tensor]]:
    """The folder of a stitching block, and the logits of the zoo's stitched model with it."""
    one, other = (LayeredModel(model) for model in models(pair, dtype))
    widths = [model.model.config.hidden_size for model in (one, other)]
    weight, bias = draw_stitch(*widths)
    layers, enters = PAIRS[pair][2:]
    block = StitchingBlock(*widths).to(torch.promote_types(dtype, torch.float32))
    block.load_state_dict({"linear.weight": weight, "linear.bias": bias})
    made = Stitched(one, other, block.requires_grad_(False))

    def logits(tokens: Tensor) -> Tensor:
        if enters == 0:
            hidden = block(one.state_behind(layers - 1, tokens), POSITION)
            return entering_first(other, hidden, tokens)
        found: Tensor = made.at(Point(layers, enters, POSITION))(tokens)
        return found

    return write_stitch(folder / "stitch", layers, enters, weight, bias, POSITION), logits


def entering_first(model: LayeredModel, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Logits where `hidden` enters the first layer: a hook in front of it."""
    handle = model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: (
            ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})
        ),
        with_kwargs=True,
    )
    try:
        return model.logits(tokens)
    finally:
        handle.remove()


def check(
    answer: Completion, prompt: list[int], logits: Callable[[Tensor], Tensor], tolerance: float
) -> None:
    """The answer's log-probabilities are the stitched model's, and its tokens the likeliest."""
    with torch.no_grad():
        expected = logits(torch.tensor([[*prompt, *answer.tokens[:-1]]]))
    check_scored(expected, prompt, answer, tolerance)


def three(pair: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Engine]:
    """The engines of two bases and of a chain of both."""
    first, second = models(pair, dtype)
    engine = Engine(first, config(**more), letter_tokenizer())
    wide = engine.add_base(WIDE, second, letter_tokenizer())
    return {SMALL: engine, WIDE: wide, CHAIN: engine.add_base(CHAIN, StitchedChain(folder, SMALL, WIDE))}


@pytest.mark.parametrize(
    ("pair", "dtype", "tolerance"),
    [*((pair, torch.float32, 1e-5) for pair in PAIRS), ("gpt2 to llama", torch.float64, 1e-6)],
)
def test_answers_beside_those_and_the_training_of_both_bases(
    pair: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """The oracle's logits come in float32, so float64 is bounded by their rounding."""
    draws = random.Random(f"stitched/{pair}")
    with Exact() if dtype == torch.float64 else nullcontext():
        folder, _ = stitched(pair, tmp_path, dtype)
        _, logits = stitched(pair, tmp_path / "exact", torch.float64)
        engines = three(pair, folder, dtype)
        training = TrainingConfig(batch_size=2, epochs=9, max_steps=2, rows=64)
        jobs = [
            engines[base].finetune(make_examples(base, 4), base, LoRAConfig(rank=2), training)
            for base in (SMALL, WIDE)
        ]
        answers: list[tuple[list[int], Completion]] = []
        turns = cycle((CHAIN, SMALL, WIDE, CHAIN))
        with planned(engines[SMALL]) as plans:
            while any(job.is_under_way for job in jobs) or len(answers) < 6:
                while len(engines[SMALL].completions) < 5:
                    (prompt,) = prompts(draws, [draws.randint(2, 40)])
                    base = next(turns)
                    handle = engines[base].generate(prompt, None, SCORED)
                    if base == CHAIN:
                        answers.append((prompt, handle))
                engines[SMALL].step()
            engines[SMALL].run()
        for prompt, answer in answers:
            check(answer, prompt, logits, tolerance)
    answering = [(plan, bases_with([plan], lambda part: part.inference)) for plan in plans]
    assert any(bases == {SMALL, WIDE, CHAIN} for _, bases in answering)
    assert any(plan.training and CHAIN in bases for plan, bases in answering)


def test_rows_of_chains_have_passes_of_their_own(tmp_path: Path) -> None:
    """A step passes each base's layers once for its own rows, and once for each chain's."""
    folder, logits = stitched("llama to llama", tmp_path)
    engines = three("llama to llama", folder)
    other = engines[SMALL].add_base("other", StitchedChain(folder, SMALL, WIDE))
    sampling = replace(SCORED, max_tokens=6)
    passes = {base: spy(engines[base]) for base in (SMALL, WIDE)}
    engine = engines[SMALL]
    for asked in ((SMALL, WIDE, CHAIN), (SMALL, CHAIN), (CHAIN,), (CHAIN, "other"), (SMALL, "other", CHAIN)):
        named = {**engines, "other": other}
        answers = {base: named[base].generate([5, 17, 33, 8], None, sampling) for base in asked}
        chains = {CHAIN, "other"} & {*asked}
        while there := {base for base, answer in answers.items() if answer.finish_reason is None}:
            for seen in passes.values():
                seen.clear()
            engine.step()
            assert passes == {base: [1] * (len(chains & there) + (base in there)) for base in passes}, asked
        for base in chains:
            check(answers[base], [5, 17, 33, 8], logits, 1e-5)


def spy(engine: Engine) -> list[int]:
    """Numbers of travellers in passes of a base from now on."""
    seen: list[int] = []
    assert isinstance(engine.executor, LocalExecutor)
    own = engine.executor.worker.fused
    forward = own.forward

    def watched(travellers: Any, *others: Any) -> None:
        seen.append(len(travellers))
        forward(travellers, *others)

    own.forward = watched
    return seen


def test_seconds_of_a_step_are_counted_once(tmp_path: Path) -> None:
    """Each base's part has the seconds of its own rows."""
    folder, _ = stitched("llama to llama", tmp_path)
    engines = three("llama to llama", folder)
    for base in engines:
        engines[base].generate([*range(5, 45)], None, SCORED)
    device, found = engines[SMALL].loop.executor, list[tuple[float, StepResult]]()
    collect = device.collect

    def timed(wait: bool = True) -> StepResult | None:
        started = time.perf_counter()
        result = collect(wait)
        assert result is not None
        found.append((time.perf_counter() - started, result))
        return result

    device.collect = timed  # type: ignore[method-assign]
    engines[SMALL].run()
    assert all(result.seconds <= elapsed for elapsed, result in found)
    both = [result for _, result in found if {WIDE, CHAIN} <= {*result.bases}]
    assert both and sum(result.seconds for _, result in found) > 0.5 * sum(elapsed for elapsed, _ in found)
    assert all(one.seconds > 0 for result in both for one in result.bases.values())


@pytest.mark.usefixtures("guessed_costs")
def test_prefixes_second_tier_and_long_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are its own: shared between its requests, moved to the second tier and back, or there as a
    whole."""
    draws = random.Random("tiers of a chain")
    folder, logits = stitched("llama to llama", tmp_path, torch.float64)
    engines = three(
        "llama to llama",
        folder,
        torch.float64,
        page_size=4,
        cache_tokens=72,
        max_running=12,
        swap_space="16MiB",
    )
    engine, chain = engines[SMALL], engines[CHAIN]
    long, *others = prompts(draws, [96, *[draws.randint(12, 24) for _ in range(5)]])
    sampling = replace(SCORED, max_tokens=24, prompt_logprobs=2)
    with planned(engine) as plans:
        answers = [(prompt, chain.generate(prompt, None, sampling)) for prompt in (long, *others)]
        beside = engines[WIDE].generate(others[0], None, sampling)
        engine.run()
        found = engine.stats().found_tokens
        read = PageStore.get
        # Steps go on, and none has rows, while the store reads: the base is asked for its pages all the same.
        monkeypatch.setattr(PageStore, "get", lambda *given: (time.sleep(0.02), read(*given))[1])
        again = chain.generate(others[0], None, replace(sampling, prompt_logprobs=None))
        deadline = time.monotonic() + 60
        while again.finish_reason is None and time.monotonic() < deadline:
            engine.loop.drive()
        assert again.finish_reason is not None, "an answer waits for its pages for ever"
    for prompt, answer in answers:
        check(answer, prompt, logits, 1e-5)
    assert again.tokens == answers[1][1].tokens != beside.tokens
    assert engine.stats().found_tokens > found
    for pick in (
        lambda part: part.swap_out,
        lambda part: part.swap_in,
        lambda part: [segment for segment in part.inference if segment.offloaded],
    ):
        assert CHAIN in bases_with(plans, pick)


def test_costs_are_measured_and_no_weights_are_counted_twice(tmp_path: Path) -> None:
    folder, _ = stitched("llama to llama", tmp_path)
    engines = three("llama to llama", folder)
    ledger, chain = engines[SMALL].memory.ledger, engines[CHAIN]
    assert isinstance(chain.base, StitchedBase)
    block = (64 + 1) * 96 * 4  # the input of the position is part of the bias
    assert ledger.accounts()[Account.BASE] == block + sum(engines[one].base.nbytes for one in (SMALL, WIDE))
    assert chain.base.nbytes == block and chain.base.backward_nbytes == 0
    small, wide = (engines[one].base for one in (SMALL, WIDE))
    wanted = [
        sum(own.nbytes for layer in (0, 1) for own in [*small.chain][layer].parameters().values()),
        sum(own.nbytes for part in ([*wide.chain][1], wide.chain.ends) for own in part.parameters().values()),
    ]
    wanted[1] += block
    assert [leg.nbytes for leg in chain.base.legs] == wanted
    chain.calibrate()
    assert chain.cost.error < 1.0 and chain.generate([5, 6, 7], sampling=SCORED).result().tokens


def test_the_chain_answers_in_a_bases_place_under_load_alone(tmp_path: Path) -> None:
    folder, logits = stitched("llama to llama", tmp_path)
    _, second = models("llama to llama")
    first = tiny("llama", max_position_embeddings=64)
    engine = Engine(first, config(max_running=1, approximation_delay=0.0), letter_tokenizer())
    wide = engine.add_base(WIDE, second, letter_tokenizer())
    chain = engine.add_base(CHAIN, StitchedChain(folder, SMALL, WIDE))
    prompt, sampling = [5, 17, 33, 8], replace(SCORED, max_tokens=40)
    exact = wide.generate(prompt, None, sampling, alternatives=[CHAIN])
    assert exact.alternative == 0, "nobody else is there"
    beside = engine.generate(prompt, None, sampling)
    # Rows of the wide base would be alone in a pass of it; the chain has a row under way already.
    busy = chain.generate(prompt, None, sampling)
    exact.cancel()
    while not busy.tokens:
        wide.step()
    chosen = wide.generate(prompt, None, sampling, alternatives=[CHAIN])
    assert chosen.alternative == 1 and chosen.sequence.request.base == CHAIN
    long = wide.generate(prompt, None, replace(sampling, max_tokens=61), alternatives=[CHAIN])
    assert long.alternative == 0
    with pytest.raises(AdapterNotFound):
        wide.generate(prompt, None, sampling, alternatives=["unknown@1"])
    wide.run()
    check(chosen, prompt, logits, 1e-5)
    assert chosen.text and chosen.changes == [] and beside.tokens


def test_no_grammar_is_compiled_for_a_chain_while_steps_wait(tmp_path: Path) -> None:
    """The chain has the second base's grammars; those of requests to the first would be compiled anew."""
    tokenizer = load_tokenizer(coserve.tiny.path())
    words = {"vocab_size": len(tokenizer)}
    settings = config(max_running=1, approximation_delay=0.0)
    engine = Engine(tiny("llama", **words), settings, tokenizer)
    wide = engine.add_base(WIDE, wide_model(**words), tokenizer)
    folder = write_stitch(tmp_path / "stitch", 2, 1, *draw_stitch(64, 96))
    chain = engine.add_base(CHAIN, StitchedChain(folder, SMALL, WIDE))
    sampling = SamplingParams(max_tokens=9, grammar=LLMatcher.grammar_from_json_schema({"enum": ["77"]}))
    busy = chain.generate([5, 6], None, replace(SCORED, max_tokens=40))
    while not busy.tokens:
        engine.step()
    answers = {one: one.generate([5, 6], None, sampling, alternatives=[CHAIN]) for one in (engine, wide)}
    assert [answer.alternative for answer in answers.values()] == [0, 1]
    engine.run()
    assert all(answer.text.startswith('"77"') for answer in answers.values())


def test_nothing_trains_or_rides_on_a_chain(tmp_path: Path) -> None:
    folder, _ = stitched("llama to llama", tmp_path)
    engines = three("llama to llama", folder)
    with pytest.raises(AdapterMismatch, match="answers only"):
        engines[CHAIN].finetune(
            make_examples("chain", 4), "chain", LoRAConfig(rank=2), TrainingConfig(batch_size=2)
        )
    assert engines[CHAIN].generate([5, 6, 7], sampling=SCORED).result().tokens


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too deep": ({"layers": 4}, "layer 4 of 3"),
    "none in front": ({"layers": 0}, "layer 0 of 3"),
    "none behind": ({"enters": 2}, "layer 3 of 2"),
    "before the first": ({"enters": -1}, "layer 0 of 2"),
    "another width": ({"weight": torch.zeros(96, 97)}, "96 x 96 is not 96 x 64"),
    "no linear": ({"weight": torch.zeros(95, 65)}, "no stitching block"),
    "words": ({"layers": "two"}, "no stitching block"),
    "no position": ({"position": None}, "no stitching block"),
    "no number": ({"bias": torch.full((96,), torch.nan)}, "not finite"),
    "no place": ({"position": float("inf")}, "not finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_chain_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[name]
    weight, bias = draw_stitch(64, 96)
    fields = {"layers": 2, "enters": 1, "weight": weight, "bias": bias, "position": POSITION, **changes}
    refused(write_stitch(tmp_path / "stitch", **fields), reason)


@pytest.mark.parametrize("damage", ["cut", "no file", "no folder", "no table", "no bias"])
def test_a_damaged_stitching_block_is_one_error(damage: str, tmp_path: Path) -> None:
    folder, _ = stitched("llama to llama", tmp_path)
    weights, place = folder / "stitching.safetensors", folder / "stitching.json"
    match damage:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-9])
        case "no file":
            weights.unlink()
        case "no folder":
            folder = tmp_path / "nowhere"
        case "no table":
            place.write_text("[1, 2]")
        case "no bias":
            place.write_text('{"layers": 2, "enters": 1, "position": 0.5')
    refused(folder, "can be read")


def refused(folder: Path, reason: str) -> None:
    first, second = models("llama to llama")
    engine = Engine(first, config())
    engine.add_base(WIDE, second)
    before = engine.memory.ledger.accounts()
    with pytest.raises(ConfigError, match=reason):
        engine.add_base(CHAIN, StitchedChain(folder, SMALL, WIDE))
    assert CHAIN not in engine.bases and engine.memory.ledger.accounts() == before
    assert engine.bases[WIDE].generate([5, 6, 7], sampling=SCORED).result().tokens


def test_bases_that_are_no_pair_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = stitched("llama to llama", tmp_path)
    engine = Engine(tiny("llama"), config())
    more = {"words": wide_model(vocab_size=99), "handing": tiny("gemma4_text", hidden_size=96)}
    for name, model in {**more, "wide": wide_model()}.items():
        engine.add_base(name, model)
    engine.add_base("chain", StitchedChain(folder, SMALL, "wide"))
    for chain, reason in (
        (StitchedChain(folder, SMALL, "lost"), "no base 'lost'"),
        (StitchedChain(folder, SMALL, "words"), "vocabularies of 96 and 99"),
        (StitchedChain(folder, SMALL, "handing"), "keys and values of others"),
        (StitchedChain(folder, "chain", "wide"), "no base of another chain"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine.add_base(CHAIN, chain)
    with pytest.raises(ConfigError, match="there is a base 'words' already"):
        engine.add_base("words", StitchedChain(folder, SMALL, "words"))
    fork_executors(monkeypatch)
    remote = Engine(tiny("llama"), replace(config(), executor="remote"))
    with pytest.raises(ConfigError, match="both in one process"):
        remote.add_base(CHAIN, StitchedChain(folder, SMALL, SMALL))
    remote.executor.close()


def test_the_position_is_part_of_the_bias(tmp_path: Path) -> None:
    weight, bias = draw_stitch(5, 3)
    read = Stitch.read(write_stitch(tmp_path / "stitch", 1, 2, weight, bias, 0.25))
    assert (read.layers, read.enters) == (1, 2)
    given = torch.randn(4, 5)
    plain = torch.nn.functional.linear(torch.cat([given, torch.full((4, 1), 0.25)], 1), weight, bias)
    torch.testing.assert_close(torch.nn.functional.linear(given, read.weight, read.bias), plain)
