"""An executor that is killed under its client, replaced, and ended as it should be."""

import signal
import socket
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from coserve.split.attach import attach
from models import VOCABULARY, tiny
from split_process import executor_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(folder)
    return folder


def trained(model: nn.Module, steps: int, at: "dict[int, threading.Event] | None" = None) -> list[float]:
    """Losses of SGD steps on one batch; `at` has an event for steps at whose beginning it is set."""
    torch.manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (1, 12))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.002)
    losses = []
    for step in range(steps):
        if at and step in at:
            at[step].set()
        optimizer.zero_grad()
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_lora() -> nn.Module:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(tiny("llama"), config).train()


def test_training_survives_a_kill_and_ends_where_it_would_have(folder: Path, tmp_path: Path) -> None:
    address = f"tcp:127.0.0.1:{free_port()}"
    kill, got = threading.Event(), list[float]()
    client, undisturbed = with_lora(), with_lora()
    with executor_process(folder, address, COSERVE_EXECUTOR_KEY="secret") as first:
        attach(undisturbed, address, "secret")
        attach(client, address, "secret")
        wanted = trained(undisturbed, 40)
        assert wanted == pytest.approx(trained(with_lora(), 40), rel=1e-4)
        assert wanted[-1] < wanted[0] - 0.1
        thread = threading.Thread(target=lambda: got.extend(trained(client, 40, {5: kill})), daemon=True)
        thread.start()
        assert kill.wait(60)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert not got
    with executor_process(folder, address, COSERVE_EXECUTOR_KEY="secret") as second:
        thread.join(60)
        assert got == wanted  # bit for bit: no call was lost, none was answered twice
        second.send_signal(signal.SIGTERM)
        assert second.wait(20) == 0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
