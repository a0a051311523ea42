import pytest

from coserve.core.plan import InferenceSegment, Sampled, TokenLogprobs
from coserve.core.request import FinishReason, Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.open_requests import record, stop_reason
from coserve.schedule.segments import inference_segment, note_planned

CONFIG = SchedulerConfig(layers=4, max_positions=64, eos_token_ids=(2, 3))


def sequence(sampling: SamplingParams, output: tuple[int, ...] = ()) -> Sequence:
    return Sequence(1, Request("r", (5, 6, 7, 8), sampling), output=list(output))


def segment(it: Sequence, start: int, length: int) -> InferenceSegment:
    planned = inference_segment(it, start, length)
    note_planned(it, planned, expected_at=0.0)
    return planned


@pytest.mark.parametrize(
    ("sampling", "output", "reason"),
    [
        (SamplingParams(), (9,), None),
        (SamplingParams(), (9, 3), FinishReason.STOP),
        (SamplingParams(ignore_eos=True), (9, 3), None),
        (SamplingParams(stop_token_ids=(9,), ignore_eos=True), (9,), FinishReason.STOP),
        (SamplingParams(min_tokens=2), (9, 3), None),
        (SamplingParams(min_tokens=2, stop_token_ids=(9,)), (9, 9), None),
        (SamplingParams(min_tokens=2), (9, 9, 3), FinishReason.STOP),
        (SamplingParams(max_tokens=2), (9, 9), FinishReason.LENGTH),
        (SamplingParams(max_tokens=2), (9, 3), FinishReason.STOP),
        (SamplingParams(max_tokens=2, min_tokens=2), (9, 3), FinishReason.LENGTH),
    ],
)
def test_why_an_answer_ends(
    sampling: SamplingParams, output: tuple[int, ...], reason: FinishReason | None
) -> None:
    assert stop_reason(sequence(sampling, output), CONFIG) is reason


def test_a_token_is_noted_with_its_times() -> None:
    it = sequence(SamplingParams())
    event = record(it, segment(it, 0, 4), Sampled(9, TokenLogprobs(-1.0)), now=2.0)
    assert event is not None and (event.token, event.logprobs) == (9, TokenLogprobs(-1.0))
    for now in (5.0, 6.0):
        record(it, segment(it, it.computed, 1), Sampled(9), now)
    assert (it.computed, it.output) == (6, [9, 9, 9])
    assert (it.first_token_at, it.last_token_at, it.slowest) == (2.0, 6.0, 3.0)


def test_a_chunk_tells_nothing_unless_it_was_scored() -> None:
    it = sequence(SamplingParams())
    assert record(it, segment(it, 0, 2), Sampled(None), 1.0) is None
    assert record(it, segment(it, 2, 1), None, 1.0) is None
    assert it.computed == 3 and it.first_token_at is None


def test_a_token_where_none_is_due_is_a_bug() -> None:
    it = sequence(SamplingParams())
    with pytest.raises(AssertionError):
        record(it, segment(it, 0, 2), Sampled(9), 1.0)
    it = sequence(SamplingParams())
    with pytest.raises(AssertionError):
        record(it, segment(it, 0, 4), None, 1.0)


def test_prompt_positions_are_reported_once() -> None:
    it = sequence(SamplingParams(prompt_logprobs=0))
    scores = tuple(TokenLogprobs(-float(n)) for n in (1, 2, 3))
    event = record(it, segment(it, 0, 2), Sampled(None, prompt_logprobs=scores[:2]), 1.0)
    assert event is not None and event.prompt_logprobs == scores[:2] and event.token is None
    it.computed = 0  # preempted
    event = record(it, segment(it, 0, 4), Sampled(9, prompt_logprobs=scores), 1.0)
    assert event is not None and event.prompt_logprobs == scores[2:]
    it.computed = 0
    event = record(it, segment(it, 0, 5), Sampled(9, prompt_logprobs=scores), 1.0)
    assert event is not None and event.prompt_logprobs == ()
