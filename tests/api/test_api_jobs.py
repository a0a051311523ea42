"""`/v1/fine_tuning/jobs` through the official client, against a scripted engine."""

import time
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from coserve.core.job_status import JobStatus
from coserve.serve.adapter_registry.imports import WEIGHTS
from coserve.wire.messages import Fault, JobCheckpoint, JobEnded, JobNote, JobStarted, JobStep
from serving import Play, World
from training import Trainer, checkpoint_folder, create, jsonl, started, stopped, upload, weighed


def test_a_job_from_its_creation_to_its_adapter(play: Play) -> None:
    async def story(world: World) -> None:
        client, trainer = world.client(), Trainer(world)
        jobs = client.fine_tuning.jobs
        job: Any = await create(world, suffix="mine", seed=7, metadata={"who": "me"})
        assert job.id.startswith("ftjob-") and job.object == "fine_tuning.job" and job.status == "running"
        assert (job.seed, job.metadata, job.model) == (7, {"who": "me"}, "tiny")
        assert (job.fine_tuned_model, job.finished_at, job.trained_tokens) == (None, None, None)
        assert job.result_files == [] and job.error is None and job.estimated_finish is None

        await world.until(lambda: bool(started(world)))
        (command,) = started(world)
        assert command.job == job.id and command.options["seed"] == 7
        assert weighed(world) == {job.id: 1.0}
        assert command.data.endswith(f"{job.training_file}.jsonl")

        await trainer.start(job.id, steps=3, dropped=1)
        before = time.time()
        await trainer.step(job.id, 1, loss=2.0, mean_token_accuracy=0.25)
        after = time.time()
        running = await jobs.retrieve(job.id)
        assert running.trained_tokens == 60 and running.estimated_finish is not None
        await world.until(lambda: world.state.link.stats is not None)
        assert world.state.link.stats is not None
        world.state.link.stats = replace(world.state.link.stats, slowdown=1.25)
        assert (await jobs.retrieve(job.id)).slowdown == 1.25
        assert int(before) + 4 <= running.estimated_finish <= after + 4  # two more steps of 2 seconds

        await trainer.checkpoint(job.id, 1, mean_token_accuracy=0.125)
        (checkpoint,) = (await jobs.checkpoints.list(job.id)).data
        assert checkpoint.id.startswith("ftckpt-") and checkpoint.step_number == 1
        assert checkpoint.fine_tuning_job_id == job.id
        assert checkpoint.metrics.to_dict() == {
            "step": 1, "train_loss": 0.5, "train_mean_token_accuracy": 0.25, "valid_loss": 0.6,
            "valid_mean_token_accuracy": 0.125, "full_valid_loss": 0.6,
            "full_valid_mean_token_accuracy": 0.125,
        }  # fmt: skip
        figures: Any = next(
            one.data for one in (await jobs.list_events(job.id)).data if one.type == "metrics"
        )
        assert (figures["train_mean_token_accuracy"], figures["valid_mean_token_accuracy"]) == (0.25, 0.125)
        name = checkpoint.fine_tuned_model_checkpoint
        assert name.startswith("ft:tiny:local:mine:") and name.endswith(":ckpt-step-1")
        world.say("yes")
        answer = await client.completions.create(model=name, prompt="x")
        assert answer.choices[0].text == "yes" and world.submits()[-1].adapter == checkpoint.id

        for step in (2, 3):
            await trainer.step(job.id, step, loss=1.0 / step)
        await trainer.checkpoint(job.id, 3)
        await trainer.end(job.id, "succeeded", 3)
        done = await jobs.retrieve(job.id)
        assert done.status == "succeeded" and done.trained_tokens == 180 and done.finished_at
        assert done.slowdown is None
        assert done.fine_tuned_model == name.removesuffix(":ckpt-step-1") and done.estimated_finish is None

        models: Any = {model.id: model for model in (await client.models.list()).data}
        assert set(models) == {"tiny", done.fine_tuned_model}
        assert models[done.fine_tuned_model].parent == "tiny"
        await client.completions.create(model=done.fine_tuned_model, prompt="x")
        folder = world.state.store.adapter_folder(world.submits()[-1].adapter or "")
        assert world.engine.adapters[folder.name] == str(folder)
        assert {f.name for f in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}

        (results,) = done.result_files
        file = await client.files.retrieve(results)
        assert file.purpose == "fine-tune-results" and file.filename.endswith(".csv")
        text = (await client.files.content(results)).text
        columns, *rows = [line.split(",") for line in text.splitlines()]
        assert columns[:5] == [
            "step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"
        ]  # fmt: skip
        assert [row[:5] for row in rows] == [
            ["1", "2.0", "0.25", "0.6", "0.125"],
            ["2", "0.5", "", "", ""],
            ["3", "0.3333333333333333", "", "0.6", ""],
        ]
        assert file.bytes == len(text)

    play(story)


