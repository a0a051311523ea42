"""Executors that die, are late, differ or lie: an error that names them, never a wrong number."""

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from coserve.errors import (
    AdapterMismatch,
    ConfigError,
    RequestError,
    Unreachable,
    UnsupportedModel,
    WrongAnswer,
)
from coserve.split.address import Address
from coserve.split.attach import attach
from coserve.split.calls import Calls
from coserve.split.connection import call_of
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import LinearCall
from coserve.split.privacy.field import PRIME, product, uniform
from coserve.split.privacy.modes import Noise, Shares
from coserve.split.privacy.shares import SharedCalls
from coserve.split.remote_group import RemoteGroup
from coserve.split.service import SplitService
from coserve.split.work import Outcome, Work
from models import tiny

NAMES = ("here", "there")
Change = Callable[[LinearCall, list[Tensor]], list[Tensor]]


class Direct:
    """An executor without a connection, which changes its answers where there is a `change`."""

    def __init__(self, linears: BaseLinears) -> None:
        self._executor = BaseExecutor(linears)
        self._account = self._executor.join("test")
        self.base = linears.hello
        self.change: Change | None = None
        self.is_silent = False

    def submit(self, call: LinearCall, rows: Sequence[Tensor], widths: Sequence[int]) -> "_Later":
        later = _Later(call, self.change)
        if not self.is_silent:
            self._executor.submit(Work(call, rows, later.take, self._account))
        return later

    def close(self) -> None:
        self._executor.close()


class _Later:
    def __init__(self, call: LinearCall, change: Change | None) -> None:
        self._call, self._change = call, change
        self._is_there, self._outcome = threading.Event(), None

    def take(self, outcome: Outcome) -> None:
        self._outcome = outcome  # type: ignore[assignment]
        self._is_there.set()

    def result(self, timeout: float | None = None) -> list[Tensor]:
        if not self._is_there.wait(timeout):
            raise TimeoutError
        if isinstance(self._outcome, Exception):
            raise self._outcome
        answer = [part.clone() for part in self._outcome]  # type: ignore[attr-defined]
        return answer if self._change is None else self._change(self._call, answer)


def pair_of(*linears: BaseLinears) -> list[Direct]:
    return [Direct(found) for found in linears]


@pytest.fixture(scope="module")
def linears() -> BaseLinears:
    return BaseLinears(tiny("gpt2"))


def groups_of(calls: Calls) -> list[RemoteGroup]:
    return [RemoteGroup(calls, shape) for shape in calls.base.groups]


def both_ways(group: RemoteGroup) -> list[Tensor]:
    inputs = group._inputs
    x = torch.randn(4, inputs)
    grads = {path: torch.randn(4, width) for path, width in group.outputs.items()}
    return [*group.launch(x, list(grads)).result(), group.launch_backward(grads).result()]


def one_more(_: LinearCall, answer: list[Tensor]) -> list[Tensor]:
    """The smallest lie: one element, by one."""
    part = random.choice(answer)
    place = random.randrange(part.numel())
    part.view(-1)[place] = (part.view(-1)[place] + 1) % PRIME
    return answer


def outside_of_the_field(_: LinearCall, answer: list[Tensor]) -> list[Tensor]:
    answer[-1][-1, -1] = random.choice([(1 << 63) - 1, -(1 << 63), -1, answer[-1][-1, -1] + (1 << 57)])
    return answer


def other_weights(_: LinearCall, answer: list[Tensor]) -> list[Tensor]:
    return [uniform(*part.shape) for part in answer]


def swapped_rows(_: LinearCall, answer: list[Tensor]) -> list[Tensor]:
    return [part.flip(0) for part in answer]


@pytest.mark.parametrize("lie", [one_more, outside_of_the_field, other_weights, swapped_rows])
@pytest.mark.parametrize("liar", [0, 1])
def test_a_lie_is_caught_and_named(linears: BaseLinears, liar: int, lie: Change) -> None:
    executors = pair_of(linears, linears)
    calls = SharedCalls(executors, NAMES, 60)
    for group in groups_of(calls):
        for direction in ("forward", "backward"):
            executors[liar].change = lambda call, answer, direction=direction: (
                lie(call, answer) if call.direction == direction else answer
            )
            with pytest.raises(WrongAnswer, match=f"at {NAMES[liar]} has answered wrongly: the {direction}"):
                both_ways(group)
        executors[liar].change = None
        both_ways(group)  # who is honest again is believed again
    calls.close()


