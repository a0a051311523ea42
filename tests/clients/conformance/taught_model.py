"""A model that gives fixed answers to some chats, made in seconds: what a test of a protocol needs of one.

Its layers are random, with sharp attention, so the hidden state of each token tells all that came before it.
Its head is the least-squares solution that maps the states in the answers to their next tokens. So it answers
these chats as it was told to, token by token, and says nothing of use to any other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coserve import tiny
from coserve.jobs.messages import read_messages, read_tools
from coserve.text import Text
from coserve.text.chat import encode_chat
from coserve.text.tokenizer import load_tokenizer

HIDDEN: Final = 1024  # more than tokens are taught
POSITIONS: Final = 4096
_SHARP: Final = 3.0  # standard deviation of an attention score
_RIDGE: Final = 1e-7
_MARGIN: Final = 0.2  # of the next token's score, which is 1, over all others'


def taught(records: Sequence[Mapping[str, Any]], folder: Path) -> int:
    """Saves a model, with coserve-tiny's tokenizer, that answers each chat of `records` as its last message
    says. Returns the number of tokens that it was taught."""
    tokenizer = load_tokenizer(str(tiny.path()))
    text = Text(tokenizer)
    chats = [_encoded(record, text) for record in records]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=2,
            num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=POSITIONS,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=False, dtype="float32",
        )
    ).eval()  # fmt: skip
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            # Scores are sums over a head's width of products, over the root of that width.
            torch.nn.init.normal_(linear.weight, std=(_SHARP**0.5 / HIDDEN**0.5))
        for linear in (layer.self_attn.v_proj, layer.self_attn.o_proj):
            torch.nn.init.normal_(linear.weight, std=1.5 / HIDDEN**0.5)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    with torch.no_grad():
        states = torch.cat(
            [model.model(torch.tensor([t])).last_hidden_state[0, n - 1 : -1] for t, n in chats]
        )
        wanted = torch.tensor([token for tokens, first in chats for token in tokens[first:]])
        assert len(wanted) < HIDDEN * 0.8, "the head has room for no more"
        head = _solved(states.double(), wanted, len(tokenizer))
        _check(states, wanted, head)
        model.lm_head.weight.copy_(head * 30.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return len(wanted)


def _encoded(record: Mapping[str, Any], text: Text) -> tuple[list[int], int]:
    """The tokens of a chat, and the place of the first of its last message."""
    messages, tools = read_messages(record["messages"]), read_tools(record)
    tokens, learned = encode_chat(messages, text.tokenizer, tools=tools)
    return tokens, max((place for place, own in enumerate(learned) if not own), default=-1) + 1


def _solved(states: torch.Tensor, wanted: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The head [vocabulary, hidden] that gives 1 to the next token of each state, and 0 to all others."""
    gram = states @ states.T
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    targets = torch.nn.functional.one_hot(wanted, vocabulary).double()
    return (states.T @ torch.linalg.solve(gram, targets)).T.float()


def _check(states: torch.Tensor, wanted: torch.Tensor, head: torch.Tensor) -> None:
    """Asserts that each next token leads clearly, also where states are a little off, as by other kernels."""
    off = states + 1e-4 * states.norm(dim=1, keepdim=True) * torch.randn_like(states) / HIDDEN**0.5
    scores = off @ head.T
    right = scores.gather(1, wanted[:, None])[:, 0]
    scores.scatter_(1, wanted[:, None], -1.0)
    assert (right - scores.max(dim=1).values).min() > _MARGIN
