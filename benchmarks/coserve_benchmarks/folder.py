"""A shape as a folder that a server can be started with, and words to train on."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from coserve.workload.requests import Tokens, training_tokens
from coserve.workload.shapes import ModelShape


def save_shape(shape: ModelShape, folder: Path, device: str = "cpu") -> Path:
    """Saves the model, made on `device`, and a tokenizer in which every token is a word; returns their
    folder."""
    path = folder / f"shape-{shape.name}"
    logging.disable_progress_bar()
    shape.build(device).save_pretrained(path)
    word_tokenizer(shape.vocabulary).save_pretrained(path)
    return path


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` tokens in which every token is a word."""
    vocabulary = {_word(token): token for token in range(size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=_word(0)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def training_file(shape: ModelShape, examples: int, length: int, seed: int) -> bytes:
    """JSONL of examples of `length` tokens each."""
    return training_lines(training_tokens([length] * examples, shape.vocabulary, seed))


def training_lines(rows: Iterable[Tokens]) -> bytes:
    """JSONL of these examples."""
    lines = (json.dumps({"text": " ".join(map(_word, row))}) for row in rows)
    return "".join(f"{line}\n" for line in lines).encode()


def _word(token: int) -> str:
    return f"w{token}"
