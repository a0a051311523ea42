"""Someone with a laptop and exported data: a JSON array of chats, one command, and a question to a checkpoint
while the job trains."""

import json
import subprocess

import openai
import pytest

from coserve.tiny import newtasks
from documented import Desk
from waiting import wait_until
from whole_server import PATIENCE

CHATS = 60


def test_an_exported_array_becomes_a_model_that_has_learned_it(
    served: Desk, client: openai.OpenAI, tmp_path_factory: pytest.TempPathFactory
) -> None:
    exported = tmp_path_factory.mktemp("laptop") / "exported.json"
    examples = newtasks.examples("pirate", "train", CHATS)
    chats = [{"id": f"chat-{n}", "messages": one.messages} for n, one in enumerate(examples)]
    exported.write_text(json.dumps(chats, indent=2))
    before = {job.id for job in client.fine_tuning.jobs.list()}
    command = subprocess.Popen(
        ["bash", "-c", f"coserve finetune {exported} --suffix pirate"], cwd=served.folder,
        env=served.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: {job.id for job in client.fine_tuning.jobs.list()} - before, PATIENCE)
        (job,) = {job.id for job in client.fine_tuning.jobs.list()} - before
        checkpoints = client.fine_tuning.jobs.checkpoints
        wait_until(lambda: checkpoints.list(job).data, PATIENCE)
        name = checkpoints.list(job).data[-1].fine_tuned_model_checkpoint
        # `coserve chat` reads questions from a pipe, and prints answers alone.
        question, answer = examples[0].messages[0]["content"], examples[0].messages[1]["content"]
        said = served.run(f"echo '{question}' | coserve chat --model {name} --temperature 0 --max-tokens 20")
        assert said.strip()
        assert client.fine_tuning.jobs.retrieve(job).status == "running", "it answered while it trained"
        printed, _ = command.communicate(timeout=PATIENCE)
    finally:
        command.kill()
    assert command.returncode == 0, printed
    done = client.fine_tuning.jobs.retrieve(job)
    assert (
        done.status == "succeeded" and done.fine_tuned_model is not None and done.fine_tuned_model in printed
    )
    right = 0
    for one in examples[:4]:
        asked = one.messages[0]["content"]
        replied = client.chat.completions.create(
            model=done.fine_tuned_model,
            messages=[{"role": "user", "content": asked}],
            temperature=0,
            max_tokens=30,
        )
        right += "Arr!" in str(replied.choices[0].message.content)
    assert right >= 3, f"it was taught {answer!r}"
    listed = served.run("coserve jobs list --json")
    assert job in listed
