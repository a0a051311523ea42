"""The order in which calls are computed, and those that are computed together."""

import random
import threading
import time

import pytest

from coserve.errors import ConfigError
from coserve.split.batching import MOST_JOINED, Batching, BatchingConfig
from coserve.split.clients import ClientAccount
from coserve.split.messages import GroupShape, LinearCall
from coserve.split.queues import MOST_COMPUTING, CallQueues
from coserve.split.work import AGE_SECONDS, Work

GROUPS = [GroupShape(1, {"a": 1, "a2": 1}), GroupShape(1, {"b": 1}), GroupShape(1, {"c": 1})]


class Desk:
    """Queues on a scripted clock; `put` names calls by number and has a client for each."""

    def __init__(self, batching: Batching = "waiting", most_rows: int = 10, **settings: float) -> None:
        self.now = 0.0
        config = BatchingConfig(batching, **settings)  # type: ignore[arg-type]
        self.queues = CallQueues(config, GROUPS, most_rows, lambda: self.now)
        self.left = 0

    def put(
        self,
        number: int,
        paths: str = "a",
        kind: str = "inference",
        rows: int = 1,
        deadline: float | None = None,
        direction: str = "forward",
        nbytes: int = 0,
    ) -> Work:
        call = LinearCall(number, tuple(paths.split()), direction, rows, "float32", kind, 4 * rows, deadline)  # type: ignore[arg-type]
        work = Work(call, [], lambda outcome: None, self.queues.join(f"client {number}"), nbytes=nbytes)
        self.now += 1e-6
        self.queues.put(work)
        self.left += 1
        return work

    def learn(self, fixed: float, per_row: float, path: str = "a") -> None:
        """Has products at `path` take so many seconds."""
        for rows in (1, 2, 8):
            call = LinearCall(0, (path,), "forward", rows, "float32", "inference", 0)
            self.queues.count(
                [Work(call, [], lambda outcome: None, self.queues.join("past"))], fixed + rows * per_row, [0]
            )

    def taken(self) -> list[list[int]]:
        """Everything that waits, in the order of products."""
        found = []
        while self.left:
            works, _ = self.queues.poll()
            self.left -= len(works)
            found.append([work.call.number for work in works])
        return found


def test_inference_goes_ahead_of_training_that_has_not_waited_long() -> None:
    desk = Desk()
    desk.put(1, "a", "training")
    desk.now = AGE_SECONDS / 2
    desk.put(2, "b")
    desk.put(3, "c")
    assert desk.taken() == [[2], [3], [1]]
    desk.put(4, "a", "training")
    desk.now += AGE_SECONDS
    desk.put(5, "b")
    assert desk.taken() == [[4], [5]]


def test_the_earliest_deadline_goes_first_within_a_class() -> None:
    desk = Desk()
    desk.put(1, "a")
    desk.put(2, "b", deadline=3.0)
    desk.put(3, "c", deadline=0.1)
    desk.put(4, "a2", "training", deadline=0.01)
    desk.put(5, "b", "training", direction="backward")
    assert desk.taken() == [[3], [2], [1], [4], [5]]


def test_new_deadlines_hold_up_no_call_without_one_for_ever() -> None:
    desk = Desk()
    desk.put(0, "a")
    desk.put(1, "a2", "training")
    order = []
    for number in range(2, 100):
        desk.put(number, "b", deadline=0.01)
        works, _ = desk.queues.poll()
        order.extend(work.call.number for work in works)
        desk.now += AGE_SECONDS / 10
    assert order.index(0) < 15 and order.index(1) < 15


def test_those_that_have_come_least_far_go_first() -> None:
    desk = Desk()
    ahead = desk.put(1, "a")
    assert desk.taken() == [[1]]
    desk.queues.answer([ahead])
    desk.queues.put(Work(call(2, "b"), [], lambda outcome: None, ahead.client))
    desk.left += 1
    desk.now = 0.1
    desk.put(3, "c")
    assert desk.taken() == [[3], [2]]