def test_events_tell_the_story(play: Play) -> None:
    async def story(world: World) -> None:
        trainer, jobs = Trainer(world), world.client().fine_tuning.jobs
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        await trainer.start(job.id, steps=2, dropped=4)
        await trainer.step(job.id, 1, loss=float("nan"))
        await trainer.step(job.id, 2, loss=0.25)
        await trainer.checkpoint(job.id, 2)
        await trainer.end(job.id, "succeeded", 2)
        events = [event async for event in jobs.list_events(job.id, limit=3)][::-1]
        assert [event.message.split(":")[0] for event in events] == [
            "Created fine-tuning job",
            "Fine-tuning job started",
            "Of 34 examples 4 are left out, as there is nothing to learn",
            "Step 1/2",
            "Step 2/2",
            "Checkpoint created at step 2",
            "New fine-tuned model created",
            "The job has successfully completed",
        ]
        assert [event.level for event in events].count("warn") == 1
        assert all(event.id.startswith("ftevent-") for event in events)
        figures: Any = events[4].data
        assert events[4].type == "metrics" and figures["train_loss"] == 0.25
        assert (figures["step"], figures["total_steps"], figures["tokens"]) == (2, 2, 60)
        assert isinstance(events[3].data, dict) and events[3].data["train_loss"] is None
        for bad in ({"after": "ftevent-none"}, {"limit": 0}):
            with pytest.raises(openai.BadRequestError):
                await jobs.list_events(job.id, **bad)

    play(story)


