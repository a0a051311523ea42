"""Writes a model's tokenizer into a GGUF file, from its `tokenizer.json`: tokens and their types, what
llama.cpp merges them by, and the chat template."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from coserve.errors import AdapterError

# llama.cpp has regular expressions by name only, and some names change more than these: whether a word that
# is a token itself is merged at all (`ignore_merges`).
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDS}"
_QWEN_2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BY_SPLIT: Final[Mapping[tuple[str, bool], str]] = MappingProxyType({
    (_QWEN_2, False): "qwen2",
    (_LLAMA_3, True): "llama-bpe",
    (_LLAMA_3, False): "dbrx",
    (_TEKKEN, True): "tekken",
    ("", False): "gpt-2",
    ("digits", False): "smollm",
})  # fmt: skip
_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")
_SPACE: Final = "\u2581"  # stands for a space in SentencePiece's pieces
_WITHOUT: Final = "with --weights-only the file has no tokenizer"


def add_vocabulary(writer: Any, gguf: Any, folder: Path, size: int) -> None:
    """Adds the tokenizer in a folder to a file that is being written, for a model of `size` token ids. Raises
    AdapterError where llama.cpp has none that makes the same tokens."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise AdapterError(f"{folder} has no tokenizer.json to make GGUF's vocabulary of: {_WITHOUT}")
    told = json.loads(file.read_text())
    model, kinds = told["model"], gguf.TokenType
    tokens = [f"[PAD{id}]" for id in range(size)]
    types = [kinds.UNUSED] * size
    by_id = {id: (piece, kinds.NORMAL) for piece, id in _pieces(model).items()}
    for added in told.get("added_tokens") or ():
        by_id[added["id"]] = (added["content"], kinds.CONTROL if added["special"] else kinds.USER_DEFINED)
    if by_id and max(by_id) >= size:
        raise AdapterError(f"{file} has the token {max(by_id)}, and the model has {size} token ids")
    if of_bytes := bool(model.get("byte_fallback")):
        writer.add_tokenizer_model("llama")
        writer.add_add_space_prefix(_prefix(told, file))
        writer.add_token_scores(_scores(model, by_id, kinds, size, file))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre(told, file))
    for id, (piece, kind) in by_id.items():
        if of_bytes and piece == model.get("unk_token"):
            kind = kinds.UNKNOWN
        elif of_bytes and _BYTE.fullmatch(piece):
            kind = kinds.BYTE
        tokens[id], types[id] = piece, kind
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=not of_bytes, n_vocab=size)
    # llama.cpp has defaults of its own for a file that does not say what a text begins and ends with.
    special.add_special_token = {"bos": False, "eos": False, **special.add_special_token}
    special.add_to_gguf(writer, quiet=True)


def _pieces(model: Mapping[str, Any]) -> Mapping[str, int]:
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise AdapterError(
            f"GGUF's vocabularies here are BPE, and this tokenizer is {model['type']}: {_WITHOUT}"
        )
    pieces: Mapping[str, int] = model["vocab"]
    return pieces


def _pre(told: Mapping[str, Any], file: Path) -> str:
    """llama.cpp's name of how texts are split before they are merged."""
    split, last = "", told.get("pre_tokenizer") or {}
    normalizer = (told.get("normalizer") or {"type": "NFC"})["type"]
    match last.get("pretokenizers") or [last]:
        case [{"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated"}, last]:
            known = last.get("use_regex") is False
        case [{"type": "Digits", "individual_digits": True}, last]:
            split, known = "digits", last.get("use_regex", True)
        case [last]:
            known = last.get("use_regex", True)
        case _:
            known = False
    name = _BY_SPLIT.get((split, bool(told["model"].get("ignore_merges"))))
    if name is None or not known or last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise AdapterError(
            f"{file} splits texts as none of llama.cpp's tokenizers known here does: {_WITHOUT}"
        )
    if normalizer != "NFC":
        raise AdapterError(f"{file} changes texts by {normalizer} first, as llama.cpp does not: {_WITHOUT}")
    return name


def _prefix(told: Mapping[str, Any], file: Path) -> bool:
    """Tells whether a space is put before a text. Raises AdapterError where a text is split at all: pieces of
    SentencePiece are merged over a whole text."""
    before = told.get("pre_tokenizer") or {"type": "Metaspace", "prepend_scheme": "never"}
    match before:
        case {"type": "Metaspace"} if not before.get("split", False):
            prepended = before.get("prepend_scheme", "always") != "never"
        case {"type": "Split", "pattern": {"String": " "}}:  # there are none any more
            prepended = False
        case _:
            raise AdapterError(
                f"{file} splits texts before pieces are merged, as llama.cpp does not: {_WITHOUT}"
            )
    normalizer = told.get("normalizer") or {}
    steps = normalizer.get("normalizers") or [normalizer]
    return prepended or any(step.get("type") == "Prepend" for step in steps)


def _scores(
    model: Mapping[str, Any], by_id: Mapping[int, tuple[str, Any]], kinds: Any, size: int, file: Path
) -> list[float]:
    """Scores of the tokens: llama.cpp merges two neighbours whenever they make a token, the one with the
    highest score first. So each token's score is the rank of the first merge that makes it, and all ways to
    make a token of two have to be merges."""
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    known, pieces = set(merges), model["vocab"]
    scores = [0.0] * size
    for rank in range(len(merges) - 1, -1, -1):
        if (id := pieces.get("".join(merges[rank]))) is not None:
            scores[id] = -1.0 - rank
    for piece, kind in by_id.values():
        if kind is kinds.NORMAL and not _BYTE.fullmatch(piece):
            for cut in range(1, len(piece)):
                halves = piece[:cut], piece[cut:]
                if halves[0] in pieces and halves[1] in pieces and halves not in known:
                    raise AdapterError(
                        f"{file} merges no {halves[0]!r} with {halves[1]!r}, as llama.cpp does: {_WITHOUT}"
                    )
    return scores
