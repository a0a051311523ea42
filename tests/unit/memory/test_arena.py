"""Memory used again: whole pieces, to one taker at a time, where they fit."""

import random

import pytest
import torch
from torch import Tensor

from coserve.memory.arena import Arena, Lease

CPU = torch.device("cpu")


def take(arena: Arena, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return arena.take(shape, dtype, CPU)


def test_what_was_given_back_is_handed_out_again() -> None:
    arena = Arena()
    first = take(arena, 3, 40)
    assert first.shape == (3, 40) and first.is_contiguous() and arena.nbytes == 0
    arena.give_back([first])
    assert arena.nbytes == 480
    again = take(arena, 4, 2, 15)
    assert again.data_ptr() == first.data_ptr() and again.shape == (4, 2, 15)
    assert arena.nbytes == 0


def test_a_lease_gives_back_a_part_or_all_that_it_holds() -> None:
    arena = Arena()
    other, lease = Lease(arena), Lease(arena)
    kept = other.take((10,), torch.float32, CPU)
    first, second = (lease.take((count,), torch.float32, CPU) for count in (100, 30))
    assert (lease.nbytes, other.nbytes, arena.nbytes) == (520, 40, 0)
    lease.give_back([first])
    assert (lease.nbytes, arena.nbytes) == (120, 400)
    lease.release()
    assert (lease.nbytes, other.nbytes, arena.nbytes) == (0, kept.nbytes, 520)
    assert lease.take((30,), torch.float32, CPU).data_ptr() == second.data_ptr()


def test_a_piece_comes_back_whole_however_little_of_it_was_used() -> None:
    arena = Arena()
    arena.give_back([take(arena, 100)])
    for _ in range(3):
        arena.give_back([take(arena, 60)])
    assert arena.nbytes == 400
    assert take(arena, 100).numel() == 100 and arena.nbytes == 0


def test_a_piece_over_twice_as_large_is_left_for_who_needs_it() -> None:
    arena = Arena()
    arena.give_back([take(arena, 100)])
    take(arena, 49)
    assert arena.nbytes == 400
    take(arena, 50)
    assert arena.nbytes == 0


def test_the_smallest_piece_that_fits_is_taken() -> None:
    arena = Arena()
    arena.give_back([take(arena, count) for count in (70, 90, 80)])
    assert take(arena, 75).untyped_storage().nbytes() == 320
    assert arena.nbytes == 640


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_do_not_mix(dtype: torch.dtype) -> None:
    arena = Arena()
    arena.give_back([take(arena, 64)])
    other = take(arena, 64, dtype=dtype)
    assert other.dtype == dtype and arena.nbytes == 256


def test_what_waits_beyond_the_limit_goes_back_to_the_system() -> None:
    """The largest first; what is out counts, and is never refused."""
    arena = Arena(limit=1000)
    pieces = [take(arena, count) for count in (50, 100, 75)]  # 900 bytes
    arena.give_back(pieces)
    assert arena.nbytes == 900
    first = take(arena, 30)  # 120 bytes in the piece of 200
    assert arena.nbytes == 700
    second = take(arena, 150)  # 600 bytes: 400 of those that wait make room
    assert arena.nbytes == 0 or arena.nbytes + 200 + 600 <= 1000
    third = take(arena, 150)
    arena.give_back([first, second, third])
    assert arena.nbytes <= 1000
    arena.set_limit(0)
    assert arena.nbytes == 0


@pytest.mark.parametrize("seed", range(3))
def test_no_two_takers_share_a_byte(seed: int) -> None:
    """Each writes its own number, and nobody's is overwritten."""
    draws, arena = random.Random(seed), Arena()
    held: dict[int, Tensor] = {}
    for number in range(300):
        if held and draws.random() < 0.5:
            key = draws.choice(list(held))
            assert bool((held[key] == key).all())
            arena.give_back([held.pop(key)])
        else:
            held[number] = take(arena, draws.randint(1, 5), draws.randint(1, 50)).fill_(number)
    for key, tensor in held.items():
        assert bool((tensor == key).all())
    assert len({tensor.data_ptr() for tensor in held.values()}) == len(held)
