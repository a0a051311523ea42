"""Controls jobs: starts them in the engine, stores their events, and restarts them.

The database has the desired state; the engine is made to follow whenever either changes:

    queued ──> running ──> succeeded, failed
       ^         │  ^
       └─ paused <┘  └ a new engine goes on from the newest good checkpoint

and cancelled from each of the first three. A job that waits for memory in the engine counts as queued. A
job's status changes before the engine gets the command, so a server killed in between repeats the command
after its restart.

Of several servers with one database, each has the jobs whose leases it holds (`store/leases.py`): it takes
queued ones while it has room, and running ones whose owner is gone.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Set
from pathlib import Path
from typing import Final

import msgspec

from coserve.core import job_words
from coserve.core.contained import contained
from coserve.core.job_status import JobStatus
from coserve.core.job_words import JobPlace, Rival
from coserve.errors import AdapterError, ConflictError, StateError
from coserve.serve.engine.link import EngineLink
from coserve.serve.engine.probation import QuarantineVerdict, WorkItem
from coserve.serve.settings import ServerSettings
from coserve.serve.store.durable import RESUMING, sweep
from coserve.serve.store.leases import LeaseKey
from coserve.serve.store.records import Adapter, File, JobRecord, NewsMark
from coserve.serve.store.store import Store
from coserve.serve.training.artifacts import Artifacts
from coserve.serve.training.origins import artifacts_are_here, bring_artifacts, drop_origins
from coserve.serve.training.shares import job_weights, next_job, next_to_wait
from coserve.serve.training.specs import best_checkpoint, spec_of
from coserve.wire.messages import (
    Fault,
    Hello,
    JobCheckpoint,
    JobEnded,
    JobNews,
    JobNote,
    JobStarted,
    JobStarved,
    JobStep,
    JobWaiting,
    Numbered,
    StopJob,
    WeighJob,
)

log = logging.getLogger(__name__)
_AWAY_SECONDS: Final = 2.0  # between two attempts to bring a job's files here
_GOOD_CHECKPOINTS: Final = 2  # kept of a running job: the newest, and one in case that is damaged

_NOTHING_SAVED: Final = "The job has no checkpoint that could be saved: it is paused"

# Reasons for a job's failure, in OpenAI's words.
_CODES: Final = {
    "DataError": "invalid_training_file",
    "ValidationDataError": "invalid_validation_file",
    "LossNotFinite": "loss_not_finite",
    "NotOffered": "not_offered",
    "AdapterError": "invalid_adapter",
    "AdapterMismatch": "invalid_adapter",
    "ConfigError": "invalid_hyperparameters",
    "OutOfMemory": "out_of_memory",
}

# And the parameter at fault.
_FILES: Final = {"DataError": "training_file", "ValidationDataError": "validation_file"}

# A finished job's adapter and file of figures, why there are none, or None for an event without results.
JobResults = tuple[Adapter, File] | OSError | AdapterError | None


class JobController:
    """Handles the link's events and connections, one at a time.

    Engines' events never raise; a full disk at the end of a job fails that job.
    """

    def __init__(self, settings: ServerSettings, store: Store, link: EngineLink) -> None:
        self._settings, self._store, self._link = settings, store, link
        self._artifacts = Artifacts(store)
        self._turn = asyncio.Lock()
        self._draining = False
        self._generation = ""
        self._inside: set[str] = set()  # jobs that the engine has, those that it is stopping included
        self._waiting: dict[str, str] = {}  # those of them that wait for memory, with the reason
        # Those that get no time to train, since when, and what gets it.
        self._starved: dict[str, tuple[int, Rival]] = {}
        self._leaving = ""  # the job that is being stopped for another tenant's
        self._weights: dict[str, float] = {}  # as last sent to the engine
        self._trials: dict[str, asyncio.Task[None]] = {}  # jobs that wait to be tried alone
        self._stopping: set[str] = set()  # jobs that the engine was told to stop
        link.news.on_connect.append(self._connected)
        link.news.on_news = self._heard
        link.news.on_guilty = self._quarantined
        store.leases.on_renewed.append(self._follow_others)
        for part in ("files", "adapters"):
            sweep(store.folder / part)

    # For routes

    async def submit(self, job: JobRecord) -> JobRecord:
        """Adds a job, which starts as soon as there is room. Raises ConflictError if a file is missing."""
        async with self._turn:
            await self._store.jobs.add(job, f"Created fine-tuning job: {job.id}")
            await self._bring_in()
        return await self._now(job)

    async def cancel(self, job: JobRecord) -> JobRecord:
        """Cancels a job for good; its checkpoints stay. Raises ConflictError if it is over."""
        return await self._change(
            job, (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED), JobStatus.CANCELLED
        )

    async def pause(self, job: JobRecord) -> JobRecord:
        """Stops a job after a checkpoint. Raises ConflictError if it is over or paused."""
        return await self._change(job, (JobStatus.QUEUED, JobStatus.RUNNING), JobStatus.PAUSED)

    async def resume(self, job: JobRecord) -> JobRecord:
        """Queues a paused job again. Raises ConflictError if it is not paused."""
        return await self._change(job, (JobStatus.PAUSED,), JobStatus.QUEUED, "resumed")

    async def save(self, job: JobRecord) -> JobRecord:
        """Ends a job after a checkpoint, of which its adapter is made. Raises ConflictError if it is over, or
        has made no step."""
        async with self._turn:
            was_paused = (await self._now(job)).status == JobStatus.PAUSED
            asked = await self._store.jobs.ask_to_save(job.id, "Fine-tuning job stops, to be saved")
            if asked is None:
                found = await self._now(job)
                why = "has made no step: there is nothing to save" if not found.step else f"is {found.status}"
                raise ConflictError(f"Job {job.id} {why}. It cannot be stopped and saved.")
            if job.id in self._trials:
                self._leave_trial(job.id)
                self._link.probation.left(WorkItem("job", job.id))
            if job.id not in self._inside:
                await self._save(asked)
            elif not was_paused:
                self._link.send(StopJob(job.id, keep=True))
            await self._bring_in()
        return await self._now(job)

    async def reorder(self, job: JobRecord, before: str | None) -> None:
        """Lets a queued job begin before another of its tenant, or last. Raises ConflictError if one of them
        is not queued."""
        async with self._turn:
            if not await self._store.jobs.reorder(job.tenant, job.id, before):
                raise ConflictError(
                    f"Only queued jobs are moved: {job.id} or the one to begin after it is not."
                )

    def reason(self, job: JobRecord) -> str | None:
        """Reason why a queued job waits, or a running one does not train."""
        most = self._settings.max_jobs
        _, starved_by = self._starved.get(job.id, (0, None))
        return job_words.waiting_for(
            JobPlace(
                status=job.status,
                is_ready=self._link.ready,
                is_draining=self._draining,
                is_inside=job.id in self._inside,
                is_on_trial=job.id in self._trials
                and not self._link.probation.is_open(WorkItem("job", job.id)),
                is_full=len(self._inside) >= most,
                most=most,
                reason=self._waiting.get(job.id),
                starved_by=starved_by,
            )
        )

    def starved_since(self, job: JobRecord) -> int | None:
        """Time of the last training of a running job that gets no time, Unix seconds; None for others."""
        since, _ = self._starved.get(job.id, (None, None))
        return since if job.status == JobStatus.RUNNING and self._link.ready else None

    @property
    def starved(self) -> int:
        """Number of running jobs that get no time to train."""
        return len(self._starved)

    def drain(self) -> None:
        """Starts no further jobs, as the server stops."""
        self._draining = True

    async def _change(
        self, job: JobRecord, source: Collection[JobStatus], status: JobStatus, word: str | None = None
    ) -> JobRecord:
        word = word or status
        async with self._turn:
            moved = await self._store.jobs.move(job.id, source, status, f"Fine-tuning job {word}")
            if moved is None:
                found = await self._now(job)
                raise ConflictError(f"Job {job.id} is {found.status} and cannot be {word}.")
            if job.id in self._trials:
                self._leave_trial(job.id)
                self._link.probation.left(WorkItem("job", job.id))
            elif status != JobStatus.QUEUED and job.id in self._inside:
                self._stop(job.id, keep=status == JobStatus.PAUSED)
            is_owned = job.id in self._inside or job.id in await self._store.leases.of_others("job")
            if status.is_final and not is_owned:
                await self._drop_what_training_needs(job.id)
            await self._bring_in()
        return await self._now(job)

    async def _now(self, job: JobRecord) -> JobRecord:
        found = await self._store.jobs.get(job.tenant, job.id)
        assert found is not None, "jobs are never deleted"
        return found

    def trains(self, job: str) -> bool:
        """Tells whether the engine has a job."""
        return job in self._inside

    # For the loop that renews leases

    async def _follow_others(self, lost: Set[LeaseKey]) -> None:
        """Has the engine follow what other servers have changed: the leases that they have taken, jobs that
        they have stopped, and those that nobody has."""
        async with self._turn:
            for _, id in (key for key in lost if key[0] == "job"):
                if id in self._trials:
                    self._leave_trial(id)
                    self._link.probation.left(WorkItem("job", id))
                elif id in self._inside:
                    self._stop(id, keep=False)
            if not self._link.ready:
                return
            jobs = {job.id: job for job in await self._unfinished()}
            for id in self._inside - self._stopping - self._trials.keys():
                if id not in jobs or jobs[id].status == JobStatus.PAUSED:
                    self._stop(id, keep=id in jobs)
            await self._bring_in()
            await self._store.leases.release_but("job", self._inside)  # such as that of one in quarantine

    def _stop(self, job: str, keep: bool) -> None:
        self._stopping.add(job)
        self._link.send(StopJob(job, keep))

    # For the link

    async def _connected(self, hello: Hello) -> None:
        """Makes a connected engine follow the database."""
        async with self._turn:
            self._generation, self._weights, self._leaving = hello.generation, {}, ""
            self._stopping = set()
            for id in list(self._trials):
                self._leave_trial(id)
            self._inside, self._waiting = set(hello.jobs), dict(hello.waiting)
            now = time.time()
            self._starved = {
                news.job: (int(now - news.seconds), news.by)
                for news in hello.starved
                if news.seconds is not None
            }
            for id in hello.jobs:
                self._link.probation.enter(WorkItem("job", id))
            await self._store.job_events.forget_engines_before(hello.generation)
            jobs = {job.id: job for job in await self._unfinished()}
            for id in hello.jobs:
                own = await self._store.leases.claim("job", id)
                if not own or id not in jobs or jobs[id].status == JobStatus.PAUSED:
                    self._stop(id, keep=own and id in jobs)
                elif (
                    jobs[id].status == JobStatus.QUEUED and id not in hello.waiting
                ):  # resumed before the engine had taken its pause
                    await self._store.jobs.move(id, (JobStatus.QUEUED,), JobStatus.RUNNING)
            if self._draining:  # jobs that are not in this engine continue under the next server
                return
            for job in jobs.values():
                is_left = job.status == JobStatus.RUNNING and job.id not in self._inside
                if is_left and await self._store.jobs.take(job.id) is not None:
                    await self._start(job)  # ignored by the engine if the job's end is on its way
                elif job.saving and job.id not in self._inside:  # its engine died before it had stopped
                    await self._save(job)
            await self._bring_in()

    async def _heard(self, numbered: Numbered) -> None:
        """Stores an event, which is acknowledged after this returns."""
        results = await self._put_results(numbered.news)
        async with self._turn:
            mark = NewsMark(self._generation, numbered.number)
            self._follow(numbered.news)
            if not await self._store.job_events.seen(mark):
                try:
                    await self._write(mark, numbered.news, results)
                except StateError:
                    raise  # it is written down later
                except Exception as error:
                    fault = contained(error, f"writing down what became of {numbered.news.job}")
                    await self._failed(mark, numbered.news.job, Fault(type(fault).__name__, str(fault)))
            if isinstance(numbered.news, JobEnded):
                self._stopping.discard(numbered.news.job)
                await self._store.leases.release("job", numbered.news.job)
                await self._bring_in()

    def _follow(self, news: JobNews) -> None:
        """Tracks a job's progress in the current engine."""
        item = WorkItem("job", news.job)
        match news:
            case JobWaiting():  # for memory, and for as long as that takes: nobody waits for it
                self._link.probation.left(item)
            case JobStarted():
                self._link.probation.enter(item)
                self._link.probation.moved(item, 0)
            case JobStep():
                self._link.probation.moved(item, news.step)
            case JobEnded():
                self._link.probation.left(item)

    async def _quarantined(self, guilty: QuarantineVerdict) -> None:
        """Stores guilty work; a job fails with it."""
        kind, subject = guilty.item
        request = guilty.request
        details = None
        if request is not None:
            details = {
                "adapter": request.adapter,
                "prompt": list(request.prompt),
                "sampling": msgspec.to_builtins(request.sampling, enc_hook=dict),  # read-only mappings
            }
        async with self._turn:
            await self._store.quarantine.add(kind, subject, guilty.reason, details)

    async def _put_results(self, news: JobNews) -> "JobResults":
        """Has all servers find what an event tells of: a checkpoint, or a job's results, which are returned
        for their rows. It takes as long as the artifact store does, and so nobody waits for it in turn.
        Raises StateError where that store is away."""
        if not self._store.leases.has("job", news.job):
            return None  # another server has the job, and puts what it makes
        match news:
            case JobCheckpoint():
                await self._store.artifacts.put(Path(news.path), replace=True)
            case JobEnded(status=JobStatus.SUCCEEDED):
                jobs = {job.id: job for job in await self._store.jobs.unfinished()}
                if (job := jobs.get(news.job)) is not None:
                    return await self._results(job, news.step)
        return None

    async def _results(self, job: JobRecord, step: int) -> "JobResults":
        try:
            return await self._artifacts.bring_in(job, step)
        except (OSError, AdapterError) as error:
            return error

    async def _write(self, mark: NewsMark, news: JobNews, results: "JobResults") -> None:
        match news:
            case JobWaiting():
                self._waiting[news.job] = news.reason
                await self._store.job_events.waiting(mark, news)
            case JobStarted():
                self._waiting.pop(news.job, None)
                await self._store.job_events.started(mark, news)
            case JobStarved():
                if news.seconds is None:
                    self._starved.pop(news.job, None)
                    await self._store.job_events.noted(mark, news.job, job_words.TRAINS_AGAIN, "info")
                else:
                    self._starved.setdefault(news.job, (int(time.time() - news.seconds), news.by))
                    told, remedy = job_words.STARVED[news.by], job_words.REMEDY[news.by]
                    said = f"Fine-tuning job {told} for {news.seconds:.0f} s{remedy}"
                    await self._store.job_events.noted(mark, news.job, said, "warn")
            case JobNote():
                await self._store.job_events.noted(mark, news.job, news.text, news.level)
            case JobStep():
                await self._store.job_events.stepped(mark, news)
            case JobCheckpoint():
                if (replaced := await self._store.job_events.checkpointed(mark, news)) is not None:
                    await self._store.artifacts.discard(self._store.folder / replaced)
                await self._drop_resume_state(news.job, keep=_GOOD_CHECKPOINTS)
            case JobEnded():
                self._inside.discard(news.job)
                self._waiting.pop(news.job, None)
                self._starved.pop(news.job, None)
                why = "as its engine stops"
                if self._leaving == news.job:
                    self._leaving, why = "", "to let another tenant's job train"
                elif self._draining:
                    why = "as the server stops"
                self._weights.pop(news.job, None)
                await self._ended(mark, news, why, results)

    async def _ended(self, mark: NewsMark, news: JobEnded, why: str, results: "JobResults") -> None:
        match news.status:
            case _ if not self._store.leases.has("job", news.job):
                await self._store.job_events.skip(mark)  # another server has it
                return
            case JobStatus.SUCCEEDED:
                own = await self._keep(mark, news.job, news.step, results)
            case JobStatus.FAILED:
                own = await self._failed(mark, news.job, news.fault)
            case JobStatus.PAUSED:
                await self._store.job_events.stopped(mark, news.job, news.step, why)
                if (saved := await self._saved(news.job)) is not None:
                    await self._save(saved)
                return  # it can go on
            case _:
                own = await self._store.job_events.cancelled(mark, news.job)
        if own:
            await self._drop_what_training_needs(news.job)

    async def _saved(self, id: str) -> JobRecord | None:
        """The job with this id if it is to end with its checkpoint."""
        jobs = await self._store.jobs.unfinished()
        return next((job for job in jobs if job.id == id and job.saving), None)

    async def _save(self, job: JobRecord) -> None:
        """Ends a job that no engine has with its best or newest checkpoint; without one it stays paused. One
        that another server has is ended there."""
        if not await self._store.leases.claim("job", job.id):
            return
        checkpoints = await self._store.job_history.all_checkpoints(job.id)
        if not checkpoints:
            await self._store.jobs.move(job.id, (JobStatus.PAUSED,), JobStatus.PAUSED, _NOTHING_SAVED)
            return
        step = best_checkpoint(job, checkpoints) or checkpoints[-1].step
        await self._keep(None, job.id, step, await self._results(job, step))
        await self._drop_what_training_needs(job.id)

    async def _keep(self, mark: NewsMark | None, job: str, step: int, results: "JobResults") -> bool:
        """Ends a job with its results, of the checkpoint of `step`; False where another server has it."""
        match results:
            case None:  # the job is over
                if mark is not None:
                    await self._store.job_events.skip(mark)
                return True
            case (adapter, result):
                return await self._store.job_events.succeeded(mark, job, step, adapter, result)
            case error:
                log.error("the adapter of %s cannot be kept: %s", job, error)
                told = f"the adapter cannot be kept: {error}"
                return await self._failed(mark, job, Fault("AdapterError", told))

    async def _failed(self, mark: NewsMark | None, job: str, fault: Fault | None) -> bool:
        fault = fault or Fault("JobError", "the engine did not say why")
        param = _FILES.get(fault.kind)
        error = {"code": _CODES.get(fault.kind, "job_failed"), "message": fault.text, "param": param}
        return await self._store.job_events.failed(mark, job, error)

    # Commands to the engine

    async def _bring_in(self) -> None:
        """Starts jobs that nobody has while the engine has room, and sends it each job's share."""
        if not self._link.ready or self._draining:
            return
        weights = {tenant.id: tenant.weight for tenant in await self._store.tenants.list()}
        jobs = await self._unfinished()
        others = await self._store.leases.of_others("job") if jobs else ()
        jobs = [job for job in jobs if job.id not in others]
        left = [job for job in jobs if job.status == JobStatus.RUNNING and job.id not in self._inside]
        for job in left:  # by a server that is gone
            if (
                len(self._inside) < self._settings.max_jobs
                and await self._store.jobs.take(job.id) is not None
            ):
                await self._start(job)
            else:
                jobs.remove(job)
        while len(self._inside) < self._settings.max_jobs:
            waiting = [job for job in jobs if job.status != JobStatus.QUEUED or job.id not in self._inside]
            chosen = next_job(waiting, weights)
            if chosen is None:
                break
            running = await self._store.jobs.take(chosen.id)
            if running is None:  # another server was first
                jobs = [job for job in jobs if job.id != chosen.id]
                continue
            jobs = [running if job.id == chosen.id else job for job in jobs]
            await self._start(running, job_weights(jobs, weights)[running.id])
        if not self._leaving and len(self._inside) >= self._settings.max_jobs:
            last = next_to_wait(jobs, weights)
            if last is not None and last.id in self._inside:
                self._leaving = last.id  # once it has stopped, the other one is brought in
                self._stop(last.id, keep=True)
        for id, weight in job_weights(jobs, weights).items():
            if id in self._inside and self._weights.get(id) != weight:
                self._link.send(WeighJob(id, weight))
                self._weights[id] = weight

    async def _start(self, job: JobRecord, weight: float = 1.0) -> None:
        """Starts a job in the engine; a suspect waits for its trial, and one whose files are elsewhere for
        these."""
        self._inside.add(job.id)
        self._weights[job.id] = weight
        is_here = await artifacts_are_here(self._store, job)
        if not is_here or not self._link.probation.is_open(WorkItem("job", job.id)):
            self._trials[job.id] = asyncio.create_task(self._try(job, weight, self._generation))
        else:
            await self._hand_in(job, weight)

    async def _try(self, job: JobRecord, weight: float, generation: str) -> None:
        """Brings the job's files here, waits until no other suspect is on trial, and starts the job."""
        while True:
            try:
                await bring_artifacts(self._store, job)
                break
            except StateError as error:
                log.warning("%s waits for its files: %s", job.id, error)
                await asyncio.sleep(_AWAY_SECONDS)
        await self._link.probation.turn(WorkItem("job", job.id))
        if not self._link.ready:  # the next engine's turn begins anew
            return
        self._link.probation.enter(WorkItem("job", job.id))  # at once: the next one would take the turn
        async with self._turn:
            self._trials.pop(job.id, None)
            if self._generation == generation:
                await self._hand_in(job, weight)

    def _leave_trial(self, job: str) -> None:
        self._trials.pop(job).cancel()
        self._inside.discard(job)

    async def _hand_in(self, job: JobRecord, weight: float) -> None:
        spec = await spec_of(self._store, job, self._settings.base_id(job.base))
        suspect = self._link.probation.suspects.get(WorkItem("job", job.id))
        self._link.probation.enter(WorkItem("job", job.id), -1 if suspect is None else suspect.progress)
        self._link.send(msgspec.structs.replace(spec, weight=weight))

    async def _unfinished(self) -> list[JobRecord]:
        """Unfinished jobs of this server's bases."""
        jobs = await self._store.jobs.unfinished()
        return [job for job in jobs if job.base in self._settings.base_names]

    async def _drop_what_training_needs(self, job: str) -> None:
        """Deletes what a job that is over needs no more."""
        await self._drop_resume_state(job, keep=0)
        await drop_origins(self._store, job)

    async def _drop_resume_state(self, job: str, keep: int) -> None:
        """Deletes the optimizer states (twice the size of the weights) of all but the newest `keep`
        checkpoints."""
        newest_last = await self._store.job_history.all_checkpoints(job)
        for checkpoint in newest_last[: max(0, len(newest_last) - keep)]:
            await self._store.artifacts.trim(self._store.folder_of(checkpoint), RESUMING)
