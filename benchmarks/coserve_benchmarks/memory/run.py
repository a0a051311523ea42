"""`coserve bench memory`: the whole table."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.memory import ablation, activations, ledger, plan, prefix, quantized
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.results import Bar

GROUPS: Final = ("activations", "ablation", "prefix", "ledger", "plan", "quantized")
# Bypass networks of three kinds; for the bottleneck, of which PEFT has none, the peer is plain torch.
COMPARED: Final = ("lora", "ia3", "bottleneck")
BARS: Final[Mapping[str, Bar | None]] = {
    # Bytes held between forward and backward over PEFT's: the pruned set at full speed, a byte budget that
    # is the bar, the leanest setting that is still fast, and with rematerialization and token windows; and
    # their speeds beside PEFT's.
    **{f"activations.vs_peft[{method}]": Bar(0.45, at_most=True) for method in COMPARED},
    **{f"activations.speed[{method}]": Bar(1.05) for method in COMPARED},
    **{f"activations.vs_peft_budget[{method}]": Bar(0.45, at_most=True) for method in COMPARED},
    **{f"activations.speed_budget[{method}]": Bar(1.05) for method in COMPARED},
    **{f"activations.vs_peft_lean[{method}]": Bar(0.29, at_most=True) for method in COMPARED},
    **{f"activations.speed_lean[{method}]": Bar(0.85) for method in COMPARED},
    **{f"activations.vs_peft_windows[{method}]": Bar(0.15, at_most=True) for method in COMPARED},
    "prefix.ttft_ratio": Bar(0.15, at_most=True),
    "ledger.error": Bar(0.10, at_most=True),
    "plan.error": Bar(0.10, at_most=True),
    "quantized.bytes_8bit": Bar(0.55, at_most=True),
    "quantized.bytes_4bit": Bar(0.33, at_most=True),
    "quantized.logit_error": None,
}
# Each group is a module beside this one; here it is hooked in, in the order of GROUPS.
_RUNS: Final[Mapping[str, Callable[[Bench], None]]] = {
    "activations": activations.run,
    "ablation": ablation.run,
    "prefix": prefix.run,
    "ledger": ledger.run,
    "quantized": quantized.run,
    "plan": plan.run,
}


def run_memory(
    shape: str = "255m",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes.

    The dictionary is as `coserve_benchmarks.engine.run_engine`'s. Raises ConfigError for an unknown shape or
    group.
    """
    groups = GROUPS if only is None else tuple(only)
    bench = begin(shape, quick, groups, GROUPS, json_path, BARS)
    run_groups(bench, groups, {name: partial(run, bench) for name, run in _RUNS.items()})
    return bench.results.as_dict()
