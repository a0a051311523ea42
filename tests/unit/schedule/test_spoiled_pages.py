"""Pages that a failed pass left without their contents: their readers end with the error, also those of
plans that were made meanwhile, and nobody finds the pages any more."""

import pytest

from coserve.core.events import RequestFailed
from coserve.core.plan import BasePlan, BaseResult, Sampled, StepPlan, StepResult
from coserve.core.request import BASE, Request, SamplingParams, VersionTraits
from coserve.errors import CoserveError, InternalError, OutOfMemory, RequestError
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler

PAGE = 4
ERRORS = [OutOfMemory("there was no memory"), InternalError("shapes do not match")]
errors = pytest.mark.parametrize("error", ERRORS, ids=repr)


class Desk:
    """A scheduler whose plans' results the test gives."""

    def __init__(self, prefill: int = 512) -> None:
        config = SchedulerConfig(4, 1000, max_prefill_rows=prefill, prefix_sharing=True)
        self.it = Scheduler(BaseCache(config, PagePool(64, PAGE)), CostModel(), make_policy("hybrid"))

    def submit(self, name: str, adapter: str | None = None) -> int:
        virtual = 6 if adapter else 0  # a page, and half of one, which is copied
        sampling = SamplingParams(max_tokens=9)
        request = Request(name, (*range(30),), sampling, adapter, traits=VersionTraits(virtual, virtual))
        return self.it.requests.submit(request, 0.0).key

    def ended(self, plan: StepPlan, **fields: object) -> dict[str, str]:
        """Applies a plan's result; the errors of the requests that it ends."""
        part: BasePlan = plan.only
        ends = {s.key: s.start + s.length for s in part.inference}
        sampled = {
            key: Sampled((5,) * (end == self.it.requests.sequences[key].known))
            for key, end in ends.items()
            if key in self.it.requests.sequences
        }
        result = BaseResult(0.01, sampled, **fields)  # type: ignore[arg-type]
        events = self.it.apply(StepResult({BASE: result}), 0.0)[BASE]
        return {event.request_id: str(event.error) for event in events if isinstance(event, RequestFailed)}


@errors
def test_virtual_tokens_are_filled_again_after_their_pass_failed(error: CoserveError) -> None:
    desk = Desk()
    for name in ("one", "two"):
        desk.submit(name, adapter="a@1")
    desk.submit("other", adapter="b@1")
    first = desk.it.plan(0.0)
    assert {prefix.adapter for prefix in first.only.prefixes} == {"a@1", "b@1"}
    desk.submit("three", adapter="a@1")  # finds the pages
    second = desk.it.plan_ahead(0.0)
    assert second is not None and not second.only.prefixes
    assert desk.ended(first, unfilled={"a@1": error}) == dict.fromkeys(("one", "two", "three"), str(error))
    assert desk.ended(second) == {}
    desk.submit("four", adapter="a@1")
    third = desk.it.plan(0.0)
    assert [prefix.adapter for prefix in third.only.prefixes] == ["a@1"]
    assert desk.ended(third) == {}
    desk.submit("five", adapter="a@1")
    assert not desk.it.plan(0.0).only.prefixes


@pytest.mark.parametrize("error", [*ERRORS, RequestError("no token can come next")], ids=repr)
def test_nobody_reads_the_pages_of_rows_whose_pass_failed(error: CoserveError) -> None:
    """A prompt's second chunk fails after its pages have been found by another's plan. Where it has passed,
    and no token can follow, they are as they should be."""
    desk = Desk(prefill=16)
    key = desk.submit("one")
    first = desk.it.plan(0.0)
    second = desk.it.plan_ahead(0.0)
    assert second is not None and desk.ended(first) == {}
    reader = desk.submit("two")
    third = desk.it.plan_ahead(0.0)
    assert third is not None
    (start,) = [segment.start for segment in third.only.inference if segment.key == reader]
    assert start > 16, "its pages are found before they are known to be written"
    is_written = isinstance(error, RequestError)
    names = ("one",) if is_written else ("one", "two")
    assert desk.ended(second, lost={key: error}) == dict.fromkeys(names, str(error))
    assert desk.ended(third) == {}
    last = desk.submit("three")
    (start,) = [segment.start for segment in desk.it.plan(0.0).only.inference if segment.key == last]
    assert start > 16 if is_written else start == 16, "what the first chunk wrote is as it was"
