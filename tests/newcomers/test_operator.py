"""An operator: keys, figures, a backup beside a job, `kill -9`; nothing that was acknowledged is lost."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from coserve.serve.processes.claim import find_running
from coserve.tiny import newtasks
from documented import Desk, blocks
from waiting import wait_until
from whole_server import PATIENCE, children_of

SERVE = "coserve serve --state /var/lib/coserve"
EXAMPLES = 64  # of a job that is under way all the while: 800 steps


def commands(name: str) -> list[str]:
    """The commands of a block of `docs/operating.md`, but for the servers that it starts."""
    (block,) = (one for one in blocks() if one.name == name)
    return [command for command in block.commands() if not command.startswith(SERVE)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, COSERVE_CHECKPOINT_STEPS="4")
    try:
        yield made
        made.end()
    finally:
        made.kill()


def start_job(client: openai.OpenAI) -> str:
    examples = newtasks.examples("pirate", "train", EXAMPLES)
    lines = "".join(json.dumps({"messages": one.messages}) + "\n" for one in examples)
    file = client.files.create(file=("chats.jsonl", lines.encode()), purpose="fine-tune").id
    hyperparameters = {"n_epochs": 100, "batch_size": 8}
    job = client.fine_tuning.jobs.create(
        model="coserve-tiny", training_file=file, suffix="kept", hyperparameters=hyperparameters
    )
    return job.id


def reached(client: openai.OpenAI, job: str) -> int:
    """Optimizer steps of the newest checkpoint."""
    found = client.fine_tuning.jobs.checkpoints.list(job).data
    return max((one.step_number for one in found), default=0)


def kill_all(state: Path) -> None:
    """SIGKILL to the server's every process, as a machine that loses its power."""
    running = find_running(state)
    assert running is not None
    children = children_of(running.pid)
    for pid in (running.pid, *children):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), PATIENCE)


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_kill_and_comes_back_from_a_backup(desk: Desk) -> None:
    state = desk.folder / "var" / "lib" / "coserve"
    key = desk.run("coserve keys create alice --state /var/lib/coserve").strip()
    desk.run(f"{SERVE} --require-keys")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{desk.url}/v1", api_key="none").models.list()
    with openai.OpenAI(base_url=f"{desk.url}/v1", api_key=key) as client:
        job = start_job(client)
        said = {command: desk.run(command) for command in commands("operating-7")}
        assert "\ncoserve_engine_up" in "".join(said.values())
        (jobs,) = (printed for command, printed in said.items() if command.endswith("coserve jobs"))
        assert job not in jobs, "the monitoring key is of another tenant"
        wait_until(lambda: reached(client, job) >= 8, PATIENCE)
        for command in commands("operating-8"):
            desk.run(command)
        backed_up = reached(client, job)

        before = client.fine_tuning.jobs.checkpoints.list(job).data[-1]
        kill_all(state)
        desk.run(SERVE)
        wait_until(lambda: reached(client, job) > backed_up, PATIENCE)
        assert client.fine_tuning.jobs.retrieve(job).status == "running"
        answers_with(client, before.fine_tuned_model_checkpoint)
        events = [event.message for event in client.fine_tuning.jobs.list_events(job, limit=100)]
        assert len([one for one in events if one.startswith("Created fine-tuning job")]) == 1
        desk.end()

        for command in commands("operating-9"):
            desk.run(command)
        desk.run("coserve serve --state /var/lib/coserve-restored")
        assert reached(client, job) >= 8, "what the backup has"
        (file,) = client.files.list(purpose="fine-tune").data
        assert len(client.files.content(file.id).text.splitlines()) == EXAMPLES
        answers_with(client, before.fine_tuned_model_checkpoint)
        wait_until(lambda: reached(client, job) > backed_up, PATIENCE)
        client.fine_tuning.jobs.cancel(job)
        wait_until(lambda: client.fine_tuning.jobs.retrieve(job).status == "cancelled", PATIENCE)


def answers_with(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="Once", max_tokens=4)
    assert answer.usage is not None and answer.usage.completion_tokens > 0
