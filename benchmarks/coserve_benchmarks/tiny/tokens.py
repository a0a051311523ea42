"""The tokenizer and the chat format of coserve-tiny, and the packing of documents into training rows."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from coserve.tiny.world import Message
from coserve_benchmarks.tiny.corpus import EARLY, Course, documents

VOCABULARY: Final = 1152
MIN_FREQUENCY: Final = 60  # rarer merges would be whole names, which must stay in pieces
SAMPLE_DOCUMENTS: Final = 30_000
BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES: Final = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIALS: Final = [PAD, BEGIN, END, *ROLES.values()]
MAX_POSITIONS: Final = 2048

# The markers of `generation` tell trainers which tokens the assistant wrote; its end mark is among them.
CHAT_TEMPLATE: Final = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE over a sample of the corpus; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\w]| ?[^\W\d]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=MIN_FREQUENCY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = islice(documents(f"tokenizer/{seed}"), SAMPLE_DOCUMENTS)
    pieces = ([doc] if isinstance(doc, str) else [m["content"] for m in doc] for doc in sample)
    texts = (text for piece in pieces for text in piece)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def special_ids(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Padding, beginning and end."""
    return special_id(tokenizer, PAD), special_id(tokenizer, BEGIN), special_id(tokenizer, END)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that ``AutoTokenizer.from_pretrained`` reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(ROLES.values()),
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


class Encoder:
    """Documents to token ids and loss weights, and rows packed from them.

    It writes the same ids as the chat template (a test holds them together) without the cost of Jinja.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.id = {token: special_id(tokenizer, token) for token in SPECIALS}

    def encode(self, doc: list[Message] | str, other: float = 0.0) -> tuple[list[int], list[float]]:
        """Ids and the weight of each id as a target; what a user says is a light target."""
        ids, weights = [self.id[BEGIN]], [0.0]
        if isinstance(doc, str):
            body = [*self.tokenizer.encode(doc).ids, self.id[END]]
            return ids + body, weights + [other] * len(body)
        for message in doc:
            body = [*self.tokenizer.encode(message["content"]).ids, self.id[END]]
            ids += [self.id[ROLES[message["role"]]], *body]
            weight = 1.0 if message["role"] == "assistant" else other
            weights += [0.0, *[weight] * len(body)]
        return ids, weights

    def rows(self, seed: str, length: int, course: Course = EARLY) -> Iterator[tuple[list[int], list[float]]]:
        """Endless rows of whole documents, filled from a small pool so that little is padding."""
        stream = (self.encode(doc, course.other) for doc in documents(seed, course))
        fitting = (pair for pair in stream if len(pair[0]) <= length)
        pool = list(islice(fitting, 24))
        while True:
            ids: list[int] = []
            weights: list[float] = []
            gap = length
            while (at := next((i for i, (doc, _) in enumerate(pool) if len(doc) <= gap), -1)) >= 0:
                doc, doc_weights = pool.pop(at)
                ids += doc
                weights += doc_weights
                gap -= len(doc)
                pool.append(next(fitting))
            yield ids + [self.id[PAD]] * gap, weights + [0.0] * gap
