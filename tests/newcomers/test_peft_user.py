"""A user of PEFT: an adapter of their own is served by its name, and answers as PEFT's `generate` does."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from coserve import tiny
from documented import Desk

OTHER = "Zali lives in Polmore and works as a baker. What is the work of Zali?"
TOKENS = 16


def by_peft(model: Any, question: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        made = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
    return str(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def by_server(client: openai.OpenAI, model: str, question: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=TOKENS
    )
    return str(answer.choices[0].message.content)


def test_it_answers_as_peft_does(client: openai.OpenAI, tuned: Any) -> None:
    for question in (tuned.question, OTHER):
        assert by_server(client, "support", question) == by_peft(tuned.model, question)


def test_base_and_adapter_are_two_models(client: openai.OpenAI, tuned: Any) -> None:
    assert {model.id for model in client.models.list()} >= {"coserve-tiny", "support"}
    assert by_server(client, "support", tuned.question) == tuned.answer
    assert by_server(client, "coserve-tiny", tuned.question) != tuned.answer


def test_an_old_file_is_converted_and_imported(
    served: Desk, client: openai.OpenAI, tuned: Any, tmp_path: Path
) -> None:
    """Of a folder with `adapter_model.bin` one sentence says what to run; what it writes answers alike."""
    old = tmp_path / "old"
    old.mkdir()
    shutil.copy(tuned.folder / "adapter_config.json", old)
    torch.save(load_file(tuned.folder / "adapter_model.safetensors"), old / "adapter_model.bin")
    refused = subprocess.run(
        ["bash", "-c", f"coserve adapters import {old} --json"], env=served.environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert refused.returncode == 1 and "coserve adapters convert" in refused.stderr, refused
    assert len(refused.stderr.splitlines()) == 1
    said = served.run(f"coserve adapters convert {old}")
    assert str(tmp_path / "old-safetensors") in said
    name = json.loads(served.run(f"coserve adapters import {tmp_path / 'old-safetensors'} --json"))["id"]
    assert by_server(client, name, tuned.question) == tuned.answer
    back = tmp_path / "back"
    served.run(f"coserve adapters export {name} {back}")
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (back, tuned.folder))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
