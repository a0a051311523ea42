"""Names of kept states against a plain account of what each slot of a device holds: random plans, of which
several are under way, some with rows that are lost."""

import random
from collections import deque

from coserve.core.plan import StateMove
from coserve.core.request import Request
from coserve.core.sequence import Sequence
from coserve.schedule import kept_states
from coserve.schedule.kept_states import KeptStates, is_kept, next_cut

SIZE = 16


def sequence(key: int, prompt: int, computed: int = 0) -> Sequence:
    return Sequence(key, Request(str(key), (1,) * prompt), computed=computed)


def test_a_slot_holds_what_its_name_says_until_nobody_waits_for_it() -> None:
    draws = random.Random("kept")
    for slots in (1, 2, 5):
        kept, device = (
            KeptStates(slots),
            dict[int, bytes](),
        )  # what slots hold, as plans are run in turn
        under_way: deque[tuple[list[StateMove], list[int], dict[int, bytes]]] = deque()
        waiting = dict[int, tuple[Sequence, bytes]]()
        found = 0
        for key in range(300):
            moves, computed, own = list[StateMove](), dict[int, bytes](), sequence(key, 40)
            name = bytes([draws.randrange(3 * slots)])
            if name in kept:
                kept.hold(own, name)
                waiting[key] = own, name
            for other in draws.sample(sorted(waiting), draws.randint(0, len(waiting))):
                begins, wanted = waiting.pop(other)
                if draws.random() < 0.2:
                    kept.let_go(begins)
                    continue
                moves.append(kept.begin(begins))
                assert device[moves[-1].slot] == wanted
                found += 1
            new = kept.keep(own, name)
            assert not (new and name in kept) and len(kept) <= slots == kept.slots
            moves += new
            computed |= {move.slot: name for move in new}
            lost = [key] if draws.random() < 0.2 else []
            device |= {move.slot: b"lost" if lost else name for move in new}  # after what has begun
            under_way.append((moves, lost, computed))
            while len(under_way) > draws.randint(0, 2):
                done, gone, _ = under_way.popleft()
                kept.written(done, gone)
        assert found > 20


def test_a_state_set_aside_stays_until_its_sequence_begins_or_forgets_it() -> None:
    """However many others are kept meanwhile; its place is then free again, before those with names."""
    kept, first, second = KeptStates(3), sequence(1, 40), sequence(2, 40)
    assert kept.set_aside(first) and kept.set_aside(second)
    moves = kept.take_leaving()
    assert [move.key for move in moves] == [1, 2] and not kept.take_leaving()
    kept.written(moves, [])
    for key in range(3, 9):
        kept.written(kept.keep(sequence(key, 40), bytes([key])), [])
        assert bytes([key]) in kept
    third = sequence(9, 40)
    kept.hold(third, bytes([8]))
    assert not kept.set_aside(sequence(10, 40)), "all places are in use"
    assert kept.set_aside(third) and not kept.take_leaving(), "it has not begun with the state that it held"
    kept.let_go(third)
    assert not kept.keep(sequence(11, 40), b"other"), "it is held for the copy"
    kept.bring_back(first)
    assert kept.begin(first) == StateMove(1, moves[0].slot, False)
    kept.forget(second)
    for key in (12, 13):
        kept.written(kept.keep(sequence(key, 40), bytes([key])), [])
    assert bytes([8]) in kept, "free places come first"
    kept.forget(third)
    assert bytes([8]) in kept, "others may find it"


def test_prompts_are_cut_where_states_are_kept() -> None:
    for prompt in (5, 63, 100, 512, 513, 1040, 1300):
        own, cuts = sequence(0, prompt), []
        while own.computed < prompt:
            own.computed = next_cut(own, SIZE)
            cuts.append(own.computed)
            assert (own.computed == prompt) is not is_kept(own, own.computed, SIZE)
        last = (prompt - 1) // SIZE * SIZE
        wanted = [*range(kept_states.EVERY, prompt, kept_states.EVERY)]
        if last - max(wanted, default=0) >= 64:
            wanted.append(last)
        assert cuts == [*wanted, prompt]