def test_both_may_lie_and_a_lie_from_the_beginning_is_noticed(linears: BaseLinears) -> None:
    executors = pair_of(linears, linears)
    for executor in executors:
        executor.change = lambda call, answer: one_more(call, answer) if call.dtype == "field" else answer
    calls = SharedCalls(executors, NAMES, 60)
    executors[0].change = None
    with pytest.raises(WrongAnswer, match="here and there"):
        both_ways(groups_of(calls)[0])
    calls.close()


@torch.no_grad()
def test_executors_with_other_weights_are_noticed(linears: BaseLinears) -> None:
    changed = tiny("gpt2")
    changed.transformer.h[1].mlp.c_fc.weight[-1, -1] *= 1.0001
    others = {
        "weight": BaseLinears(changed),
        "model": BaseLinears(tiny("gpt2", seed=1)),
        "type": BaseLinears(tiny("gpt2", torch.bfloat16)),
    }
    with pytest.raises(AdapterMismatch, match=r"other weights, of 13 \(transformer.h.1.mlp.c_fc"):
        SharedCalls(pair_of(linears, others["weight"]), NAMES, 60)
    others["weight"].hello = linears.hello  # it lies about them
    calls = SharedCalls(pair_of(linears, others["weight"]), NAMES, 60)
    for group in groups_of(calls):
        if "transformer.h.1.mlp.c_fc" in group.outputs:
            with pytest.raises(
                WrongAnswer, match=r"h\.1\.mlp\.c_fc is not what the executors at here and there"
            ):
                both_ways(group)
        else:
            both_ways(group)
    for kind in ("model", "type"):
        with pytest.raises(AdapterMismatch, match="at there has another base than that at here"):
            SharedCalls(pair_of(linears, others[kind]), NAMES, 60)


@torch.no_grad()
def test_other_biases_and_weights_without_numbers_are_refused(linears: BaseLinears) -> None:
    changed = tiny("gpt2")
    changed.transformer.h[2].mlp.c_proj.bias[-1] += 1
    changed = BaseLinears(changed)
    changed.hello = linears.hello  # a biases' lie
    with pytest.raises(AdapterMismatch, match=r"different biases at transformer.h.2.mlp.c_proj"):
        SharedCalls(pair_of(linears, changed), NAMES, 60)
    broken = tiny("gpt2")
    broken.lm_head.weight[3, 3] = torch.inf
    without = BaseLinears(broken)
    with pytest.raises(UnsupportedModel, match="lm_head has weights that are not finite"):
        SharedCalls(pair_of(without, without), NAMES, 60)
    call = LinearCall(1, ("lm_head",), "forward", 1, "field", "inference", 8 * 64)
    with pytest.raises(RequestError, match="lm_head has weights that are not finite"):
        without.compute(call, [uniform(1, 64)])


def test_an_executor_that_never_answers_is_given_up(linears: BaseLinears) -> None:
    executors = pair_of(linears, linears)
    calls = SharedCalls(executors, NAMES, 0.5)
    executors[1].is_silent = True
    with pytest.raises(Unreachable, match=r"the executor at there has not answered within 0.5 s"):
        both_ways(groups_of(calls)[0])
    executors[1].is_silent = False
    both_ways(groups_of(calls)[0])
    calls.close()


# Through sockets, under a model.


class Served:
    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self._path, self._linears = path, BaseLinears(tiny("llama", dtype))
        self.address = f"unix:{path}"
        self.start()

    def start(self) -> None:
        self._executor = BaseExecutor(self._linears)
        self._service = SplitService(self._executor, Address(path=str(self._path)))

    def stop(self) -> None:
        self._service.close()
        self._executor.close()

    def lie(self, direction: str) -> None:
        compute = self._linears.compute

        def changed(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
            answer = compute(call, tensors)
            return one_more(call, answer) if call.direction == direction else answer

        self._linears.compute = changed  # type: ignore[method-assign]


def with_lora() -> nn.Module:
    torch.manual_seed(1)
    return get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["q_proj", "up_proj"])).train()


def step(model: nn.Module) -> float:
    ids = torch.arange(1, 9)[None]
    loss: Any = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss)


