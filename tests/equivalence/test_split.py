"""A client of a base executor computes what the same script computes alone."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from coserve.errors import NotOffered
from coserve.split.absent import AbsentWeight
from coserve.split.address import Address
from coserve.split.attach import attach
from coserve.split.channel import Transport
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.service import SplitService
from coserve.split.transport import SocketTransport
from models import tiny
from split_in_process import InProcess
from split_served import drawn_ids, gradients

KINDS = ("llama", "gpt2", "gemma2", "mixtral")  # over shared memory
WAYS = ("shared", "socket", "tcp", "in-process")  # for the first
TOLERANCE = 1e-5  # float32: products of joined rows round differently


class Served:
    """An executor of a tiny model, and its calls."""

    def __init__(self, kind: str, way: str, folder: Path) -> None:
        self.kind = kind
        linears = BaseLinears(tiny(kind))
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        compute = linears.compute

        def noted(call: Any, tensors: Any) -> list[Tensor]:
            self.calls.append((call.direction, call.paths))
            return compute(call, tensors)

        linears.compute = noted  # type: ignore[method-assign]
        self.executor = BaseExecutor(linears)
        unix, tcp = Address(path=str(folder / f"{kind}.sock")), Address.parse("tcp:127.0.0.1:0")
        self.service = SplitService(self.executor, tcp if way == "tcp" else unix)
        self.address: str | Transport = str(self.service.address)
        if way == "in-process":
            self.address = InProcess(self.executor)
        if way == "socket":
            self.address = SocketTransport(unix, shared_memory=False)


@pytest.fixture(
    scope="module",
    params=[*((kind, WAYS[0]) for kind in KINDS), *((KINDS[0], way) for way in WAYS[1:])],
    ids="-".join,
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(*request.param, tmp_path_factory.mktemp("split"))
    yield served
    served.service.close()
    served.executor.close()


def with_lora(kind: str, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    targets = ["c_attn", "c_proj", "c_fc"] if kind == "gpt2" else ["q_proj", "v_proj", "o_proj"]
    if kind in ("llama", "gemma2"):
        targets += ["up_proj", "down_proj"]
    model = get_peft_model(tiny(kind), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return model.train()


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys() and len(wanted) > 3
    for name, grad in wanted.items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=TOLERANCE, msg=name)


def test_logits_and_answers_are_the_same(served: Served) -> None:
    plain, client = tiny(served.kind), tiny(served.kind)
    attach(client, served.address)
    ids = drawn_ids(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(client(ids).logits, plain(ids).logits, rtol=1e-5, atol=TOLERANCE)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(client.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_gradients_of_lora_are_the_same(served: Served, is_wrapped_first: bool) -> None:
    plain, ids = with_lora(served.kind), drawn_ids(2, 11)
    if is_wrapped_first:
        client = with_lora(served.kind)
        attach(client, served.address)
    else:
        bare = tiny(served.kind)
        attach(bare, served.address)
        config = LoraConfig(r=4, target_modules=plain.peft_config["default"].target_modules)
        client = get_peft_model(bare, config).train()
        missing = client.load_state_dict({k: v for k, v in plain.state_dict().items() if "lora_" in k}, False)
        assert not missing.unexpected_keys
    assert_same(gradients(client, ids), gradients(plain, ids))


def test_one_call_each_way_for_siblings(served: Served) -> None:
    client, ids = with_lora(served.kind), drawn_ids(1, 5)
    connection = attach(client, served.address)
    served.calls.clear()
    gradients(client, ids)
    forward = [paths for direction, paths in served.calls if direction == "forward"]
    assert len(forward) == len(set(forward)) == len(connection.base.groups)
    backward = [paths for direction, paths in served.calls if direction == "backward"]
    assert len(backward) == len(set(backward)) <= len(forward) - 1  # the first's input needs no gradient
    if served.kind == "llama":
        assert max(map(len, forward)) == 3 and max(map(len, backward)) == 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(served: Served, use_reentrant: bool) -> None:
    plain, client, ids = with_lora(served.kind), with_lora(served.kind), drawn_ids(2, 7)
    attach(client, served.address)
    client.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    client.enable_input_require_grads()
    assert_same(gradients(client, ids), gradients(plain, ids))


def test_weights_are_freed_and_cannot_be_read(served: Served) -> None:
    client = tiny(served.kind)
    attach(client, served.address)
    linears = [module for module in client.modules() if "Virtual" in type(module).__name__]
    assert len(linears) == sum(len(group.outputs) for group in served.executor.hello.groups)
    for linear in linears:
        assert isinstance(linear.weight, AbsentWeight)
        with pytest.raises(NotOffered, match="is the executor's"):
            linear.weight.isnan()


def test_clients_at_once_get_their_own(served: Served) -> None:
    ids = [drawn_ids(1, length) for length in (4, 9)]
    plain = [with_lora(served.kind, seed) for seed in (1, 2)]
    clients = [with_lora(served.kind, seed) for seed in (1, 2)]
    for client in clients:
        attach(client, served.address)
    wanted = [gradients(model, own) for model, own in zip(plain, ids, strict=True)]
    got: dict[int, list[dict[str, Tensor]]] = {0: [], 1: []}

    def train(number: int) -> None:
        got[number] = [gradients(clients[number], ids[number]) for _ in range(3)]

    threads = [threading.Thread(target=train, args=(number,)) for number in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, found in got.items():
        assert len(found) == 3
        for one in found:
            assert_same(one, wanted[number])


def test_a_client_that_never_loads_the_linears(served: Served) -> None:
    plain = tiny(served.kind)
    with torch.device("meta"):
        client = AutoModelForCausalLM.from_config(plain.config).eval()
    attach(client, served.address)
    own = {name for name, p in client.named_parameters() if p.is_meta}
    tied = "lm_head.weight"
    client.load_state_dict({k: v for k, v in plain.state_dict().items() if k in own - {tied}}, False, True)
    for module, whole in zip(client.modules(), plain.modules(), strict=True):  # such as rotary tables
        for name, buffer in whole.named_buffers(recurse=False):
            module._buffers[name] = buffer
    assert not any(p.is_meta for p in (*client.parameters(), *client.buffers()))
    ids = drawn_ids(1, 8)
    with torch.no_grad():
        torch.testing.assert_close(client(ids).logits, plain(ids).logits, rtol=1e-5, atol=TOLERANCE)
