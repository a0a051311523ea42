"""A cluster without a model: workers whose tokens are hashes of all that they have seen, so that a page that
is lost, doubled, stale or another request's shows in the next token.

Everything that may happen is drawn: who computes next, which chunk of a move is done, when instances come and
go, when a worker dies. The policies decide, the world carries out.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

from coserve.cluster.coordination import (
    PagesCopy,
    PausedPages,
    proactive_moves,
    redundant_copies,
)
from coserve.cluster.dispatch import SCHEDULER, Dispatch, DispatchEstimate, DispatchRule, DispatchSettings
from coserve.cluster.meeting import Meeting, MovingPages, PageMove
from coserve.cluster.placement import (
    PlacementSettings,
    PlacementTask,
    moves_between,
    place_by_locality,
)
from coserve.cluster.records import (
    BlockInstance,
    ChainRequest,
    ClusterBlock,
    ClusterLink,
    ClusterView,
    ClusterWorker,
    ComputeProfile,
)
from coserve.cluster.scaling import AddInstance, ScalingSettings, scale
from coserve.cluster.speculation import RowsAhead, SpeculationStep, speculated_places

PAGE, TOKEN_NBYTES, BLOCK_NBYTES = 4, 2, 100
PROFILE = ComputeProfile(((1, 0.01), (8, 0.02)))


def mixed(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def passed(content: str, pages: Sequence[str]) -> str:
    """A block's output for its newest row: of all its pages."""
    return mixed(content, tuple(pages))


