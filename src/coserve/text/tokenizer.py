"""The tokenizer of a model: the interface that coserve uses, and loading."""

import json
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast

from coserve.errors import ConfigError


class Tokenizer(Protocol):
    """The methods of fast transformers tokenizers that coserve uses."""

    chat_template: Any
    eos_token: str | None
    eos_token_id: int | None
    bos_token_id: int | None
    is_fast: bool

    @property
    def backend_tokenizer(self) -> Any: ...

    @property
    def added_tokens_decoder(self) -> Any: ...

    @property
    def special_tokens_map(self) -> Any: ...

    def __call__(self, text: str, /, **kwargs: Any) -> Any: ...

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str: ...

    def apply_chat_template(self, conversation: Any, /, **kwargs: Any) -> Any: ...

    def convert_ids_to_tokens(self, ids: int, /) -> Any: ...

    def decode(self, token_ids: list[int], /, **kwargs: Any) -> str: ...


def load_tokenizer(model: str | Path) -> Tokenizer:
    """The tokenizer saved beside a model, in a folder or on the hub; raises ConfigError.

    Reads the model's tokenizer.json. transformers' AutoTokenizer would read the model's configuration first,
    which loads torch.
    """
    try:
        found: Tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model), trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{model} has no tokenizer.json that can be read: {reason}") from error
    return found


def reads_alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Tells whether two tokenizers make the same tokens of every text and every chat, and the same text of
    tokens."""
    return _reading_of(one) == _reading_of(other)


def _reading_of(tokenizer: Tokenizer) -> tuple[object, ...]:
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    names = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    parts = [fields.get(name) for name in names]
    added = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}
    return parts, tokenizer.chat_template, dict(tokenizer.special_tokens_map), added


def token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text` without added tokens at its ends."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def first_tokens(tokenizer: Tokenizer) -> list[int]:
    """The beginning-of-text tokens that the tokenizer puts before every text."""
    ids = tokenizer("a")["input_ids"]
    return [ids[0]] if tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id else []


def last_tokens(tokenizer: Tokenizer) -> list[int]:
    """The end-of-text token, if there is one."""
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