def call(number: int, path: str) -> LinearCall:
    return LinearCall(number, (path,), "forward", 1, "float32", "inference", 4)


def test_calls_at_the_same_linears_are_computed_together() -> None:
    def asked(batching: Batching) -> list[list[int]]:
        desk = Desk(batching)
        for number, paths in enumerate(["a", "b", "a", "a a2", "b", "a"], 1):
            desk.put(number, paths)
        desk.put(7, "a", direction="backward")
        return desk.taken()

    assert asked("waiting") == asked("opportunistic") == asked("lockstep") == [[1, 3, 6], [2, 5], [4], [7]]
    assert asked("none") == [[1], [2], [3], [4], [5], [6], [7]]


@pytest.mark.parametrize(
    ("factor", "per_row", "wanted"),
    [
        (1.0, 0.01, [[1, 2, 3]]),  # 16 rows add 0.16 s, inference alone takes 1.04
        (0.1, 0.01, [[1, 2], [3]]),
        (1.0, 0.1, [[1, 2], [3]]),
        (0.0, 0.01, [[1, 2], [3]]),
        (1.0, 0.0, [[1, 2, 3]]),  # what training adds costs nothing
    ],
)
def test_training_joins_inference_where_it_adds_little(
    factor: float, per_row: float, wanted: list[list[int]]
) -> None:
    desk = Desk("opportunistic", 100, wait_factor=factor)
    desk.learn(1.0, per_row)
    for number, (kind, rows) in enumerate((("inference", 1), ("inference", 3), ("training", 16)), 1):
        desk.put(number, kind=kind, rows=rows)
    assert desk.taken() == wanted


def test_training_does_not_join_before_its_cost_is_known() -> None:
    desk = Desk("opportunistic")
    desk.put(1)
    desk.put(2, kind="training")
    assert desk.taken() == [[1], [2]]


@pytest.mark.parametrize("batching", ["opportunistic", "lockstep"])
@pytest.mark.parametrize(("rows", "wanted"), [((4, 6, 1), [[1, 2], [3]]), ((11, 1), [[1], [2]])])
def test_rows_of_a_product_are_bounded(
    batching: Batching, rows: tuple[int, ...], wanted: list[list[int]]
) -> None:
    desk = Desk(batching)
    for number, count in enumerate(rows, 1):
        desk.put(number, rows=count)
    assert desk.taken() == wanted


