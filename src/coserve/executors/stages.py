"""Answers of the stages of a pipeline, put together as one executor's."""

from collections.abc import Sequence
from dataclasses import replace

from coserve.core.plan import BaseResult
from coserve.executors.executor import DeviceMemory, ExecutorSpec


def spec_of_stages(specs: Sequence[ExecutorSpec]) -> ExecutorSpec:
    """The facts of the first of so many stages, with the bytes of the fullest one. Each stage can be at a
    plan of its own."""
    names = ("cache_nbytes", "grown", "host_room", "state_slots")  # a stage may have no recurrent layer
    largest = {name: max(getattr(spec, name) for spec in specs) for name in names}
    return replace(specs[0], **largest, plans=len(specs), plan_rate=float(len(specs)))


def result_of_stages(results: Sequence[BaseResult]) -> BaseResult:
    """The last stage's result, which alone has tokens and losses, with the seconds of all."""
    return replace(results[-1], seconds=sum(result.seconds for result in results))


def fullest(stages: Sequence[DeviceMemory]) -> DeviceMemory:
    """Of each kind of bytes those of the stage that holds most."""
    sessions = {
        job: {account: max(stage.sessions[job].get(account, 0) for stage in stages) for account in held}
        for job, held in stages[0].sessions.items()
        if all(job in stage.sessions for stage in stages)
    }
    names = ("base", "base_backward", "adapters", "slots", "graphs", "graph_stores")
    most = {name: max(getattr(stage, name) for stage in stages) for name in names}
    return DeviceMemory(**most, sessions=sessions)
