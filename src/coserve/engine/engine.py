"""One engine: a frozen base, and everything that is answered and trained on it."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, PreTrainedModel

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bank import AdapterBank
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.methods.lora import LoRAConfig
from coserve.config import EngineConfig
from coserve.core.events import Event, Finished, JobFailed, StepDone, TokenEvent
from coserve.core.request import SLO, FinishReason, Request, SamplingParams
from coserve.engine.calibrate import measure
from coserve.engine.detokenize import Detokenizer
from coserve.engine.handles import Completion, FineTuning
from coserve.engine.runner import LocalRunner
from coserve.engine.table import SequenceTable
from coserve.errors import ConfigError, JobError, RequestError
from coserve.jobs import datasets
from coserve.memory.kv import KVPool
from coserve.memory.malloc import keep_freed_memory
from coserve.memory.pages import PagePool
from coserve.model.load import load_base
from coserve.model.sampling_table import SamplingTable
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.train.example import Example, Prepared, prepare
from coserve.train.trainer import TrainingConfig, TrainingRun, fresh_adapter

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Messages


class Engine:
    """Answers requests and trains adapters on one frozen base, in the same steps.

    `generate` and `finetune` return handles at once; iterating any of them drives `step`, which advances
    all of them. Safe to use from several threads.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        config: EngineConfig = EngineConfig(),
        tokenizer: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        if config.device == "cpu":
            keep_freed_memory()
        self.base = load_base(model, dtype, config.device)
        self.tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(model)
        self.bank = AdapterBank()
        self.completions: dict[int, Completion] = {}
        self.jobs: dict[str, FineTuning] = {}
        self._detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer)
        self._random = random.Random(config.seed)
        self._requests = 0
        self._lock = threading.RLock()
        self.runner = self._make_runner()
        self.scheduler = self._make_scheduler()
        if config.calibrate:
            samples = measure(self.runner, config.page_size, config.pages, self.base.max_positions)
            self.scheduler.cost.fit(samples)

    # The loop

    def step(self) -> list[Event]:
        """One step: decide, run, take in. Returns what it brought about, for every request and job."""
        with self._lock:
            plan = self.scheduler.plan(self.clock())
            result = self.runner.run(plan)
            events = self.scheduler.apply(plan, result, self.clock())
            for event in events:
                self._deliver(event)
            return events

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
    ) -> Completion:
        """Queues one answer and returns its handle.

        `prompt` is text, token ids, or chat messages; `adapter` a name (its current version is used to the
        end) or a version's key. `arrival` is on the engine's clock and defaults to now. Raises RequestError,
        AdapterNotFound or ConfigError, with nothing queued.
        """
        with self._lock:
            version = None if adapter is None else self.bank.find(adapter)
            request = self._request(self.tokenize(prompt), version, sampling, slo, arrival)
            if unknown := [t for t in request.prompt if not 0 <= t < self.base.vocabulary]:
                raise RequestError(f"token {unknown[0]} is not one of the model's {self.base.vocabulary}")
            self.runner.table.sampling.check(request.sampling)
            if sampling.stop and self._detokenizer is None:
                raise ConfigError("stop strings need a tokenizer, and the engine was given none")
            sequence = self.scheduler.submit(request, self.clock())
            if version is not None:
                self.bank.pin(version.key)
            text = None if self._detokenizer is None else self._detokenizer.stream(sampling.stop)
            cancel = partial(self._cancel_sequence, sequence.key)
            completion = Completion(sequence, text, self._drive, cancel)
            self.completions[sequence.key] = completion
            return completion

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt; messages go through the chat template."""
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return tuple(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise ConfigError("text prompts need a tokenizer, and the engine was given none")
        if isinstance(prompt, str):
            return tuple(self.tokenizer(prompt)["input_ids"])
        rendered = self.tokenizer.apply_chat_template(
            cast(Messages, prompt), add_generation_prompt=True, tokenize=False
        )
        return tuple(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    # Adapters

    def load_adapter(self, name: str, folder: str | Path) -> AdapterVersion:
        """Makes a LoRA adapter in PEFT's format answer to `name`."""
        with self._lock:
            self._refuse_in_training(name)
            adapter = read_adapter(folder, name, self.base.shapes, self.base.dtype, self.base.device)
            adapter = replace(adapter, version=self.bank.next_version(name))
            self.bank.publish(adapter)
            return adapter

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; answers under way keep it until they end."""
        with self._lock:
            self._refuse_in_training(name)
            self.bank.remove(name)

    def save_adapter(self, name: str, folder: str | Path) -> None:
        """Writes the adapter's current version in PEFT's format."""
        with self._lock:
            write_adapter(self.bank.find(name), folder, str(self.base.model.config.name_or_path))

    # Fine-tuning

    def finetune(
        self,
        data: str | Path | Sequence[Mapping[str, Any]] | Sequence[Example],
        adapter: str,
        lora: LoRAConfig = LoRAConfig(),
        training: TrainingConfig = TrainingConfig(),
        start_from: str | None = None,
    ) -> FineTuning:
        """Starts training `adapter` and returns the job's handle.

        `data` is a JSONL or text file, records as such a file holds them, or token examples. Every optimizer
        step publishes a version, which `generate` uses from then on. `start_from` names a loaded adapter to
        continue from (its own configuration counts then). Raises DataError, AdapterError or JobError.
        """
        with self._lock:
            self._refuse_in_training(adapter)
            prepared = self._prepare(data, training)
            if start_from is None:
                first = fresh_adapter(self.base, adapter, lora, training.seed)
            else:
                before = self.bank.find(start_from)
                first = AdapterVersion(adapter, 0, before.config, before.bypasses)
            first = replace(first, version=self.bank.next_version(adapter))
            job = f"job-{len(self.jobs) + 1}"
            run = TrainingRun(
                self.base, self.bank, job, first, prepared.examples, training, self.runner.arena
            )
            self.runner.runs[job] = run
            handle = FineTuning(
                job, adapter, run.steps, self._drive, partial(self._end_job, job, "cancelled"),
                partial(self.save_adapter, adapter), prepared.truncated, prepared.dropped,
            )  # fmt: skip
            self.jobs[job] = handle
            self._feed(job)
            return handle

    # Inside

    def _make_runner(self) -> LocalRunner:
        config, base = self.config, self.base
        pool = KVPool(base.caches, config.pages, config.page_size, base.dtype, base.device)
        most = -(-min(config.cache_tokens, base.max_positions) // config.page_size)
        sampling = SamplingTable(config.max_running, base.vocabulary, self._eos_ids(), base.device)
        return LocalRunner(base, self.bank, pool, SequenceTable(config.max_running, most, pool, sampling))

    def _make_scheduler(self) -> Scheduler:
        config = self.config
        try:
            settings = SchedulerConfig(
                layers=self.base.depth,
                max_positions=self.base.max_positions,
                eos_token_ids=self._eos_ids(),
                max_running=config.max_running,
                **config.scheduler,
            )
        except TypeError as error:
            raise ConfigError(f"engine.scheduler: {error}") from error
        pages = PagePool(config.pages, config.page_size)
        return Scheduler(settings, pages, CostModel(), make_policy(config.policy, **config.policy_options))

    def _eos_ids(self) -> tuple[int, ...]:
        eos = getattr(self.base.model.generation_config, "eos_token_id", None)
        if eos is None:
            eos = self.base.model.config.get_text_config().eos_token_id
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    def _request(
        self,
        tokens: tuple[int, ...],
        version: AdapterVersion | None,
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
        )

    def _prepare(self, data: Any, training: TrainingConfig) -> Prepared:
        if isinstance(data, Sequence) and not isinstance(data, str) and data and isinstance(data[0], Example):
            return Prepared(tuple(data))
        if self.tokenizer is None:
            raise ConfigError("training on text needs a tokenizer, and the engine was given none")
        return prepare(
            datasets.read(data), self.tokenizer, loss_on=training.loss_on, max_length=training.max_length
        )

    def _drive(self) -> bool:
        """One step if there is anything to do."""
        with self._lock:
            if not self.scheduler.has_work:
                return False
            self.step()
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
            case StepDone():
                self.jobs[event.job].take(event)
                self._feed(event.job)
            case JobFailed():
                self.jobs[event.job].fail(event)
                self._forget_run(event.job)

    def _complete(self, key: int, reason: FinishReason) -> None:
        completion = self.completions.pop(key)
        completion.finish(reason)
        adapter = completion.sequence.request.adapter
        if adapter is not None:
            self.bank.unpin(adapter)

    def _cancel_sequence(self, key: int) -> None:
        with self._lock:
            self.scheduler.cancel(key)

    def _feed(self, job: str) -> None:
        """Gives the scheduler the job's next optimizer step, or ends the job."""
        run = self.runner.runs[job]
        micro_batches = run.next_step(iter(self.scheduler.new_key, None))
        if micro_batches:
            self.scheduler.add_training(job, micro_batches, run.config.weight)
        else:
            self._end_job(job, "succeeded")

    def _end_job(self, job: str, status: str) -> None:
        with self._lock:
            if self.jobs[job].status == "running":
                self.jobs[job].status = status
                self._forget_run(job)

    def _forget_run(self, job: str) -> None:
        """Frees all a job held; its published version stays."""
        self.scheduler.remove_training(job)
        self.runner.runs.pop(job).abandon()

    def _refuse_in_training(self, adapter: str) -> None:
        busy = [j for j, h in self.jobs.items() if h.adapter == adapter and h.status == "running"]
        if busy:
            raise JobError(f"adapter {adapter!r} is being trained by {busy[0]}")


def _tokenizer_of(model: str | Path | PreTrainedModel) -> Any:
    """The tokenizer saved beside a model; a model object brings none."""
    if isinstance(model, PreTrainedModel):
        return None
    return AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
