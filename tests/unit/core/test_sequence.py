import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch, PausedWindow, Sequence, Span


def sequence(prompt: int = 5, output: int = 0, max_tokens: int = 10) -> Sequence:
    request = Request("r", tuple(range(100, 100 + prompt)), SamplingParams(max_tokens=max_tokens))
    return Sequence(1, request, output=list(range(200, 200 + output)))


@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 12), st.integers(0, 12))
def test_tokens_are_a_slice_of_prompt_and_answer(prompt: int, output: int, start: int, length: int) -> None:
    it = sequence(prompt, output)
    whole = [*it.request.prompt, *it.output]
    assert it.tokens(start, length) == whole[start : start + length]


def test_progress_is_a_number() -> None:
    it = sequence(prompt=5, output=2)
    it.computed = 4
    assert (it.length, it.remaining, it.longest) == (7, 3, 15)
    assert not it.is_finished


def test_a_micro_batch_goes_forward_and_back() -> None:
    batch = MicroBatch(1, "job", "a@0", lengths=(3, 4), layers=2)
    batch.advance(0, 5, Span(0, 1))
    assert batch.is_paused and batch.next_window(7) == (0, 5) and batch.next_span(9) == Span(1, 2)
    batch.advance(0, 5, Span(1, 2))
    assert not batch.is_paused and batch.rows_left == 2
    batch.advance(5, 2, Span(0, 2))
    assert batch.direction is Direction.LOSS and batch.rows_left == 7
    assert batch.next_window(3) == (0, 3) and batch.next_span(9) == Span(2, 3)
    batch.advance(0, 3, Span(2, 3))
    assert not batch.is_paused and batch.direction is Direction.LOSS
    assert batch.rows_left == 4 and batch.next_window(9) == (3, 4)
    batch.advance(3, 4, Span(2, 3))
    assert batch.direction is Direction.BACKWARD and batch.rows_left == 7
    assert batch.next_window(3) == (4, 3) and batch.next_span(1) == Span(1, 2)
    batch.advance(4, 3, Span(1, 2))
    assert batch.rows_left == 3 and batch.next_window(9) == (4, 3)
    batch.advance(4, 3, Span(0, 1))
    assert not batch.done
    batch.advance(0, 4, Span(0, 2))
    assert batch.done


def test_a_window_that_was_put_down_can_be_cut() -> None:
    batch = MicroBatch(1, "job", "a@0", lengths=(8,), layers=2)
    batch.advance(0, 8, Span(0, 1))
    batch.advance(0, 3, Span(1, 2))  # the left part goes on first: the right one attends to it
    assert batch.paused == [PausedWindow(3, 5, 1)] and batch.next_window(9) == (3, 5)
    batch.advance(3, 5, Span(1, 2))
    batch.advance(0, 8, Span(2, 3))
    batch.advance(0, 8, Span(1, 2))
    assert batch.next_window(2) == (6, 2)
    batch.advance(6, 2, Span(0, 1))  # going back the right part comes first
    assert batch.paused == [PausedWindow(0, 6, 1)] and not batch.done
    batch.advance(0, 6, Span(0, 1))
    assert batch.done


def test_windows_and_layers_travel_in_order() -> None:
    batch = MicroBatch(1, "job", "a@0", lengths=(8,), layers=4)
    with pytest.raises(AssertionError, match="windows"):
        batch.advance(2, 2, Span(0, 4))
    with pytest.raises(AssertionError, match="layers"):
        batch.advance(0, 2, Span(1, 4))
    batch.advance(0, 8, Span(0, 4))
    with pytest.raises(AssertionError, match="windows"):
        batch.advance(6, 2, Span(4, 5))
    with pytest.raises(AssertionError, match="layers"):
        batch.advance(0, 2, Span(3, 4))
    batch.advance(0, 8, Span(4, 5))
    with pytest.raises(AssertionError, match="windows"):
        batch.advance(0, 2, Span(0, 4))
    with pytest.raises(AssertionError, match="layers"):
        batch.advance(6, 2, Span(0, 3))


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4))
def test_any_way_through_ends(data: st.DataObject, lengths: list[int], layers: int) -> None:
    batch = MicroBatch(1, "job", "a@0", tuple(lengths), layers)
    passed = {Direction.TRAIN_FORWARD: 0, Direction.LOSS: 0, Direction.BACKWARD: 0}
    while not batch.done:
        start, rows = batch.next_window(data.draw(st.integers(1, 10)))
        span = batch.next_span(data.draw(st.integers(1, 5)))
        passed[batch.direction] += rows * len(span)
        batch.advance(start, rows, span)
    through = sum(lengths) * layers
    assert passed == {
        Direction.TRAIN_FORWARD: through,
        Direction.LOSS: sum(lengths),
        Direction.BACKWARD: through,
    }
