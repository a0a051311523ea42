"""Rows `trains[method].loss_drop`: all methods learn one new task, in one engine, at the same time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from coserve import tiny
from coserve.adapters.settings import settings_of
from coserve.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning
from coserve.tiny.newtasks import examples
from coserve.train.config import TrainingConfig
from coserve.train.save_policy import SavePolicy
from coserve_benchmarks.methods.menu import METHODS, RATES
from coserve_benchmarks.ours import Bench

TASK: Final = "pirate"
_BATCH: Final = 8
_ENDS: Final = 5  # steps at either end whose mean loss counts
_SMOOTHED: Final = 9  # steps that a point of a curve is the mean of


def run(bench: Bench) -> None:
    """Mean loss of the first steps less that of the last ones, for each method."""
    steps = bench.settings.curve_steps
    engine = Engine(tiny.path(), EngineConfig())
    asked = examples(TASK, "train", _BATCH * steps)
    data = engine.prepare([{"messages": question.messages} for question in asked])
    jobs: dict[str, FineTuning] = {}
    for method, fields in METHODS.items():
        training = TrainingConfig(
            learning_rate=RATES[method], batch_size=_BATCH, warmup_ratio=0.05, keep=SavePolicy.EVERYTHING
        )
        jobs[method] = engine.finetune(data, method, settings_of(fields), training)
    engine.run()
    for method, job in jobs.items():
        losses = [updated.loss for updated in job.history]
        assert job.status == "succeeded", f"{method}: {job.error}"
        drop = fmean(losses[:_ENDS]) - fmean(losses[-_ENDS:])
        note = f"from {fmean(losses[:_ENDS]):.3f} to {fmean(losses[-_ENDS:]):.3f} in {len(losses)} steps"
        bench.results.series(f"trains[{method}].loss", losses)
        bench.results.row(f"trains[{method}].loss_drop", drop, note=note)


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """The loss of every method over its optimizer steps, as SVG or PNG by `path`'s ending."""
    from coserve_benchmarks.drawing import new_figure, save, style

    with style():
        figure = new_figure(8, 4.5)
        axes = figure.subplots()
        for number, method in enumerate(METHODS):
            losses = results["series"].get(f"trains[{method}].loss", ())
            if losses:
                axes.plot(range(1, len(losses) + 1), losses, color=f"C{number}", alpha=0.15, linewidth=0.8)
                axes.plot(*_smoothed(losses), color=f"C{number}", label=method)
        axes.set(xlabel="optimizer step", ylabel="loss (nats a token)")
        axes.set(title="one engine, one base, all at once")
        axes.set_ylim(bottom=0)
        axes.legend(ncols=2)
        save(figure, path)


def _smoothed(losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Steps, and the mean loss of those around each."""
    half = _SMOOTHED // 2
    steps = range(len(losses))
    return [s + 1 for s in steps], [fmean(losses[max(0, s - half) : s + half + 1]) for s in steps]
