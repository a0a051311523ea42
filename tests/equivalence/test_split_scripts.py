"""Scripts and PEFT methods that coserve has no code for, as clients of a base executor."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from coserve.errors import NotOffered
from coserve.split.absent import AbsentWeight
from coserve.split.address import Address
from coserve.split.attach import attach
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.service import SplitService
from models import VOCABULARY, tiny

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
SQUARE = ["q_proj", "o_proj"]  # of one shape, for methods that share matrices
TEXT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
FRESH = {"target_modules": TARGETS, "init_weights": False}
# Methods are drawn, not begun at zero, so that each of their parameters has a gradient.
METHODS: Mapping[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False),
    "adalora": lambda: peft.AdaLoraConfig(
        init_r=6,
        target_r=4,
        total_step=10,
        tinit=1,
        tfinal=2,
        target_modules=TARGETS,
        init_lora_weights=False,
    ),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=SQUARE, init_weights=False),
    "loha": lambda: peft.LoHaConfig(r=4, **FRESH),
    "lokr": lambda: peft.LoKrConfig(r=4, **FRESH),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=8, **FRESH),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=20, **FRESH),
    "c3a": lambda: peft.C3AConfig(block_size=32, target_modules=SQUARE, init_weights=False),
    "gralora": lambda: peft.GraloraConfig(r=4, gralora_k=2, **FRESH),
    "road": lambda: peft.RoadConfig(group_size=8, **FRESH),
    "miss": lambda: peft.MissConfig(r=4, **FRESH),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**TEXT),
    "prompt tuning": lambda: peft.PromptTuningConfig(**TEXT),
    "modules to save": lambda: peft.LoraConfig(r=4, target_modules=SQUARE, modules_to_save=["lm_head"]),
}
LORA: Mapping[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    executor = BaseExecutor(BaseLinears(tiny("llama")))
    service = SplitService(executor, Address(path=str(tmp_path_factory.mktemp("split") / "base.sock")))
    yield str(service.address)
    service.close()
    executor.close()


def made(config: peft.PeftConfig, address: str = "", *, is_wrapped_first: bool = True) -> nn.Module:
    """A model with an adapter; a client where there is an address."""
    torch.manual_seed(1)
    model: nn.Module = tiny("llama")
    if address and not is_wrapped_first:
        attach(model, address)
    torch.manual_seed(2)
    model = get_peft_model(model, config).train()
    if address and is_wrapped_first:
        attach(model, address)
    return model


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(3)  # of methods that draw numbers
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert got.keys() == wanted.keys() and wanted
    for name, grad in wanted.items():
        largest = float(grad.abs().max())
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-5 * max(1.0, largest), msg=name)
    assert any(grad.abs().max() > 1e-3 for grad in wanted.values())


def drawn_ids(length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (2, length))


@pytest.mark.parametrize("is_wrapped_first", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_gradients(address: str, method: str, is_wrapped_first: bool) -> None:
    if method == "modules to save" and not is_wrapped_first:
        pytest.skip("the copy needs weights: test_what_reads_weights_is_refused_by_name")
    plain = made(METHODS[method]())
    client = made(METHODS[method](), address, is_wrapped_first=is_wrapped_first)
    assert any(isinstance(p, AbsentWeight) for p in client.parameters())
    ids = drawn_ids(9)
    assert_same(gradients(client, ids), gradients(plain, ids))


def test_different_methods_at_once_with_gradient_checkpointing(address: str) -> None:
    chosen = ["adalora", "vera", "loha", "ia3", "prefix tuning", "lora"]
    ids = {method: drawn_ids(5 + number) for number, method in enumerate(chosen)}
    wanted = {method: gradients(made(METHODS[method]()), ids[method]) for method in chosen}
    clients = {method: made(METHODS[method](), address) for method in chosen}
    for method in set(chosen) - {"prefix tuning"}:  # its keys and values do not go with checkpointing
        clients[method].gradient_checkpointing_enable({"use_reentrant": False})
        clients[method].enable_input_require_grads()
    got: dict[str, list[dict[str, Tensor]]] = {method: [] for method in chosen}

    def train(method: str) -> None:
        for _ in range(3):
            model = clients[method]
            model.zero_grad()
            model(input_ids=ids[method], labels=ids[method]).loss.backward()
            got[method].append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    threads = [threading.Thread(target=train, args=(method,)) for method in chosen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for method, found in got.items():
        assert len(found) == 3, method
        for one in found:
            assert_same(one, wanted[method])


def trained(
    model: nn.Module, folder: Path, *, is_checkpointed: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of each step of a Trainer, and the trained parameters."""
    examples = torch.randint(1, VOCABULARY, (12, 10), generator=torch.Generator().manual_seed(7))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=is_checkpointed,
    )
    data = [{"input_ids": ids, "labels": ids} for ids in examples]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_trainer_trains_as_without(address: str, tmp_path: Path, is_checkpointed: bool) -> None:
    config = METHODS["lora"]
    wanted, end = trained(made(config()), tmp_path / "plain", is_checkpointed=False)
    losses, got = trained(made(config(), address), tmp_path / "client", is_checkpointed=is_checkpointed)
    assert len(losses) == 5 and len(set(losses)) > 1
    assert losses == pytest.approx(wanted, abs=1e-5)
    start = made(config())
    for name, parameter in start.named_parameters():
        if parameter.requires_grad:  # Adam divides small gradients by themselves: a step is 1e-3
            torch.testing.assert_close(got[name], end[name], rtol=0, atol=2e-4, msg=name)
            assert not torch.equal(got[name], parameter)
    saved = peft.PeftModel.from_pretrained(tiny("llama"), str(tmp_path / "client" / "checkpoint-5"))
    for name, parameter in saved.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(parameter.detach(), got[name], msg=name)


