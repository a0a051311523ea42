"""A refused command of a `tinker` client takes its turn, and does nothing: the next one runs at once."""

import asyncio
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from coserve.serve.tinker import handover, schema
from coserve.serve.tinker.passes import MOST_DATA
from coserve.serve.tinker.turns import MOST_WAITING, Turns
from coserve.wire.messages import Forward, LoadTraining, SaveTraining, StepOptimizer
from serving import Play, World
from tinkering import Caller, passed, sent

VALUES = int(os.environ.get("COSERVE_ATTACK_VALUES", "2"))  # of each field
COMMANDS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "optim_step": (schema.OptimStepRequest, {"adam_params": {}}),
    "save_weights": (schema.SaveWeightsRequest, {"path": "a"}),
    "save_weights_for_sampler": (schema.SaveWeightsForSamplerRequest, {"path": "a"}),
    "save_weights_external": (schema.SaveWeightsExternalRequest, {"path": "a"}),
    "load_weights": (schema.LoadWeightsRequest, {"path": "tinker://a/weights/b", "optimizer": True}),
}
KNOWN: list[tuple[str, dict[str, Any]]] = [
    *[
        (path, {"path": name})
        for path in ("save_weights", "save_weights_for_sampler", "save_weights_external")
        for name in ("a b", "a/b", "../a", "", "x" * 200, 5)
    ],
    *[
        (path, {"ttl_seconds": seconds})
        for path in ("save_weights", "save_weights_for_sampler", "save_weights_external")
        for seconds in (0, 60, -1, 10**12, 10**45, "1h", 4000.5)
    ],
    *[
        ("optim_step", {"adam_params": {name: value}})
        for name, values in {
            "learning_rate": (float("nan"), float("inf"), -0.1, None, "x", 1e300),
            "beta1": (1.5, 1.0, -0.1, float("nan")), "beta2": (1.5, None), "weight_decay": (-0.1,),
            "eps": (-1.0,), "grad_clip_norm": (-1.0,), "momentum": (0.9,),
        }.items()
        for value in values
    ],
    ("optim_step", {"adam_params": None}), ("optim_step", {"unknown": 1}),
    ("save_weights_for_sampler", {"path": None}),
    ("save_weights_for_sampler", {"sampling_session_seq_id": 1}),
    ("save_weights", {"user_metadata": {"x": "y" * 20_000}}), ("load_weights", {"path": None}),
    ("load_weights", {"session_id": "s"}), ("load_weights", {"optimizer": "yes"}),
]  # fmt: skip
FREE: list[Any] = [
    -1, 1.5, True, None, "", "x y", "a/b", "\ud800", [], [5], {}, {"x": 1}, {"rank": -1}, "x" * 5000,
    float("nan"), float("-inf"), 10**50, -(10**30), 1e308, [[[]]], {"type": "sgd"},
]  # fmt: skip


