"""Executes a server's commands on the engine and sends one report per step."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from types import MappingProxyType

from msgspec import structs

from coserve.adapters.paging.stored import StoredVersion
from coserve.adapters.settings import settings_of
from coserve.core.contained import contained
from coserve.core.events import Event, Finished, RequestFailed, TokenEvent
from coserve.core.request import Request
from coserve.core.step_trace import StepTrace, begin_trace, end_trace
from coserve.engine.adapters import EngineAdapters
from coserve.engine.background import Background, Outcome
from coserve.engine.compiling import Compiling
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.engine.job_files import read_beginning
from coserve.engine.jobs import Jobs
from coserve.engine.preview import judge, read_preview
from coserve.engine.remembered import CostFile
from coserve.engine.served_sessions import ServedSessions
from coserve.errors import (
    AdapterError,
    ConfigError,
    ConflictError,
    CoserveError,
    DataError,
    EngineLost,
    InternalError,
    JobError,
    OutOfMemory,
)
from coserve.schedule.waits import MOST_WAITS
from coserve.train.job import PreparedJob
from coserve.wire.messages import (
    Acknowledge,
    AddAdapter,
    Cancel,
    CheckJob,
    CheckMethod,
    Command,
    Drain,
    Fault,
    Hello,
    JobPreview,
    JobSpec,
    PinAdapter,
    PreviewJob,
    RemoveAdapter,
    Reply,
    Report,
    SessionCommand,
    StepSpans,
    StopJob,
    Token,
    TraceSteps,
    WeighJob,
)
from coserve.wire.scores import NONE, Scores, little

_CHECKS = 8  # jobs that are checked at once; a server asks for one of each tenant
_PREVIEWS = 2  # jobs that are looked at at once; whole files are in memory meanwhile
_STATS_EVERY = 1.0  # seconds
_STALE = 2  # statistics that are due after work: its own, and one that says that no more was done
_SPEAK_EVERY = 1.0  # seconds; a server takes several of them without a report for a hang
_REMEMBER_EVERY = 60.0  # seconds
_TRACED = 60.0  # seconds


class ServedEngine:
    """Serves one server at a time on one engine, all on the loop's thread.

    Requests and replies belong to the connected server; jobs and their events outlive the connection. `costs`
    store step costs as they are corrected, by base.
    """

    def __init__(
        self,
        engine: Engine,
        hello: Hello,
        background: Background,
        costs: Mapping[str, CostFile | None] = MappingProxyType({}),
    ) -> None:
        self.draining = False
        self._unreadable = ""
        self._engine, self._hello, self._background = engine, hello, background
        self._checks = background.another(_CHECKS, "check")  # for which no job is to wait, nor they for one
        self._previews = background.another(_PREVIEWS, "preview")
        self._jobs = Jobs(engine, background)
        self._sessions = ServedSessions(engine, background, lambda reply: self._replies.append(reply))
        self._compiling = {  # by base
            one.base_id: Compiling(one.grammars, one.executor, background, self._generate, self._fail)
            for one in engine.bases
        }
        self._connection = 0  # counts servers, so that a late reply never reaches the next one
        self._answers: dict[str, Completion] = {}  # by their requests' ids
        self._tokens: list[Token] = []
        self._replies: list[Reply] = []
        self._stale = _STALE  # statistics that are due
        self._told = 0.0  # time of the last statistics
        self._spoke = 0.0  # time of the last report
        self._costs = costs
        self._remembered = time.monotonic()  # time at which the costs were last written
        self._trace: tuple[int, StepTrace] | None = None  # with the `ref` of its command

    # The server

    def connected(self) -> Hello:
        """Greets a server that has just connected; requests of the one before are cancelled."""
        self.disconnected()
        self._jobs.repeat_news()
        return Hello(
            **{
                **{f: getattr(self._hello, f) for f in Hello.__struct_fields__},
                "jobs": self._jobs.names,
                "waiting": self._jobs.waiting,
                "starved": self._jobs.starved,
            }
        )

    def disconnected(self) -> None:
        """Cancels all requests: their server is gone."""
        for name in list(self._answers):
            self._cancel(name)
        for compiling in self._compiling.values():
            compiling.clear()
        self._sessions.disconnected()
        self._connection += 1
        self._trace = None
        end_trace()
        self._tokens.clear()
        self._replies.clear()
        self._stale, self._told = _STALE, 0.0

    def take(self, command: Command) -> None:
        """Executes a command, or starts to. Any exception is reported to the server as a fault."""
        try:
            self._obey(command)
        except BaseException as error:
            self._fail(command, error)

    def _obey(self, command: Command) -> None:
        match command:
            case Request():
                self._submit(command)
            case Cancel():
                self._cancel(command.id)
            case AddAdapter():
                self._load(command)
            case PinAdapter():
                self._pin(command)
            case RemoveAdapter():
                self._unload(command)
            case CheckMethod():
                self._check(command)
            case CheckJob():
                engine = self._engine.bases[command.spec.base]
                checked = partial(self._checked, engine, command.ref, self._connection)
                read = partial(read_beginning, engine, command.spec)
                self._checks.do("checking the job", read, checked)
            case PreviewJob():
                engine = self._engine.bases[command.spec.base]
                previewed = partial(self._previewed, engine, command.ref, self._connection)
                read_job = partial(read_preview, engine, command.spec, command.records, command.shown)
                self._previews.do("looking at the job", read_job, previewed)
            case TraceSteps():
                self._begin_trace(command)
            case JobSpec():
                if not self.draining:  # else the next engine resumes it
                    self._jobs.start(command)
            case StopJob():
                self._jobs.stop(command.job, command.keep)
            case WeighJob():
                self._jobs.set_weight(command.job, command.weight)
            case SessionCommand():
                self._sessions.take(command, self.draining)
            case Acknowledge():
                self._jobs.acknowledge(command.number)
            case Drain():
                self.drain()

    def drain(self) -> None:
        """Refuses new work, stops jobs with a checkpoint, ends sessions, and finishes answers under way."""
        self.draining = True
        self._sessions.close_all()
        self._jobs.stop_all()

    # The loop

    @property
    def has_work(self) -> bool:
        """Tells whether a step would do anything."""
        return self._engine.has_work

    @property
    def is_drained(self) -> bool:
        """Tells whether a drain is over: every job has stopped and every answer has ended."""
        compiles = any(self._compiling.values())
        return self.draining and not self._jobs.names and not self._answers and not compiles

    def step(self) -> None:
        """Runs one step of the engine and records its events for the report."""
        self._stale = _STALE  # also for a step that only frees a cancelled answer's state, or fails
        events = self._engine.step()
        for event in events:
            self._tell(event)
        self._jobs.after_step(events)
        if self._costs and time.monotonic() >= self._remembered + _REMEMBER_EVERY:
            self._remember()

    @property
    def unreadable(self) -> str:
        """The reason for which weights cannot be read, and all work waits; empty where it goes on."""
        return self._unreadable

    @unreadable.setter
    def unreadable(self, reason: str) -> None:
        if bool(reason) != bool(self._unreadable):
            self._stale, self._told = _STALE, 0.0  # the server is told next, before any answer
        self._unreadable = reason

    def until_report(self) -> float:
        """Seconds until the next report is due, even an empty one."""
        due = self._spoke + _SPEAK_EVERY
        if self._stale:
            due = min(due, self._told + _STATS_EVERY)
        return max(due - time.monotonic(), 0.0)

    def report(self) -> Report | None:
        """The report for the server; None where it would be empty and is not due."""
        for compiling in self._compiling.values():
            compiling.end_overdue()
        self._end_trace()
        tokens, replies, news = tuple(self._tokens), tuple(self._replies), self._jobs.take_news()
        if not (tokens or replies or news or self.is_drained or self.until_report() == 0.0):
            return None
        self._tokens.clear()
        self._replies.clear()
        now = self._spoke = time.monotonic()
        stats = None
        if self._stale and now >= self._told + _STATS_EVERY:
            self._stale, self._told = max(self._stale - 1, bool(self.unreadable)), now
            stats = self._engine.stats()
            compiled = dict.fromkeys(
                islice(chain(*self._compiling.values()), MOST_WAITS), "its grammar is compiled"
            )
            holdings = structs.replace(stats.holdings, waits={**stats.holdings.waits, **compiled})
            stats = structs.replace(stats, unreadable=self.unreadable, holdings=holdings)
        return Report(tokens, replies, news, stats, self.is_drained)

    # Inside

    def _remember(self) -> None:
        """Stores the current step costs in the background."""
        self._remembered = time.monotonic()
        for base, file in self._costs.items():
            if file is not None:
                write = partial(file.write, self._engine.bases[base].cost.learned)
                self._background.do("remembering what steps cost", write, lambda _: None)

    def _begin_trace(self, command: TraceSteps) -> None:
        if self._trace is not None:
            raise ConflictError("steps are being traced already: wait until that trace has ended")
        self._trace = command.ref, begin_trace(min(command.seconds, _TRACED))

    def _end_trace(self) -> None:
        """Ends a trace whose time is over."""
        if self._trace is not None and time.perf_counter() >= self._trace[1].until:
            (ref, trace), self._trace = self._trace, None
            end_trace()
            spans = StepSpans(tuple(trace.spans), trace.dropped)
            self._replies.append(Reply(ref, spans=spans))

    def _fail(self, command: Command, error: BaseException) -> None:
        """Ends the request, job or call of a command that failed."""
        match command:
            case Request():
                fault = Fault.of(contained(error, "the request"))
                self._tokens.append(Token(command.id, fault=fault))
            case AddAdapter() | PinAdapter() | RemoveAdapter():
                self._reply(command.ref, contained(error, "the adapter", AdapterError))
            case CheckMethod() | CheckJob() | PreviewJob() | TraceSteps():
                self._reply(command.ref, contained(error, "checking the job", ConfigError))
            case SessionCommand():
                self._reply(command.ref, contained(error, "the session", JobError))
            case JobSpec() | StopJob() | WeighJob():
                self._jobs.fail(command.job, contained(error, "the job", JobError))
            case _:
                raise error

    def _reply(self, ref: int, error: CoserveError | None = None) -> None:
        self._replies.append(Reply(ref, None if error is None else Fault.of(error)))

    def _submit(self, request: Request) -> None:
        if self.draining:
            raise EngineLost("the engine is shutting down and takes no new requests")
        request = self._placed(request)
        if request.id in self._answers or any(request.id in each for each in self._compiling.values()):
            raise ConflictError(f"there is a request {request.id!r} already")
        engine = self._engine.bases[request.base]
        if not self._compiling[engine.base_id].keep(request):
            self._generate(request)

    def _generate(self, request: Request) -> None:
        self._answers[request.id] = self._engine.bases[request.base].submit(request)

    def _placed(self, request: Request) -> Request:
        """The request on the engine's clock and on the base that is to answer: its adapter's, or the chain of
        two bases. `max_tokens` are cut to what the adapter's virtual tokens leave; the server does not know
        of these. Raises AdapterNotFound."""
        arrival = self._engine.clock() + request.arrival
        if (adapter := request.adapter) is None:
            return structs.replace(request, arrival=arrival)
        if adapter in self._hello.stitched:
            return structs.replace(request, arrival=arrival, base=adapter, adapter=None)
        known, sampling = self._engine.adapters.bank.look(adapter), request.sampling
        virtual = known.virtual.count
        room = self._engine.scheduler.requests.queues.room(len(request.prompt), virtual, known.base)
        if virtual and 1 <= room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        return structs.replace(request, arrival=arrival, base=known.base, sampling=sampling)

    def _cancel(self, name: str) -> None:
        for compiling in self._compiling.values():
            compiling.cancel(name)
        completion = self._answers.pop(name, None)
        if completion is not None:
            completion.cancel()

    def _tell(self, event: Event) -> None:
        if not isinstance(event, TokenEvent | Finished | RequestFailed):
            return
        name = event.request_id
        completion = self._answers.get(name)
        if completion is None or completion.sequence.key != event.key:  # cancelled, or a validation example
            return
        if isinstance(event, RequestFailed):
            self._tokens.append(Token(name, fault=Fault.of(event.error)))
            del self._answers[name]
            return
        alternative = completion.alternative
        if isinstance(event, TokenEvent):
            if event.pooled and event.finish_reason is None:  # the whole embedding is told at the end
                return
            self._tokens.append(
                Token(
                    name,
                    event.token,
                    NONE if event.logprobs is None else Scores.of((event.logprobs,)),
                    Scores.of(event.prompt_logprobs),
                    event.finish_reason,
                    cached=event.cached,
                    alternative=alternative,
                    embedding=little("f", completion.embedding),
                )
            )
        else:
            self._tokens.append(Token(name, finish=event.finish_reason, alternative=alternative))
        if event.finish_reason is not None:
            del self._answers[name]

    def _load(self, command: AddAdapter) -> None:
        if command.key in self._engine.adapters.bank:
            self._reply(command.ref)
            return
        adapters = self._engine.bases[command.base].adapters
        look = partial(adapters.look_at, command.key, command.path, command.new)
        self._background.do(
            "looking at the adapter", look, partial(self._looked_at, adapters, command, self._connection)
        )

    def _looked_at(
        self,
        adapters: EngineAdapters,
        command: AddAdapter,
        connection: int,
        outcome: Outcome[StoredVersion],
    ) -> None:
        error = outcome if isinstance(outcome, CoserveError) else None
        if isinstance(outcome, StoredVersion) and command.key not in adapters.bank:
            try:  # it may be a repeated request
                adapters.add_stored(outcome)
            except CoserveError as refusal:
                error = refusal
        if isinstance(error, InternalError):  # the file caused an unforeseen exception
            error = AdapterError(str(error))
        if connection == self._connection:
            self._reply(command.ref, error)

    def _pin(self, command: PinAdapter) -> None:
        self._engine.adapters.pin(command.key, command.pinned)
        self._reply(command.ref)

    def _check(self, command: CheckMethod) -> None:
        def checked(outcome: Outcome[object], connection: int = self._connection) -> None:
            error = outcome if isinstance(outcome, CoserveError) else None
            if connection == self._connection:
                self._reply(
                    command.ref, ConfigError(str(error)) if isinstance(error, InternalError) else error
                )

        # Thousands of patterns take long, so steps do not wait for them.
        self._background.do("checking the settings", partial(settings_of, command.method), checked)

    def _checked(self, engine: Engine, ref: int, connection: int, outcome: Outcome[PreparedJob]) -> None:
        """Reports errors about a job's data, its adapter, its memory, and bugs; others are reported once the
        job is accepted."""
        error: CoserveError | None = outcome if isinstance(outcome, CoserveError) else None
        try:
            if isinstance(outcome, PreparedJob):
                engine.training.check(outcome)
        except CoserveError as refusal:
            error = refusal
        if isinstance(error, InternalError):
            error = ConfigError(str(error))
        elif not isinstance(error, DataError | OutOfMemory | AdapterError):
            error = None
        if connection == self._connection:
            self._reply(ref, error)

    def _previewed(
        self,
        engine: Engine,
        ref: int,
        connection: int,
        outcome: Outcome[tuple[JobPreview, PreparedJob | None]],
    ) -> None:
        if connection != self._connection:
            return
        if isinstance(outcome, CoserveError):
            self._reply(ref, ConfigError(str(outcome)) if isinstance(outcome, InternalError) else outcome)
        else:
            self._replies.append(Reply(ref, preview=judge(engine, *outcome)))

    def _unload(self, command: RemoveAdapter) -> None:
        self._engine.adapters.unload(command.key)
        self._reply(command.ref)
