"""Rows of a plan: programs with their estimated and measured bytes, and whether they fit the budget."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from coserve.config import EngineConfig
from coserve.errors import PromptTooLong
from coserve.memory.compiled import built_bytes
from coserve.memory.fake_tensors import fake_tensors
from coserve.memory.malloc import resident_bytes
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.plan.engine_run import least_memories, refusals
from coserve.plan.estimate import Estimate, estimates, spread
from coserve.plan.host import plan_host
from coserve.plan.measure import measure_peaks
from coserve.plan.recipes import Fields
from coserve.plan.stages import Peaks, PlainLoss, Program, ProgramSize, System
from coserve.plan.streaming import StreamedBase, plan_streaming
from coserve.plan.subject import Subject
from coserve.streamed.trial import link_rate
from coserve.train.save_policy import SavePolicy, SavePolicySetting
from coserve.worker.opening import host_room

Recipes = Mapping[str, Sequence[Fields]]
Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Row:
    """A program and its bytes. `measured` are its peaks in fresh processes, if measured; `refused` is why it
    does not fit into the budget, else empty; `least` is then the smallest budget with which it does, where
    its base is streamed."""

    program: Program
    estimate: Estimate
    refused: str
    measured: Peaks | None = None
    how: str = ""  # it was measured
    least: int | None = None

    @property
    def errors(self) -> dict[str, float]:
        """Relative error of the estimate by stage, where the stage was measured."""
        return {
            stage.value: abs(self.estimate.peaks[stage] - peak) / peak
            for stage, peak in (self.measured or {}).items()
        }

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON; sizes in bytes."""
        program, estimate = self.program, self.estimate
        return {
            "name": program.name,
            "system": program.system.value,
            "batch": program.load.batch,
            "adapter": list(program.parts),
            "keep": program.keep if program.system is System.COSERVE and program.trains else None,
            **asdict(estimate.components),
            "total": estimate.components.total,
            "peaks": dict(estimate.peaks),
            "measured": None if self.measured is None else dict(self.measured),
            "errors": self.errors,
            "fits": not self.refused,
            "refused": self.refused,
            "least": self.least,
        }