def drawn(draws: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Commands with a value of `FREE` in one of their fields, or in one within it, or in a field that no
    command has."""
    for path, (kind, _) in COMMANDS.items():
        for name in (*kind.model_fields, "no_such_field"):
            if name in ("model_id", "seq_id"):
                continue
            for value in draws.sample(FREE, VALUES):
                yield path, {name: value}
        for name in schema.TinkerAdam.model_fields if path == "optim_step" else ():
            for value in draws.sample(FREE, VALUES):
                yield path, {"adam_params": {name: value}}


async def send(caller: Caller, path: str, body: dict[str, Any]) -> Any:
    """A body as Python's own `json` writes it, with its NaN and lone surrogates."""
    return await caller.post(path, json.dumps(body).encode(), **{"content-type": "application/json"})


def test_after_each_refusal_the_next_command_runs_at_once(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "STEPS", 1_000_000)  # no state is kept beside the commands

    async def story(world: World) -> None:
        caller, draws, number, refusals = Caller(world), random.Random(49), 0, 0
        run = await caller.run()
        for path, fields in [*KNOWN, *drawn(draws)]:
            number += 1
            whole = {"model_id": run, "seq_id": number, **COMMANDS[path][1], **fields}
            before = len(sent(world, Forward, StepOptimizer, SaveTraining, LoadTraining))
            refused = await send(caller, path, whole)
            if refused.status_code == 200:  # a value that is right, or an error of the command's future
                assert (path, fields) not in KNOWN, (path, fields)
                await caller.result(refused)
                continue
            refusals += 1
            assert refused.status_code == 400, (path, fields, refused.text)
            assert before == len(sent(world, Forward, StepOptimizer, SaveTraining, LoadTraining))
            again = await send(caller, path, whole)  # as after a lost connection: the same words
            assert again.text == refused.text
            number += 1
            step = await caller.post("optim_step", {"model_id": run, "seq_id": number, "adam_params": {}})
            done = await asyncio.wait_for(caller.result(step), 5)
            assert done["type"] == "optim_step", (path, fields, done)
        assert refusals > len(KNOWN) + 20 * VALUES

    play(story)


def test_refusals_far_and_foreign_ones_take_no_turn(play: Play) -> None:
    async def story(world: World) -> None:
        _, key = await world.state.store.tenants.create_key("one")
        _, foreign = await world.state.store.tenants.create_key("other")
        owner, other = Caller(world, key), Caller(world, foreign)
        run = await owner.run()
        await other.run()
        bad = {"model_id": run, "adam_params": {"beta1": 1.5}}
        for number in range(1, 5):
            assert (await send(other, "optim_step", {**bad, "seq_id": number})).status_code == 400
            assert (
                await send(Caller(world, "wrong"), "optim_step", {**bad, "seq_id": number})
            ).status_code == 401
        for number in (0, -1, 2**40, 1 + MOST_WAITING, True, "1", None):
            assert (await send(owner, "optim_step", {**bad, "seq_id": number})).status_code == 400
        step = {"model_id": run, "adam_params": {}}
        # Refusals that come early take their turns in order, and a command that waits keeps its own.
        late = await owner.post("optim_step", {**step, "seq_id": 4})
        for number in (2, 4, 3, 5):
            assert (await send(owner, "optim_step", {**bad, "seq_id": number})).status_code == 400
        used = await owner.post("optim_step", {**step, "seq_id": 3})
        assert used.status_code == 400 and "was used" in used.text
        assert not sent(world, StepOptimizer)
        assert "metrics" in await owner.result(await owner.post("optim_step", {**step, "seq_id": 1}))
        assert "metrics" in await owner.result(late)
        assert "metrics" in await owner.result(await owner.post("optim_step", {**step, "seq_id": 6}))
        # A pass with too much in it is not read as a whole, and has a number all the same.
        many = await owner.post("forward_backward", passed(run, 7) + b"\x1a\x00" * (90 * MOST_DATA))
        assert many.status_code == 400 and "parts" in many.text
        assert "loss_fn_outputs" in await owner.result(await owner.post("forward_backward", passed(run, 8)))
        assert len(sent(world, StepOptimizer)) == 3

    play(story)


@pytest.mark.parametrize("seed", range(20))
def test_turns_pass_over_what_was_refused_whatever_the_order(seed: int) -> None:
    async def story() -> None:
        draws, turns = random.Random(seed), Turns(gap_seconds=30.0)
        kinds = {number: draws.random() < 0.5 for number in range(1, 60)}
        had: list[int] = []

        async def take(number: int) -> None:
            async with turns.turn(number):
                had.append(number)
                await asyncio.sleep(0)

        tasks = []
        for number in draws.sample(sorted(kinds), len(kinds)):
            if kinds[number]:
                tasks.append(asyncio.create_task(take(number)))
            else:
                turns.skip(number)
            if draws.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert had == [number for number, runs in kinds.items() if runs]
        assert turns.next == 60
        for number in range(60, 10_000):
            turns.skip(number + 1)
        assert len(turns._refused) <= MOST_WAITING

    asyncio.run(story())
