"""Rows `quantized.*`: a base in eight and in four bits: its bytes, the error of its logits, losses of
training on it, and speed."""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from coserve import tiny
from coserve.adapters.methods.lora import LoRAConfig
from coserve.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.model.load import load_base
from coserve.tiny.newtasks import examples
from coserve.tiny.world import KINDS, questions
from coserve.train.config import TrainingConfig
from coserve.train.save_policy import SavePolicy
from coserve.wire.control import decode_line, encode_line
from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.inference import answer_all
from coserve_benchmarks.memory.logits import LogitError, logits_of
from coserve_benchmarks.memory.resident import ResidentBytes, ResidentOrder
from coserve_benchmarks.ours import Bench, make_engine, seconds_of_steps, start_training
from coserve_benchmarks.timing import alternate, timed

DENSE: Final = "none"
QUANTIZED: Final = ("8bit", "4bit")
_BATCHES: Final = (1, 16, 64)  # sequences that decode at once
_PROMPT: Final = 16  # tokens: as good as nothing beside the answer
_OF_EACH_KIND: Final = 8  # held-out questions whose logits are compared
_TASK: Final = "pirate"
_BATCH: Final = 8  # examples of an optimizer step of what is learned
_ENDS: Final = 5  # steps whose mean loss counts
_WORDS: Final = (
    "root mean square of the difference from the float32 model's logits over their standard deviation, "
    "embedded model in four bits, held-out questions"
)


def run(bench: Bench) -> None:
    """Bytes, errors, losses, speeds."""
    _bytes(bench)
    _errors(bench)
    _losses(bench)
    _speeds(bench)


def _bytes(bench: Bench) -> None:
    """Measures bytes: the base's own count of unique storages, and the resident size of a process that holds
    it."""
    results = bench.results
    dense = 2 * bench.shape.parameters
    with tempfile.TemporaryDirectory() as folder:
        model = save_shape(bench.shape, Path(folder))
        for kind in (DENSE, *QUANTIZED):
            held = _measure(model, kind)
            results.figure(f"quantized.resident[{kind}]", held.resident, f"bytes of {held.how}")
            results.figure(f"quantized.peak[{kind}]", held.peak, "bytes, the most while it was loaded")
            results.figure(f"quantized.bytes[{kind}]", held.counted, "bytes of weights as they are held")
            if kind != DENSE:
                note = "of all weights in bfloat16: embedding and head too, each storage once"
                results.row(f"quantized.bytes_{kind}", held.counted / dense, note=note)


def _measure(model: Path, kind: str) -> ResidentBytes:
    command = (sys.executable, "-m", "coserve_benchmarks.memory.resident")
    order = encode_line(ResidentOrder(str(model), kind))
    done = subprocess.run(command, input=order + "\n", stdout=subprocess.PIPE, text=True, check=True)
    return decode_line(done.stdout.splitlines()[-1], ResidentBytes)


def _errors(bench: Bench) -> None:
    """Measures logit errors on the embedded model, which is trained, and on the bench's shape of random
    weights."""
    exact = load_base(tiny.path(), "float32")
    engine = Engine(tiny.path(), EngineConfig(calibrate=False, cache_tokens=1024))
    asked = [question for kind in KINDS for question in questions(kind, "held_out", _OF_EACH_KIND)]
    texts = [e.tokens for e in engine.prepare([{"messages": q.messages} for q in asked]).examples]
    wanted = logits_of(exact, texts)
    bfloat16 = LogitError.between(wanted, logits_of(engine.base, texts))
    _figures(bench, "tiny,bfloat16", bfloat16)
    for kind in QUANTIZED:
        found = LogitError.between(wanted, logits_of(load_base(tiny.path(), quantize=kind), texts))
        _figures(bench, f"tiny,{kind}", found)
        bench.results.row("quantized.logit_error", found.relative, note=_WORDS)
    random = fixed_prompts(2, 128, bench.shape.vocabulary, bench.settings.seed)
    wanted = logits_of(load_base(bench.shape.build()), random)
    for kind in QUANTIZED:
        found = LogitError.between(wanted, logits_of(load_base(bench.shape.build(), quantize=kind), random))
        _figures(bench, f"{bench.shape.name},{kind}", found)


def _figures(bench: Bench, name: str, error: LogitError) -> None:
    figure = bench.results.figure
    figure(f"quantized.logit_error[{name}]", error.relative, "of the logits' standard deviation")
    figure(f"quantized.divergence[{name}]", error.divergence, "nats")
    figure(f"quantized.agreement[{name}]", error.agreement, "of the likeliest tokens")


def _losses(bench: Bench) -> None:
    """Trains a new task on each kind of weights: mean loss of the first and last steps."""
    steps = bench.settings.curve_steps
    asked = examples(_TASK, "train", _BATCH * steps)
    training = TrainingConfig(learning_rate=3e-3, batch_size=_BATCH, warmup_ratio=0.05)
    for kind in (DENSE, *QUANTIZED):
        engine = Engine(tiny.path(), EngineConfig(quantize=kind, calibrate=False, cache_tokens=1024))
        data = engine.prepare([{"messages": question.messages} for question in asked])
        job = engine.finetune(data, "pirate", LoRAConfig(rank=8), training)
        job.result()
        losses = [updated.loss for updated in job.history]
        bench.results.series(f"quantized.loss[{kind}]", losses)
        bench.results.figure(f"quantized.first_loss[{kind}]", fmean(losses[:_ENDS]), "nats")
        bench.results.figure(f"quantized.last_loss[{kind}]", fmean(losses[-_ENDS:]), "nats")


def _speeds(bench: Bench) -> None:
    """Measures tokens a second of answers and of training, alternating with bfloat16."""
    settings, vocabulary = bench.settings, bench.shape.vocabulary
    engines = {kind: make_engine(bench, quantize=kind, calibrate=False) for kind in (DENSE, *QUANTIZED)}
    for batch in _BATCHES:
        prompts = fixed_prompts(batch, _PROMPT, vocabulary, settings.seed)
        work = {
            kind: timed(partial(answer_all, engine, prompts, settings.answer))
            for kind, engine in engines.items()
        }
        for kind, times in alternate(work, settings.slow_rounds, bench.machine.threads).items():
            rate = batch * settings.answer / times.median
            spread = (batch * settings.answer / times.high, batch * settings.answer / times.low)
            bench.results.figure(f"quantized.decode[{kind},{batch}]", rate, "output tokens/s", spread)
    for engine in engines.values():
        start_training(engine, bench, "trained", SavePolicy.EVERYTHING)
    steps = {kind: partial(seconds_of_steps, engine) for kind, engine in engines.items()}
    tokens = settings.batch * settings.length
    for kind, times in alternate(steps, settings.train_rounds, bench.machine.threads).items():
        spread = (tokens / times.high, tokens / times.low)
        bench.results.figure(f"quantized.training[{kind}]", tokens / times.median, "tokens/s", spread)
