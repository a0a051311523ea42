"""One engine: frozen bases, mostly one, their answers and their training."""

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from msgspec import structs
from transformers import PreTrainedModel

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.paging.stored import StoredVersion
from coserve.cluster.opening import open_cluster
from coserve.config import EngineConfig, StitchedChain
from coserve.core.events import Event
from coserve.core.request import BASE, SLO, FinishReason, Request, SamplingParams
from coserve.engine.adapters import EngineAdapters
from coserve.engine.admission import Admission
from coserve.engine.approximations import Approximations, ChainOfBases, Version, for_version
from coserve.engine.base_memory import base_memory, scheduler_config
from coserve.engine.calibrate import measure, measure_interference
from coserve.engine.chain_changes import ChainChanges
from coserve.engine.completion import Completion
from coserve.engine.finetuning import FineTuning, Keeping
from coserve.engine.loop import StepLoop
from coserve.engine.memory import DeviceBudget, EngineMemory
from coserve.engine.reading import Data, Reading, read_data
from coserve.engine.rollouts import Rollouts
from coserve.engine.sessions import Sessions
from coserve.engine.stats import count
from coserve.engine.training import Training
from coserve.engine.training_client import TrainingClient
from coserve.engine.training_host import Openings, TrainingHost
from coserve.errors import AdapterError, ConfigError, RequestError
from coserve.executors.executor import CompileGrammar
from coserve.jobs.limits import limits_of
from coserve.memory.pages import PagePool
from coserve.model.sampling_table import check_sampling
from coserve.model.stitched import StitchedBase
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.offloading import Offloading
from coserve.schedule.policies import Policy, make_policy
from coserve.schedule.reads import OffloadCosts
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.swap_tier import GUESS, SwapTier
from coserve.schedule.swapping import Swapping
from coserve.text import Text
from coserve.train.config import TrainingConfig
from coserve.train.example import Prepared, check_tokens
from coserve.train.fresh import sketch_adapter
from coserve.train.job import PreparedJob, check_invoked, reserved_positions
from coserve.train.lengths import check_lengths_of, limit_of
from coserve.train.needs import Steps
from coserve.train.objectives import Distillation, Objective, Supervised, objective_of
from coserve.train.state import TrainingState
from coserve.wire.messages import EngineStats
from coserve.worker.compute_threads import set_threads
from coserve.worker.offloaded import offloaded_page_nbytes
from coserve.worker.opening import Opened, open_executor, open_stitched

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Messages


