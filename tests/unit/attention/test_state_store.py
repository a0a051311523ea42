"""The store of recurrent states against a plain state for each sequence: random passes; some do not count."""

import random

import torch
from torch import Tensor

from coserve.attention.states import PassStates, States, StateShape, StateStore, equal_lengths
from coserve.kernels.recurrent import StatePlaces

SHAPES = (StateShape((3,), torch.float64), StateShape((2, 2), torch.float32))
WIDTH = 4


class Summing:
    """A mixer whose state is the sum of all rows so far, and a product of their signs; it gives the sums."""

    def __init__(self, number: int, x: Tensor) -> None:
        self.number, self._x = number, x

    def run(self, rows: slice, batch: int, before: States | None) -> tuple[Tensor, States]:
        x = self._x[rows].view(batch, -1, 1)
        if before is None:
            before = torch.zeros(batch, 3, dtype=torch.float64), torch.ones(batch, 2, 2)
        sums = x.cumsum(1) + before[0][:, None, :1]
        after = sums[:, -1].expand(batch, 3).clone(), before[1] * x.sign().prod(1)[..., None].float()
        before[0].fill_(torch.nan)  # a mixer may write there
        return sums.reshape(1, -1, 1).expand(1, -1, WIDTH), after

    def update(self, rows: slice, states: list[StatePlaces]) -> Tensor | None:
        """A kernel that reads and writes where states lie, in every second mixer."""
        if not self.number:
            return None
        out, after = self.run(rows, rows.stop - rows.start, tuple(one.read() for one in states))
        for one, state in zip(states, after, strict=True):
            one.write(state)
        return out

    def zeros(self, rows: int) -> Tensor:
        return torch.zeros(1, rows, WIDTH, dtype=torch.float64)


def test_each_sequence_has_its_own_state_and_passes_that_fail_leave_none() -> None:
    draws = random.Random("states")
    generator = torch.Generator().manual_seed(0)
    store = StateStore([SHAPES, SHAPES], 6, torch.device("cpu"), slots=2)
    seen: dict[int, list[float]] = {}  # the rows of each line's sequence
    kept: dict[int, list[float]] = {}  # of each slot's
    for _ in range(60):
        line, slot = draws.randrange(6), draws.randrange(2)
        if line in seen and draws.random() < 0.5:
            store.keep(line, slot)
            kept[slot] = seen[line]
        elif slot in kept:
            store.begin(line, slot)
            seen[line] = kept[slot]
        lines = draws.sample(range(6), draws.randint(1, 6))
        for line in lines:
            if draws.random() < 0.2:
                seen.pop(line, None)  # it has ended, and another begins there
        lens = [draws.choice((1, 1, 3)) for _ in lines]
        ends = [len(seen.get(line, ())) + count for line, count in zip(lines, lens, strict=True)]
        x = torch.randn(sum(lens), generator=generator, dtype=torch.float64)
        counts = draws.random() < 0.7
        states = PassStates(store, lines, lens, ends)
        for number in (0, 1):
            padding = draws.randint(0, 2)
            out = states.mix(Summing(number, (1 + number) * x), len(x) + padding)
            assert not out[0, len(x) :].any()
            wanted = []
            for line, own in zip(lines, x.split(lens), strict=True):
                rows = torch.tensor([*seen.get(line, ()), *own.tolist()], dtype=torch.float64)
                wanted.append((1 + number) * rows.cumsum(0)[-len(own) :])
            assert torch.allclose(out[0, : len(x), 0], torch.cat(wanted), atol=1e-12)
        if counts:
            states.commit()
            for line, own in zip(lines, x.split(lens), strict=True):
                seen[line] = [*seen.get(line, ()), *own.tolist()]
    assert store.nbytes == 2 * (2 * 6 + 2) * (3 * 8 + 4 * 4)


def test_neighbours_of_equal_length_are_one_call() -> None:
    lens, ends = [1, 1, 1, 4, 4, 4, 2, 1], [9, 5, 1, 4, 4, 8, 2, 1]
    assert equal_lengths(lens, ends) == [(0, 2), (2, 1), (3, 2), (5, 1), (6, 1), (7, 1)]
    assert equal_lengths([], []) == []
