"""Peers for held activations: PEFT, or plain torch on the model for methods that PEFT does not have."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.lora import LoRAConfig
from coserve.workload.requests import Tokens
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.peers import PeftTraining, TorchTraining

RANK: Final = 8
WIDTH: Final = 64

OURS: Final[Mapping[str, object]] = {
    "lora": LoRAConfig(rank=RANK),
    "ia3": IA3Config(),
    "bottleneck": BottleneckConfig(width=WIDTH),
}


def peer_of(method: str, shape: ModelShape, examples: Sequence[Tokens]) -> TorchTraining:
    """Trains an adapter of the method with all of it in the base's dtype, as the engine computes."""
    if method == "lora":
        return PeftTraining(shape, examples, RANK, matched=True)
    peer = _ia3(shape, examples) if method == "ia3" else _bottleneck(shape, examples)
    assert peer.dtypes == {torch.bfloat16}, "the peer keeps its adapter in another dtype"
    return peer


def _ia3(shape: ModelShape, examples: Sequence[Tokens]) -> TorchTraining:
    """At keys, values and what enters the second linear of the feed-forward, as PEFT chooses for a Llama."""
    from peft import IA3Config, get_peft_model

    base: Any = shape.build()
    model = get_peft_model(base, IA3Config(), autocast_adapter_dtype=False)
    return TorchTraining(base, model, examples, shape.vocabulary)


class _Bottleneck(nn.Module):
    """y + U relu(D y), as `coserve`'s."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, WIDTH, dtype=torch.bfloat16)
        self.up = nn.Linear(WIDTH, hidden, dtype=torch.bfloat16)
        nn.init.zeros_(self.up.weight)

    def forward(self, y: Tensor) -> Tensor:
        added: Tensor = self.up(F.relu(self.down(y)))
        return y + added


def _bottleneck(shape: ModelShape, examples: Sequence[Tokens]) -> TorchTraining:
    """One behind each attention and each feed-forward, hooked on from outside."""
    base: Any = shape.build()
    base.requires_grad_(False)
    for layer in base.model.layers:
        for sublayer in (layer.self_attn, layer.mlp):
            sublayer.bottleneck = _Bottleneck(shape.hidden)
            sublayer.register_forward_hook(_behind(sublayer.bottleneck))
    return TorchTraining(base, base, examples, shape.vocabulary)


def _behind(bottleneck: _Bottleneck) -> Callable[[nn.Module, Any, Any], Any]:
    def add(_: nn.Module, __: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return (bottleneck(out[0]), *out[1:])
        return bottleneck(out)

    return add
