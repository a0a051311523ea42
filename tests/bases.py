"""Schedules of two bases on scripted executors, and engines of two tiny models of other widths, for tests."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from coserve import Engine, EngineConfig
from coserve.core.events import Event
from coserve.core.plan import BasePlan, StepPlan, StepResult
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.engine.completion import Completion
from coserve.executors.step_executor import StepExecutor
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.offloading import Offloading
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.step_costs import StepCosts
from coserve.schedule.swap_tier import SwapTier
from coserve.schedule.swapping import Swapping
from models import letter_tokenizer, tiny
from scripted_executor import ScriptedExecutor

PAGE = 4
SMALL, WIDE = "base", "wide"  # ids of the two bases
CHAIN = "small-to-wide@2"  # of a chain of both
LAYERS = {SMALL: 3, WIDE: 2}


class TwoBases:
    """A scheduler of two bases, with so many pages each and one second tier of `swap` bytes, in which a page
    takes one and two, and a scripted executor for each base, which checks its part of every plan."""

    def __init__(
        self, pages: int = 64, wide_pages: int = 64, wide: dict[str, Any] | None = None, swap: int = 0,
        sharing: bool = False,
    ) -> None:  # fmt: skip
        limits = {"max_running": 16, "interruptible": True, "prefix_sharing": sharing}
        config = SchedulerConfig(LAYERS[SMALL], 512, **limits)  # type: ignore[arg-type]
        self.pools = {SMALL: PagePool(pages, PAGE), WIDE: PagePool(wide_pages, PAGE)}
        costs, tier = {base: CostModel() for base in LAYERS}, SwapTier(swap)
        first = BaseCache(config, self.pools[SMALL], Swapping(costs[SMALL], swap, tier))
        self.it = Scheduler(first, costs[SMALL], make_policy("hybrid"))
        its = SchedulerConfig(LAYERS[WIDE], **{"max_positions": 256, **(wide or {})})
        swapping = Swapping(costs[WIDE], swap // 2, tier, 2)
        offloading = Offloading(tier, wide_pages + 1, swap // 2, PAGE)
        self.it.add_base(WIDE, BaseCache(its, self.pools[WIDE], swapping, offloading), costs[WIDE])
        self.executor, self.executors = scripted(swap)
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.now = 0.0

    def submit(self, request: Request) -> Sequence:
        return self.it.requests.submit(request, 0.0)

    def step(self) -> list[Event]:
        plan = self.it.plan(self.now)
        for executor in self.executors.values():
            executor.now = self.now
        result = self.executor.run(plan)
        self.plans.append(plan)
        self.results.append(result)
        self.now += result.seconds
        return [event for events in self.it.apply(result, self.now).values() for event in events]

    def drain(self) -> None:
        for _ in range(2000):
            if not self.it.has_work:
                return
            self.step()
        raise AssertionError("the work does not end")


def two_costs() -> StepCosts:
    """Costs of two bases, as assumed before any measurement."""
    cost = StepCosts(CostModel())
    cost.bases[WIDE] = CostModel()
    return cost


def scripted(
    swap: int = 0, **kinds: type[ScriptedExecutor]
) -> tuple[StepExecutor, dict[str, ScriptedExecutor]]:
    """An executor of two bases, and those of the bases, of the given kinds."""
    parts = {
        base: kinds.get(base, ScriptedExecutor)(
            PAGE, CostModel().predict, swap_pages=swap, swap_seconds=(1e-6, 1e-6)
        )
        for base in (SMALL, WIDE)
    }
    executor = StepExecutor(parts[SMALL])
    executor.add(WIDE, parts[WIDE])
    return executor, parts


def request(base: str, prompt: int = 6, answer: int = 4, first: int = 0) -> Request:
    tokens = tuple(range(first, first + prompt))
    return Request("r", tokens, SamplingParams(max_tokens=answer), base=base)


def two_engines(**config: Any) -> tuple[Engine, Engine]:
    """An engine of a llama of width 64 and three layers, and one beside it, of width 96 and two layers."""
    settings: dict[str, Any] = {"calibrate": False, "cache_tokens": 1024, "page_size": 8, "executor": "local"}
    engine = Engine(tiny("llama"), EngineConfig(**{**settings, **config}), letter_tokenizer())
    return engine, engine.add_base(WIDE, wide_model(), letter_tokenizer())


def wide_model(name: str = "llama", dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    """A model of width 96 and two layers."""
    changes = {"n_embd": 96, "n_layer": 2} if name == "gpt2" else {"hidden_size": 96, "num_hidden_layers": 2}
    return tiny(name, dtype, seed=3, **changes, **fields)


def bases_with(plans: Iterable[StepPlan], pick: Callable[[BasePlan], Collection[object]]) -> set[str]:
    """Bases whose parts of the plans have any of what is picked."""
    return {base for plan in plans for base, part in plan.bases.items() if pick(part)}


@contextmanager
def planned(engine: Engine) -> Iterator[list[StepPlan]]:
    """The plans that an engine of several bases runs."""
    plans: list[StepPlan] = []
    device = engine.loop.executor
    launch = device.launch

    def watched(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    device.launch = watched  # type: ignore[method-assign]
    try:
        yield plans
    finally:
        device.launch = launch  # type: ignore[method-assign]


def check_scored(expected: Tensor, prompt: list[int], answer: Completion, tolerance: float) -> None:
    """Log-probabilities of the prompt and of the chosen tokens are those of the logits `expected`
    [tokens, vocabulary], of the prompt and all but the answer's last token."""
    expected = torch.log_softmax(expected.double(), -1)
    assert len(answer.prompt_logprobs) == len(prompt) - 1
    for place, given in enumerate(answer.prompt_logprobs):
        assert abs(expected[place, prompt[place + 1]] - given.chosen) < tolerance
        for token, logprob in given.top:
            assert abs(expected[place, token] - logprob) < tolerance
    rows = expected[len(prompt) - 1 :]
    own = rows.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert float((rows.max(-1).values - own).max()) < tolerance


def draw_stitch(first: int, second: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weight [second, first + 1] and bias [second] of a stitching block between two widths, which keep the
    size of what they are given."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(second, first + 1, generator=generator) / first**0.5
    return weight, torch.randn(second, generator=generator) / 8


def write_stitch(
    folder: Path, layers: int, enters: int, weight: Tensor, bias: Tensor, position: float = 0.4
) -> Path:
    """A folder with a stitching block, as a zoo's view is."""
    folder.mkdir(parents=True)
    place = {"layers": layers, "enters": enters, "position": position}
    (folder / "stitching.json").write_text(json.dumps(place))
    save_file({"weight": weight, "bias": bias}, folder / "stitching.safetensors")
    return folder
