"""Plans and results survive being bytes (whole schedules: tests/scenario/test_schedule_interleavings)."""

import msgspec
import pytest

from coserve import errors
from coserve.core.plan import BasePlan, BaseResult, InferenceSegment, Passes, Sampled, TokenLogprobs
from coserve.core.request import SLO, Request, SamplingParams, VersionTraits
from coserve.wire.plans import decode_plan, decode_result, encode_plan, encode_result


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=0),
        SamplingParams(seed=2**63 - 1, logit_bias={7: -float("inf"), 3: 1.5}, stop_token_ids=(1, 2)),
        SamplingParams(temperature=0.7, top_p=0.9, stop=("a", "b"), logprobs=5, grammar='{"type": "object"}'),
    ],
)
def test_a_plan_comes_back_as_it_was(sampling: SamplingParams) -> None:
    request = Request(
        "r", (1, 2), sampling, "a@1", SLO(0.5), traits=VersionTraits(4), scope=None,
        alternatives=("b@2", None), continued=(5,),
    )  # fmt: skip
    segment = InferenceSegment(3, 2, 1, 6, 1, "a@1", (9, 4), False, request, 1, template=9, drafts=(7,))
    plan = BasePlan((segment,), released=(1, 2), share=0.5, passes=Passes(True))
    assert decode_plan(encode_plan(plan)) == plan


def test_a_result_keeps_the_errors_of_jobs() -> None:
    scored = TokenLogprobs(-0.25, ((4, -0.25), (9, -1.5)))
    given = BaseResult(
        0.5,
        {3: Sampled((4, 7), (scored, scored), (scored,))},
        failed={"a": errors.LossNotFinite("NaN at step 3"), "b": errors.OutOfMemory("12 MiB short")},
    )
    found = decode_result(encode_result(given))
    assert found.sampled == given.sampled
    assert [(job, type(error), str(error)) for job, error in found.failed.items()] == [
        ("a", errors.LossNotFinite, "NaN at step 3"),
        ("b", errors.OutOfMemory, "12 MiB short"),
    ]


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", msgspec.msgpack.encode({"inference": 1}), msgspec.msgpack.encode({"released": ["a"]})],
)
def test_what_no_scheduler_sends_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_plan(data)
