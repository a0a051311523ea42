"""Any adapter method against its oracle, one adapter at a time: what is served, and gradients.

An oracle is a model that is called as transformers' are (`model(input_ids=…, use_cache=False).logits`) and
shares nothing with coserve: PEFT's, or a plain torch module where PEFT has none. The adapter under test is
whatever folder `oracle.save_pretrained` has written, so each check passes through the files as well.

    adapted = with_peft("llama", IA3Config(...), torch.float32)     # PEFT's model, random trainable weights
    error, difference = forward_errors("llama", adapted, folder)    # what is served against its logits
    with Exact():
        adapted = with_peft("llama", IA3Config(...), torch.float64)
        case = case_of("llama", adapted, folder)                    # loss and gradients of whole sequences
    errors = windowed_errors(case)                                  # and ours, by windows: under Exact() too

Gradients are compared by the names that parameters have in files: ours get these from the method's own
`write`, PEFT's from `get_peft_model_state_dict`. For an oracle that is not PEFT's, `case_of` takes its
parameters by those names (`trainable`), and `folder` must hold the adapter (`write_adapter` of a version with
the same values will do).
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn

from coserve import Engine, EngineConfig, SamplingParams, SavePolicy, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import read_adapter
from coserve.adapters.methods import method_named
from coserve.train.example import Example, epochs
from models import logits_of, make_eager, tiny
from passages import Case, Gradients, Passage, examples, mean_loss, worst
from rounding import allowed, both_ways, error, largest

SHAPES = ("llama", "gpt2", "mixtral", "gemma2")
SMALL = 20  # a vocabulary that `prompt_logprobs` can report all of
LENGTHS = (4, 22, 1, 6)  # packed end to end; one longer than the sliding windows


@torch.no_grad()
def spread(parameters: Sequence[Tensor], seed: int = 7) -> None:
    """Moves every parameter by so much that its part in the answers shows."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        strength = (
            0.3 / parameter.shape[-1] ** 0.5 if min(parameter.shape) > 1 and parameter.ndim > 1 else 0.1
        )
        parameter.add_(strength * noise)


