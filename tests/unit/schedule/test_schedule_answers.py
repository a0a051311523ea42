import pytest

from coserve.core.plan import InferenceSegment, Sampled, TokenLogprobs
from coserve.core.request import FinishReason, Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.core.speculation import PromptLookup, SpeculativeConfig
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.open_requests import record, stop_reason
from coserve.schedule.segments import inference_segment, note_planned

CONFIG = SchedulerConfig(layers=4, max_positions=64, eos_token_ids=(2, 3))


def sequence(sampling: SamplingParams, output: tuple[int, ...] = ()) -> Sequence:
    return Sequence(1, Request("r", (5, 6, 7, 8), sampling), output=list(output))


def segment(it: Sequence, start: int, length: int, drafts: tuple[int, ...] = ()) -> InferenceSegment:
    planned = inference_segment(it, start, length, drafts)
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
    (event,) = record(it, segment(it, 0, 4), Sampled((9,), (TokenLogprobs(-1.0),)), 2.0, CONFIG)
    assert (event.token, event.logprobs) == (9, TokenLogprobs(-1.0))
    for now in (5.0, 6.0):
        record(it, segment(it, it.computed, 1), Sampled((9,)), now, CONFIG)
    assert (it.computed, it.output) == (6, [9, 9, 9])
    assert (it.first_token_at, it.last_token_at, it.slowest) == (2.0, 6.0, 3.0)


def test_a_chunk_tells_nothing_unless_it_was_scored() -> None:
    it = sequence(SamplingParams())
    assert record(it, segment(it, 0, 2), Sampled(), 1.0, CONFIG) == []
    assert record(it, segment(it, 2, 1), None, 1.0, CONFIG) == []
    assert it.computed == 3 and it.first_token_at is None


def test_a_token_where_none_is_due_is_a_bug() -> None:
    it = sequence(SamplingParams())
    with pytest.raises(AssertionError):
        record(it, segment(it, 0, 2), Sampled((9,)), 1.0, CONFIG)
    it = sequence(SamplingParams())
    with pytest.raises(AssertionError):
        record(it, segment(it, 0, 4), None, 1.0, CONFIG)


def test_prompt_positions_are_reported_once() -> None:
    it = sequence(SamplingParams(prompt_logprobs=0))
    scores = tuple(TokenLogprobs(-float(n)) for n in (1, 2, 3))
    (event,) = record(it, segment(it, 0, 2), Sampled(prompt_logprobs=scores[:2]), 1.0, CONFIG)
    assert event.prompt_logprobs == scores[:2] and event.token is None
    it.computed = 0  # preempted
    (event,) = record(it, segment(it, 0, 4), Sampled((9,), prompt_logprobs=scores), 1.0, CONFIG)
    assert event.prompt_logprobs == scores[2:]
    it.computed = 0
    (event,) = record(it, segment(it, 0, 5), Sampled((9,), prompt_logprobs=scores), 1.0, CONFIG)
    assert event.prompt_logprobs == ()


def drafting(*drafts: int) -> tuple[Sequence, InferenceSegment]:
    """A sequence with one token of its answer, and a plan under way that verifies drafts."""
    it = sequence(SamplingParams(logprobs=0), (9,))
    it.lookup, it.computed, it.pages = PromptLookup(SpeculativeConfig(8)), 4, [3, 4]
    return it, segment(it, 4, 1, drafts)


def test_drafts_count_once_they_have_held() -> None:
    it, planned = drafting(6, 7, 8)
    assert (planned.length, planned.known, planned.tail_rows) == (4, 1, 4)
    assert (it.computed, it.unsampled, it.remaining) == (5, 1, 0)
    scores = tuple(TokenLogprobs(-float(n)) for n in (1, 2))
    events = record(it, planned, Sampled((6, 5), scores), 3.0, CONFIG)
    assert [(event.token, event.logprobs) for event in events] == [(6, scores[0]), (5, scores[1])]
    assert (it.output, it.computed, it.unsampled, it.remaining) == ([9, 6, 5], 6, 0, 1)


def test_an_answer_ends_within_its_drafts() -> None:
    it, planned = drafting(6, 2, 8)
    events = record(it, planned, Sampled((6, 2, 8, 5)), 3.0, CONFIG)
    assert [event.finish_reason for event in events] == [None, FinishReason.STOP]
    assert it.output == [9, 6, 2]


def test_drafts_of_a_sequence_that_was_preempted_meanwhile_give_tokens_alone() -> None:
    it, planned = drafting(6, 7)
    it.pages, it.computed = [], 0
    assert len(record(it, planned, Sampled((6, 7, 8)), 3.0, CONFIG)) == 3
    assert (it.output, it.computed, it.remaining) == ([9, 6, 7, 8], 0, 8)