@cache
def inputs(chain: tuple[str, ...], tokens: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The plain computation: what each block of a chain is given, token by token, and last what comes out."""
    found = [tokens]
    for content in chain:
        pages = [mixed(content, given) for given in found[-1]]
        found.append(tuple(passed(content, pages[: end + 1]) for end in range(len(pages))))
    return tuple(found)


@cache
def answer_of(chain: tuple[str, ...], prompt: tuple[str, ...], count: int) -> tuple[str, ...]:
    tokens = prompt
    for _ in range(count):
        tokens += (mixed("token", inputs(chain, tokens)[-1][-1]),)
    return tokens[len(prompt) :]


@dataclass
class ScriptedWorker:
    """Pages by request and block; `used` is counted with each change."""

    name: str
    blocks: set[str] = field(default_factory=set)
    pages: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    queues: dict[str, list[int]] = field(default_factory=dict)
    used: int = 0
    is_alive: bool = True

    def load(self, content: str) -> None:
        if content not in self.blocks:
            self.blocks.add(content)
            self.used += BLOCK_NBYTES

    def unload(self, content: str) -> None:
        self.blocks.remove(content)
        self.used -= BLOCK_NBYTES

    def set_pages(self, key: int, content: str, pages: Sequence[str]) -> None:
        self.used += TOKEN_NBYTES * (len(pages) - len(self.pages.pop((key, content), ())))
        if pages:
            self.pages[key, content] = list(pages)

    def counted(self) -> int:
        return BLOCK_NBYTES * len(self.blocks) + TOKEN_NBYTES * sum(map(len, self.pages.values()))


@dataclass
class Walk:
    """A request under way: its tokens so far, its place in the chain and what it brings there."""

    key: int
    chain: tuple[str, ...]
    prompt: tuple[str, ...]
    count: int
    approximates: bool
    tokens: tuple[str, ...] = ()
    place: int = 0
    at: str = SCHEDULER
    seen: int = 0  # tokens whose pages exist in every block
    rows: tuple[str, ...] = ()  # inputs of the block at `place`
    goal: DispatchEstimate | None = None
    move: "PagesUnderWay | None" = None
    owners: dict[str, str] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.count

    def restart(self) -> None:
        """Rows on their way are lost: the scheduler has the tokens, and sends them again."""
        self.place, self.at, self.goal, self.move = 0, SCHEDULER, None, None
        self.rows = self.tokens[self.seen :]


@dataclass
class PagesUnderWay:
    """Pages that come to a worker from both ends; `base` tokens are there already."""

    meeting: Meeting
    base: int
    source: str | None
    front: list[str] = field(default_factory=list)
    back: list[str] = field(default_factory=list)


class ScriptedCluster:
    """One drawn world."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.workers = {name: ScriptedWorker(name) for name in "abcd"[: draw.randint(2, 4)]}
        contents = [f"block{n}" for n in range(draw.randint(2, 5))]
        chains = [tuple(draw.choices(contents, k=draw.randint(1, 4))) for _ in range(3)]
        chains = [tuple(dict.fromkeys(chain)) for chain in chains]  # a block is in a chain once
        self.blocks = {one: ClusterBlock(one, BLOCK_NBYTES, TOKEN_NBYTES, 1, PROFILE) for one in contents}
        self.dispatch = Dispatch(
            DispatchSettings(
                PAGE, draw.choice([*DispatchRule, DispatchRule.OWNER_FIRST]), draw.choice((0.0, 1.0))
            )
        )
        self.memory = BLOCK_NBYTES * len(contents) + 2000
        self.walks = [
            Walk(
                key,
                draw.choice(chains),
                tuple(mixed(seed, key, n) for n in range(draw.randint(1, 20))),
                draw.randint(1, 5),
                draw.random() < 0.5,
            )
            for key in range(draw.randint(1, 5))
        ]
        for walk in self.walks:
            walk.tokens = walk.prompt
            walk.restart()
        self.now, self.deaths, self.wrong = 0.0, 0, 0
        self.happened: dict[str, int] = {}

    def run(self, most: int = 20_000) -> None:
        """Until all answers are complete; then copies are swept."""
        rare: list[Callable[[], object]] = [
            self.scaled,
            self.swept,
            self.died,
            self.moved_ahead,
            self.placed_anew,
        ]
        for _ in range(most):
            open_walks = [walk for walk in self.walks if not walk.is_done]
            if not open_walks:
                break
            self.now += self.draw.random() / 10
            if self.draw.random() < 0.1:
                self.draw.choice(rare)()
            else:
                self.advance(self.draw.choice(open_walks))
            self.check_accounts()
        assert all(walk.is_done for walk in self.walks), "every answer ends"
        for walk in self.walks:
            assert walk.tokens[len(walk.prompt) :] == answer_of(walk.chain, walk.prompt, walk.count)
        self.swept()
        self.check_accounts()
        assert not any(worker.pages for worker in self.workers.values()), "pages of nobody are left"

    def view(self) -> ClusterView:
        instances = [
            BlockInstance(
                worker.name, content,
                tuple(len(self.walk(key).rows) for key in worker.queues.get(content, ())),
                8, 64,
                None if worker.queues.get(content) else self.now - 100 * self.draw.random(),
            )
            for worker in self.workers.values()
            for content in sorted(worker.blocks)
            if worker.is_alive
        ]  # fmt: skip
        workers = {
            one.name: ClusterWorker(one.name, "left" if one.name in "ab" else "right", self.memory, one.used,
                                    1e4, 1e4, self.draw.choice((10.0, 1000.0)), one.is_alive)
            for one in self.workers.values()
        }  # fmt: skip
        link = ClusterLink(1000.0)
        links = {(one, other): link for one in (SCHEDULER, *workers) for other in workers if one != other}
        return ClusterView(workers, self.blocks, tuple(instances), links)

    def walk(self, key: int) -> Walk:
        return self.walks[key]

    def request(self, walk: Walk) -> ChainRequest:
        pages: dict[str, dict[str, int]] = {}
        for worker in self.workers.values():
            for (key, content), held in worker.pages.items():
                if key == walk.key and worker.is_alive:
                    pages.setdefault(content, {})[worker.name] = len(held)
        return ChainRequest(walk.key, walk.seen, len(walk.rows), pages, walk.approximates)

    def advance(self, walk: Walk) -> None:
        """The next thing of one request: it is dispatched, a chunk of its pages comes, or it is computed."""
        if walk.goal is None:
            self.sent(walk)
        elif walk.move is not None:
            self.chunk(walk, walk.goal.worker, walk.chain[walk.place], walk.move)
            if walk.move is not None and walk.move.meeting.is_done:
                self.arrived(walk.goal.worker, walk.key, walk.chain[walk.place], walk.move)
                walk.move = None
        elif self.workers[walk.goal.worker].queues[walk.chain[walk.place]][0] == walk.key:
            self.computed(walk, walk.goal.worker)

    def sent(self, walk: Walk) -> None:
        view, request, content = self.view(), self.request(walk), walk.chain[walk.place]
        goal = self.dispatch.choose(view, request, content, walk.at)
        assert goal is not None, "each worker has room for all blocks"
        worker = self.workers[goal.worker]
        for gone in goal.evicted:
            worker.unload(gone)
        worker.load(content)
        worker.queues.setdefault(content, []).append(walk.key)
        walk.goal, walk.owners[content] = goal, goal.worker
        if goal.plan is not None:
            way = self.draw.choice([*MovingPages])
            walk.move = self.begin_move(request, content, goal.worker, goal.source, way)
            self.count("moved")

    def begin_move(
        self, request: ChainRequest, content: str, worker: str, source: str | None, way: MovingPages
    ) -> PagesUnderWay:
        base = request.held(content, worker) // PAGE * PAGE
        link = None if source is None else ClusterLink(1000.0)
        move = PageMove(request.tokens - base, TOKEN_NBYTES, PAGE, link, 100.0)
        return PagesUnderWay(Meeting(move, self.draw.choice((4, 8)), way), base, source)

    def chunk(self, walk: Walk, worker: str, content: str, move: PagesUnderWay) -> None:
        """One chunk of a move, of a drawn end."""
        meeting, seconds = move.meeting, self.draw.uniform(0.001, 0.5)
        if self.draw.random() < 0.5:
            if (tokens := meeting.next_recomputed()) is not None:
                given = inputs(walk.chain, walk.tokens[: walk.seen])[walk.chain.index(content)]
                assert tokens.start == len(move.front), "recomputed without what is before"
                move.front += [mixed(content, given[move.base + n]) for n in tokens]
                meeting.recomputed(seconds)
        elif (tokens := meeting.next_copied()) is not None:
            assert move.source is not None
            source = self.workers[move.source]
            there = source.pages.get((walk.key, content), [])[move.base : walk.seen]
            if not source.is_alive or len(there) < tokens.stop or self.draw.random() < 0.02:
                meeting.lost(None)
                self.count("lost")
            else:
                move.back = there[tokens.start : tokens.stop] + move.back
                meeting.copied(seconds)

    def arrived(self, worker: str, key: int, content: str, move: PagesUnderWay) -> None:
        there = self.workers[worker]
        kept = there.pages.get((key, content), [])[: move.base]
        there.set_pages(key, content, kept + move.front + move.back)

    def computed(self, walk: Walk, name: str) -> None:
        worker, content = self.workers[name], walk.chain[walk.place]
        worker.queues[content].remove(walk.key)
        out = self.rows_out(worker, walk, content, walk.rows)
        walk.at, walk.goal = name, None
        chain = [(walk.owners.get(one, ""), one) for one in walk.chain]
        slowest = [chain[walk.place]] if self.draw.random() < 0.5 else []
        if speculated_places(chain, slowest, self.blocks, walk.approximates) and walk.place + 1 < len(
            walk.chain
        ):
            self.went_ahead(walk, out)
        else:
            self.passed_on(walk, out)

    def rows_out(
        self, worker: ScriptedWorker, walk: Walk, content: str, rows: Sequence[str]
    ) -> tuple[str, ...]:
        """Computes rows at a worker: pages of rows that were computed before, and lost on their way, are
        written anew."""
        pages = worker.pages.get((walk.key, content), [])[: walk.seen]
        assert len(pages) == walk.seen, "pages are missing"
        out = []
        for row in rows:
            pages = [*pages, mixed(content, row)]
            out.append(passed(content, pages))
        worker.set_pages(walk.key, content, pages)
        return tuple(out)

    def went_ahead(self, walk: Walk, out: tuple[str, ...]) -> None:
        """The block behind computes with a prediction of `out`, if its pages are there, in a drawn order with
        the verification."""
        following = walk.chain[walk.place + 1]
        holders = [w for w in self.workers.values() if w.is_alive and following in w.blocks
                   and len(w.pages.get((walk.key, following), ())) >= walk.seen]  # fmt: skip
        if not holders:
            return self.passed_on(walk, out)
        worker, right = self.draw.choice(holders), self.draw.random() < 0.7
        predicted = out if right else tuple(mixed("guess", row) for row in out)
        ahead, kept, said = RowsAhead(), (), SpeculationStep.WAIT
        events = self.draw.choice(
            (("come", "compute", "verify"), ("come", "verify", "compute"), ("verify", "come", "compute"))
        )
        for event in events:
            if event == "come":
                ahead.came()
            elif event == "compute" and ahead.has_come:
                kept = self.rows_out(worker, walk, following, predicted)
                said = ahead.computed()
            elif event == "verify":
                said = ahead.verified(0.97 if right else 0.9)
        assert said is not SpeculationStep.WAIT
        if ahead.is_wrong:
            worker.set_pages(walk.key, following, worker.pages[walk.key, following][: walk.seen])
            self.count("wrong")
        self.passed_on(walk, out)
        if said is SpeculationStep.PASS_ON:
            walk.at = worker.name
            self.count("right")
            self.passed_on(walk, kept)

    def passed_on(self, walk: Walk, out: tuple[str, ...]) -> None:
        walk.place += 1
        walk.rows = out
        if walk.place == len(walk.chain):
            walk.seen = len(walk.tokens)
            walk.tokens += (mixed("token", out[-1]),)
            if not walk.is_done:
                walk.restart()

    def scaled(self) -> None:
        pages = {
            (worker.name, content): {
                key: TOKEN_NBYTES * len(held) for (key, one), held in worker.pages.items() if one == content
            }
            for worker in self.workers.values()
            for content in worker.blocks
        }
        for change in scale(
            self.view(), pages, self.now, ScalingSettings(self.draw.choice((0.05, 0.5)), 30.0)
        ):
            into = change.worker if isinstance(change, AddInstance) else change.target
            out_of = change.source if isinstance(change, AddInstance) else change.worker
            self.workers[into].load(change.content)
            for key in change.moved:
                self.copy_whole(key, change.content, out_of, into)
            if not isinstance(change, AddInstance):
                self.dropped(change.worker, change.content)
            self.count(type(change).__name__)

    def copy_whole(self, key: int, content: str, source: str, target: str) -> None:
        """Pages of one request go from one worker to another, if no move fills them there now."""
        held, there = self.workers[source].pages[key, content], self.workers[target]
        is_filled = (goal := self.walk(key).goal) is not None and goal.worker == target
        if not is_filled and len(held) > len(there.pages.get((key, content), ())):
            there.set_pages(key, content, held)

    def dropped(self, name: str, content: str) -> None:
        worker = self.workers[name]
        worker.unload(content)
        for key, one in [*worker.pages]:
            if one == content:
                worker.set_pages(key, one, ())
        for key in worker.queues.pop(content, []):
            self.walk(key).restart()

    def swept(self) -> None:
        copies = [
            PagesCopy(
                key,
                content,
                worker.name,
                min(len(held), self.walk(key).seen),
                self.reads(key, content, worker),
            )
            for worker in self.workers.values()
            for (key, content), held in worker.pages.items()
        ]
        owners = {(walk.key, content): name for walk in self.walks for content, name in walk.owners.items()}
        for one in redundant_copies(copies, owners, [walk.key for walk in self.walks if not walk.is_done]):
            self.workers[one.worker].set_pages(one.key, one.content, ())
            self.count("swept")

    def reads(self, key: int, content: str, worker: ScriptedWorker) -> int:
        """A request that waits there reads its pages, and a move those of its source."""
        walk = self.walk(key)
        if walk.is_done or walk.goal is None or walk.chain[walk.place] != content:
            return 0
        source = None if walk.move is None else walk.move.source
        return int(worker.name in (walk.goal.worker, source))

    def died(self) -> None:
        """A worker is gone with all that it had, and returns empty; one other stays."""
        name = self.draw.choice([*self.workers])
        self.workers[name] = ScriptedWorker(name)
        for walk in self.walks:
            if not walk.is_done and name in (walk.at, walk.goal and walk.goal.worker):
                if walk.goal is not None:
                    for worker in self.workers.values():
                        for queue in worker.queues.values():
                            if walk.key in queue:
                                queue.remove(walk.key)
                walk.restart()
        self.count("died")

    def moved_ahead(self) -> None:
        """Proactive moves: whole, as their chunks are those of others."""
        waiting = [walk for walk in self.walks if not walk.is_done and walk.goal is None and walk.seen]
        paused = [
            PausedPages(self.request(walk), self.draw.randint(0, 2), self.now - 5.0) for walk in waiting
        ]
        for one in proactive_moves(self.view(), paused, self.now, self.dispatch):
            walk, to = self.walk(one.key), one.estimate
            for gone in to.evicted:
                self.workers[to.worker].unload(gone)
            self.workers[to.worker].load(one.content)
            move = self.begin_move(self.request(walk), one.content, to.worker, to.source, MovingPages.MEET)
            while not move.meeting.is_done:
                self.chunk(walk, to.worker, one.content, move)
            self.arrived(to.worker, one.key, one.content, move)
            self.count("proactive")

    def placed_anew(self) -> None:
        """Instances without work and pages go where placement wants them."""
        placed = {content: worker.name for worker in self.workers.values() for content in worker.blocks}
        blocks = {content: self.blocks[content] for content in placed}
        traffic = {(a, b): self.draw.uniform(0, 5000) for a in placed for b in placed if a < b}
        task = PlacementTask(blocks, self.view().workers, traffic, {}, PlacementSettings(reserve=0.0))
        wanted = place_by_locality(task)
        for content, to in moves_between(task, placed, wanted or {}):
            out_of = placed[content]
            if not self.workers[out_of].queues.get(content):
                self.workers[to].load(content)
                for key, one in [*self.workers[out_of].pages]:
                    if one == content:
                        self.copy_whole(key, content, out_of, to)
                self.dropped(out_of, content)
                self.count("placed")

    def check_accounts(self) -> None:
        for worker in self.workers.values():
            assert worker.used == worker.counted() <= self.memory, worker.name
        queued = [key for w in self.workers.values() for queue in w.queues.values() for key in queue]
        assert len(queued) == len({*queued}) == sum(walk.goal is not None for walk in self.walks)

    def count(self, what: str) -> None:
        self.happened[what] = self.happened.get(what, 0) + 1
