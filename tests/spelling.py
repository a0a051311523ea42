"""A tokenizer that spells as Llama's first ones do."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Llama's kind: spaces are written as U+2581, and unknown characters as their bytes."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁hi"]
    bpe = models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