@pytest.mark.parametrize("batching", ["opportunistic", "lockstep"])
def test_bytes_of_a_product_are_bounded(batching: Batching) -> None:
    """Logits of many rows are not copied into one product."""
    desk = Desk(batching)
    for number, parts in enumerate((2, 2, 1, 5), 1):
        desk.put(number, nbytes=parts * MOST_JOINED // 4)
    assert desk.taken() == [[1, 2], [3], [4]]


@pytest.mark.parametrize("batching", ["opportunistic", "lockstep"])
@pytest.mark.parametrize(("rows", "nbytes", "waits"), [(3, 0, True), (10, 0, False), (3, MOST_JOINED, False)])
def test_a_product_that_is_full_waits_for_nobody(
    batching: Batching, rows: int, nbytes: int, waits: bool
) -> None:
    desk = Desk(batching, wait_cap=10.0)
    desk.learn(1.0, 0.0)
    other = desk.queues.join("other")
    for _ in range(2):  # calls a half a second after an answer
        desk.queues.put(work := Work(call(0, "a"), [], lambda outcome: None, other))
        assert desk.queues.poll()[0] == [work]
        desk.queues.answer([work])
        desk.now += 0.5
    desk.now -= 0.4
    desk.put(1, rows=rows, nbytes=nbytes)
    works, again = desk.queues.poll()
    assert bool(works) is not waits and (again > desk.now) is waits


@pytest.mark.parametrize(("rows", "waits"), [(1, True), (10, False)])
def test_a_call_waits_no_longer_than_others_would_spare_it(rows: int, waits: bool) -> None:
    """Reading weights takes 0.2 s and each row another one: the other client comes in 0.1 or 0.3 s."""
    desk = Desk("opportunistic", 100, wait_cap=10.0)
    desk.learn(0.2, 1.0)
    other = desk.queues.join("other")
    for _ in range(2):
        desk.queues.put(work := Work(call(0, "a"), [], lambda outcome: None, other))
        assert desk.queues.poll()[0] == [work]
        desk.queues.answer([work])
        desk.now += 0.5
    desk.now -= 0.1 if waits else 0.3
    desk.put(1, rows=rows)
    works, again = desk.queues.poll()
    assert bool(works) is not waits and (again > desk.now) is waits


@pytest.mark.parametrize("batching", ["opportunistic", "waiting", "lockstep", "none"])
def test_who_leaves_takes_its_calls_along(batching: Batching) -> None:
    desk = Desk(batching)
    gone, stays = desk.put(1), desk.put(2)
    desk.queues.leave(gone.client)
    desk.queues.put(Work(call(3, "b"), [], lambda outcome: None, gone.client))  # read before, put after
    works, _ = desk.queues.poll()
    assert works == [stays]
    assert desk.queues.poll() == ([], float("inf"))
    assert [client.name for client in desk.queues.status()[1]] == ["client 2"]


def test_figures_are_those_of_an_independent_count() -> None:
    desk, draws = Desk("waiting", 64), random.Random()
    puts: list[Work] = []
    batches: list[tuple[list[Work], float]] = []
    for number in range(200):
        puts.append(desk.put(number, draws.choice(["a", "a2", "b"]), rows=draws.randint(1, 9)))
        if draws.random() < 0.3:
            works, _ = desk.queues.poll()
            seconds = draws.uniform(0.001, 0.01)
            desk.now += seconds
            desk.queues.count(works, seconds, [8 * work.call.rows for work in works])
            desk.queues.answer(works)
            batches.append((works, seconds))
    answered = {work for works, _ in batches for work in works}
    by_group = {product.paths: product for product in desk.queues.status()[0]}
    for paths, product in by_group.items():
        own = [(works, s) for works, s in batches if works[0].call.paths[0] in paths]
        waiting = [work for work in puts if work.call.paths[0] in paths and work not in answered]
        assert product.batches == len(own)
        assert product.calls == sum(len(works) for works, _ in own)
        assert product.rows == sum(work.call.rows for works, _ in own for work in works)
        assert product.seconds == pytest.approx(sum(s for _, s in own))
        assert product.waiting_calls == len(waiting)
        assert product.waiting_rows == sum(work.call.rows for work in waiting)
    assert set(by_group) == {("a", "a2"), ("b",)}
    for work, status in zip(puts, desk.queues.status()[1], strict=True):
        rows, is_answered = work.call.rows, work in answered
        assert (status.calls, status.rows) == ((1, rows) if is_answered else (0, 0))
        assert (status.waiting_calls, status.waiting_rows) == ((0, 0) if is_answered else (1, rows))
        assert (status.received_bytes, status.sent_bytes) == (4 * rows, 8 * rows * is_answered)
    assert desk.queues.received.total == 4 * sum(work.call.rows for work in puts)
    assert desk.queues.sent.total == 8 * sum(work.call.rows for work in answered)


def test_settings_out_of_their_range_are_refused() -> None:
    for settings in ({"mode": "sometimes"}, {"wait_factor": -1.0}, {"wait_factor": float("nan")}):
        with pytest.raises(ConfigError):
            BatchingConfig(**settings)  # type: ignore[arg-type]
    for settings in (
        {"wait_cap": float("inf")},
        {"wait_cap": -0.1},
        {"client_rows": 0},
        {"products": -1},
        {"products": 65},
    ):
        with pytest.raises(ConfigError):
            BatchingConfig(**settings)  # type: ignore[arg-type]


def test_a_short_call_alone_is_computed_by_who_brings_it() -> None:
    """Not where its seconds are unknown or long, another waits or is computed, or it waits for company."""

    def offered(desk: Desk, number: int, path: str = "a") -> list[int]:
        client = desk.queues.join(f"client {number}")
        return [
            work.call.number
            for work in desk.queues.offer(Work(call(number, path), [], lambda outcome: None, client))
        ]

    desk = Desk()
    assert offered(desk, 1) == []  # unknown
    desk.learn(1e-4, 1e-5)
    assert offered(desk, 2) == []  # the first waits
    assert [work.call.number for work in desk.queues.take()] == [1, 2]
    assert offered(desk, 3) == []  # these are computed
    desk.queues.done()
    assert [work.call.number for work in desk.queues.take()] == [3]
    desk.queues.done()
    assert offered(desk, 4) == [4]
    assert offered(desk, 5) == []
    desk.queues.done()
    assert [work.call.number for work in desk.queues.take()] == [5]
    desk.queues.done()
    desk.learn(1.0, 1e-5, "b")
    assert offered(desk, 6, "b") == []  # long


def test_as_many_products_are_handed_out_as_are_computed_at_once() -> None:
    desk = Desk("none", products=2)
    for number, path in enumerate("abc"):
        desk.put(number, path)
    assert [[work.call.number for work in desk.queues.take()] for _ in range(2)] == [[0], [1]]
    assert not desk.queues.is_last()
    found = list[list[Work]]()
    third = threading.Thread(target=lambda: found.append(desk.queues.take()))
    third.start()
    third.join(0.05)
    assert not found
    desk.queues.done()
    third.join(10)
    assert [work.call.number for work in found[0]] == [2] and not desk.queues.is_last()
    desk.queues.done()
    assert desk.queues.is_last()


def test_few_connections_have_threads_that_compute() -> None:
    """Each of these threads gets OpenMP threads of its own. Who leaves makes room."""
    desk = Desk()
    desk.learn(1e-4, 1e-5)
    clients = [desk.queues.join(f"client {number}") for number in range(64)]

    def offered(client: ClientAccount) -> bool:
        works = desk.queues.offer(Work(call(0, "a"), [], lambda outcome: None, client))
        computes = bool(works)
        works = works or desk.queues.take()
        desk.queues.answer(works)
        desk.queues.done()
        return computes

    found = [[offered(client) for client in clients] for _ in range(2)]
    assert found[0] == found[1] == [True] * MOST_COMPUTING + [False] * (64 - MOST_COMPUTING)
    desk.queues.leave(clients[0])
    assert offered(clients[-1]) and not offered(clients[-2]) and offered(clients[1])


@pytest.mark.parametrize("products", [1, 3])
def test_calls_of_many_threads_are_each_computed_once(products: int) -> None:
    """No more than `products` at a time; a call that is computed by who brings it is the only one."""
    queues = CallQueues(BatchingConfig("opportunistic", products=products), GROUPS, 10)
    client = queues.join("past")
    for rows in (1, 2, 8):
        queues.count([Work(call(0, "a"), [], lambda outcome: None, client)], 1e-4 + rows * 1e-6, [0])
    computed, at_once, most = list[int](), 0, 0
    lock = threading.Lock()

    def compute(works: list[Work]) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(1e-4)
        queues.answer(works)
        with lock:
            at_once -= 1
            computed.extend(work.call.number for work in works)
        queues.done()

    def take() -> None:
        while works := queues.take():
            compute(works)

    def bring(first: int) -> None:
        mine = queues.join(f"client {first}")
        for number in range(first, first + 50):
            if works := queues.offer(Work(call(number, "a"), [], lambda outcome: None, mine)):
                compute(works)
            while number not in computed:
                time.sleep(1e-5)

    takers = [threading.Thread(target=take) for _ in range(products)]
    for taker in takers:
        taker.start()
    bringers = [threading.Thread(target=bring, args=(first,)) for first in range(0, 400, 100)]
    for thread in bringers:
        thread.start()
    for thread in bringers:
        thread.join(30)
    queues.close()
    for taker in takers:
        taker.join(10)
    assert sorted(computed) == [first + k for first in range(0, 400, 100) for k in range(50)]
    assert most <= products