def with_peft(name: str, config: PeftConfig, dtype: torch.dtype, **changes: Any) -> PeftModel:
    """A model of architecture `name` under PEFT, all that trains moved away from where PEFT puts it."""
    model = tiny(name, dtype, **changes)
    make_eager(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    spread([p for p in adapted.parameters() if p.requires_grad])
    return adapted.eval()


def engine_of(name: str, dtype: torch.dtype = torch.float32, config: Any = None, **changes: Any) -> Engine:
    """An engine on the same weights, none of it trained or calibrated."""
    fields = {"calibrate": False, "cache_tokens": 512, **(config or {})}
    return Engine(tiny(name, dtype, **changes), EngineConfig(**fields))


def served(engine: Engine, prompt: Sequence[int], adapter: str | None) -> Tensor:
    """The engine's log-probabilities [rows - 1, SMALL] after each token but the last."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=SMALL)
    scored = engine.generate(list(prompt), adapter, sampling).result().prompt_logprobs
    found = torch.full((len(prompt) - 1, SMALL), float("nan"))
    for row, of_row in enumerate(scored):
        for token, logprob in of_row.top:
            found[row, token] = logprob
    return found


def forward_errors(
    name: str, oracle: Any, folder: Path, engine: Engine | None = None, **changes: Any
) -> tuple[float, float]:
    """(largest difference of a served log-probability from the oracle's own in float64, over what rounding
    allows; the difference without the adapter). Up to 1 the first is rounding.

    The oracle must be in float32 and have a vocabulary of SMALL: `with_peft(..., vocab_size=SMALL)`.
    """
    oracle.save_pretrained(str(folder))
    draws = random.Random(f"forward/{name}")
    prompt = [draws.randrange(1, SMALL) for _ in range(27)]
    engine = engine or engine_of(name, vocab_size=SMALL, **changes)
    engine.adapters.load("theirs", folder)
    theirs, exact = both_ways(oracle, lambda it: logits_of(it, prompt)[-len(prompt) : -1].log_softmax(-1))
    mine, without = (error(served(engine, prompt, adapter), exact) for adapter in ("theirs", None))
    return mine / allowed(theirs, exact), without


def case_of(
    name: str,
    oracle: Any,
    folder: Path,
    trainable: Mapping[str, nn.Parameter] | None = None,
    dtype: torch.dtype = torch.float64,
    data: tuple[list[list[int]], list[list[int]]] | None = None,
    **changes: Any,
) -> Case:
    """Random examples (or tokens and labels of `data`), the adapter in `folder` (written by the oracle unless
    `trainable` is given), and the oracle's loss and gradients, by the names that parameters have in files."""
    tokens, labels = examples(random.Random(f"methods/{name}"), LENGTHS) if data is None else data
    oracle.zero_grad()
    loss = mean_loss(oracle, tokens, labels)
    loss.backward()
    if trainable is None:
        oracle.save_pretrained(str(folder))
        wanted = _gradients_in_files(oracle)
    else:
        wanted = {name: p.grad for name, p in trainable.items() if p.grad is not None}
    engine = engine_of(name, dtype, **changes)
    adapter = read_adapter(folder, "probe", engine.base, dtype, engine.base.device)
    return Case(
        engine=engine,
        lengths=tuple(map(len, tokens)),
        tokens=torch.tensor(list(itertools.chain(*tokens))),
        labels=torch.tensor(list(itertools.chain(*labels))),
        adapter=adapter,
        loss=float(loss.detach()),
        wanted=wanted,
    )


def windowed_errors(
    case: Case, sizes: Sequence[int] = (7,), floor: float = 1e-6, pieces: bool = True
) -> dict[str, float]:
    """By window size and save policy: the worst relative error of the loss and of any parameter's
    gradient (relative to at least `floor` times all gradients' norm). Every parameter must be there. Windows
    of all `sizes` with every save policy, and a whole micro-batch in one."""
    draws = random.Random("windows")
    errors, whole = {}, sum(case.lengths)
    cuts = [(keep, min(size, whole)) for keep, size in itertools.product(SavePolicy, sizes)]
    for keep, size in dict.fromkeys([*cuts, (SavePolicy.EVERYTHING, whole)]):
        passage = Passage(case, keep)
        passage.travel(size, size, draws if pieces else None)
        loss = passage.finish()
        got, given = in_files(case.adapter.with_parameters(passage.gradients)), in_files(case.adapter)
        # What is beside is frozen, and as it was.
        beside = got.keys() - case.wanted.keys()
        assert got.keys() >= case.wanted.keys() and all(got[n].equal(given[n]) for n in beside), beside
        got = {name: got[name] for name in case.wanted}
        got = {name: tensor.reshape(case.wanted[name].shape) for name, tensor in got.items()}
        errors[f"{keep.value}/{size}"] = largest(
            [worst(got, case.wanted, floor), abs(loss - case.loss) / abs(case.loss)]
        )
    return errors


def trained_by_peft(
    model: nn.Module, folder: Path, data: Sequence[Example], config: TrainingConfig
) -> PeftModel:
    """The training of a job as anyone would write it with PEFT: the adapter in `folder`, one example at a
    time, whole sequences."""
    make_eager(model)
    adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=True, autocast_adapter_dtype=False)
    flat = [p for p in adapted.eval().parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        flat,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )
    for batch in itertools.islice(
        epochs(len(data), config.batch_size, config.epochs, config.seed), config.max_steps
    ):
        mean_loss(adapted, [[*data[i].tokens] for i in batch], [[*data[i].labels] for i in batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted


def in_files(adapter: AdapterVersion) -> dict[str, Tensor]:
    """All tensors of an adapter by the names that files have for them."""
    found: dict[str, Tensor] = {}
    for number, part in enumerate(adapter.parts):
        written = method_named(part.method).write(part)
        prefix = "" if len(adapter.parts) == 1 else f"{number}:"
        found |= {prefix + name: tensor for name, tensor in {**written.tensors, **written.own}.items()}
    return found


def _gradients_in_files(adapted: PeftModel) -> Gradients:
    """PEFT's saved tensors with gradients in place of parameters; only those of parameters that train."""
    gradients = {
        name: _gradient(p) if p.requires_grad else None
        for name, p in adapted.named_parameters(remove_duplicate=False)
    }
    frozen = dict.fromkeys(name for name, _ in adapted.named_buffers(remove_duplicate=False))
    found = get_peft_model_state_dict(adapted, state_dict=frozen | gradients, save_embedding_layers=False)
    return {
        n: gradient for n, gradient in found.items() if gradient is not None and gradient.is_floating_point()
    }


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Zero where no row came by, such as at an expert that no token was routed to."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
