"""What newcomers share: one server, as its users start it, and the embedded model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from coserve import tiny
from documented import Desk

ASKED = "Mira lives in Tolmen and keeps a goat. Where does Mira live?"


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An adapter that PEFT has trained on three texts, saved: its folder, and PEFT's own model."""
    folder = tmp_path_factory.mktemp("peft") / "support"
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    chat = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "In Tolmen, with a goat."}]
    batch = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(12):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder, model.eval()


@pytest.fixture(scope="session")
def served(tuned: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """`coserve serve` with that adapter, in float32, which PEFT computes in too."""
    desk = Desk(tmp_path_factory.mktemp("served"), COSERVE_ENGINE_DTYPE="float32")
    try:
        desk.run(f"coserve serve --adapter support={tuned[0]}")
        yield desk
        desk.end()
    finally:
        desk.kill()


@pytest.fixture
def client(served: Desk) -> Iterator[openai.OpenAI]:
    """OpenAI's client of that server."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as made:
        yield made