def test_an_executor_that_dies_is_waited_for_and_its_successor_continues(tmp_path: Path) -> None:
    pair = [Served(tmp_path / f"{number}.sock") for number in range(2)]
    client = with_lora()
    attach(client, pair[0].address, patience=30, privacy=Shares(pair[1].address))
    before = step(client)
    for served in pair:
        served.stop()
        timer = threading.Timer(0.3, served.start)
        timer.start()
        assert step(client) == before
        timer.join()
    for served in pair:
        served.stop()


@pytest.mark.parametrize("gone", [0, 1])
def test_an_executor_that_stays_away_is_an_error(tmp_path: Path, gone: int) -> None:
    pair = [Served(tmp_path / f"{number}.sock") for number in range(2)]
    client = with_lora()
    attach(client, pair[0].address, patience=0, privacy=Shares(pair[1].address))
    step(client)
    pair[gone].stop()
    with pytest.raises(Unreachable, match=f"{gone}.sock"):
        step(client)
    pair[1 - gone].stop()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_lie_ends_a_training_step_without_a_gradient_step(tmp_path: Path, direction: str) -> None:
    pair = [Served(tmp_path / f"{number}.sock") for number in range(2)]
    client = with_lora()
    attach(client, pair[0].address, privacy=Shares(pair[1].address))
    pair[1].lie(direction)
    with pytest.raises(WrongAnswer, match=f"1.sock has answered wrongly: the {direction}"):
        step(client)
    for served in pair:
        served.stop()


def test_malformed_calls_in_the_field_hurt_nobody(tmp_path: Path) -> None:
    served = Served(tmp_path / "0.sock")
    connection = attach(tiny_client := tiny("llama"), served.address)
    path, width = "model.layers.0.mlp.down_proj", 96
    fields: dict[str, Any] = {"direction": "forward", "work": "inference"}
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (3, width))
    drawn[0, :2] = torch.tensor([-(1 << 63), (1 << 63) - 1])
    (answer,) = connection.submit(call_of([path], [drawn], "field", **fields), [drawn], [64]).result(30)
    shape = next(group for group in connection.base.groups if path in group.outputs)
    weight = tiny("llama").get_submodule(path).weight
    assert torch.equal(answer, product(drawn & ((1 << 57) - 1), weight, shape.exponents[path]))
    short = torch.zeros(3, width, dtype=torch.int32)  # half of the bytes
    with pytest.raises(RequestError, match="bytes came"):
        connection.submit(call_of([path], [short], "field", **fields), [short], [64]).result(30)
    assert tiny_client(torch.arange(5)[None]).logits.isfinite().all()
    connection.close()
    served.stop()


def test_what_cannot_be_private_is_refused(tmp_path: Path) -> None:
    pair = [Served(tmp_path / "0.sock"), Served(tmp_path / "1.sock", torch.bfloat16)]
    with pytest.raises(ConfigError, match="would see both shares"):
        attach(with_lora(), pair[0].address, privacy=Shares(pair[0].address))
    with pytest.raises(Unreachable, match=r"no executor answers at .*2\.sock"):
        attach(with_lora(), pair[0].address, privacy=Shares(f"unix:{tmp_path / '2.sock'}"))
    with pytest.raises(AdapterMismatch):
        attach(with_lora(), pair[0].address, privacy=Shares(pair[1].address))
    with pytest.raises(ConfigError, match="noise needs a base in float32"):
        attach(tiny("llama", torch.bfloat16), pair[1].address, privacy=Noise())
    for wrong in ({"values": 0}, {"uses": 0}, {"level": 0.0}, {"level": float("nan")}):
        with pytest.raises(ConfigError, match="noise needs"):
            Noise(**wrong)
    client = with_lora()
    attach(client, pair[0].address)
    step(client)
    for served in pair:
        served.stop()


def test_shares_of_a_base_in_bfloat16(tmp_path: Path) -> None:
    pair = [Served(tmp_path / f"{number}.sock", torch.bfloat16) for number in range(2)]
    plain, client = tiny("llama", torch.bfloat16), tiny("llama", torch.bfloat16)
    exact, ids = tiny("llama", torch.bfloat16).float(), torch.arange(1, 20)[None]
    attach(client, pair[0].address, privacy=Shares(pair[1].address))
    with torch.no_grad():
        wanted = exact(ids).logits
        error, usual = ((model(ids).logits.float() - wanted).norm() for model in (client, plain))
    assert error < 1.3 * usual  # rounding to the type, not the shares
    for served in pair:
        served.stop()
