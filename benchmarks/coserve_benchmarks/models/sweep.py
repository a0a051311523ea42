"""One type of models after the other, built small: does it answer and train as transformers' own?

The oracle is the model's own forward of one text at a time, of a multimodal model as a whole with its towers.
Where that is further from itself in float64 than the tolerance, it is the forward in float64; and where
transformers' own answers from a cache are further from its forward, decoded rows are compared with these.
"""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.adapters.files import WEIGHTS, write_adapter
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.saved import PREFIX
from coserve.adapters.settings import settings_of
from coserve.config import EngineConfig
from coserve.core.request import SamplingParams
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.errors import CoserveError
from coserve.memory.fake_tensors import fake_tensors
from coserve.model.base import Base
from coserve.model.foreign import read_config
from coserve.model.load import load_base, model_of_shapes
from coserve.model.quantized.embedding import QuantizedEmbedding
from coserve.split.address import Address
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.service import SplitService
from coserve.streamed.model_files import stored_bytes
from coserve.streamed.shapes import enough_to_stream
from coserve.train.config import TrainingConfig
from coserve.train.fresh import fresh_adapter
from coserve.workload.requests import Tokens, training_tokens
from coserve_benchmarks.folder import word_tokenizer
from coserve_benchmarks.methods.menu import METHODS
from coserve_benchmarks.models import shrunk
from coserve_benchmarks.ours import examples

ANSWERS: Final = 2e-5  # largest error of a log-probability, of the largest logit
TRAINING: Final = 2e-3  # of a gradient, of its norm or of a hundredth of all
_LENGTHS: Final = (9, 30, 4)  # of prompts and of training texts: beyond sliding windows, beyond a chunk
_NEW: Final = 4  # tokens of an answer
CONFIG: Final[dict[str, Any]] = {
    "calibrate": False, "cache_tokens": 512, "page_size": 4, "scheduler": {"max_prefill_rows": 16},
}  # fmt: skip
_ROUNDED: Final = 64 << 10  # bytes by which small blocks grow as they are rounded up to pages
_LORA: Final = LoRAConfig(rank=4, alpha=6.0)
# Plain descent: with an epsilon that dwarfs every gradient and no memory, AdamW subtracts the learning rate
# over epsilon times the gradient.
_HUGE: Final = 1e12
_STEP: Final = 1e6


@dataclass(slots=True)
class Outcome:
    """The outcome of one type. `unbuilt` are transformers' own words where it makes no small model that reads
    text alone, `refused` coserve's; errors are None where nothing was compared, and `words` say why. `most`
    has the largest error of answers by what was compared, where that is not `ANSWERS`. A `fault` is anything
    else."""

    name: str
    unbuilt: str = ""
    refused: str = ""
    answers: float | None = None
    training: float | None = None
    streamed: float | None = None
    split: float | None = None
    quantized: float | None = None
    without: list[str] = field(default_factory=list)  # methods that it does not take
    words: dict[str, str] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    fault: str = ""

    @property
    def is_exact(self) -> bool:
        """Tells whether it answers and trains, and within the tolerances."""
        return not self.fault and self.answers is not None and self.training is not None

    def take(self, what: str, found: "ComparedAnswers") -> None:
        """Notes how far answers are from their oracle."""
        setattr(self, what, found.error)
        self.words |= {
            (key if what == "answers" else f"{what}.{key}"): own for key, own in found.words.items()
        }
        if found.most > ANSWERS:
            self.most[what] = found.most


@dataclass(frozen=True, slots=True)
class ComparedAnswers:
    """The largest error of a log-probability, of the largest logit, and the largest that is right: `ANSWERS`,
    or that of transformers' own float32 against its float64 where that is larger. `words` say which oracle it
    was instead of the forward in float32: `exact` or `decoded`."""

    error: float
    most: float = ANSWERS
    words: Mapping[str, str] = field(default_factory=dict)


