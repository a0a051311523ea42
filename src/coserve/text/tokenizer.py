"""The tokenizer of a model: the interface that coserve uses, and loading."""

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

    def get_chat_template(self) -> str: ...

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
