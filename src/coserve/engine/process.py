"""The engine's process, started by `coserve.wire.launch` and controlled by a supervisor.

Imports take seconds and loading a model more, so a supervisor keeps a standby process that has done its
imports, and has those of its ranks done, and waits for `wire.control.EngineStart`. The loop is: commands, a
step, a report. Without work it sleeps until a message comes.

The process exits with status 0 after a drain, with status 1 where its model cannot be loaded or a bug showed,
with status 4 where its ranks were ended from outside, and at once when its standard input closes because the
supervisor is gone. A drain begins on the server's
command, or on SIGTERM once no server is connected: a service manager may signal all processes while the
server still has requests to pass on. Before the model is ready, SIGTERM exits at once. Killing the process
loses nothing that was reported.
"""

import hashlib
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from safetensors.torch import load_file  # noqa: F401  # imported in advance, so that loading is quick
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
from transformers.utils import logging as transformers_logging

from coserve.adapters.methods import methods
from coserve.adapters.sites import linear_names
from coserve.core.request import BASE, Request
from coserve.core.size import show_size
from coserve.engine.background import Background
from coserve.engine.engine import Engine
from coserve.engine.link import Closed, Connected, Connection, Done, Drained, Inbox, Item, Link, Received
from coserve.engine.remembered import CostFile, circumstances
from coserve.engine.served_engine import ServedEngine
from coserve.errors import ConfigError, CoserveError, EngineLost, WeightsUnreadable
from coserve.executors.spares import keep_spares
from coserve.text.tokenizer import reads_alike
from coserve.train.pruning.once import TRACING
from coserve.wire.child import SupervisorPipes
from coserve.wire.control import BEAT_SECONDS, EngineStart, Status
from coserve.wire.launch import RANKS
from coserve.wire.logs import CONTEXT, WorkContext, configure_logs
from coserve.wire.messages import Command, Drain, FurtherBase, Hello

# Seconds for which a step may wait. A step of answers alone takes 3 to 50 ms, so a burst of commands makes
# others' tokens at most some times slower, whatever its length.
MOST_INTAKE: Final = 0.02
_UNSEEN: Final = 0.005  # seconds that a kind of work is expected to take which has not been seen
_NEWEST: Final = 0.25  # weight of the newest measurement in a kind's mean
# Seconds for which a thread that reads training data keeps the interpreter from a step. With Python's default
# of 5 ms, steps of 4 ms took 21 ms beside it; with this, 13 ms.
SWITCH: Final = 5e-4
_UNREADABLE: Final = 0.25  # seconds before weights that could not be read are read again
_REMIND: Final = 60.0  # seconds until the log says again why all work waits
_FLUSH: Final = 5.0  # seconds that the last report of a drain may take to be read
_LOST: Final = 4  # exit status
_MEASURING: Final = "measuring what steps cost on this machine (some seconds, the first time only)"

_log = logging.getLogger(__name__)


