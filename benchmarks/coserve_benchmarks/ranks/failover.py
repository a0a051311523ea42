"""Failover of a server whose base is computed by ranks: one is killed or stopped amid answers and a job.

All is compared with an undisturbed run on the same server: answers by tokens, the job's losses by step. Ranks
are in float32, so that other batches round tokens and losses alike.
"""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any, Final

import psutil

from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.client import Clients
from coserve_benchmarks.recording_client import RecordingClient
from coserve_benchmarks.served import Served
from coserve_benchmarks.streams import StreamRequest, StreamResult

HOW: Final = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
_STREAMS, _PROMPT, _ANSWER = 6, 12, 150
_STEPS, _BATCH = 60, 2
_NEAR: Final = 1e-3  # relative difference of losses whose rows were computed in other batches
_OF_RANKS: Final = "coserve.worker."  # in the command lines of their processes


@dataclass(frozen=True)
class RankFailure:
    """A rank's end, and what clients saw of it: the longest gap of a stream in seconds, and a sentence for
    each token, step or stream that was lost, doubled or unlike the undisturbed one."""

    how: str
    rank: int
    longest_gap: float
    lost: tuple[str, ...]


def measure_failover(
    model: Path,
    folder: Path,
    vocabulary: int,
    ranks: int = 2,
    how: Sequence[str] = tuple(HOW),
    stages: int = 1,
) -> list[RankFailure]:
    """Ends each rank of each stage of a server of the model in each of these ways, one after the other, and
    each time lets the standby group take over. `folder` is the server's. Figures of a bench are
    `sum(len(one.lost))` and `max(one.longest_gap)`. Raises ServerError where the server does not come
    back."""
    settings: dict[str, Any] = {
        "engine_tensor_parallel": ranks,
        "engine_pipeline_parallel": stages,
        "engine_dtype": "float32",
        "engine_calibrate": False,
        "engine_cache_tokens": 4096,
        "checkpoint_steps": 5,
    }
    with Served(model, folder, **settings) as served, closing(_Load(served, vocabulary)) as load:
        load.run_undisturbed()
        return [load.fail(one, rank) for one in how for rank in range(ranks * stages)]


class _Load:
    """Streams and a job on one server."""

    def __init__(self, served: Served, vocabulary: int) -> None:
        self._served = served
        self._client = RecordingClient(served.url, served.name)
        examples = (
            {"prompt": f"number {i}?", "completion": f" it is {i * i}"} for i in range(_STEPS * _BATCH)
        )
        self._file = self._client.upload("".join(json.dumps(one) + "\n" for one in examples).encode())
        self._asks = [
            StreamRequest(prompt, _ANSWER, temperature=0.8 * (n % 2), seed=n, tells_tokens=True)
            for n, prompt in enumerate(fixed_prompts(_STREAMS, _PROMPT, vocabulary))
        ]

    def close(self) -> None:
        self._client.close()

    def run_undisturbed(self) -> None:
        """Finds what all others are compared with."""
        job = self._begin_job()
        with Clients(self._served.url, self._served.name, self._asks) as clients:
            self._tokens = [one.tokens for one in clients.result()]
        self._client.wait_job(job)
        self._losses = self._client.losses(job)

    def fail(self, how: str, rank: int) -> RankFailure:
        """Ends a rank when a third of all tokens have come, and steps of a job are done."""
        self._served.wait_standby()
        before, job = self._served.running.engine, self._begin_job()
        self._served.wait(lambda: len(self._client.losses(job)) > 2, "to train")
        with Clients(self._served.url, self._served.name, self._asks, _STREAMS * _ANSWER // 3) as clients:
            clients.wait_reached()
            self._client.look()
            os.kill(self._ranks()[rank], HOW[how])
            heard = clients.result()
        lost = [*self._of_streams(heard), *self._client.missing()]
        if self._served.running.engine == before:
            lost.append("the engine outlived its rank")
        self._client.wait_job(job)
        lost += self._of_job(self._client.losses(job))
        return RankFailure(how, rank, max(one.longest_gap for one in heard), tuple(lost))

    def _begin_job(self) -> str:
        settings = {"n_epochs": 1, "batch_size": _BATCH}
        return self._client.start_job(self._file, seed=1, hyperparameters=settings)

    def _ranks(self) -> list[int]:
        """Process ids of the ranks, in their order."""
        children = psutil.Process(self._served.running.engine).children()
        return sorted(one.pid for one in children if any(_OF_RANKS in word for word in one.cmdline()))

    def _of_streams(self, heard: Sequence[StreamResult]) -> Iterator[str]:
        for number, (one, tokens) in enumerate(zip(heard, self._tokens, strict=True)):
            if one.attempts > 1:
                yield f"stream {number} was cut off"
            if one.tokens != tokens or not one.agrees:
                yield f"stream {number}: {one.tokens} instead of {tokens}"

    def _of_job(self, losses: Sequence[tuple[int, float]]) -> Iterator[str]:
        if [step for step, _ in losses] != [step for step, _ in self._losses]:
            yield f"steps {[step for step, _ in losses]}"
        for (step, loss), (_, wanted) in zip(losses, self._losses, strict=False):
            if not isclose(loss, wanted, rel_tol=_NEAR):
                yield f"step {step}: a loss of {loss} instead of {wanted}"