@pytest.mark.parametrize("method", LORA)
def test_lora_that_needs_the_base_is_refused(address: str, method: str) -> None:
    config = peft.LoraConfig(r=4, target_modules=TARGETS, **LORA[method])
    with pytest.raises(NotOffered, match=r"DoRA reads|begins with 'p|begins with 'o"):
        made(config, address)
    with pytest.raises(NotOffered, match=r"layers.0.self_attn.q_proj.weight is the executor's"):
        made(config, address, is_wrapped_first=False)


def test_what_reads_weights_is_refused_by_name(address: str) -> None:
    for config in (peft.HRAConfig(r=4, **FRESH), peft.HiraConfig(r=4, **FRESH)):
        model = made(config, address)
        with pytest.raises(NotOffered, match=r"q_proj.weight is the executor's"):
            model(input_ids=drawn_ids(4))
    model = made(METHODS["lora"](), address)
    with pytest.raises(NotOffered, match=r"q_proj.weight is the executor's"):
        model.merge_adapter()
    assert_same(gradients(model, ids := drawn_ids(5)), gradients(made(METHODS["lora"]()), ids))  # as before


def test_training_what_the_executor_has_is_refused_by_name(address: str) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], bias="all")
    with_biases = get_peft_model(tiny("llama", attention_bias=True), config)
    with pytest.raises(NotOffered, match=r"layers.0.self_attn.q_proj.bias is to be trained"):
        attach(with_biases, address)
    with pytest.raises(NotOffered, match=r"lm_head.weight is to be trained"):
        model = made(METHODS["modules to save"](), address, is_wrapped_first=False)
        model(input_ids=drawn_ids(4))
    model = made(METHODS["lora"](), address)
    model.requires_grad_(True)
    with pytest.raises(NotOffered, match=r"layers.0.self_attn.q_proj.weight is to be trained"):
        model(input_ids=drawn_ids(4))
    model.requires_grad_(False)
    model(input_ids=drawn_ids(4))


def test_absent_weights_can_be_moved_copied_and_shown(address: str) -> None:
    model = made(METHODS["lora"](), address)
    again = copy.deepcopy(model)
    weight = next(p for p in again.parameters() if isinstance(p, AbsentWeight))
    assert "q_proj.weight" in repr(weight) and weight.shape == (64, 64) and not weight.is_meta
    assert_same(gradients(again, ids := drawn_ids(6)), gradients(model, ids))
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert isinstance(half(input_ids=drawn_ids(3)).logits, Tensor)
    for read in (weight.sum, lambda: torch.cat([torch.ones(1, 64), weight])):
        with pytest.raises(NotOffered, match=r"q_proj.weight"):
            read()
