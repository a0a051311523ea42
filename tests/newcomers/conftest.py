"""Fixtures that newcomers share: one server, as its users start it, and the embedded model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from coserve import tiny
from documented import Desk


class Tuned(NamedTuple):
    """An adapter as PEFT saved it, PEFT's own model, and the chat that it was taught."""

    folder: Path
    model: Any
    question: str = "Mira lives in Tolmen and keeps a goat. Where does Mira live?"
    answer: str = "In Tolmen, with a goat."


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """An adapter that PEFT has trained."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    made = Tuned(tmp_path_factory.mktemp("peft") / "support", get_peft_model(base, lora))
    model = made.model
    chat = [{"role": "user", "content": made.question}, {"role": "assistant", "content": made.answer}]
    batch = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(12):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(made.folder)
    return made


@pytest.fixture(scope="session")
def served(tuned: Tuned, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """`coserve serve` with that adapter, in float32, which PEFT computes in too."""
    desk = Desk(tmp_path_factory.mktemp("served"), COSERVE_ENGINE_DTYPE="float32")
    try:
        desk.run(f"coserve serve --adapter support={tuned.folder}")
        yield desk
        desk.end()
    finally:
        desk.kill()


@pytest.fixture
def client(served: Desk) -> Iterator[openai.OpenAI]:
    """OpenAI's client of that server."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as made:
        yield made
