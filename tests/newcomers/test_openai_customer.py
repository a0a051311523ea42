"""A customer of OpenAI's fine-tuning: the official client, with nothing changed but its address."""

import json

import openai
import pytest

from coserve.tiny import newtasks
from waiting import wait_until
from whole_server import PATIENCE

OVER = ("succeeded", "failed", "cancelled")


def upload(client: openai.OpenAI, count: int) -> str:
    examples = newtasks.examples("pirate", "train", count)
    lines = "".join(json.dumps({"messages": one.messages}) + "\n" for one in examples)
    return client.files.create(file=("chats.jsonl", lines.encode()), purpose="fine-tune").id


def test_files_jobs_events_and_checkpoints(client: openai.OpenAI) -> None:
    file = upload(client, 12)
    listed = client.files.retrieve(file)
    assert (listed.purpose, listed.filename) == ("fine-tune", "chats.jsonl")
    assert len(client.files.content(file).text.splitlines()) == 12
    jobs = client.fine_tuning.jobs
    job = jobs.create(
        model="coserve-tiny", training_file=file, validation_file=upload(client, 3), seed=3,
        suffix="customer",
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 4}}},
        metadata={"team": "support"},
    )  # fmt: skip
    assert job.status in ("validating_files", "queued", "running") and job.fine_tuned_model is None
    wait_until(lambda: jobs.retrieve(job.id).status in OVER, PATIENCE)
    done = jobs.retrieve(job.id)
    assert done.status == "succeeded" and done.error is None and done.seed == 3
    assert done.fine_tuned_model is not None and ":customer:" in done.fine_tuned_model
    assert done.metadata == {"team": "support"} and (done.trained_tokens or 0) > 0
    events = list(jobs.list_events(job.id, limit=2))  # of pages of two
    losses = [e.data["train_loss"] for e in events[::-1] if e.type == "metrics" and isinstance(e.data, dict)]
    assert len(losses) == 9 and losses[-1] < losses[0]
    assert "successfully completed" in events[0].message
    checkpoint = jobs.checkpoints.list(job.id).data[0]
    assert checkpoint.step_number == 9 and checkpoint.metrics.valid_loss is not None
    for model in (checkpoint.fine_tuned_model_checkpoint, done.fine_tuned_model):
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hello"}], stream=True, max_tokens=8
        )
        assert [piece.choices[0].finish_reason for piece in stream][-1] in ("stop", "length")
    (results,) = done.result_files
    assert len(client.files.content(results).text.splitlines()) == 1 + 9
    assert client.models.delete(done.fine_tuned_model).deleted
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=done.fine_tuned_model, prompt="x")


def test_a_job_is_cancelled_while_it_trains(client: openai.OpenAI) -> None:
    jobs = client.fine_tuning.jobs
    job = jobs.create(
        model="coserve-tiny", training_file=upload(client, 40),
        hyperparameters={"n_epochs": 50, "batch_size": 1},
    )  # fmt: skip
    wait_until(lambda: (jobs.retrieve(job.id).trained_tokens or 0) > 0, PATIENCE)
    jobs.cancel(job.id)
    wait_until(lambda: jobs.retrieve(job.id).status == "cancelled", PATIENCE)
    with pytest.raises(openai.OpenAIError):
        jobs.cancel(job.id)
    assert jobs.retrieve(job.id).fine_tuned_model is None


def test_errors_are_in_the_field_s_words(client: openai.OpenAI) -> None:
    jobs, file = client.fine_tuning.jobs, upload(client, 4)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "hello"}])
    assert unknown.value.code == "model_not_found" and "gpt-4o" in unknown.value.message
    with pytest.raises(openai.BadRequestError) as wrong:
        jobs.create(model="coserve-tiny", training_file=file, hyperparameters={"n_epochs": 0})
    assert wrong.value.type == "invalid_request_error" and "n_epochs" in str(wrong.value.param)
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as missing:
        jobs.create(model="coserve-tiny", training_file="file-nothing")
    assert "file-nothing" in missing.value.message and missing.value.param == "training_file"
    images = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
    }
    with pytest.raises(openai.BadRequestError) as image:
        client.chat.completions.create(model="coserve-tiny", messages=[images])  # type: ignore[list-item]
    assert "image" in image.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        client.files.create(file=("bad.jsonl", b'{"messages": 5}\n'), purpose="fine-tune")
    assert "bad.jsonl, line 1: " in bad.value.message and "messages" in bad.value.message
