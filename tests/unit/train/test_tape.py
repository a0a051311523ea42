"""Windows over packed examples."""

from hypothesis import given
from hypothesis import strategies as st

from coserve.train.window import Window


@st.composite
def windows(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    lengths = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=6)))
    start = draw(st.integers(0, sum(lengths) - 1))
    return lengths, start, draw(st.integers(1, sum(lengths) - start))


@given(windows())
def test_a_window_says_whose_rows_it_has(case: tuple[tuple[int, ...], int, int]) -> None:
    """Against a list with one entry per row."""
    lengths, start, rows = case
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]
    inside = owner[start : start + rows]
    window = Window.of(lengths, start, rows)
    assert (window.start, window.rows) == (start, rows)
    assert window.pieces == tuple(inside.count(i) for i in sorted(set(inside)))
    assert window.past == owner[:start].count(inside[0])


def test_by_hand() -> None:
    assert Window.of((4, 3, 5), 0, 12) == Window(0, 12, 0, (4, 3, 5))
    assert Window.of((4, 3, 5), 2, 6) == Window(2, 6, 2, (2, 3, 1))
    assert Window.of((4, 3, 5), 4, 3) == Window(4, 3, 0, (3,))
    assert Window.of((4, 3, 5), 9, 2) == Window(9, 2, 2, (2,))