class Intake:
    """Tells how much work fits between two steps, by what each kind of it has taken. One piece always
    does."""

    def __init__(self, most: float = MOST_INTAKE, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._expected: dict[str, float] = {}  # seconds, by kind
        self._spent: float | None = None  # in this turn; None before the first piece

    def begin(self) -> None:
        """Begins a turn: a step has run."""
        self._spent = None

    def takes(self, kind: str) -> bool:
        """Tells whether one more piece of a kind fits into this turn."""
        if self._spent is None:
            return True
        return self._spent + self._expected.get(kind, _UNSEEN) <= self._most

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        """Context in which a piece runs."""
        begun = self._clock()
        try:
            yield
        finally:
            taken = self._clock() - begun
            self._spent = (self._spent or 0.0) + taken
            expected = self._expected.get(kind, taken)
            self._expected[kind] = expected + _NEWEST * (taken - expected)


def main(pipes: SupervisorPipes) -> None:
    """Waits for a start command, loads the model, serves."""
    threading.excepthook = lambda args: sys.excepthook(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )
    transformers_logging.disable_progress_bar()
    sys.setswitchinterval(SWITCH)
    keep_spares(next((int(one.removeprefix(RANKS)) for one in sys.argv if one.startswith(RANKS)), 0))
    pipes.say(Status("standby"))
    inbox = Inbox()
    try:
        start = pipes.start_line(EngineStart)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which decides
        configure_logs("engine", start.log_level, start.log_json)
        if start.log_json:
            transformers_logging.disable_default_handler()
            transformers_logging.enable_propagation()
        started = time.monotonic()
        pipes.say(Status("loading"))
        engine = _load(start)
        engine.memory.count_process()
        costs = {one.base_id: _cost_file(start, one) for one in engine.bases}
        if start.config.measures_costs:
            for one in engine.bases:
                know_costs(one, costs[one.base_id], lambda: pipes.say(Status("measuring", _MEASURING)))
        link = Link(Path(start.socket), inbox)
    except CoserveError as error:
        pipes.say(Status("failed", str(error), kind=type(error).__name__))
        sys.exit(1)
    seconds = time.monotonic() - started
    hello = _hello(start, engine, seconds)
    inbox.pauses(engine.arrivals)
    worker = ServedEngine(engine, hello, Background(inbox), costs)
    engine.loop.executor.on_progress(pipes.beat)
    TRACING.on_progress = pipes.beat
    signal.signal(signal.SIGTERM, lambda *_: inbox.put(Drained()))
    link.start()
    pipes.say(Status("ready", f"{_describe(hello)}; {_memory(engine)}", seconds))
    try:
        Loop(worker, inbox, pipes.beat).run()
    except EngineLost as error:
        if error.is_crash:
            raise
        _log.error("%s", error)
        pipes.say(Status("crashed", str(error), kind=type(error).__name__))
        os._exit(_LOST)
    link.close()
    for base, file in costs.items():
        if file is not None:
            file.write(engine.bases[base].cost.learned)
    pipes.say(Status("drained"))
    os._exit(0)  # does not wait for threads that still read jobs' data


class Loop:
    """Runs commands, a step and a report in turn until a drain is over. `beat` is called once a turn, after
    each command, and twice a second while idle.

    Commands and finished work are taken in their order, as many before each step as `intake` lets: the others
    wait for the next turn. While weights of a streamed base cannot be read, all work waits: the step is tried
    again four times a second, and commands take effect after it. A drain then ends at once, without
    checkpoints: jobs resume from the last ones.
    """

    def __init__(
        self, worker: ServedEngine, inbox: Inbox, beat: Callable[[], object], intake: Intake | None = None
    ) -> None:
        self._worker, self._inbox, self._beat, self._intake = worker, inbox, beat, intake or Intake()
        self._server: Connection | None = None
        self._leaving = False  # as soon as no server is connected
        # What is to be taken: commands with their connections, and finished work.
        self._waiting: deque[tuple[Connection, Command] | Done] = deque()
        self._told = -math.inf  # time at which the log last had the reason

    def run(self) -> None:
        while not (self._worker.is_drained or self._gives_up):
            self._beat()
            self._take_in()
            if self._worker.has_work:
                self._step()
            self._report()
        if self._server is not None:
            self._server.finish(_FLUSH)

    @property
    def _gives_up(self) -> bool:
        """Tells whether a drain would wait for weights that cannot be read."""
        return bool(self._worker.unreadable) and (self._worker.draining or self._leaving)

    def _step(self) -> None:
        """Runs a step. Where weights of the base cannot be read, all work under way waits until they can."""
        before = self._worker.unreadable
        try:
            self._worker.step()
        except WeightsUnreadable as error:
            self._worker.unreadable = str(error)
            if str(error) != before or time.monotonic() >= self._told + _REMIND:
                self._told = time.monotonic()
                _log.error("all work waits: %s", error)
            time.sleep(_UNREADABLE)
            return
        if before:
            self._worker.unreadable = ""
            _log.warning("all work goes on: weights can be read again")

    def _take_in(self) -> None:
        """Takes what has come, as far as a step may wait; without work waits for an item until the next
        beat."""
        self._intake.begin()
        wait = not (self._waiting or self._worker.has_work or self._worker.is_drained)
        while self._take_waiting() and (item := self._next(wait)) is not None:
            self._sort(item)
            wait = False

    def _take_waiting(self) -> bool:
        """Takes what waits; False where some of it is left to the next turn."""
        while self._waiting and not self._worker.unreadable:
            first = self._waiting[0]
            kind = first.what if isinstance(first, Done) else type(first[1]).__name__
            if not self._intake.takes(kind):
                return False
            self._waiting.popleft()
            with self._intake.measured(kind):
                self._take(first)
            self._beat()
        return True

    def _next(self, wait: bool) -> Item | None:
        due = self._worker.until_report() if self._server else BEAT_SECONDS
        try:
            return self._inbox.get(wait, min(due, BEAT_SECONDS))
        except queue.Empty:
            return None

    def _sort(self, item: Item) -> None:
        """Follows connections at once, and puts work behind what waits. A drain is heeded at once while
        weights cannot be read."""
        match item:
            case Connected():
                self._server = item.connection
                self._server.send(self._worker.connected())
            case Received() if item.connection is self._server:
                self._waiting.extend((item.connection, command) for command in item.commands)
                if self._worker.unreadable:
                    self._worker.draining |= any(isinstance(command, Drain) for command in item.commands)
            case Closed() if item.connection is self._server:
                self._server = None
                self._worker.disconnected()
                self._leave()
            case Drained():
                self._leaving = True
                self._leave()
            case Done():
                self._waiting.append(item)
            case _:
                pass  # from a replaced server

    def _take(self, work: tuple[Connection, Command] | Done) -> None:
        if isinstance(work, Done):
            work.then()
        elif work[0] is self._server:  # else the server is gone
            context = CONTEXT.set(_context_of(work[1]))
            try:
                self._worker.take(work[1])
            finally:
                CONTEXT.reset(context)

    def _leave(self) -> None:
        if self._leaving and self._server is None and not self._worker.unreadable:
            self._worker.drain()

    def _report(self) -> None:
        if self._server is not None:
            report = self._worker.report()
            if report is not None:
                self._server.send(report)


def know_costs(engine: Engine, costs: CostFile | None, measuring: Callable[[], None]) -> None:
    """Gives the engine its step costs: from the file, or measured and, where they are certain, then written
    to it. `measuring` is called before measuring, which takes seconds."""
    found = None if costs is None else costs.read()
    if found is not None:
        engine.cost.recall(found)
        return
    measuring()
    if not engine.calibrate():
        _log.info("costs of steps are rough, from a busy machine or few runs: steps refine them")
    elif costs is not None:
        costs.write(engine.cost.learned)


def _context_of(command: Command) -> WorkContext:
    """The context of a command's log records: of a request, or of a job."""
    if isinstance(command, Request):
        return WorkContext(answer=command.id)
    return WorkContext(job=getattr(command, "job", ""))


def _load(start: EngineStart) -> Engine:
    """Loads the engine with all its bases, without step costs. Raises the error of a base that cannot be
    loaded, with its id; a chain of two that cannot be opened is left out, as an approximation that nobody
    has to be given."""
    scheduler = {**start.config.scheduler, "interruptible": True}  # by messages to the inbox
    own = replace(start.config, calibrate=False, scheduler=scheduler)
    engine = Engine(start.model, own, counts_libraries=True)
    for base, model in start.bases.items():
        try:
            added = engine.add_base(base, model)
        except CoserveError as error:
            raise type(error)(f"the base {base}: {error}") from error
        _check_alike(engine, added)
    chains = {} if start.config.deterministic else start.stitched  # none of which would ever be chosen
    for chain, stitched in chains.items():
        try:
            engine.add_base(chain, stitched)
        except CoserveError as error:
            _log.warning("the chain %s is left out: %s", chain, error)
    return engine


def _check_alike(engine: Engine, added: Engine) -> None:
    """Raises ConfigError for a base whose tokenizer is another than the first base's, which the server reads
    all texts with."""
    first, other = engine.text, added.text
    if first is None or other is None or not reads_alike(first.tokenizer, other.tokenizer):
        raise ConfigError(
            f"the base {added.base_id}: its tokenizer, special tokens or chat template are others than those "
            "of the first base, and a server has one of these"
        )


def _cost_file(start: EngineStart, engine: Engine) -> CostFile | None:
    """The file of a base's measured costs; None where costs are not measured."""
    if start.calibration is None or not start.config.calibrate:
        return None
    path = Path(start.calibration)
    if engine.base_id != BASE:  # ids may have characters that names of files may not
        path = path.with_stem(f"{path.stem}-{hashlib.sha256(engine.base_id.encode()).hexdigest()[:12]}")
    return CostFile(path, circumstances(engine.base, engine.config))


def _hello(start: EngineStart, engine: Engine, seconds: float) -> Hello:
    base, config = engine.base, engine.config
    return Hello(
        generation=uuid.uuid4().hex,
        model=start.model,
        dtype=str(base.dtype).removeprefix("torch."),
        device=str(base.device),
        parameters=base.parameters,
        positions=base.max_positions,
        vocabulary=base.vocabulary,
        width=base.hidden_size,
        cache_tokens=config.sequence_pages * config.page_size,
        max_running=config.max_running,
        deterministic=config.deterministic,
        load_seconds=seconds,
        quantize=base.quantized,
        cache_dtype=config.cache_dtype,
        offloaded_tokens=_offloaded_tokens(engine),
        crash=start.crash,
        linears=linear_names(base.sites, base.depth),
        bases={
            one.base_id: FurtherBase(
                start.bases[one.base_id],
                one.base.parameters,
                one.base.max_positions,
                one.base.vocabulary,
                one.base.hidden_size,
                linear_names(one.base.sites, one.base.depth),
                _offloaded_tokens(one),
            )
            for one in engine.bases
            if one.base_id in start.bases
        },
        stitched=tuple(one.base_id for one in engine.bases if one.base_id in start.stitched),
        methods=tuple(methods()),
    )


def _offloaded_tokens(engine: Engine) -> int:
    return engine.executor.spec.offload_pages * engine.config.page_size


def _describe(hello: Hello) -> str:
    """One line about the engine for the log."""
    size = f"{hello.parameters / 1e6:.0f}M parameters"
    kept = hello.dtype if hello.quantize == "none" else f"{hello.dtype} over {hello.quantize} weights"
    others = "".join(f", {one.parameters / 1e6:.0f}M of {id}" for id, one in hello.bases.items())
    others += "".join(f", the chain {chain}" for chain in hello.stitched)
    return f"{size}{others}, {kept} on {hello.device}, cache of {hello.cache_tokens} tokens"


def _memory(engine: Engine) -> str:
    """One line about the memory budget and the bytes outside of it."""
    memory = engine.memory
    found = f"{show_size(memory.ledger.budget)} of memory, beside {show_size(memory.imports)} of imports"
    for one in engine.bases:
        if one.streaming is not None:
            free = one.cost.free_rows
            found += f"; {one.streaming}" + (f"; it computes {free} rows meanwhile" if free else "")
    return found
