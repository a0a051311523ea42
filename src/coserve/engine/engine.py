"""One engine: a frozen base, its answers and its training."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bank import AdapterBank, check_name
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.paging.cache import AdapterCache, AdapterTier
from coserve.adapters.paging.reader import Reader
from coserve.adapters.paging.stored import KnownVersion, Outline, Outlines, StoredVersion
from coserve.attention.offloaded import offloaded_page_nbytes
from coserve.config import EngineConfig
from coserve.core.events import Event, Finished, JobFailed, PassDone, RequestFailed, StepDone, TokenEvent
from coserve.core.plan import StepResult
from coserve.core.request import SLO, FinishReason, Request, SamplingParams
from coserve.engine.admission import Admission
from coserve.engine.arrivals import Arrivals
from coserve.engine.calibrate import measure, measure_lanes
from coserve.engine.completion import Completion
from coserve.engine.finetuning import FineTuning, Keeping, PreparedJob
from coserve.engine.memory import EngineMemory
from coserve.engine.paged import PagedAdapters
from coserve.engine.reading import Data, read_data
from coserve.engine.rollouts import SCOPE, Rollouts
from coserve.engine.sessions import Sessions
from coserve.engine.stats import count
from coserve.engine.training import Training
from coserve.engine.training_client import TrainingClient
from coserve.errors import AdapterError, ConfigError, CoserveError, RequestError
from coserve.executors.executor import (
    CompileGrammar,
    DropAdapters,
    FetchAdapter,
    LoadAdapter,
    ReadAdapter,
)
from coserve.executors.opening import open_executor
from coserve.memory.pages import PagePool
from coserve.model.sampling_table import check_sampling
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.offloading import Offloading
from coserve.schedule.policies import Policy, make_policy
from coserve.schedule.reads import OffloadCosts
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.swapping import GUESS, Swapping
from coserve.text import Text
from coserve.train.config import TrainingConfig
from coserve.train.example import Prepared, check_fit
from coserve.train.needs import Steps
from coserve.train.objectives import Distillation, Objective, Supervised, objective_of
from coserve.train.state import TrainingState
from coserve.wire.messages import EngineStats

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Messages


class Engine:
    """Answers requests and trains adapters on one frozen base, in the same steps.

    `generate` and `finetune` return handles at once; iterating any handle drives `step`, which advances all
    of them. Safe to use from several threads.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        config: EngineConfig = EngineConfig(),
        tokenizer: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.clock = config, clock
        policy = make_policy(config.policy, **config.policy_options)  # a wrong policy is refused first
        self.memory = EngineMemory(config)
        special = config.allow_special_tokens
        texts = cache(lambda: _text_of(model, special) if tokenizer is None else Text(tokenizer, special))
        opened = open_executor(model, config, lambda: getattr(texts(), "tokenizer", None))
        self.executor, self.base, self.grammars = opened.executor, opened.base, opened.grammars
        self.streaming = self.executor.spec.streaming
        reads = 0 if self.streaming is None else self.streaming.plan.read_nbytes
        self._plans_ahead = config.plans_ahead and not reads and not config.base
        self.text = texts()
        reader = Reader(self._read_stored, self.executor.pause_training)
        room = self.executor.spec.host_room
        self.cache = AdapterCache(reader.begin, self._drop_adapter, self.memory.stored_room, room)
        self.bank = AdapterBank(self.cache)
        self.completions: dict[int, Completion] = {}
        self._random = random.Random(config.seed)
        self._requests = 0
        self._lock = threading.RLock()
        self.arrivals = Arrivals(self.executor)
        self.scheduler = self._make_scheduler(policy)
        if self.streaming is not None:
            places = {*range(self.base.depth)} - self.streaming.plan.resident
            self.scheduler.cost.reads.start(places, self.streaming.plan.read_nbytes, self.streaming.rate)
        self.memory.open(self.executor, self.base, self.cache, self.scheduler.config)
        self._outlines = Outlines(self.base, self.base.dtype, opened.slot_nbytes)
        self.paged = PagedAdapters(self.cache, self.scheduler, reader)
        admission = Admission(
            self.memory, self.executor, self.base, self.scheduler.config, self._steps(policy)
        )
        own = self.executor, self.base, self.bank, self.scheduler, admission
        self.sessions = Sessions(*own, self._drive, self._lock)
        self.rollouts = Rollouts(self.generate, self.text, self._others_wait, config.max_running)
        self.training = Training(
            *own, self.sessions, self.rollouts, self._drive, self.save_adapter, self._lock
        )
        if config.calibrate:
            self.calibrate()

    def calibrate(self) -> None:
        """Measures the costs of steps on this machine, in some seconds; nothing else may be under way."""
        room = self.base, self.config.page_size, self.config.pages
        is_short = self.streaming is not None  # of memory
        self.scheduler.cost.fit(measure(self.executor, *room, lean=is_short))
        self.memory.return_excess()
        threads = torch.get_num_threads()
        # Two lanes would read a streamed base's weights twice.
        if not is_short and (lanes := measure_lanes(self.executor, *room)) is not None:
            self.scheduler.cost.lanes.start(*lanes)
        torch.set_num_threads(threads)  # a lane's own number is MKL's for the whole process

    # The loop

    def step(self) -> list[Event]:
        """Plans, runs and applies one step. Returns the events of all requests and jobs.

        Training alone lasts at most `scheduler.quantum`, as the caller may have requests that it hands over
        after the step; with `scheduler.interruptible` all are announced (`arrivals`), and it lasts until one
        is, at most `scheduler.max_quantum`.
        """
        return self._step(self.scheduler.config.interruptible)

    def _step(self, interruptible: bool) -> list[Event]:
        with self._lock:
            self.scheduler.interruptible = interruptible
            is_awaited = self.arrivals.before_step()
            if not self._is_stuck:  # commands would wait for the plan
                self.paged.advance()
            # A layer of training runs before who waits already gets the next step: not one of a large window.
            self.scheduler.window_rows = 0 if is_awaited else self.training.admission.window_rows()
            result = self._next_result()
            self._publish(result)
            events = self.scheduler.apply(result, self.clock())
            for event in events:
                self._deliver(event)
            for event in self.rollouts.advance():
                events.append(event)
                self._deliver(event)
            self.memory.return_excess()
            return [e for e in events if not (isinstance(e, JobFailed) and e.job in self.jobs)]  # retried

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self._drive():
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
    ) -> Completion:
        """Queues one request and returns its handle.

        `prompt` is text, token ids, or chat messages; `adapter` a name (its current version is used to the
        end) or a version's key. `arrival` is on the engine's clock and defaults to now. `continued` are the
        answer's first tokens if another engine generated them: they count as its beginning, and the handle
        reports only the tokens after them. Without `text` the answer stays tokens, and stop strings are left
        to the caller. A prefix common to prompts of one `scope` is computed once; None shares nothing. The
        first token of a `newcomer` goes first. Raises RequestError, AdapterNotFound or ConfigError, with
        nothing queued.
        """
        # Before the lock is taken: no step waits while a grammar is compiled.
        grammar = check_sampling(sampling, self.base.vocabulary, self.grammars, continued)
        if grammar is not None:
            self.executor.call(CompileGrammar(grammar.text))
        with self.arrivals.arriving(), self._lock:
            version = None if adapter is None else self.bank.look(adapter)
            request = self._request(self.tokenize(prompt), version, sampling, slo, arrival)
            request = replace(request, scope=scope, newcomer=newcomer)
            if unknown := [t for t in (*request.prompt, *continued) if not 0 <= t < self.base.vocabulary]:
                raise RequestError(f"token {unknown[0]} is not one of the model's {self.base.vocabulary}")
            if text and sampling.stop and self.text is None:
                raise ConfigError("stop strings need a tokenizer, and the engine was given none")
            stream = self.text.stream(sampling.stop) if text and self.text else None
            blocked = isinstance(version, StoredVersion)
            sequence = self.scheduler.submit(request, self.clock(), continued, blocked)
            cancel = partial(self._cancel_sequence, sequence.key)
            completion = Completion(sequence, stream, self._drive, cancel, grammar)
            self.completions[sequence.key] = completion
            if completion.skip(continued):
                self.scheduler.finish(sequence.key, FinishReason.STOP)
            if version is not None and not sequence.is_finished:
                self.paged.came(sequence)
            return completion

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
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

    # Adapters

    def load_adapter(self, name: str, folder: str | Path) -> AdapterVersion:
        """Loads an adapter in PEFT's format, of any method, under `name`."""
        base = self.base  # without the lock: steps go on meanwhile
        return self.add_adapter(read_adapter(folder, name, base, base.dtype, base.device))

    def add_adapter(self, adapter: AdapterVersion) -> AdapterVersion:
        """Publishes an adapter under its name, and keeps it in memory; returns it with its version number."""
        with self._lock:
            check_name(adapter.name)  # before the weights are on the device
            self.training.refuse_while_trained(adapter.name)
            self.memory.load(adapter)
            adapter = replace(adapter, version=self.bank.next_version(adapter.name))
            self.bank.publish(KnownVersion(adapter.name, adapter.version, self._load(adapter)))
            return adapter

    def register_adapter(self, name: str, folder: str | Path) -> StoredVersion:
        """Publishes the adapter in `folder` under `name`; its weights stay on disk until a request needs
        them, and may be evicted again. So the folder has to stay as it is."""
        return self.add_stored(self.look_at_adapter(name, folder))

    def look_at_adapter(self, name: str, folder: str | Path, new: bool = False) -> StoredVersion:
        """Reads the outline of the adapter in `folder`, for `add_stored`. The weights of a `new` one are
        checked, and not kept. Takes no lock. Raises AdapterError if the adapter does not fit this base."""
        return self._outlines.look(name, folder, new)

    def add_stored(self, stored: StoredVersion) -> StoredVersion:
        """Publishes an adapter on disk under its name; returns it with its version number. Raises OutOfMemory
        if it would never fit."""
        with self._lock:
            self.training.refuse_while_trained(stored.name)
            self.memory.fit(stored.name, stored.cost)
            stored = replace(stored, version=self.bank.next_version(stored.name))
            self.bank.publish(stored)
            return stored

    def pin_adapter(self, name: str, pinned: bool = True) -> None:
        """Loads a registered adapter and keeps it in memory, or unpins it."""
        with self._lock:
            self.paged.pin(self.bank.look(name).key, pinned)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter; answers under way keep it until they end."""
        with self._lock:
            self.training.refuse_while_trained(name)
            self.bank.remove(name)
            self.training.admission.advance()

    def weights(self, name: str) -> AdapterVersion:
        """An adapter's current version, or the version of a given key, with its weights, read from files if
        they are not on the device. Raises AdapterNotFound."""
        with self._lock:
            known = self.bank.look(name)
            if isinstance(known, StoredVersion) and self.cache.tier(known.key) is not AdapterTier.DEVICE:
                return known.read(self.base, self.base.dtype, self.base.device)
            return self.executor.call(FetchAdapter(known.key))

    def save_adapter(self, name: str, folder: str | Path) -> None:
        """Writes the adapter's current version in PEFT's format."""
        with self._lock:
            try:
                config = self.base.model.config
                write_adapter(self.weights(name), folder, str(config.name_or_path), config.model_type)
            except OSError as error:
                raise AdapterError(f"the adapter cannot be written to {folder}: {error.strerror}") from error

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
        prepared = data if isinstance(data, Prepared) else self.prepare(data, training, aim)
        with self._lock:
            start = self.weights(start_from) if isinstance(start_from, str) else start_from
            methods = tuple(method) if isinstance(method, Sequence) else (method,)
            reference = start if aim.has_reference else None
            if isinstance(aim, Distillation) and aim.teacher is not None:
                reference = self.weights(aim.teacher)
            asked = PreparedJob(
                job or f"job-{self.training.started + 1}", adapter, prepared, methods, training,
                start if resume is None else resume.adapter, resume, aim, reference,
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
        with self._lock:
            start = self.weights(from_adapter) if isinstance(from_adapter, str) else from_adapter
            methods = tuple(method) if isinstance(method, Sequence) else (method,)
            name = session or f"session-{self.sessions.opened + 1}"
            self.training.refuse_while_trained(adapter)
            self.training.refuse_taken(name)
            return self.sessions.open(name, adapter, methods, training, start)

    def prepare(
        self,
        data: Data,
        training: TrainingConfig = TrainingConfig(),
        objective: Objective = Supervised(),
        most: int | None = None,
    ) -> Prepared:
        """Reads, checks and tokenizes training data, of it the first `most` records. Raises DataError. Takes
        no lock: steps go on meanwhile."""
        prepared = read_data(data, training, objective, self.text, most)
        check_fit(prepared, self.base.max_positions, self.base.vocabulary)
        return prepared

    @property
    def jobs(self) -> dict[str, FineTuning]:
        """Jobs that have not ended, by their ids."""
        return self.training.jobs

    # State

    @property
    def has_work(self) -> bool:
        """Tells whether a step would do anything."""
        return self.scheduler.has_work or self.rollouts.has_work

    @property
    def _is_stuck(self) -> bool:
        """Tells whether the last step raised WeightsUnreadable: its plan is the next one to run, and no
        command that changes adapters or jobs can be executed before it."""
        return not self._plans_ahead and bool(self.scheduler.under_way)

    def stats(self) -> EngineStats:
        """Counters since the start, and the current state."""
        with self._lock:
            return count(self.scheduler, self.memory, self._pages, self.cache)

    # Inside

    def _next_result(self) -> StepResult:
        """The result of the oldest plan under way: of the last one where the base's weights could not be
        read, and it stayed. With asynchronous scheduling the next plan is launched first, if it can be made
        already. Not on a streamed or remote base: a command that a result leads to, such as one for a job's
        state, would have to wait until that plan can run. Planning takes milliseconds, and its steps longer.
        """
        if not self.scheduler.under_way:
            plan = self.scheduler.plan(self.clock())
            if not self._plans_ahead:
                return self.executor.run(plan)
            self.executor.launch(plan)
        if self._plans_ahead and (ahead := self.scheduler.plan_ahead(self.clock())) is not None:
            self.executor.launch(ahead)
        result = self.executor.collect()
        assert result is not None, "a plan that was launched has a result"
        return result

    def _others_wait(self) -> bool:
        """Tells whether a request waits for room that is no job's rollout."""
        return any(not (s.request.scope or "").startswith(SCOPE) for s in self.scheduler.waiting)

    def _read_stored(self, stored: StoredVersion) -> int:
        """Loads a stored version onto the device; returns its bytes there. Runs on the reader's thread."""
        return self.executor.call(ReadAdapter(stored)).nbytes

    def _load(self, adapter: AdapterVersion) -> Outline:
        return self.executor.call(LoadAdapter(adapter))

    def _drop_adapter(self, key: str, tier: AdapterTier) -> None:
        self.executor.call(DropAdapters((key,), tier))

    def _publish(self, result: StepResult) -> None:
        """Publishes the versions of a step's optimizer steps, with the outlines of those before."""
        for updated in result.updated.values():
            name, _, number = updated.version.rpartition("@")
            if name not in self.bank:  # removed while the plan was under way
                self._drop_adapter(updated.version, AdapterTier.DEVICE)
                continue
            before = self.bank.look(name)
            self.bank.publish(KnownVersion(name, int(number), before.outline))

    def _steps(self, policy: Policy) -> Steps:
        """Limits of a job's work under way at once."""
        settings = self.scheduler.config
        window = settings.training_window or settings.reserved_rows
        return Steps(settings.micro_batches_in_flight, None if policy.whole else window, self.config.offload)

    def _make_scheduler(self, policy: Policy) -> Scheduler:
        config = self.config
        try:
            settings = SchedulerConfig(
                layers=self.base.depth,
                max_positions=self.base.max_positions,
                eos_token_ids=self.executor.spec.eos_ids,
                max_running=config.max_running,
                prefix_sharing=config.prefix_sharing,
                row_buckets=self.base.row_buckets,
                **config.scheduler_settings,
            )
        except TypeError as error:
            raise ConfigError(f"engine.scheduler: {error}") from error
        self._pages = PagePool(config.pages, config.page_size)
        cost, spec = CostModel(), self.executor.spec
        swapping = Swapping(cost, spec.swap_pages, GUESS * spec.cache_nbytes / config.pages)
        offloading = Offloading(
            swapping, config.pages + 1, spec.offload_pages, config.page_size, spec.offload_refusal
        )
        page_nbytes = offloaded_page_nbytes(self.base.caches, config.page_size, self.base.dtype)
        cost.offload = OffloadCosts(GUESS * page_nbytes / config.page_size)
        return Scheduler(settings, self._pages, cost, policy, swapping, offloading)

    def _request(
        self,
        tokens: tuple[int, ...],
        version: KnownVersion | None,
        sampling: SamplingParams,
        slo: SLO,
        arrival: float | None,
    ) -> Request:
        self._requests += 1
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._random.getrandbits(63))
        return Request(
            id=f"req-{self._requests}",
            prompt=tokens,
            sampling=sampling,
            adapter=None if version is None else version.key,
            slo=slo,
            arrival=self.clock() if arrival is None else arrival,
            virtual=0 if version is None else version.virtual.count,
            virtual_rows=0 if version is None else version.virtual.prompt_count,
        )

    def _drive(self) -> bool:
        """Runs one step if there is anything to do; callers on other threads take the lock before it."""
        self.arrivals.give_way()
        with self._lock:
            if not self.has_work:
                return False
            self._step(interruptible=True)  # who else has requests is on another thread, and announces them
            return True

    def _deliver(self, event: Event) -> None:
        match event:
            case TokenEvent():
                completion = self.completions[event.key]
                stopped = completion.take(event)
                if event.finish_reason is not None:
                    self._complete(event.key, event.finish_reason)
                elif stopped:
                    self.scheduler.finish(event.key, FinishReason.STOP)
            case Finished():
                self._complete(event.key, event.finish_reason)
            case RequestFailed():
                self._complete(event.key, FinishReason.CANCELLED, event.error)
            case PassDone() | StepDone() | JobFailed():
                self.training.deliver(event)
                self.sessions.deliver(event)

    def _complete(self, key: int, reason: FinishReason, error: CoserveError | None = None) -> None:
        completion = self.completions.pop(key)
        completion.finish(reason, error)
        adapter = completion.sequence.request.adapter
        if adapter is not None:
            self.cache.release(adapter, key)
            if self.training.admission.waiting:  # perhaps for this adapter's bytes
                self.training.admission.advance()

    def _cancel_sequence(self, key: int) -> None:
        with self.arrivals.arriving(), self._lock:
            self.scheduler.cancel(key)


def _text_of(model: str | Path | PreTrainedModel, special: bool) -> Text | None:
    """Text with the tokenizer saved beside a model; None for a model object."""
    return None if isinstance(model, PreTrainedModel) else Text.load(model, special)
