"""Row `plan.error`: relative error of planned against measured bytes, for the worst stage of all programs."""

from typing import Final

from coserve.plan.recipes import METHODS
from coserve.plan.rows import PlanRequest, make_plan
from coserve.plan.stages import PlainLoss
from coserve.plan.subject import subject_of
from coserve_benchmarks.ours import Bench

_COMPARED: Final = ("lora", "ia3", "bottleneck")
_CACHE_TOKENS: Final = 8192


def run(bench: Bench) -> None:
    """Plans and measures answers, full fine-tuning and adapters of three kinds, by plain torch and by the
    engine, on 1,024-token examples: each stage estimated without data and run in a process of its own."""
    tiny = bench.shape.name == "tiny"
    asked = PlanRequest(
        {name: [METHODS[name]] for name in (_COMPARED[:1] if tiny else _COMPARED)},
        batches=(2,),
        length=64 if tiny else 1024,
        cache_tokens=512 if tiny else _CACHE_TOKENS,
        loss=PlainLoss.LABELS,
        budget=1 << 40,
        device="cpu",
    )
    subject = subject_of(bench.shape.name, bench.shape.config, "bfloat16")
    plan = make_plan(subject, asked)
    bench.results.section("plan", plan)
    for row in plan["rows"]:
        name = f"plan.{row['system']}[{row['name']}]"
        bench.results.figure(name, row["total"], "bytes estimated")
        bench.results.figure(f"{name}.measured", max(row["measured"].values()), "bytes")
        bench.results.figure(f"{name}.error", max(row["errors"].values()), "of the worst stage")
    bench.results.row("plan.error", plan["error"], note=f"{plan['measure']}; the worst stage of all programs")