class Engine:
    """Answers requests and trains adapters on one frozen base, in the same steps.

    `generate` and `finetune` return handles at once; iterating any handle drives `step`, which advances all
    of them. `adapters` loads, registers and saves adapters. Safe to use from several threads.

    More bases, of any width and depth, may join (`add_base`): each then has an `Engine` of its own for its
    requests, adapters and jobs. All of these share one schedule, one ledger and their steps (BlockLLM, 4.3).
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        config: EngineConfig = EngineConfig(),
        tokenizer: Any = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        beside: "Engine | None" = None,
        base_id: str = BASE,
        opened: Opened | None = None,
        counts_libraries: bool = False,
    ) -> None:
        """`counts_libraries` is for a process of the engine's own, which is to call `memory.count_process`.
        `beside`, `base_id` and `opened` are for `add_base`: the engine of the first base, the id of this one,
        and its executor where that is not to be opened for a model."""
        self.config, self.clock, self.base_id = config, clock, base_id
        policy = make_policy(config.policy, **config.policy_options)  # refused before the model loads
        if beside is None:
            set_threads(config.threads)
        self._counts_libraries = counts_libraries
        budget = DeviceBudget(config) if beside is None else beside.memory.budget
        self.memory: EngineMemory = EngineMemory(config, budget, base_id)
        special = config.allow_special_tokens
        texts = cache(lambda: _text_of(model, special) if tokenizer is None else Text(tokenizer, special))
        if opened is None:
            room = base_memory(model, config, self.memory.ledger, counts_libraries)
            placed = config if room is None else replace(config, base_memory=room)
            opening = open_cluster if config.cluster else open_executor
            opened = opening(model, placed, lambda: getattr(texts(), "tokenizer", None))
        self.executor, self.base, self.grammars = opened.executor, opened.base, opened.grammars
        self._workers = opened.workers
        self.streaming = self.executor.spec.streaming
        reads = 0 if self.streaming is None else self.streaming.plan.read_nbytes
        self.text = texts()
        self._random = random.Random(config.seed)
        self._numbers = itertools.count(1)  # of requests
        settings = scheduler_config(config, self.base, self.executor.spec)
        self.pages, self.cost = PagePool(config.pages, config.page_size), CostModel()
        self.cost.graphs = self.executor.spec.graphs
        if beside is None:
            plans_ahead = self.executor.spec.plans - 1
            plans_ahead += config.plans_ahead and not reads and not config.base
            first = self._cache(settings, SwapTier(config.swap_nbytes, GUESS))
            schedule = Scheduler(first, self.cost, policy)
            self.loop: StepLoop[Engine] = StepLoop(
                self.executor, schedule, clock, plans_ahead, self.memory.stored_room
            )
        else:
            self.loop = beside.loop
        self.bases, self.scheduler = self.loop.bases, self.loop.scheduler
        self.arrivals, self.completions = self.loop.arrivals, self.loop.completions
        if self.streaming is not None:
            places = {*range(self.base.depth)} - self.streaming.plan.resident
            self.cost.reads.start(places, self.streaming.plan.read_nbytes, self.streaming.rate)
        self.adapters: EngineAdapters = EngineAdapters(
            self.loop.adapters,
            self.executor,
            self.base,
            self.memory,
            opened.slot_nbytes,
            self._refuse_while_trained,
            lambda: self.training.admission.advance(),
            self.loop.lock,
            base_id,
        )
        self.memory.open(self.executor, self.base, self.adapters.cache, settings)
        bound = None if config.deterministic else config.approximation_delay
        self._approximations = Approximations(
            self.adapters.cache,
            self.scheduler,
            self.adapters.reader,
            self.memory,
            self.base.nbytes,
            self.cost,
            bound,
            base_id,
        )
        self.changes = ChainChanges(
            self.scheduler, self.adapters.cache, self._approximations, self.completions, base_id
        )
        admission = Admission(
            self.memory,
            self.executor,
            self.base,
            settings,
            self._steps(policy, settings),
            self.loop.jobs,
        )
        self.openings = Openings(self.executor, self.adapters.bank, base_id)
        host = TrainingHost(
            self.executor,
            self.base,
            self.adapters.bank,
            self.scheduler,
            admission,
            self.openings,
            self.loop.drive,
            self.loop.lock,
            base_id,
        )
        self.sessions = Sessions(host)
        self.rollouts = Rollouts(self.generate, self.text, lambda: self.loop.others_wait, config.max_running)
        self.training: Training = Training(host, self.sessions, self.rollouts, self.adapters.save)
        if config.measures_costs:
            self.calibrate()
        self.loop.join(base_id, self, self.executor, self.cost, partial(self._cache, settings))

    def add_base(
        self, base: str, model: str | Path | PreTrainedModel | StitchedChain, tokenizer: Any = None
    ) -> "Engine":
        """Loads one more base under the id `base`, with the settings of this engine, and returns its
        `Engine`: what that answers and trains is in the same steps as all else.

        It has pages of its own, as many as this engine's; a queue, the second tier and bytes in common with
        all. A chain of two bases that are there shares their weights and the second one's tokenizer; it
        answers, and nothing trains on it. Its id is an alternative for requests to either. Takes seconds, in
        which nobody steps. Raises ModelError or ConfigError, with nothing changed.
        """
        with self.arrivals.arriving(), self.loop.lock:
            first = self.bases.first
            first._check_more(base)
            config = replace(self.config, calibrate=False)
            if isinstance(model, StitchedChain):
                added = first._stitched(base, model, config)
            else:
                counts = self._counts_libraries
                added = Engine(
                    model, config, tokenizer, self.clock, beside=first, base_id=base, counts_libraries=counts
                )
            if self.config.calibrate:
                added.calibrate()
            return added

    def _stitched(self, base: str, chain: StitchedChain, config: EngineConfig) -> "Engine":
        """The engine of a chain of two bases. Raises ConfigError."""
        one, other = self.bases[chain.first], self.bases[chain.second]
        opened = open_stitched(chain.folder, (one.executor, other.executor), config, other.grammars)
        tokenizer = getattr(other.text, "tokenizer", None)
        model = other.base.model  # whose own tokenizer is not read
        return Engine(model, config, tokenizer, self.clock, beside=self, base_id=base, opened=opened)

    def _check_more(self, base: str) -> None:
        """Raises ConfigError where no base of this id can join."""
        config = self.config
        if not base or base in self.bases:
            said = f"there is a base {base!r} already" if base else "a base's id must not be empty"
            raise ConfigError(said)
        for name, is_set in (
            ("async_scheduling", bool(config.async_scheduling)),
            ("base", bool(config.base)),
            ("cluster", bool(config.cluster)),
            ("pipeline_parallel", config.pipeline_parallel > 1),
        ):
            if is_set:
                raise ConfigError(f"engine.{name} is for engines of one base, and this one is to have more")

    def _refuse_while_trained(self, adapter: str) -> None:
        """Raises JobError if an adapter is in training, on whatever base."""
        for engine in self.bases:
            engine.training.refuse_while_trained(adapter)

    def calibrate(self) -> bool:
        """Measures the costs of this base's steps on this machine, in some seconds; nothing else may be under
        way. False where they are rough, as the machine was busy."""
        room = self.base, self.config.page_size, self.config.pages
        is_short = self.streaming is not None  # memory does not hold the base
        measured = measure(self.executor, *room, lean=is_short)
        self.cost.fit(measured.samples)
        self.memory.return_excess()
        threads = torch.get_num_threads()
        # Two streams would read a streamed base's weights twice, and several bases take turns.
        is_first = self.base_id == BASE
        if is_first and not is_short and (slower := measure_interference(self.executor, *room)) is not None:
            self.cost.interference.start(*slower)
        torch.set_num_threads(threads)  # a stream's own number is MKL's for the whole process
        return measured.is_certain

    # The loop

    def step(self) -> list[Event]:
        """Plans, runs and applies one step. Returns the events of all requests and jobs.

        Training alone lasts at most `scheduler.quantum`, as the caller may have requests that it hands over
        after the step. With `scheduler.interruptible` all requests are announced (`arrivals`), and training
        lasts until one is, at most `scheduler.max_quantum`.
        """
        return self.loop.step(self.scheduler.config.interruptible)

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.loop.drive():
            pass

    # Answers

    def generate(
        self,
        prompt: Prompt,
        adapter: str | None = None,
        sampling: SamplingParams = SamplingParams(),
        slo: SLO = SLO(),
        arrival: float | None = None,
        continued: Sequence[int] = (),
        text: bool = True,
        scope: str | None = "",
        newcomer: bool = False,
        alternatives: Sequence[str | None] = (),
    ) -> Completion:
        """Queues one request and returns its handle.

        `prompt` is text, token ids, or chat messages. `adapter` is a name, whose current version is used to
        the end, or a version's key. `arrival` is on the engine's clock, in seconds, and defaults to now.
        `continued` are the answer's first tokens if another engine generated them: they count as its
        beginning, and the handle reports only the tokens after them. Without `text` the answer stays tokens,
        and stop strings are left to the caller. A prefix common to prompts of one `scope` is computed once;
        None shares nothing. The first token of a `newcomer` has priority.

        Under load (`schedule.approximation`) one of the `alternatives`, names or keys of adapters, the most
        accurate first, may answer in the adapter's place, or go on with the answer; None is the base, and the
        id of a chain of two bases is that one, which answers a request as a whole. The handle tells which one
        does.
        Raises RequestError, AdapterNotFound or ConfigError, with nothing queued.
        """
        request = Request(
            f"req-{next(self._numbers)}", self._tokens(prompt), sampling, adapter, slo,
            self.clock() if arrival is None else arrival, self.base_id, scope=scope, newcomer=newcomer,
            alternatives=tuple(alternatives), continued=tuple(continued),
        )  # fmt: skip
        return self.submit(request, text)

    def submit(self, request: Request, text: bool = False) -> Completion:
        """Queues a request for this base, as `generate` does, and returns its handle. Where it has no seed
        one is drawn. Raises what `generate` does, with nothing queued."""
        sampling, continued = request.sampling, request.continued
        # Before the lock is taken: no step waits while a grammar is compiled.
        grammar = check_sampling(sampling, self.base.vocabulary, self.grammars, continued)
        if grammar is not None:
            self.executor.call(CompileGrammar(grammar.text))
        with self.arrivals.arriving(self.arrivals.presses(request.slo)), self.loop.lock:
            asked = None if request.adapter is None else self.adapters.look(request.adapter)
            others = (self._alternative(one, grammar is not None) for one in request.alternatives)
            versions = [asked, *others]
            length, most = len(request.prompt), sampling.max_tokens
            chosen = self._approximations.choose(versions, length, most, self.clock())
            version = versions[chosen]
            if sampling.seed is None:
                seeded = replace(sampling, seed=self._random.getrandbits(63))
                request = structs.replace(request, sampling=seeded)
            request = for_version(request, version)
            if unknown := [t for t in (*request.prompt, *continued) if not 0 <= t < self.base.vocabulary]:
                raise RequestError(f"token {unknown[0]} is not one of the model's {self.base.vocabulary}")
            if text and sampling.stop and self.text is None:
                raise ConfigError("stop strings need a tokenizer, and the engine was given none")
            stream = self.text.stream(sampling.stop) if text and self.text else None
            blocked = isinstance(version, StoredVersion)
            sequence = self.scheduler.requests.submit(request, self.clock(), blocked)
            cancel = partial(self.loop.cancel, sequence.key)
            completion = Completion(sequence, stream, self.loop.drive, cancel, grammar, chosen)
            self.completions[sequence.key] = completion
            if not isinstance(version, ChainOfBases):
                self.changes.allow(sequence.key, versions)
            if completion.skip(continued):
                self.scheduler.requests.finish(sequence.key, FinishReason.STOP)
            if request.adapter is not None and not sequence.is_finished:
                self.adapters.paged.came(sequence)
            return completion

    def _alternative(self, name: str | None, has_grammar: bool) -> Version:
        """The adapter of this name or key, the chain of two bases of this id, or for None this base. Raises
        AdapterNotFound and AdapterError."""
        if name is None:
            return None
        if name not in self.bases or not isinstance((chain := self.bases[name]).base, StitchedBase):
            found = self.adapters.look(name)
            if found.outline.invocation:
                raise AdapterError(f"{name} acts from its invocation tokens on (aLoRA): it is no alternative")
            return found
        most = min(chain.base.max_positions, self.config.pages * self.config.page_size)
        if has_grammar and chain.grammars is not self.grammars:
            most = 0  # it would be compiled once more, while everybody's step waits
        return ChainOfBases(name, sum(leg.nbytes for leg in chain.base.legs), most)

    # Fine-tuning

    def finetune(
        self,
        data: Data | Prepared,
        adapter: str,
        method: object | Sequence[object] = LoRAConfig(),
        training: TrainingConfig = TrainingConfig(),
        start_from: str | AdapterVersion | None = None,
        job: str | None = None,
        resume: TrainingState | None = None,
        keeping: Keeping | None = None,
        objective: str | Mapping[str, Any] | Objective = Supervised(),
    ) -> FineTuning:
        """Starts training `adapter` and returns the job's handle.

        `data` is a JSONL or text file, records with the fields of such a file's, or token examples. Every
        optimizer step publishes a version, which `generate` uses from then on. `method` is the settings of an
        adapter method, such as LoRAConfig, or a sequence of several that form one adapter. `objective` is
        what steps minimise (`train.objectives`), or its name, which may also be given as `method`.
        `start_from` is an adapter, or a loaded one's name, to continue from (its own settings count then).
        `job` is the job's id; the id of an ended job may be used again. `resume` is the state at which the
        same job continues. `keeping` receives the states to keep. Raises DataError, AdapterError or JobError.
        """
        if isinstance(method, str):
            objective, method = method, LoRAConfig()
        aim = objective_of(objective)
        methods = tuple(method) if isinstance(method, Sequence) else (method,)
        with self.loop.lock:
            start = self.adapters.weights(start_from) if isinstance(start_from, str) else start_from
            reference = start if aim.has_reference else None
            if isinstance(aim, Distillation) and aim.teacher is not None:
                reference = self.adapters.weights(aim.teacher)
        if resume is not None:
            start = resume.adapter
        first = start or sketch_adapter(self.base, adapter, methods, training.seed)
        if isinstance(data, Prepared):
            prepared = data
        else:
            reading = Reading(reserved=reserved_positions(first, reference, aim))
            prepared = self.prepare(data, training, aim, reading)
        check_invoked(prepared.examples, aim.group, first, reference)
        with self.loop.lock:
            asked = PreparedJob(
                job or f"job-{self._started + 1}", adapter, prepared, methods, training, first,
                start is None, resume, aim, reference,
            )  # fmt: skip
            return self.training.start(asked, keeping)

    def open_training(
        self,
        adapter: str,
        method: object | Sequence[object] = LoRAConfig(),
        training: TrainingConfig = TrainingConfig(),
        from_adapter: str | AdapterVersion | None = None,
        session: str | None = None,
    ) -> TrainingClient:
        """Opens a training session for `adapter`, which its client drives: passes with losses of
        `train.losses`, optimizer steps, states.

        `method` and `from_adapter` are as `finetune`'s `method` and `start_from`. Of `training` the seed, the
        weight, the save policy and `rows` count: the most rows of a micro-batch, and so of one datum, for
        which memory is reserved. `session` is the session's name. Where bytes are missing it opens later, and
        its operations wait. Raises AdapterError, JobError, and OutOfMemory where it would never fit.
        """
        methods = tuple(method) if isinstance(method, Sequence) else (method,)
        with self.loop.lock:
            start = self.adapters.weights(from_adapter) if isinstance(from_adapter, str) else from_adapter
            name = session or f"session-{sum(one.sessions.opened for one in self.bases) + 1}"
            first = start or sketch_adapter(self.base, adapter, methods, training.seed)
            return self.open_session(
                PreparedJob(name, adapter, Prepared(()), methods, training, first, start is None)
            )

    def open_session(self, prepared: PreparedJob) -> TrainingClient:
        """Opens a training session, as `open_training` does. Raises what that does."""
        with self.loop.lock:
            self.training.refuse_while_trained(prepared.adapter)
            self.training.refuse_taken(prepared.job)
            return self.sessions.open(prepared)

    def prepare(
        self,
        data: Data,
        training: TrainingConfig = TrainingConfig(),
        objective: Objective = Supervised(),
        reading: Reading = Reading(),
    ) -> Prepared:
        """Reads, checks and tokenizes training data. Raises DataError, also for examples that are too long
        where `training.too_long` refuses these, and where none is left. Takes no lock: steps go on
        meanwhile."""
        limits, positions = limits_of(self.config, self.base.max_positions), self.base.max_positions
        limit = limit_of(training.max_length, training.too_long, positions, reading.reserved, reading.names)
        prepared = read_data(data, training, objective, self.text, limit, reading, limits)
        if not reading.tolerates:
            check_lengths_of(prepared, limit)
        check_tokens(prepared, self.base.vocabulary)
        return prepared

    @property
    def jobs(self) -> dict[str, FineTuning]:
        """Jobs on this base that have not ended, by their ids."""
        return self.training.jobs

    @property
    def _started(self) -> int:
        """Jobs that were ever started, on all bases."""
        return sum(one.training.started for one in self.bases)

    # State

    @property
    def has_work(self) -> bool:
        """Tells whether a step would do anything."""
        return self.loop.has_work

    def stats(self) -> EngineStats:
        """Counters since the start, and the current state."""
        with self.loop.lock:
            pages = [one.pages for one in self.bases]
            return count(self.scheduler, self.memory, pages, self.adapters.cache, self._workers())

    # Inside

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt. Messages go through the chat template, which raises DataError."""
        if not isinstance(prompt, Sequence):
            raise RequestError(f"a prompt is text, token ids or messages, not {type(prompt).__name__}")
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return tuple(prompt)  # type: ignore[arg-type]
        if not isinstance(prompt, str) and not all(isinstance(turn, Mapping) for turn in prompt):
            raise RequestError("a prompt is text, token ids or messages; each message is a mapping")
        if self.text is None:
            raise ConfigError("text prompts need a tokenizer, and the engine was given none")
        return self.text.encode(prompt) if isinstance(prompt, str) else self.text.chat(cast(Messages, prompt))

    def _steps(self, policy: Policy, settings: SchedulerConfig) -> Steps:
        """Limits of a job's work under way at once."""
        window = settings.training_window or settings.reserved_rows
        is_whole = policy.whole and settings.training_window is None
        return Steps(settings.micro_batches_in_flight, None if is_whole else window, self.config.offload)

    def _cache(self, settings: SchedulerConfig, tier: SwapTier) -> BaseCache:
        """The cache of this base's keys and values, also of those in the second tier."""
        config, spec = self.config, self.executor.spec
        copy_nbytes = config.swap_nbytes // max(spec.swap_pages, 1)  # of a page, at least what it takes
        swapping = Swapping(self.cost, spec.swap_pages, tier, max(copy_nbytes, 1))
        offloading = Offloading(
            tier, config.pages + 1, spec.offload_pages, config.page_size, spec.offload_refusal
        )
        page_nbytes = offloaded_page_nbytes(self.base.caches, config.page_size, self.base.dtype)
        self.cost.offload = OffloadCosts(GUESS * page_nbytes / config.page_size)
        return BaseCache(settings, self.pages, swapping, offloading)


def _text_of(model: str | Path | PreTrainedModel, special: bool) -> Text | None:
    """Text with the tokenizer saved beside a model; None for a model object."""
    return None if isinstance(model, PreTrainedModel) else Text.load(model, special)