def test_hyperparameters_peft_and_optimizer(play: Play) -> None:
    async def story(world: World) -> None:
        file = await upload(world, examples=1000)
        job: Any = await create(world, training_file=file)
        used = {"n_epochs": 3, "batch_size": 16, "learning_rate_multiplier": 1.0}
        assert job.hyperparameters.model_dump() == used
        assert job.method.supervised.hyperparameters.model_dump() == used
        await world.until(lambda: len(started(world)) == 1)
        assert started(world)[0].options["learning_rate"] == pytest.approx(3.2e-3)  # it is 256 wide
        top = {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": 0.5}
        job = await create(world, training_file=file, hyperparameters=top)
        assert job.hyperparameters.n_epochs == 2 and job.hyperparameters.learning_rate_multiplier == 0.5
        inner = {"type": "supervised", "supervised": {"hyperparameters": {"batch_size": 5}}}
        more = {
            "peft": {"rank": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True},
            "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.95], "max_steps": 4, "max_grad_norm": None},
        }
        job = await create(world, training_file=file, method=inner, extra_body=more)
        assert job.peft == more["peft"]
        assert job.hyperparameters.learning_rate_multiplier == pytest.approx(0.3125)
        await world.until(lambda: len(started(world)) == 3)
        options = started(world)[2].options
        assert started(world)[2].method == more["peft"], "for the engine to read"
        assert options["batch_size"] == 5 and options["learning_rate"] == 1e-3 and options["max_steps"] == 4
        assert options["betas"] == [0.9, 0.95] and options["max_grad_norm"] is None
        several = [{"type": "ia3"}, {"peft_type": "LORA", "r": 2}]
        job = await create(world, training_file=file, extra_body={"peft": several})
        assert job.peft == several
        world.engine.refusals["method"] = Fault("ConfigError", "peft (lora) has no field 'rnk'")
        with pytest.raises(openai.BadRequestError, match="no field 'rnk'") as refused:
            await create(world, training_file=file, extra_body={"peft": {"rnk": 4}})
        assert refused.value.param == "peft"

    play(story)


def test_what_becomes_of_too_long_examples_is_told(play: Play) -> None:
    """With the names that files were uploaded by."""

    async def story(world: World) -> None:
        trainer, jobs, file = Trainer(world), world.client().fine_tuning.jobs, await upload(world)
        optimizer = {"max_length": 64, "too_long": "truncate"}
        body = {"optimizer": optimizer}
        job: Any = await create(world, training_file=file, validation_file=file, extra_body=body)
        assert job.examples is None and job.optimizer == optimizer
        await world.until(lambda: bool(started(world)))
        spec = started(world)[0]
        assert (spec.options["max_length"], spec.options["too_long"]) == (64, "truncate")
        assert spec.data_name == spec.validation_name == "chats.jsonl"
        await trainer.tell(JobStarted(job.id, 0, 4, 30, 600, 3, 1, 1, 3, 2e-4, skipped=2, split=1, pieces=5))
        shown: Any = await jobs.retrieve(job.id)
        assert shown.examples == {"trained": 30, "truncated": 3, "skipped": 2, "dropped": 1}
        (told,) = [event for event in (await jobs.list_events(job.id)).data if event.level == "warn"]
        assert told.message == (
            "Of 29 examples 2 are too long and skipped; 3 are too long and truncated; 1 is left out, as "
            "there is nothing to learn; 1 is plain text and too long, and cut into 5 pieces"
        )
        await create(world, training_file=file)
        await world.until(lambda: len(started(world)) == 2)
        assert started(world)[1].options["too_long"] == "error"

    play(story)


def reinforcement(hyperparameters: Any = None, **grader: Any) -> dict[str, Any]:
    settings = {"grader": grader, "hyperparameters": hyperparameters or {}}
    return {"type": "reinforcement", "reinforcement": settings}


def test_training_methods_reach_the_engine_and_are_shown(play: Play) -> None:
    async def story(world: World) -> None:
        file, trainer = await upload(world), Trainer(world)
        dpo: Any = {
            "type": "dpo",
            "dpo": {"hyperparameters": {"beta": 0.3, "n_epochs": 2, "batch_size": "auto"}},
        }
        job: Any = await create(world, training_file=file, method=dpo)
        await world.until(lambda: len(started(world)) == 1)
        spec = started(world)[0]
        assert spec.objective == {"type": "dpo", "beta": 0.3} and "objective" not in spec.options
        assert job.method.type == "dpo" and job.method.supervised is None
        shown = {**job.hyperparameters.model_dump(), "beta": 0.3}
        assert job.method.dpo.hyperparameters.model_dump(exclude_none=True) == shown
        figures = {"rewards/margins": 0.25, "rewards/accuracies": 1.0}
        await trainer.start(job.id, steps=1)
        await trainer.tell(JobStep(job.id, 1, 0.5, 40, 60, 1.0, 2e-4, 2.0, metrics=figures))
        events = (await world.client().fine_tuning.jobs.list_events(job.id)).data
        (told,) = [event.data for event in events if event.type == "metrics"]
        assert told is not None and figures.items() <= told.items()  # type: ignore[attr-defined]
        await trainer.checkpoint(job.id, 1)
        await trainer.end(job.id, "succeeded", 1)
        (result,) = (await world.client().fine_tuning.jobs.retrieve(job.id)).result_files
        header, line = (await world.client().files.content(result)).text.splitlines()
        assert header.endswith("seconds,rewards/accuracies,rewards/margins") and line.endswith(",1.0,0.25")

        orpo = {"type": "orpo", "orpo": {"hyperparameters": {"beta": "auto", "nll_on": "answer"}}}
        job = await create(world, training_file=file, extra_body={"method": orpo})
        await world.until(lambda: len(started(world)) == 2)
        assert started(world)[1].objective == {"type": "orpo", "nll_on": "answer"}

        kto = {"type": "kto", "kto": {"hyperparameters": {"beta": 0.2, "undesirable_weight": 1.5}}}
        job = await create(world, training_file=file, extra_body={"method": kto})
        await world.until(lambda: len(started(world)) == 3)
        assert started(world)[2].objective == {"type": "kto", "beta": 0.2, "undesirable_weight": 1.5}
        assert job.method.kto["hyperparameters"]["undesirable_weight"] == 1.5

        grader = {"type": "string_check", "reference": "{{item.answer}}", "operation": "eq"}
        own = {"group_size": 4, "max_tokens": 16, "clip": None, "loss_type": "dr_grpo"}
        asked = {**own, "scale_rewards": "auto", "batch_size": 2}
        job = await create(world, training_file=file, method=reinforcement(asked, **grader))
        wanted = {"type": "reinforcement", "grader": grader, **own}
        await world.until(lambda: len(started(world)) == 4)
        assert started(world)[3].objective == wanted and started(world)[3].options["batch_size"] == 2
        assert job.method.reinforcement.grader.type == "string_check"

    play(story)


def distillation(teacher: str, **hyperparameters: Any) -> dict[str, Any]:
    return {
        "type": "distillation",
        "distillation": {"teacher": teacher, "hyperparameters": hyperparameters},
    }


def test_a_teacher_is_an_adapter_of_the_tenants_own(play: Play) -> None:
    async def story(world: World) -> None:
        trainer, client, store = Trainer(world), world.client(), world.state.store
        first = await create(world)
        await world.until(lambda: bool(started(world)))
        await trainer.succeed(first.id)
        name = (await client.fine_tuning.jobs.retrieve(first.id)).fine_tuned_model
        assert name is not None
        body = {"method": distillation(name, top_k=4, temperature="auto")}
        job: Any = await create(world, extra_body=body)
        await world.until(lambda: len(started(world)) == 2)
        spec, adapter = started(world)[1], await store.adapters.find("local", name, "tiny")
        assert adapter is not None and spec.teacher is not None
        assert Path(spec.teacher, WEIGHTS).samefile(store.folder_of(adapter) / WEIGHTS)
        assert spec.objective == {"type": "distillation", "teacher": name, "top_k": 4}
        assert spec.start_from is None and "teacher" not in spec.options
        assert job.method.distillation["teacher"] == name
        with pytest.raises(openai.ConflictError, match="teaches in the job"):
            await client.models.delete(name)
        await trainer.succeed(job.id)
        await create(world, extra_body={"method": distillation("tiny")})
        await world.until(lambda: len(started(world)) == 3)
        assert started(world)[2].teacher is None
        await client.models.delete(name)
        with pytest.raises(openai.NotFoundError, match="does not exist") as refused:
            await create(world, extra_body=body)
        assert refused.value.param == "method.distillation.teacher"

    play(story)


def test_rewards_of_a_validation_are_shown_and_remembered(play: Play) -> None:
    async def story(world: World) -> None:
        file, trainer, jobs = await upload(world), Trainer(world), world.client().fine_tuning.jobs
        method = reinforcement(type="regex", pattern="a")
        body = {"optimizer": {"load_best_model_at_end": True}}
        job = await create(world, training_file=file, validation_file=file, method=method, extra_body=body)
        await world.until(lambda: bool(started(world)))
        assert started(world)[0].validation is not None and started(world)[0].keep_best
        await trainer.start(job.id)
        await trainer.step(job.id, 2)
        path = checkpoint_folder(trainer.folder(job.id), 2)
        await trainer.tell(
            JobCheckpoint(job.id, 2, str(path), "digest", 0.5, metrics={"reward": 0.75, "x": float("nan")})
        )
        (kept,) = (await jobs.checkpoints.list(job.id)).data
        figures: Any = kept.metrics
        assert (figures.valid_reward, figures.valid_x) == (0.75, None)
        events = (await jobs.list_events(job.id)).data
        (told,) = [event.data for event in events if event.type == "metrics"]
        assert told is not None and told["valid_reward"] == 0.75  # type: ignore[index]
        await jobs.pause(job.id)
        await trainer.end(job.id, "paused", 2)
        await jobs.resume(job.id)
        await world.until(lambda: len(started(world)) == 2)
        assert started(world)[1].validated == {2: -0.75}

    play(story)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"extra_body": {"peft": 4}}, "peft"),
        ({"extra_body": {"peft": []}}, "peft"),
        ({"extra_body": {"peft": {"r": "x" * 100_000}}}, "peft"),
        ({"extra_body": {"optimizer": {"leaning_rate": 1}}}, "did you mean 'learning_rate'?"),
        ({"extra_body": {"sufix": "x"}}, "did you mean 'suffix'?"),
        ({"extra_body": {"too_long": "skip"}}, "did you mean 'optimizer.too_long'?"),
        ({"extra_body": {"optimizer": {"too_long": "cut"}}}, "optimizer.too_long"),
        (
            {
                "method": reinforcement(type="regex", pattern="a"),
                "extra_body": {"optimizer": {"too_long": "truncate"}},
            },
            "for reinforcement optimizer.too_long is 'error' or 'skip'",
        ),
        ({"hyperparameters": {"epochs": 4}}, "did you mean 'n_epochs'?"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"batch_size": "many"}}, "hyperparameters.batch_size"),
        ({"extra_body": {"optimizer": {"learning_rate": -1}}}, "optimizer.learning_rate"),
        ({"extra_body": {"optimizer": {"betas": [0.9, 1.0]}}}, "optimizer.betas"),
        ({"method": {"type": "grpo"}}, "method.type"),
        ({"method": {"type": "dpo", "orpo": {}}}, "orpo is of another"),
        ({"method": {"type": "dpo", "dpo": {"hyperparameters": {"betta": 1}}}}, "did you mean 'beta'?"),
        ({"method": {"type": "orpo", "orpo": {"hyperparameters": {"beta": 0}}}}, "beta"),
        ({"method": {"type": "kto", "kto": {"hyperparameters": {"desirable_weight": -1}}}}, "desirable_wei"),
        ({"method": {"type": "distillation"}}, "with a teacher"),
        ({"method": {"type": "distillation", "distillation": {}}}, "teacher"),
        ({"method": distillation("tiny", top_k=65)}, "top_k"),
        ({"method": distillation("tiny", temperature=0)}, "temperature"),
        ({"method": {"type": "reinforcement"}}, "with a grader"),
        (
            {
                "method": reinforcement(
                    type="score_model", model="tiny", input=[{"role": "robot", "content": ""}]
                )
            },
            "of another role",
        ),
        ({"method": reinforcement(type="python", source="x")}, "no grader 'python': it would run a tenant's"),
        (
            {"method": reinforcement(type="text_similarity", reference="a", evaluation_metric="meteor")},
            "meteor",
        ),
        (
            {"method": reinforcement(type="multi", graders={}, calculate_output="1")},
            "an object of 1 to 16 by name",
        ),
        (
            {
                "method": reinforcement(
                    type="multi",
                    graders={"a": {"type": "http", "url": "http://127.0.0.1:1/"}},
                    calculate_output="a",
                )
            },
            "'a': the grader's host '127.0.0.1' has an address that is not public",
        ),
        ({"method": reinforcement(type="regex", pattern="(")}, "no regular expression"),
        ({"method": reinforcement(type="http", url="http://127.0.0.1:1/")}, "not public"),
        (
            {"method": reinforcement(type="http", url="http://[::1]/", allowed_hosts=["::1"])},
            "no field 'allowed_hosts'",
        ),
        ({"method": reinforcement({"group_size": 1}, type="regex", pattern="a")}, "group_size"),
        ({"suffix": "a b"}, "suffix"),
        ({"suffix": "a" * 65}, "suffix"),
        ({"seed": -1}, "seed"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"integrations": [{"type": "mlflow", "wandb": {"project": "x"}}]}, "integrations"),
        (
            {
                "hyperparameters": {"learning_rate_multiplier": 1.0},
                "extra_body": {"optimizer": {"learning_rate": 1e-3}},
            },
            "not both",
        ),
        (
            {
                "hyperparameters": {"n_epochs": 1},
                "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}},
            },
            "not in both",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(shared_play: Play, fields: dict[str, Any], said: str) -> None:
    async def story(world: World) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await create(world, **fields)
        assert said in str(caught.value.message)
        assert not (await world.client().fine_tuning.jobs.list()).data

    shared_play(story)


@pytest.mark.parametrize(
    ("kind", "param"), [("DataError", "training_file"), ("ValidationDataError", "validation_file")]
)
def test_a_file_of_another_kind_is_refused_when_the_job_is_created(play: Play, kind: str, param: str) -> None:
    async def story(world: World) -> None:
        file, text = await upload(world), "file-1.jsonl, line 3: expected ...; found ..."
        world.engine.refusals["job"] = Fault(kind, text)
        with pytest.raises(openai.BadRequestError) as caught:
            await create(world, training_file=file, validation_file=file)
        error = caught.value
        assert (error.param, error.code, error.body["message"]) == (param, f"invalid_{param}", text)  # type: ignore[index]
        assert not (await world.client().fine_tuning.jobs.list()).data
        world.engine.refusals.clear()
        job, trainer = await create(world, training_file=file, validation_file=file), Trainer(world)
        await world.until(lambda: bool(started(world)))
        await trainer.tell(JobEnded(job.id, JobStatus.FAILED, 0, Fault(kind, text)))  # at a later line
        failed = await world.client().fine_tuning.jobs.retrieve(job.id)
        assert failed.error is not None
        assert (failed.error.param, failed.error.code) == (param, f"invalid_{param}")

    play(story)


def test_files_and_models_of_a_job_must_exist(play: Play) -> None:
    async def story(world: World) -> None:
        trainer, file = Trainer(world), await upload(world)
        with pytest.raises(openai.NotFoundError) as caught:
            await create(world, training_file="file-none")
        assert caught.value.param == "training_file"
        with pytest.raises(openai.NotFoundError) as caught:
            await create(world, training_file=file, validation_file="file-none")
        assert caught.value.param == "validation_file"
        with pytest.raises(openai.NotFoundError) as caught:
            await create(world, training_file=file, model="tinny")
        assert caught.value.code == "model_not_found"
        job = await create(world, training_file=file)
        await world.until(lambda: bool(started(world)))
        await trainer.succeed(job.id)
        done = await world.client().fine_tuning.jobs.retrieve(job.id)
        with pytest.raises(openai.BadRequestError, match="fine-tune-results"):
            await create(world, training_file=done.result_files[0])

    play(story)


def test_training_goes_on_from_an_adapter(play: Play) -> None:
    async def story(world: World) -> None:
        trainer, client = Trainer(world), world.client()
        first = await create(world)
        await world.until(lambda: bool(started(world)))
        await trainer.succeed(first.id)
        name = (await client.fine_tuning.jobs.retrieve(first.id)).fine_tuned_model
        assert name is not None
        with pytest.raises(openai.BadRequestError, match="keeps its shape"):
            await create(world, model=name, extra_body={"peft": {"r": 4}})
        second = await create(world, model=name)
        await world.until(lambda: len(started(world)) == 2)
        command, store = started(world)[1], world.state.store
        adapter = await store.adapters.find("local", name, "tiny")
        assert adapter is not None and command.start_from is not None
        assert Path(command.start_from, WEIGHTS).samefile(store.folder_of(adapter) / WEIGHTS)
        assert command.method == {}
        with pytest.raises(openai.ConflictError):
            await client.models.delete(name)
        await trainer.succeed(second.id)
        grown = (await client.fine_tuning.jobs.retrieve(second.id)).fine_tuned_model
        card: Any = await client.models.retrieve(grown or "")
        assert card.parent == name
        await client.models.delete(name)

    play(story)


def test_pause_resume_and_cancel(play: Play) -> None:
    async def story(world: World) -> None:
        jobs, trainer = world.client().fine_tuning.jobs, Trainer(world)
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        with pytest.raises(openai.ConflictError) as caught:
            await jobs.resume(job.id)
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert "is running and cannot be resumed" in str(caught.value.message)
        paused: Any = await jobs.pause(job.id)
        assert paused.status == "paused"
        await world.until(lambda: bool(stopped(world)))
        assert stopped(world)[0].keep
        with pytest.raises(openai.ConflictError):
            await jobs.pause(job.id)
        assert (await jobs.resume(job.id)).status == "queued"  # the engine is still stopping it
        await trainer.checkpoint(job.id, 2)
        await trainer.end(job.id, "paused", 2)
        await world.until(lambda: len(started(world)) == 2)
        assert (await jobs.retrieve(job.id)).status == "running"
        cancelled = await jobs.cancel(job.id)
        assert cancelled.status == "cancelled" and cancelled.finished_at
        await world.until(lambda: len(stopped(world)) == 2)
        assert not stopped(world)[1].keep
        await trainer.end(job.id, "cancelled", 2)
        for ask in (jobs.cancel, jobs.pause, jobs.resume):
            with pytest.raises(openai.ConflictError):
                await ask(job.id)
        (kept,) = (await jobs.checkpoints.list(job.id)).data
        await world.client().completions.create(model=kept.fine_tuned_model_checkpoint, prompt="x")
        words = [event.message async for event in jobs.list_events(job.id)]
        assert [w for w in words if w.startswith("Fine-tuning job ")] == [
            f"Fine-tuning job {word}"
            for word in ("cancelled", "saved at step 2, where it continues", "resumed", "paused")
        ]

    play(story)


def test_a_failure_is_told_and_checkpoints_stay(play: Play) -> None:
    async def story(world: World) -> None:
        jobs, trainer = world.client().fine_tuning.jobs, Trainer(world)
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        await trainer.checkpoint(job.id, 1)
        await trainer.end(job.id, "failed", 2, Fault("LossNotFinite", "the loss became nan"))
        failed = await jobs.retrieve(job.id)
        assert failed.status == "failed" and failed.error is not None and failed.finished_at
        assert (failed.error.code, failed.error.message) == ("loss_not_finite", "the loss became nan")
        assert failed.fine_tuned_model is None and len((await world.client().models.list()).data) == 1
        newest = (await jobs.list_events(job.id, limit=1)).data[0]
        assert newest.level == "error" and "the loss became nan" in newest.message
        (kept,) = (await jobs.checkpoints.list(job.id)).data
        await world.client().completions.create(model=kept.fine_tuned_model_checkpoint, prompt="x")

    play(story)


def test_lists_are_in_order_and_in_pages(play: Play) -> None:
    async def story(world: World) -> None:
        jobs, file = world.client().fine_tuning.jobs, await upload(world)
        kinds: list[Any] = [
            {"metadata": {"n": "0", "x": "y"}},
            {"metadata": {"n": "1"}},
            {},
            {"metadata": {}},
        ]
        ids = [(await create(world, training_file=file, **kind)).id for kind in kinds]
        assert [job.id async for job in jobs.list(limit=1)] == ids[::-1]
        first = await jobs.list(limit=3)
        assert [job.id for job in first.data] == ids[:0:-1] and first.has_more
        assert [job.id for job in (await jobs.list(after=ids[1])).data] == ids[:1]
        assert [job.id async for job in jobs.list(metadata={"n": "1"})] == [ids[1]]
        assert [job.id async for job in jobs.list(metadata={"n": "0", "x": "y"})] == [ids[0]]
        assert not [job async for job in jobs.list(metadata={"n": "2"})]
        with pytest.raises(openai.BadRequestError) as refused:
            await jobs.list(metadata={str(n): "x" for n in range(17)})
        assert refused.value.param == "metadata"
        none = [job.id async for job in jobs.list(extra_query={"metadata": "null"})]
        assert none == [ids[3], ids[2]]
        with pytest.raises(openai.BadRequestError):
            await jobs.list(after="ftjob-none")

    play(story)


def test_another_tenants_job_is_one_that_does_not_exist(play: Play) -> None:
    async def story(world: World) -> None:
        _, ann = await world.state.store.tenants.create_key("ann")
        _, bob = await world.state.store.tenants.create_key("bob")
        job = await create(world, ann)
        await world.until(lambda: bool(started(world)))
        await Trainer(world).succeed(job.id)
        client = world.client(ann)
        name = (await client.fine_tuning.jobs.retrieve(job.id)).fine_tuned_model or ""
        assert name.startswith("ft:tiny:ann::")
        (kept,) = (await client.fine_tuning.jobs.checkpoints.list(job.id)).data

        async def refusals(id: str, *names: str) -> list[str]:
            other, said = world.client(bob), []
            jobs = other.fine_tuning.jobs
            own = await upload(world, bob)
            asked: list[Any] = [
                jobs.retrieve(id), jobs.cancel(id), jobs.pause(id), jobs.resume(id), jobs.list_events(id),
                jobs.checkpoints.list(id), jobs.list(after=id),
            ]  # fmt: skip
            for name in names:
                asked += [
                    other.completions.create(model=name, prompt="x"),
                    other.models.retrieve(name),
                    other.models.delete(name),
                    jobs.create(model=name, training_file=own),
                ]
            for ask in asked:
                with pytest.raises(openai.APIStatusError) as caught:
                    await ask
                text = caught.value.response.text
                for secret in (id, *sorted(names, key=len, reverse=True)):
                    text = text.replace(secret, "ID")
                said.append(f"{caught.value.status_code} {text}")
            return said

        nothing = await refusals("ftjob-" + "x" * 24, "ft:tiny:ann::xxxxxxxx", "ft:tiny:ann::x:ckpt-step-1")
        assert await refusals(job.id, name, kept.fine_tuned_model_checkpoint) == nothing
        assert not (await world.client(bob).fine_tuning.jobs.list()).data
        assert len((await world.client(bob).models.list()).data) == 1

    play(story)


def test_before_the_first_engine_nobody_knows_how_wide_the_model_is(play: Play) -> None:
    async def story(world: World) -> None:
        file = await upload(world)
        hello, world.state.link.hello = world.state.link.hello, None
        world.state.link._connected.clear()
        with pytest.raises(openai.InternalServerError) as refused:
            await create(world, training_file=file)
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
        world.state.link.hello = hello
        world.state.link._connected.set()
        await create(world, training_file=file)

    play(story)


def test_a_tenant_has_only_so_many_open_jobs(play: Play) -> None:
    async def story(world: World) -> None:
        file = await upload(world)
        for _ in range(2):
            await create(world, training_file=file)
        with pytest.raises(openai.RateLimitError) as caught:
            await create(world, training_file=file)
        assert caught.value.response.headers["retry-after"]

    play(story, max_jobs_tenant=2)


def test_a_corpus_trains_too(play: Play) -> None:
    async def story(world: World) -> None:
        files = world.client().files
        file = await files.create(file=("book.txt", b"one\n\ntwo"), purpose="fine-tune")
        valid = await files.create(file=("v.jsonl", jsonl({"text": "three"})), purpose="fine-tune")
        await create(world, training_file=file.id, validation_file=valid.id)
        await world.until(lambda: bool(started(world)))
        (command,) = started(world)
        assert command.data.endswith(".txt") and (command.validation or "").endswith(".jsonl")

    play(story)


def test_the_best_checkpoint_is_the_result(play: Play) -> None:
    async def story(world: World) -> None:
        jobs, trainer = world.client().fine_tuning.jobs, Trainer(world)
        file = await upload(world)
        settings = {"early_stopping_patience": 2, "early_stopping_threshold": 0.1, "save_steps": 5}
        with pytest.raises(openai.BadRequestError) as caught:
            await create(world, training_file=file, extra_body={"optimizer": settings})
        assert caught.value.param == "optimizer.early_stopping_patience"
        body = {"optimizer": settings}
        job = await create(world, training_file=file, validation_file=file, extra_body=body)
        assert job.model_dump()["optimizer"] == settings
        await world.until(lambda: bool(started(world)))
        (spec,) = started(world)
        assert (spec.every, spec.keep_best, spec.patience, spec.threshold) == (5, True, 2, 0.1)
        assert not spec.validated and "early_stopping_patience" not in spec.options
        await trainer.start(job.id)
        await trainer.step(job.id, 5)
        await trainer.checkpoint(job.id, 5)
        await trainer.tell(JobNote(job.id, "Stopped early at step 9", "info"))
        await jobs.pause(job.id)
        await trainer.end(job.id, "paused", 5)
        await jobs.resume(job.id)
        await world.until(lambda: len(started(world)) == 2)
        assert started(world)[1].validated == {5: 0.6}
        await trainer.start(job.id, 5)
        await trainer.step(job.id, 9)
        await trainer.end(job.id, "succeeded", 5)
        assert (await jobs.retrieve(job.id)).fine_tuned_model
        events = [(event.level, event.message) async for event in jobs.list_events(job.id)]
        assert ("info", "Stopped early at step 9") in events
        assert ("info", "Fine-tuning job resumed from step 5") in events
        assert ("info", "Fine-tuning job saved at step 5, where it continues once it is resumed") in events

    play(story)
