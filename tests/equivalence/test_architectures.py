"""Every causal language model of transformers that can be built small: it answers and trains like
transformers, or is refused with one reason; nothing raises anything else."""

import itertools
import random
import warnings
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapters import lora_adapter
from coserve import Engine, EngineConfig, SamplingParams, SavePolicy
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.sites import Kind
from coserve.errors import UnsupportedModel
from coserve_benchmarks.models import shrunk
from models import greedy, prompts
from passages import LORA, Case, Passage, examples, mean_loss, worst

# Layers of a type that may be recurrent, and are not; routed attention, shared keys and values, several
# hidden states, sparse attention, a cache of its own, experts added to what a linear gives, queries and keys
# clipped where they lie.
SHORT = (
    "granitemoehybrid dense", "granitemoehybrid experts", "jetmoe", "gemma4_text", "gemma3n_text",
    "deepseek_v32", "moshi", "llama4_text", "olmo",
)  # fmt: skip
# Several hidden states; ALiBi; layers and attention older than the interfaces; embeddings that count
# positions; encoders that were made decoders; caches and layers that are shared; biases made of values;
# states that are arguments.
EXACT = (
    "gemma3n_text", "mpt", "falcon alibi", "xglm", "openai-gpt", "gpt_neox_japanese", "diffllama", "roformer",
    "minimax", "zamba2", "doge", "xlstm",
)  # fmt: skip
ANSWER, ROWS = 6, (9, 30, 4)
TOLERANCE = 2e-3  # of gradients in float32, of each parameter's norm or of a hundredth of all


def engine(model: PreTrainedModel) -> Engine:
    config = EngineConfig(calibrate=False, cache_tokens=512, page_size=4, scheduler={"max_prefill_rows": 16})
    return Engine(model, config)


def answers_alike(name: str, served: Engine) -> bool:
    """Three prompts at once, in chunks, beyond sliding windows."""
    asked = prompts(random.Random(name), ROWS)
    own = shrunk.build(name)
    wanted = [greedy(own, prompt, ANSWER) for prompt in asked]
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    given = [served.generate(prompt, sampling=sampling) for prompt in asked]
    served.run()
    return [answer.tokens for answer in given] == wanted


def gradient_error(name: str, served: Engine) -> float:
    """Of windows and put-downs, with the default save policy of a job over HTTP, against autograd."""
    draws = random.Random(f"train/{name}")
    tokens, labels = examples(draws, ROWS)
    sites = {
        p: s for p, s in served.base.sites.items() if s.kind is Kind.LINEAR and s.stage < served.base.depth
    }
    generator = torch.Generator().manual_seed(1)
    bypasses = {
        path: LoRABypass(
            torch.randn(4, site.inputs, generator=generator) * 0.3 / site.inputs**0.5,
            torch.randn(site.outputs, 4, generator=generator) * 0.15,
            LORA.at([path]).scale(path, LORA.rank),
        )
        for path, site in sites.items()
    }
    oracle = shrunk.build(name)
    leaves = {
        f"{path}.{letter}": tensor.clone().requires_grad_()
        for path, bypass in bypasses.items()
        for letter, tensor in bypass.parameters().items()
    }
    for path in bypasses:
        a, b = leaves[f"{path}.lora_A"], leaves[f"{path}.lora_B"]

        def beside(_: nn.Module, args: tuple[Tensor], out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            return out + LORA.at([""]).scale("", LORA.rank) * (args[0] @ a.t()) @ b.t()

        oracle.get_submodule(path).register_forward_hook(beside)
    loss = mean_loss(oracle, tokens, labels)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    wanted = {
        n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found, strict=True)
    }
    flat = (torch.tensor(list(itertools.chain(*of))) for of in (tokens, labels))
    adapter = lora_adapter("probe", 0, LORA, bypasses)
    case = Case(served, ROWS, *flat, adapter, float(loss.detach()), wanted)
    passage = Passage(case, SavePolicy.PRUNED)
    passage.travel(11, 11 if served.base.mixers else 17, draws)  # states are kept where windows begin
    ended = passage.finish()
    assert abs(ended - case.loss) <= 1e-3 * case.loss
    return worst(passage.gradients, wanted, floor=0.01)


def outcome(name: str) -> str:
    """The outcome of a model, in a line. Any other exception is a fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = shrunk.build(name)
        except Exception as error:  # of transformers' own: there is no model to try
            return f"not built: {type(error).__name__}"
        try:
            served = engine(model)
        except UnsupportedModel as refused:
            return f"refused: {refused}"
        assert answers_alike(name, served), f"{name} answers otherwise"
        error = gradient_error(name, served)
        assert error <= TOLERANCE, f"{name}: its gradients are {error:.1e} apart"
        return "ok"


@pytest.mark.parametrize("name", SHORT)
def test_an_architecture_is_right_or_refused(name: str) -> None:
    assert not outcome(name).startswith("not built")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EXACT)
def test_an_architecture_is_right(name: str) -> None:
    assert outcome(name) == "ok"


@pytest.mark.slow
def test_every_architecture_is_right_or_refused() -> None:
    """Prints a table."""
    outcomes, faults = {}, {}
    for name in (*shrunk.NAMES, *shrunk.VARIANTS):
        try:
            outcomes[name] = outcome(name)
        except Exception as error:
            faults[name] = f"{type(error).__name__}: {error}"
            outcomes[name] = f"FAULT: {faults[name]}"
        print(f"{name:28} {outcomes[name][:160]}", flush=True)
    print(Counter(outcome.partition(":")[0] for outcome in outcomes.values()))
    assert not faults
