"""The provider chooses which linears are the executor's; clients keep the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from coserve.errors import AdapterMismatch, ConfigError
from coserve.split.address import Address
from coserve.split.attach import attach
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.layers import LayerChoice
from coserve.split.linears import find_linears
from coserve.split.service import SplitService
from models import tiny

PATHS = [
    f"model.layers.{layer}.{name}"
    for layer in range(12)
    for name in ("self_attn.q_proj", "mlp.experts.5.w1", "mlp.down_proj")
]


def numbers(layers: str) -> set[int]:
    chosen = LayerChoice(layers, with_head=False).chosen([*PATHS, "project", "lm_head"], "lm_head")
    found = {int(path.split(".")[2]) for path in chosen}
    assert set(chosen) == {path for path in PATHS if int(path.split(".")[2]) in found}
    return found


def test_layers_are_numbers_in_ranges() -> None:
    assert numbers("0-3") == {0, 1, 2, 3}
    assert numbers("5") == {5}  # of layers, not of experts
    assert numbers("0, 4-5,11") == {0, 4, 5, 11}
    assert numbers("10-999999999999") == {10, 11}


def test_layers_are_a_regular_expression_of_whole_paths() -> None:
    choice = LayerChoice(r".*\.(q_proj|down_proj)", with_head=False)
    assert choice.chosen(PATHS, None) == [path for path in PATHS if not path.endswith("w1")]
    assert LayerChoice(r"model\.layers\.1\..*").chosen(PATHS, None) == PATHS[3:6]


def test_the_head_is_in_or_out_by_itself() -> None:
    paths = [*PATHS, "lm_head"]
    assert LayerChoice().chosen(paths, "lm_head") == paths
    assert LayerChoice(with_head=False).chosen(paths, "lm_head") == PATHS
    assert LayerChoice("0").chosen(paths, "lm_head") == [*PATHS[:3], "lm_head"]
    assert LayerChoice(".*").chosen(paths, "lm_head") == paths


@pytest.mark.parametrize("layers", ["12", "3-2", "lm_head", "q_proj", "(", "0-", "0,,1", "-1", "*"])
def test_a_choice_of_nothing_is_refused(layers: str) -> None:
    with pytest.raises(ConfigError, match="--layers"):
        LayerChoice(layers).chosen([*PATHS, "lm_head"], "lm_head")


@contextmanager
def served(folder: Path, kind: str, layers: str, with_head: bool) -> Iterator[str]:
    linears = BaseLinears(tiny(kind), choice=LayerChoice(layers, with_head))
    executor = BaseExecutor(linears)
    service = SplitService(executor, Address(path=str(folder / "executor.sock")))
    yield str(service.address)
    service.close()
    executor.close()


def virtual(model: nn.Module) -> set[str]:
    return {path for path, (_, module) in find_linears_of_any_type(model).items() if module}


def find_linears_of_any_type(model: nn.Module) -> dict[str, tuple[str, bool]]:
    return {
        path: (path, "Virtual" in type(module).__name__)
        for path, module in model.named_modules()
        if hasattr(module, "weight")
    }


@pytest.mark.parametrize(
    ("kind", "layers", "with_head", "some", "count"),
    [
        ("llama", "0-1", True, "lm_head", 2 * 7 + 1),
        ("llama", "1", False, "model.layers.1.mlp.up_proj", 7),
        ("llama", r".*\.(k|v|down)_proj", False, "model.layers.2.self_attn.k_proj", 9),
        ("gpt2", "0,2", False, "transformer.h.2.mlp.c_fc", 8),
    ],
)
def test_clients_keep_what_the_executor_does_not_have(
    tmp_path: Path, kind: str, layers: str, with_head: bool, some: str, count: int
) -> None:
    ids = torch.randint(1, 96, (2, 9))
    with served(tmp_path, kind, layers, with_head) as address:
        plain, client = tiny(kind), tiny(kind)
        attach(client, address)
        assert len(virtual(client)) == count and some in virtual(client)
        with torch.no_grad():
            torch.testing.assert_close(client(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)
        losses, grads = [], []
        for is_client in (False, True):
            torch.manual_seed(1)
            targets = ["c_attn", "c_fc"] if kind == "gpt2" else ["q_proj", "v_proj", "up_proj"]
            model = get_peft_model(
                tiny(kind), LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
            )
            if is_client:
                attach(model, address)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert grads[0].keys() == grads[1].keys()
        for name, grad in grads[0].items():
            torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-5)


def test_the_executor_holds_what_it_was_told_to_and_no_more() -> None:
    every, one = BaseLinears(tiny("llama")), BaseLinears(tiny("llama"), choice=LayerChoice("1", False))
    layer = sum(p.nbytes for p in tiny("llama").model.layers[1].parameters() if p.dim() > 1)
    assert one.nbytes == layer < every.nbytes
    assert one.hello.fingerprint != every.hello.fingerprint
    with pytest.raises(ConfigError, match="matches no linear"):
        BaseLinears(tiny("llama"), choice=LayerChoice("3"))


def test_a_client_without_weights_is_told_what_to_load(tmp_path: Path) -> None:
    plain = tiny("llama")
    with served(tmp_path, "llama", "0-1", False) as address:
        with torch.device("meta"):
            client = AutoModelForCausalLM.from_config(plain.config).eval()
        with pytest.raises(
            AdapterMismatch, match=r"does not have model\.layers\.2\.self_attn\.q_proj, .*lm_head"
        ):
            attach(client, address)
        assert not virtual(client)
        missing = {path for path in find_linears(plain) if ".0." not in path and ".1." not in path}
        own = {f"{path}.weight": plain.get_submodule(path).weight for path in missing}
        client.load_state_dict(own, strict=False, assign=True)
        attach(client, address)
        left = {name for name, p in client.named_parameters() if p.is_meta}
        client.load_state_dict({k: v for k, v in plain.state_dict().items() if k in left}, False, True)
        for module, whole in zip(client.modules(), plain.modules(), strict=True):  # such as rotary tables
            for name, buffer in whole.named_buffers(recurse=False):
                module._buffers[name] = buffer
        ids = torch.randint(1, 96, (1, 7))
        with torch.no_grad():
            torch.testing.assert_close(client(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)


def test_other_weights_at_an_offered_linear_are_refused_and_at_others_are_not(tmp_path: Path) -> None:
    with served(tmp_path, "llama", "0-1", False) as address:
        for layer, is_refused in ((2, False), (1, True)):
            client = tiny("llama")
            client.model.layers[layer].mlp.up_proj.weight.data.mul_(1.5)
            if not is_refused:
                attach(client, address)
                continue
            with pytest.raises(AdapterMismatch, match=r"1 linear .* of 14 \(model.layers.1.mlp.up_proj\)"):
                attach(client, address)
