"""A scripted engine behind a real socket: what the server does without a model, and through what deaths.

It speaks the engine's protocol and computes nothing. An answer's tokens are a function of its prompt, its
seed and their positions alone, so a continued answer is the one it would have been.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from coserve.core.plan import TokenLogprobs, Updated
from coserve.core.request import FinishReason, Request
from coserve.core.training import PassOutput
from coserve.wire.codec import decode_commands, encode_answer
from coserve.wire.frames import read_frame, write_frame
from coserve.wire.messages import (
    Acknowledge,
    AddAdapter,
    Answer,
    Cancel,
    CheckJob,
    CheckMethod,
    CloseTraining,
    Command,
    Drain,
    EngineStats,
    Fault,
    Forward,
    FurtherBase,
    Hello,
    JobPreview,
    JobStarved,
    Numbered,
    OpenTraining,
    Paging,
    PinAdapter,
    PreviewJob,
    RemoveAdapter,
    Reply,
    Report,
    SaveTraining,
    SessionCommand,
    StepOptimizer,
    StepSpans,
    Token,
    TraceSteps,
)
from coserve.wire.scores import NONE, Scores, little

SPEAK_SECONDS = 1.0  # between two reports, at most
Script = Callable[[Request, int], int]  # the token at a place of an answer


def any_token(vocabulary: int, eos: tuple[int, ...] = ()) -> Script:
    """Tokens that look random, never one that ends the answer."""

    def token(request: Request, place: int) -> int:
        seed = hash((request.prompt, request.sampling.seed, request.adapter, place))
        drawn = seed % vocabulary
        while drawn in eos:
            drawn = (drawn + 1) % vocabulary
        return drawn

    return token


class FakeEngine:
    """Listens on a socket and gives every running request one token a step.

    `die` is kill -9: the connection ends in the middle and everything is forgotten. `start` then is the next
    engine. `said` holds every command since the first start. `refusals` are faults by adapter key. A command
    for which `poison` holds, or a token of an answer for which `fatal` does, makes it `collapse`: it crashes,
    and the next one, which says so, is there at once.
    """

    def __init__(self, socket: Path, script: Script | None = None, step_seconds: float = 0.0) -> None:
        self.socket, self.step_seconds = socket, step_seconds
        self.vocabulary, self.positions, self.max_running, self.eos = 1152, 2048, 16, (2,)
        self.script = script or any_token(self.vocabulary, self.eos)
        self.said: list[Command] = []
        self.refusals: dict[str, Fault] = {}
        self.preview = JobPreview()  # of every job
        self.spans = StepSpans((), 0)  # of every trace
        self.deaf_to: tuple[type[Command], ...] = ()  # commands that it does not get to the end of
        self.caches = (
            False  # whether a prompt counts as cached, but for its last token, once its scope sent it
        )
        self.cached: set[tuple[str | None, tuple[int, ...]]] = set()
        self.sessions: set[str] = set()  # training sessions that are open
        self.updates = 0
        self.steps = 0
        self.hangs = False  # says nothing while it is connected
        self._spoke = 0.0  # on `time.monotonic`
        self.running: dict[str, Request] = {}
        self.places: dict[str, int] = {}
        self.begun: dict[str, int] = {}  # tokens of an answer that came with its request
        self.adapters: dict[str, str] = {}
        self.bases: dict[str, FurtherBase] = {}  # beside its first one
        self.stitched: tuple[str, ...] = ()  # chains of two of them
        self.pinned: set[str] = set()
        self.news: list[Numbered] = []
        self.jobs: tuple[str, ...] = ()  # that it says it trains, when a server connects
        self.waiting: dict[str, str] = {}  # and which of these wait for memory
        self.starved: tuple[JobStarved, ...] = ()  # those of them that have no time to train
        self.poison: Callable[[Command], bool] = lambda command: False
        self.chooses: Callable[[Request], int] = lambda request: 0  # which of its alternatives answers
        self.fatal: Callable[[Request, int], bool] = lambda request, place: False
        self.collapses = 0
        self._falling: asyncio.Task[None] | None = None
        self.crash = ""  # how the engine before it brought itself down, as it says
        self._scored: dict[tuple[int, int], Scores] = {}  # by token and alternatives
        self._generations = count(1)
        self._generation = ""
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._replies: list[Reply] = []
        self._drained = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "FakeEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def start(self) -> None:
        """A new engine: nothing loaded, nothing running."""
        self._generation = f"generation-{next(self._generations)}"
        self.running, self.places, self.adapters, self.news = {}, {}, {}, []
        self.pinned, self.sessions = set(), set()
        self._replies, self._drained = [], False
        self._server = await asyncio.start_unix_server(self._accept, self.socket)

    async def die(self) -> None:
        """The process is gone, in the middle of whatever it did."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self.disconnect()
        for task in list(self._tasks):
            task.cancel()
        self.socket.unlink(missing_ok=True)

    async def collapse(self) -> None:
        """Crashes, and is replaced."""
        self.collapses += 1
        self.crash = "exit status 1"
        await self.die()
        await self.start()

    def disconnect(self) -> None:
        """Ends the connection only: requests are cancelled, adapters stay."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        self.running, self.places = {}, {}

    def tell(self, numbered: Numbered) -> None:
        """Reports a piece of job news, now and on every connection until it is acknowledged."""
        self.news.append(numbered)
        self._send(Report(jobs=(numbered,)))

    def tell_tokens(self, *tokens: Token) -> None:
        """Reports these tokens now, beside what the script says."""
        self._send(Report(tokens))

    def hello(self) -> Hello:
        return Hello(
            self._generation, "fake", "float32", "cpu", 1000, self.positions, self.vocabulary, 256, 32768,
            self.max_running, True, 0.1, self.jobs, self.waiting, self.starved,
            crash=self.crash, linears={"attention": ("self_attn.q_proj",), "feed_forward": ("mlp.up_proj",)},
            bases=self.bases, stitched=self.stitched,
        )  # fmt: skip

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.disconnect()
        self._writer = writer
        self._send(self.hello())
        if self.news:
            self._send(Report(jobs=tuple(self.news)))
        stepping = asyncio.create_task(self._step_on())
        self._tasks.add(stepping)
        with suppress(OSError, EOFError, asyncio.CancelledError):
            while True:
                for command in decode_commands(await read_frame(reader)):
                    self.said.append(command)
                    self._obey(command)
                    if self.poison(command):
                        self._fall()
        stepping.cancel()
        self._tasks.discard(stepping)
        if self._writer is writer:  # no other connection has taken its place
            self.disconnect()

    async def _step_on(self) -> None:
        while True:
            await asyncio.sleep(self.step_seconds)
            if not self.hangs:
                self._step()

    def _fall(self) -> None:
        self.disconnect()
        self._falling = asyncio.create_task(self.collapse())

    def _step(self) -> None:
        if any(self.fatal(running, self.places[id]) for id, running in self.running.items()):
            self._fall()
            return
        tokens = [self._advance(request) for request in list(self.running.values())[: self.max_running]]
        replies, self._replies = self._replies, []
        if tokens or replies or self._drained or time.monotonic() > self._spoke + SPEAK_SECONDS:
            self.steps += bool(tokens or replies or self._drained)
            self._spoke = time.monotonic()
            self._send(Report(tuple(tokens), tuple(replies), stats=self._stats(), drained=self._drained))
            self._drained = False

    def _advance(self, request: Request) -> Token:
        sampling, place = request.sampling, self.places[request.id]
        first = place == self.begun[request.id]
        scored = NONE if sampling.prompt_logprobs is None or not first else self._scores(request)
        if sampling.max_tokens == 0:
            self._drop(request.id)
            chosen = self.chooses(request)
            pooled = b"" if sampling.pooling is None else little("f", self.embed(request))
            return Token(
                request.id, None, NONE, scored, FinishReason.LENGTH, alternative=chosen, embedding=pooled
            )
        token = self.script(request, place)
        self.places[request.id] = place + 1
        finish = None
        if (token in self.eos and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif place + 1 >= sampling.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._drop(request.id)
        logprobs = NONE if sampling.logprobs is None else self._score(token, sampling.logprobs)
        return Token(
            request.id, token, logprobs, scored, finish, cached=self._cached(request) if first else 0,
            alternative=self.chooses(request),
        )  # fmt: skip

    def embed(self, request: Request) -> list[float]:
        """An embedding that tells what was embedded, and how."""
        kind = len(request.sampling.pooling or "")
        return [float(kind), float(sum(request.prompt)), *[1.0] * 254]

    def _cached(self, request: Request) -> int:
        known = (request.scope, request.prompt) in self.cached
        self.cached.add((request.scope, request.prompt))
        return len(request.prompt) - 1 if known and self.caches else 0

    def _scores(self, request: Request) -> Scores:
        most = request.sampling.prompt_logprobs or 0
        return Scores.joined([self._score(token, most) for token in request.prompt[1:]])

    def _score(self, token: int, alternatives: int) -> Scores:
        if (known := self._scored.get((token, alternatives))) is None:
            others = tuple(((token + i) % self.vocabulary, -0.5 - i) for i in range(alternatives))
            known = self._scored[token, alternatives] = Scores.of((TokenLogprobs(-0.5, others),))
        return known

    def _obey(self, command: Command) -> None:
        if isinstance(command, self.deaf_to):
            return
        match command:
            case Request():
                self._admit(command, len(command.continued))
            case Cancel():
                self._drop(command.id)
            case AddAdapter():
                fault = self.refusals.get(command.key)
                if fault is None:
                    self.adapters[command.key] = command.path
                self._replies.append(Reply(command.ref, fault))
            case RemoveAdapter():
                self.adapters.pop(command.key, None)
                self._replies.append(Reply(command.ref))
            case PinAdapter():
                fault = self.refusals.get("pin")
                if fault is None:
                    (self.pinned.add if command.pinned else self.pinned.discard)(command.key)
                self._replies.append(Reply(command.ref, fault))
            case CheckMethod():
                self._replies.append(Reply(command.ref, self.refusals.get("method")))
            case CheckJob():
                self._replies.append(Reply(command.ref, self.refusals.get("job")))
            case TraceSteps():
                self._replies.append(Reply(command.ref, spans=self.spans))
            case PreviewJob():
                self._replies.append(Reply(command.ref, self.refusals.get("preview"), preview=self.preview))
            case Acknowledge():
                self.news = [news for news in self.news if news.number > command.number]
            case Drain():
                self._drained = True
            case SessionCommand():
                self._replies.append(self._trained(command))
            case _:
                pass  # jobs are told by `tell`

    def _trained(self, command: SessionCommand) -> Reply:
        """A session's reply, which says the command's name: it opens at once, a pass has -0.5 for every
        target, and files are empty. `refusals` are by session, or by the command's name."""
        ref, name = command.ref, type(command).__name__
        fault = self.refusals.get(command.session) or self.refusals.get(name)
        if fault is not None:
            return Reply(ref, fault)
        match command:
            case OpenTraining():
                self.sessions.add(command.session)
            case CloseTraining():
                self.sessions.discard(command.session)
            case Forward():
                scores = tuple((-0.5,) * len(datum.tokens) for datum in command.data)
                output = PassOutput(0.5 * sum(map(len, scores)), scores)
                return Reply(ref, output=output, said=name)
            case StepOptimizer():
                self.updates += 1
                rate = command.params.learning_rate
                return Reply(ref, updated=Updated(self.updates, 1.0, 1, 0.1, rate, "v"), said=name)
            case SaveTraining():
                folder = Path(command.path) / "state" if command.state else Path(command.path)
                folder.mkdir(exist_ok=True)
                for file in ("adapter_config.json", "adapter_model.safetensors"):
                    (folder / file).write_text("{}")
                return Reply(ref, said=str(folder))
        return Reply(ref, said=name)

    def _admit(self, request: Request, begun: int) -> None:
        if request.adapter is not None and request.adapter not in {*self.adapters, *self.stitched}:
            fault = Fault("AdapterNotFound", f"no adapter {request.adapter!r} is loaded")
            self._send(Report((Token(request.id, fault=fault),)))
            return
        self.running[request.id], self.places[request.id] = request, begun
        self.begun[request.id] = begun

    def _drop(self, request: str) -> None:
        self.running.pop(request, None)
        self.places.pop(request, None)

    def _send(self, answer: Answer) -> None:
        if self._writer is not None:
            write_frame(self._writer, encode_answer(answer))

    def _stats(self) -> EngineStats:
        running = min(len(self.running), self.max_running)
        return EngineStats(
            self.steps, 0, 0, 0, 0.0, 0, 0, running, len(self.running) - running, 2048, 2000, 0.1, 0, 0,
            len(self.adapters), paging=Paging(resident=tuple(self.adapters), pinned=tuple(self.pinned)),
        )  # fmt: skip


def expected(fake: FakeEngine, wanted: Request) -> list[int]:
    """Tokens of the whole answer to a request, as the engine's script has them."""
    return [fake.script(wanted, place) for place in range(wanted.sampling.max_tokens)]
