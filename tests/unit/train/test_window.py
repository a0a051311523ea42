"""Windows over packed examples, with and without an adapter's prompt before them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.kernels import reference
from coserve.kernels.attention import AttentionSpec
from coserve.train.window import PastKV, Window, attend_window

GROUPS, HEADS, WIDTH = 2, 4, 4


@st.composite
def windows(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, int]:
    """Lengths, start, rows, and how many rows of a prompt are the first of the lengths."""
    prompt = draw(st.sampled_from([0, 0, 1, 5]))
    lengths = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=6)))
    lengths = (*[prompt] * bool(prompt), *lengths)
    start = draw(st.integers(0, sum(lengths) - 1))
    return lengths, start, draw(st.integers(1, sum(lengths) - start)), prompt


@given(windows())
def test_a_window_says_whose_rows_it_has(case: tuple[tuple[int, ...], int, int, int]) -> None:
    """Against a list with one entry per row; the prompt's is -1."""
    lengths, start, rows, prompt = case
    owner = [i - bool(prompt) for i, length in enumerate(lengths) for _ in range(length)]
    inside, before = owner[start : start + rows], owner[:start]
    window = Window.of(lengths, start, rows, prompt)
    assert (window.start, window.rows) == (start, rows)
    assert (window.before, window.prompt) == (before.count(-1), inside.count(-1))
    assert window.pieces == tuple(inside.count(i) for i in sorted({*inside} - {-1}))
    assert window.past == (0 if window.prompt else before.count(inside[0]))


def test_by_hand() -> None:
    assert Window.of((4, 3, 5), 0, 12) == Window(0, 12, 0, (4, 3, 5))
    assert Window.of((4, 3, 5), 2, 6) == Window(2, 6, 2, (2, 3, 1))
    assert Window.of((4, 3, 5), 4, 3) == Window(4, 3, 0, (3,))
    assert Window.of((4, 3, 5), 9, 2) == Window(9, 2, 2, (2,))
    assert Window.of((4, 3, 5), 0, 2, prompt=4) == Window(0, 2, 0, (), 0, 2)
    assert Window.of((4, 3, 5), 3, 6, prompt=4) == Window(3, 6, 0, (3, 2), 3, 1)
    assert Window.of((4, 3, 5), 6, 4, prompt=4) == Window(6, 4, 2, (1, 3), 4, 0)


def visible(lengths: tuple[int, ...], prompt: int, row: int) -> list[int]:
    """Rows of the micro-batch that row `row` attends to, in the order of positions."""
    begin = 0
    for length in lengths:
        if row < begin + length:
            return [*range(prompt if begin else 0), *range(begin, row + 1)]
        begin += length
    raise AssertionError("no such row")


@pytest.mark.parametrize("spec", [AttentionSpec(0.4), AttentionSpec(0.4, 4), AttentionSpec(0.4, 7, 2.0)])
@settings(max_examples=60, deadline=None)
@given(case=windows(), count=st.sampled_from([0, 3]), seed=st.integers(0, 1000))
def test_each_row_attends_to_what_precedes_it(
    spec: AttentionSpec, case: tuple[tuple[int, ...], int, int, int], count: int, seed: int
) -> None:
    """Given keys first, then the prompt, then its own example; a sliding window counts them all."""
    lengths, start, rows, prompt = case
    draws = torch.Generator().manual_seed(seed)
    whole = torch.randn(2, 1, GROUPS, sum(lengths), WIDTH, generator=draws, dtype=torch.float64)
    before = torch.randn(2, 1, GROUPS, count, WIDTH, generator=draws, dtype=torch.float64)
    q = torch.randn(1, HEADS, rows, WIDTH, generator=draws, dtype=torch.float64)
    window = Window.of(lengths, start, rows, prompt)

    def part(span: slice) -> tuple[Tensor, Tensor]:
        return whole[0][:, :, span], whole[1][:, :, span]

    past = PastKV(
        (before[0], before[1]) if count else None,
        part(slice(window.before)) if window.before else None,
        part(window.past_span) if window.past else None,
    )
    out = attend_window(q, *part(window.span), past, window, spec)
    for row in range(rows):
        seen = visible(lengths, prompt, start + row)
        k, v = (torch.cat([given, own[:, :, seen]], 2) for given, own in zip(before, whole, strict=True))
        age = torch.arange(k.shape[2] - 1, -1, -1)
        allowed = (age < (spec.window or 1000))[None]
        wanted = reference.attention(q[:, :, row : row + 1], k, v, spec.scale, allowed, spec.softcap)
        assert torch.allclose(out[:, row], wanted[:, :, 0], rtol=0, atol=1e-12)
