"""States of a micro-batch's windows, and what is owed to them."""

import torch

from coserve.memory.arena import Arena, Lease
from coserve.train.states import MicroBatchStates
from coserve.train.window import Window

LENGTHS = (5, 7)


def states(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 3, generator=generator), torch.randn(1, 2, 2, generator=generator)


def test_a_window_that_goes_on_has_the_state_before_it_and_no_other() -> None:
    lease = Lease(Arena())
    kept = MicroBatchStates(LENGTHS, lease)
    windows = [Window.of(LENGTHS, start, rows) for start, rows in ((0, 3), (3, 2), (5, 4), (9, 3))]
    left = {number: states(number) for number in range(8)}
    for number, window in enumerate(windows):
        for mixer in (0, 1):
            kept.save(mixer, window, left[4 * mixer + number])
    for mixer in (0, 1):
        assert kept.before(mixer, windows[0]) is None and kept.before(mixer, windows[2]) is None
        for number in (1, 3):
            found = kept.before(mixer, windows[number])
            assert found is not None and all(map(torch.equal, found, left[4 * mixer + number - 1]))
    assert lease.nbytes == 2 * 2 * 7 * 4  # two mixers, two places within examples
    kept.save(0, windows[0], left[5])  # a pass that is repeated writes again, and takes nothing
    found = kept.before(0, windows[1])
    assert found is not None and torch.equal(found[0], left[5][0]) and lease.nbytes == 2 * 2 * 7 * 4


def test_what_is_owed_is_the_window_befores_until_it_has_gone_back() -> None:
    kept = MicroBatchStates(LENGTHS, Lease(Arena()))
    windows = [Window.of(LENGTHS, start, rows) for start, rows in ((0, 5), (5, 4), (9, 3))]
    for number, window in enumerate(windows):
        kept.save(0, window, states(number))
    grads = states(7)
    assert kept.owed(0, windows[2]) is None
    kept.owe(0, windows[2], grads)
    assert kept.owed(0, windows[1]) is grads and kept.owed(0, windows[0]) is None
    kept.owe(0, windows[1], states(8))  # an example begins with it: it owes nobody
    assert kept.owed(0, windows[1]) is None and kept.owed(0, windows[0]) is None
