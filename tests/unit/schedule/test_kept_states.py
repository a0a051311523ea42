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