def make_programs(load: ProgramSize, recipes: Recipes, keep: str | int) -> Iterator[Program]:
    """Inference, full fine-tuning (plain torch only), and each adapter, by plain torch and by the engine."""
    for system in System:
        yield Program("inference", system, load, trains=False)
        if system is System.TORCH:
            yield Program("full fine-tuning", system, load, trains=True)
        for name, parts in recipes.items():
            yield Program(name, system, load, trains=True, parts=parts, keep=keep)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Request for a plan. `keep` is coserve's save policy, `budget` the bytes available, `memory` and
    `base_memory` what the engine is told of them; programs are measured on `device`, their base in memory as
    a whole, or with None only estimated. The engine is one on the device `where`, beside which the host's
    memory is planned, too."""

    recipes: Recipes
    batches: Sequence[int] = (4,)
    length: int = 512
    cache_tokens: int = 32768
    loss: PlainLoss = PlainLoss.LABELS
    keep: SavePolicySetting = SavePolicy.INPUTS
    budget: int = 0
    device: str | None = None
    memory: str | int | float = "auto"
    base_memory: str | int | float = "auto"
    where: str = "cpu"
    host_memory: str | int | float = "auto"

    def programs(self) -> Iterator[Program]:
        """Programs of all batch sizes."""
        keep = self.keep.value if isinstance(self.keep, SavePolicy) else self.keep
        for batch in self.batches:
            yield from make_programs(
                ProgramSize(batch, self.length, self.cache_tokens, self.loss), self.recipes, keep
            )


def make_plan(
    subject: Subject, request: PlanRequest, tell: Tell = lambda _: None, processes: int = 1
) -> dict[str, Any]:
    """The whole plan, for JSON, estimated by so many `processes`. `tell` is called with progress messages.
    Raises ModelError or AdapterError for programs that no engine could run, and ServerError where measuring
    fails."""
    imports = resident_bytes()  # so far they are all that there is
    tell("estimating the base")
    streamed, link = None, link_rate(torch.device(request.where))
    host, on_cpu = None, torch.device(request.where).type == "cpu"
    programs = list(request.programs())
    with spread(processes) as run_all:
        found = estimates(subject, programs, run_all)
        with fake_tensors():
            base = load_base(subject.build())
            check_length(subject, base, request.length)
            if request.device is None:
                config = EngineConfig(
                    device=request.where,
                    memory=request.memory,
                    base_memory=request.base_memory,
                    cache_tokens=request.cache_tokens,
                    host_memory=request.host_memory,
                )
                streamed = plan_streaming(subject, base, config, link)
                if not on_cpu:
                    held = None if streamed is None else streamed.held
                    host = plan_host(base, config, host_room(config), held, programs)
        rows = list(
            plan_rows(subject, programs, found, request.budget, request.device, tell, streamed, on_cpu)
        )
    return {
        "model": subject.name,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "length": request.length,
        "loss": request.loss.value,
        "cache_tokens": request.cache_tokens,
        "budget": request.budget,
        "built": built_bytes(),
        "imports": imports,
        "streamed": None if streamed is None else streamed.as_dict(),
        "host": None if host is None else host.as_dict(),
        "measure": next((row.how for row in rows if row.how), None),
        "error": largest_error(rows),
        "rows": [row.as_dict() for row in rows],
    }


def check_length(subject: Subject, base: Base, length: int) -> None:
    """Raises PromptTooLong for more tokens than a base has positions."""
    if length > base.max_positions:
        raise PromptTooLong(
            f"{length} tokens do not fit into the {base.max_positions} positions of {subject.name}"
        )


def plan_rows(
    subject: Subject,
    programs: Sequence[Program],
    found: Iterator[Estimate],
    budget: int,
    device: str | None,
    tell: Tell = lambda _: None,
    streamed: StreamedBase | None = None,
    on_cpu: bool = True,
) -> Iterator[Row]:
    """Rows one by one, of programs and what is `found` of each. With a `device` they are measured, too; None
    only estimates. `streamed` is the engine's base where it is not in memory as a whole; the engine is one
    `on_cpu`, or on a GPU, where its process counts no libraries."""
    tell("asking the engine what fits")
    answers = iter(_ask_engine(subject, programs, budget, on_cpu, streamed))
    for number, program in enumerate(programs, 1):
        what = f"{program.system}, {program.name} ({number} of {len(programs)})"
        tell(f"estimating {what}")
        estimate, least = next(found), None
        if program.system is System.COSERVE:
            refused, least = next(answers)
            if streamed is not None:
                estimate = estimate.without(streamed.freed)
        else:
            refused = "" if estimate.components.total <= budget else "it needs more than there is"
        peaks, how = None, ""
        if device is not None:
            tell(f"measuring {what}")
            peaks, how = measure_peaks(subject, program, device)
        yield Row(program, estimate, refused, peaks, how, least)


def _ask_engine(
    subject: Subject, programs: Sequence[Program], budget: int, on_cpu: bool, streamed: StreamedBase | None
) -> Iterator[tuple[str, int | None]]:
    """For each of the engine's programs the reason for which it does not fit into the budget, else "", and
    the smallest budget with which it does, where its base is streamed."""
    ours = [program for program in programs if program.system is System.COSERVE]
    if streamed is None:
        yield from ((why, None) for why in refusals(subject, ours, budget, on_cpu))
        return
    reasons = refusals(subject, ours, budget, on_cpu, streamed.room)
    refused = [program for program, why in zip(ours, reasons, strict=True) if why]
    least = iter(least_memories(subject, refused, streamed.least))
    yield from ((why, next(least) if why else None) for why in reasons)


def largest_error(rows: Sequence[Row]) -> float | None:
    """The largest error of all rows; None without measurements."""
    errors = [error for row in rows for error in row.errors.values()]
    return max(errors) if errors else None
