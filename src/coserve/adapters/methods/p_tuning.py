"""P-tuning: prompt embeddings computed by a small trained network. Liu et al. 2021."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import Part, Place, Side
from coserve.adapters.method import Written
from coserve.adapters.prompts import (
    EMBEDDINGS,
    ENCODER,
    LOST,
    MOST_HIDDEN,
    PlainPrompt,
    Shapes,
    draw_encoder,
    expect_count,
    has_encoder,
    linear_shapes,
    prompt_fields,
    read_encoder,
    read_prompt,
)
from coserve.adapters.saved import Saved, shown
from coserve.adapters.sites import Frame
from coserve.adapters.virtual import Prompt, prompt_site
from coserve.errors import AdapterError, AdapterMismatch

Encoder = Literal["MLP", "LSTM"]
MOST_LAYERS: Final = 64  # of an LSTM


@dataclass(frozen=True, slots=True)
class PTuningConfig:
    """Settings of P-tuning: `tokens` virtual tokens that an `encoder` of inner width `hidden` (0 takes the
    model's) computes. `layers` are an LSTM's."""

    tokens: int = 20
    encoder: Encoder = "MLP"
    hidden: int = 0
    layers: int = 2

    def __post_init__(self) -> None:
        expect_count("P-tuning", self.tokens)
        if self.encoder not in get_args(Encoder):
            raise AdapterError(f"the encoder is {' or '.join(get_args(Encoder))}, not {shown(self.encoder)}")
        for name, least, most in (("hidden", 0, MOST_HIDDEN), ("layers", 1, MOST_LAYERS)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise AdapterError(f"the encoder's {name} must be {least} to {most}, not {shown(value)}")

    @property
    def layers_of_lstm(self) -> int:
        """Layers of the LSTM; 0 where the encoder is not one."""
        return self.layers if self.encoder == "LSTM" else 0


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt(Prompt):
    """A prompt and its encoder, by PEFT's names: `embedding.weight`, `mlp_head...`, `lstm_head...`."""

    weights: Mapping[str, Tensor] = field(repr=False)
    layers: int  # of the LSTM; 0 is an MLP

    @property
    def count(self) -> int:
        return len(self.weights["embedding.weight"])

    def parameters(self) -> Mapping[str, Tensor]:
        return self.weights

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "EncodedPrompt":
        return replace(self, weights=parameters)

    def rows(self) -> Tensor:
        x = self.weights["embedding.weight"]
        if self.layers:
            return self._linear("mlp_head.2", self._linear("mlp_head.0", self._lstm(x)).relu())
        x = self._linear("mlp_head.2", self._linear("mlp_head.0", x).relu()).relu()
        return self._linear("mlp_head.4", x)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _lstm(self, x: Tensor) -> Tensor:
        """Bidirectional LSTM over x [count, width], as torch's."""
        for layer in range(self.layers):
            ways = [self._one_way(x, f"l{layer}"), self._one_way(x.flip(0), f"l{layer}_reverse").flip(0)]
            x = torch.cat(ways, dim=-1)
        return x

    def _one_way(self, x: Tensor, of: str) -> Tensor:
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w_in, w_hidden, b_in, b_hidden = (self.weights[f"lstm_head.{kind}_{of}"] for kind in kinds)
        entering = F.linear(x, w_in, b_in)
        hidden = cell = x.new_zeros(w_hidden.shape[1])
        found = []
        for row in entering:
            i, f, g, o = (row + F.linear(hidden, w_hidden, b_hidden)).chunk(4)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            found.append(hidden)
        return torch.stack(found)


class PTuning:
    """Prompts that an encoder computes. PEFT's files hold its outputs and not the encoder, so training from
    such a file trains the embeddings directly; coserve's checkpoints have the encoder."""

    name, peft_type, config = "p_tuning", "P_TUNING", PTuningConfig
    aliases: Final = {
        "num_virtual_tokens": "tokens",
        "encoder_reparameterization_type": "encoder",
        "encoder_hidden_size": "hidden",
        "encoder_num_layers": "layers",
    }

    def fresh(self, config: PTuningConfig, frame: Frame, generator: torch.Generator) -> Part:
        """Draws the encoder as PEFT does: torch's defaults for an embedding, an LSTM and linears."""
        width = prompt_site(frame).outputs
        weights = draw_encoder(config.tokens, width, _shapes(config, width), generator)
        return self._part(config, EncodedPrompt(weights, config.layers_of_lstm), frame)

    def read(self, saved: Saved, frame: Frame) -> Part:
        kind = saved.take("encoder_reparameterization_type", "MLP")
        hidden, layers = saved.take("encoder_hidden_size", 0), saved.take("encoder_num_layers", 2)
        saved.ignore("encoder_dropout")  # of the encoder's LSTM, while PEFT trained it
        prompt = read_prompt(saved, frame)
        if not has_encoder(saved):
            return self._part(PTuningConfig(prompt.count), replace(prompt, note=LOST), frame)
        if layers > len(saved.tensors):
            raise AdapterMismatch(f"{saved.folder}: encoder_num_layers={layers}, and it has fewer tensors")
        config, width = PTuningConfig(prompt.count, kind, hidden, layers), prompt_site(frame).outputs
        weights = read_encoder(saved, prompt.count, width, _shapes(config, width))
        return self._part(config, EncodedPrompt(weights, config.layers_of_lstm), frame)

    def write(self, part: Part) -> Written:
        config, (prompt,) = part.config, part.bypasses.values()
        assert isinstance(config, PTuningConfig) and isinstance(prompt, Prompt)
        tensors = {EMBEDDINGS: prompt.rows()}
        fields = prompt_fields(tensors[EMBEDDINGS])
        if isinstance(prompt, PlainPrompt):
            return Written(fields, tensors)
        fields["encoder_reparameterization_type"] = config.encoder
        fields["encoder_hidden_size"] = config.hidden or tensors[EMBEDDINGS].shape[1]
        fields["encoder_num_layers"] = config.layers
        own = {f"{ENCODER}{name}": weight for name, weight in prompt.parameters().items()}
        return Written(fields, tensors, own)

    def _part(self, config: PTuningConfig, prompt: Prompt, frame: Frame) -> Part:
        return Part(self.name, config, {Place(prompt_site(frame).path, Side.PROMPT): prompt})


def _shapes(config: PTuningConfig, width: int) -> Shapes:
    hidden = config.hidden or width
    if config.encoder == "MLP":
        return linear_shapes("mlp_head", (0, 2, 4), (width, hidden, hidden, width))
    bound = hidden**-0.5
    found: Shapes = {}
    for layer in range(config.layers):
        for way in (f"l{layer}", f"l{layer}_reverse"):
            entering = 2 * hidden if layer else width
            found[f"lstm_head.weight_ih_{way}"] = (4 * hidden, entering), bound
            found[f"lstm_head.weight_hh_{way}"] = (4 * hidden, hidden), bound
            found[f"lstm_head.bias_ih_{way}"] = found[f"lstm_head.bias_hh_{way}"] = (4 * hidden,), bound
    return found | linear_shapes("mlp_head", (0, 2), (2 * hidden, 2 * hidden, width))


METHOD = PTuning()
