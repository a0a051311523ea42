"""A client in a mode of privacy computes what the same script computes alone."""

import copy
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from coserve.split.address import Address
from coserve.split.attach import attach
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import Limits
from coserve.split.privacy.modes import Noise, Privacy, Shares
from coserve.split.remote_group import RemoteGroup
from coserve.split.service import SplitService
from models import tiny
from split_served import drawn_ids, gradients

MODES = ("noise", "shares")
TOLERANCE = {"noise": 1e-4, "shares": 1e-5}  # noise of 8 times the rows' size costs three bits


class Pair:
    """Two executors of the same tiny model."""

    def __init__(self, kind: str, folder: Path, limits: Limits | None = None, **changes: Any) -> None:
        self.kind = kind
        self.executors = [BaseExecutor(BaseLinears(tiny(kind, **changes), limits)) for _ in range(2)]
        self.services = [
            SplitService(executor, Address(path=str(folder / f"{number}.sock")))
            for number, executor in enumerate(self.executors)
        ]
        self.addresses = [str(service.address) for service in self.services]

    def mode(self, name: str) -> Privacy:
        return Noise(uses=3) if name == "noise" else Shares(self.addresses[1])

    def close(self) -> None:
        for service, executor in zip(self.services, self.executors, strict=True):
            service.close()
            executor.close()


@pytest.fixture(scope="module", params=["llama", "gpt2", "mixtral"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(request.param, tmp_path_factory.mktemp("split"))
    yield pair
    pair.close()


def with_lora(kind: str) -> nn.Module:
    torch.manual_seed(1)
    targets = ["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "v_proj", "o_proj"]
    return get_peft_model(
        tiny(kind), LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    ).train()


@pytest.mark.parametrize("name", MODES)
def test_logits_answers_and_gradients_are_the_same(pair: Pair, name: str) -> None:
    plain, client = with_lora(pair.kind), with_lora(pair.kind)
    attach(client, pair.addresses[0], privacy=pair.mode(name))
    ids, limit = drawn_ids(2, 9), TOLERANCE[name]
    with torch.no_grad():
        torch.testing.assert_close(
            client(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=limit, atol=limit
        )
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(client.generate(ids, **options), plain.generate(ids, **options))
    for _ in range(2):
        got, wanted = gradients(client, ids), gradients(plain, ids)
        assert got.keys() == wanted.keys() and wanted
        for path, grad in wanted.items():
            largest = max(1.0, float(grad.abs().max()))
            torch.testing.assert_close(got[path], grad, rtol=10 * limit, atol=limit * largest, msg=path)


@pytest.mark.parametrize("name", MODES)
def test_a_client_that_never_loads_the_linears(pair: Pair, name: str) -> None:
    plain = tiny(pair.kind)
    with torch.device("meta"):
        client = AutoModelForCausalLM.from_config(plain.config).eval()
    attach(client, pair.addresses[0], privacy=pair.mode(name))
    own = {path for path, p in client.named_parameters() if p.is_meta}
    client.load_state_dict(
        {k: v for k, v in plain.state_dict().items() if k in own - {"lm_head.weight"}}, False, True
    )
    for module, whole in zip(client.modules(), plain.modules(), strict=True):
        for path, buffer in whole.named_buffers(recurse=False):
            module._buffers[path] = buffer
    ids, limit = drawn_ids(1, 8), TOLERANCE[name]
    with torch.no_grad():
        torch.testing.assert_close(client(ids).logits, plain(ids).logits, rtol=limit, atol=limit)


def test_shares_give_the_same_bits_each_time_and_in_any_company(pair: Pair) -> None:
    client, other, ids = with_lora(pair.kind).eval(), with_lora(pair.kind), drawn_ids(3, 7)
    for model in (client, other):
        attach(model, pair.addresses[0], privacy=pair.mode("shares"))
    alone = gradients(client, ids)
    beside = threading.Thread(target=lambda: [gradients(other, drawn_ids(2, 5)) for _ in range(3)])
    beside.start()
    again = gradients(copy.deepcopy(client), ids)
    beside.join(60)
    assert all(torch.equal(alone[path], again[path]) for path in alone)


def products(group: RemoteGroup, x: Tensor, grads: dict[str, Tensor]) -> list[Tensor]:
    return [*group.launch(x, list(grads)).result(), group.launch_backward(grads).result()]


@pytest.mark.parametrize("name", MODES)
def test_rows_of_every_size_and_calls_cut_to_limits(tmp_path: Path, name: str) -> None:
    pair = Pair("gpt2", tmp_path, Limits(rows=16, payload=8 * 64 * 192))
    client = tiny("gpt2")  # its end closes the calls
    calls = attach(client, pair.addresses[0], privacy=pair.mode(name))
    try:
        for shape in calls.base.groups:
            check_sizes(RemoteGroup(calls, shape), dict(shape.outputs), shape.inputs, name)
    finally:
        pair.close()


def check_sizes(group: RemoteGroup, outputs: dict[str, int], inputs: int, name: str) -> None:
    base = tiny("gpt2")
    x = torch.randn(5, 9, inputs)
    grads = {path: 1e-6 * torch.randn(5, 9, width) for path, width in outputs.items()}
    got = products(group, x, grads)
    wide = [base.get_submodule(path) for path in outputs]
    weights = [m.weight.double() if type(m).__name__ == "Conv1D" else m.weight.double().t() for m in wide]
    wanted = [x.double() @ w + (0 if m.bias is None else m.bias) for w, m in zip(weights, wide, strict=True)]
    back = sum(grad.double() @ w.t() for grad, w in zip(grads.values(), weights, strict=True))
    assert isinstance(back, Tensor)
    widest = max(inputs, *outputs.values())  # noise is the larger by its root
    limit = {"noise": 6e-7 * widest**0.5, "shares": 5e-7}[name]
    for found, exact in zip(got, [*wanted, back], strict=True):
        error = (found - exact).norm() / exact.norm()
        assert found.shape == exact.shape and error < limit
    if name == "shares":
        check_extremes(group, list(outputs), x.flatten(0, 1), weights, [m.bias for m in wide])


def check_extremes(
    group: RemoteGroup, paths: list[str], x: Tensor, weights: Sequence[Tensor], biases: Sequence[Any]
) -> None:
    """Sizes far apart within one call, an outlier, and values that are not finite."""
    x = x * 10.0 ** torch.linspace(-30, 30, len(x))[:, None]
    x[0], x[20, 3] = 0.0, 1000 * x[20].abs().max()
    x[7, 1], x[9, 2] = torch.nan, torch.inf
    is_finite = x.isfinite().all(1)
    for found, weight, bias in zip(group.launch(x, paths).result(), weights, biases, strict=True):
        exact = (x.double() @ weight + (0 if bias is None else bias))[is_finite]
        assert found[~is_finite].isnan().all()
        assert ((found[is_finite] - exact).norm(dim=1) <= 1e-6 * exact.norm(dim=1)).all()