def sweep(names: Iterable[str]) -> Iterator[Outcome]:
    """Tries each type."""
    for name in names:
        outcome = Outcome(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                _try(outcome)
            except Exception as error:  # a fault of ours, whichever it is: the other types go on
                outcome.fault = _words(error)
        yield outcome


def _try(outcome: Outcome) -> None:
    name, texts = outcome.name, training_tokens(list(_LENGTHS), shrunk.VOCABULARY, 0)
    try:
        oracle = shrunk.build(name)
        logits_of(oracle, texts[0])
    except Exception as error:  # transformers', of every kind
        outcome.unbuilt = _words(error)
        return
    try:
        engine = Engine(shrunk.build(name), EngineConfig(**CONFIG))
    except CoserveError as error:
        outcome.refused = str(error)
        return
    outcome.take("answers", compare_answers(engine, oracle, texts))
    for method, fields in METHODS.items():
        try:
            fresh_adapter(engine.base, method, settings_of(fields), 0)
        except CoserveError as error:
            outcome.without.append(method)
            outcome.words[method] = str(error)
    with _refusals(outcome, "training"):
        outcome.training = gradient_error(engine, oracle, texts)
    with tempfile.TemporaryDirectory() as scratch, _refusals(outcome, "streamed", scratch):
        outcome.take("streamed", _streamed(name, texts, Path(scratch) / "model"))
    with tempfile.TemporaryDirectory() as scratch, _refusals(outcome, "split", scratch):
        outcome.take("split", compare_split(name, oracle, texts, Path(scratch) / "base.sock"))
    with _refusals(outcome, "quantized"):
        outcome.take("quantized", _quantized(name, oracle, texts))
    _expect(outcome)


def _expect(outcome: Outcome) -> None:
    """Notes errors beyond the tolerances as faults."""
    within = {**dict.fromkeys(("answers", "streamed", "split", "quantized"), ANSWERS), "training": TRAINING}
    beyond = [
        f"{what} are {error:.1e} apart"
        for what, most in within.items()
        if (error := getattr(outcome, what)) is not None and not error <= outcome.most.get(what, most)
    ]
    outcome.fault = "; ".join(beyond)


@contextmanager
def _refusals(outcome: Outcome, what: str, scratch: str = "") -> Iterator[None]:
    """Context whose refusal becomes the outcome's words, without the name of a `scratch` folder."""
    try:
        yield
    except CoserveError as error:
        outcome.words[what] = str(error).replace(f"{scratch}/", "") if scratch else str(error)


def compare_answers(engine: Engine, oracle: PreTrainedModel, texts: list[Tokens]) -> ComparedAnswers:
    """Compares texts and their answers, side by side and in chunks."""
    sampling = SamplingParams(max_tokens=_NEW, ignore_eos=True, prompt_logprobs=3, logprobs=3)
    given = [engine.generate(list(text), sampling=sampling) for text in texts]
    engine.run()
    pairs = [*zip(texts, given, strict=True)]
    wanted = [_forward(oracle, *pair) for pair in pairs]
    if (error := _largest(pairs, wanted)) <= ANSWERS:
        return ComparedAnswers(error)
    words, most = dict[str, str](), ANSWERS
    exact = copy.deepcopy(oracle).double()
    exact.set_experts_implementation("eager")  # grouped products of experts have no float64
    in_float64 = [_forward(exact, *pair) for pair in pairs]
    if (own := _apart(wanted, in_float64)) > ANSWERS:
        oracle, wanted, most = exact, in_float64, own
        words["exact"] = f"compared with transformers' in float64, {own:.1e} from its own in float32"
    decoded = [_decoded(oracle, logits, *pair) for logits, pair in zip(wanted, pairs, strict=True)]
    if (own := _apart(wanted, decoded)) > ANSWERS:
        wanted = decoded
        words["decoded"] = f"decoded rows compared with transformers' cache, {own:.1e} from its own forward"
    return ComparedAnswers(_largest(pairs, wanted), most, words)


def _largest(pairs: list[tuple[Tokens, Completion]], wanted: list[Tensor]) -> float:
    return max(_error(logits, *pair) for logits, pair in zip(wanted, pairs, strict=True))


def _apart(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference of logits, of the largest."""
    pairs = zip(one, other, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _forward(model: PreTrainedModel, text: Tokens, answer: Completion) -> Tensor:
    """Logits [rows, vocabulary] of a text and its answer."""
    return logits_of(model, [*text, *answer.tokens[:-1]])


@torch.no_grad()
def _decoded(model: PreTrainedModel, logits: Tensor, text: Tokens, answer: Completion) -> Tensor:
    """These `logits` with rows of the answer as `generate` computes them, one after the other."""
    ids, tokens = torch.tensor([list(text)]), answer.tokens
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=len(tokens),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        prefix_allowed_tokens_fn=lambda _, given: [tokens[len(given) - len(text)]],
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat([logits[: len(text) - 1], *found.logits])


def _error(logits: Tensor, text: Tokens, answer: Completion) -> float:
    wanted = logits.double().log_softmax(-1)
    scores = [*answer.prompt_logprobs, *answer.logprobs]
    errors = [
        abs(float(wanted[place, token]) - logprob)
        for place, score in enumerate(scores)
        for token, logprob in score.top
    ]
    # The answer's tokens are the likeliest, or as likely.
    rows = wanted[len(text) - 1 :]
    chosen = rows.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
    errors.append(float((rows.max(-1).values - chosen).max()))
    return max(errors) / float(logits.abs().max())


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: list[int] | Tokens) -> Tensor:
    """Logits [rows, vocabulary] of one text."""
    found: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return found


def gradient_error(engine: Engine, oracle: PreTrainedModel, texts: list[Tokens]) -> float:
    """Largest error of a gradient of a job on LoRA beside all linears of the layers, which is read off one
    step of plain descent."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, after = Path(scratch) / "before", Path(scratch) / "after"
        fresh = fresh_adapter(engine.base, "probe", [_LORA], 0)
        generator = torch.Generator().manual_seed(1)
        stirred = fresh.with_parameters(
            {
                name: parameter + 0.1 * torch.randn(parameter.shape, generator=generator)
                for name, parameter in fresh.parameters().items()
            }
        )
        write_adapter(stirred, folder)
        start = engine.adapters.load("probe", folder)
        config = TrainingConfig(
            learning_rate=_STEP * _HUGE, epsilon=_HUGE, betas=(0.0, 0.0), schedule="constant",
            warmup_ratio=0.0, max_grad_norm=None, batch_size=len(texts),
        )  # fmt: skip
        engine.finetune(examples(texts), "trained", training=config, start_from=start).result()
        engine.adapters.save("trained", after)
        then, now = (load_file(one / WEIGHTS) for one in (folder, after))
    wanted = _gradients(oracle, then, texts)
    whole = float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    errors = [
        float(((then[name] - now[name]) / _STEP - gradient).norm() / max(float(gradient.norm()), whole / 100))
        for name, gradient in wanted.items()
    ]
    return max(errors)


def _gradients(model: PreTrainedModel, tensors: dict[str, Tensor], texts: list[Tokens]) -> dict[str, Tensor]:
    """Gradients of the mean loss for an adapter's tensors, by autograd through the model's own forward."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    model.requires_grad_(False)
    hooks = []
    for name, a in leaves.items():
        if not name.endswith(".lora_A.weight"):
            continue
        path, b = name.removeprefix(PREFIX).removesuffix(".lora_A.weight"), name.replace("lora_A", "lora_B")
        hooks.append(model.get_submodule(path).register_forward_hook(_beside(a, leaves[b])))
    losses = []
    for text in texts:
        ids = torch.tensor([list(text)])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum"))
    for hook in hooks:
        hook.remove()
    loss = torch.stack(losses).sum() / sum(len(text) - 1 for text in texts)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found, strict=True)
    }


def _beside(a: Tensor, b: Tensor) -> Callable[..., Tensor]:
    scale = _LORA.alpha / _LORA.rank

    def beside(_: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return y + scale * (given[0] @ a.t()) @ b.t()

    return beside


def _streamed(name: str, texts: list[Tokens], folder: Path) -> ComparedAnswers:
    """As `compare_answers`, of a base that is read from its folder for each pass, but for what must stay; the
    oracle is what transformers reads from there."""
    shrunk.build(name).save_pretrained(folder)
    oracle = shrunk.auto_class(shrunk.kind_of(name)).from_pretrained(folder).eval()
    with fake_tensors():
        shapes = load_base(model_of_shapes(folder, read_config(folder), torch.float32))
    stored = stored_bytes(folder, [block.path for block in shapes.chain])
    budget = enough_to_stream(shapes, stored) + _ROUNDED
    config = EngineConfig(**CONFIG, base_memory=budget)
    return compare_answers(Engine(folder, config, word_tokenizer(shrunk.VOCABULARY)), oracle, texts)


def compare_split(name: str, oracle: PreTrainedModel, texts: list[Tokens], socket: Path) -> ComparedAnswers:
    """As `compare_answers`, of a base whose linears an executor of this process computes."""
    executor = BaseExecutor(BaseLinears(shrunk.build(name)))
    try:
        service = SplitService(executor, Address(path=str(socket)))
        try:
            config = EngineConfig(**CONFIG, base=str(service.address))
            return compare_answers(Engine(shrunk.build(name), config), oracle, texts)
        finally:
            service.close()
    finally:
        executor.close()


def _quantized(name: str, oracle: PreTrainedModel, texts: list[Tokens]) -> ComparedAnswers:
    """As `compare_answers`, of a base in four bits (linears whose inputs are no multiple of a block, the
    embedding and the head in eight); the oracle gets the numbers that its weights are then."""
    engine = Engine(shrunk.build(name), EngineConfig(**CONFIG, quantize="4bit"))
    give_weights(oracle, engine.base)
    return compare_answers(engine, oracle, texts)


@torch.no_grad()
def give_weights(oracle: PreTrainedModel, base: Base) -> None:
    """Gives a model the numbers that the linears and the embedding of a quantized base have."""
    for path, linear in base.linears.items():
        module, weight = oracle.get_submodule(path), linear.placement.weight()
        module.weight.copy_(weight.t() if isinstance(module, Conv1D) else weight)
    embedding = base.model.get_input_embeddings()
    if isinstance(embedding, QuantizedEmbedding):
        oracle.get_input_embeddings().weight.copy_(embedding.weight)


def _words(error: Exception) -> str:
    """The kind of an error, and the beginning of what it says."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:120]}" if said else type(error).__name__
