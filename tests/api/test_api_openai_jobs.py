"""Scripts of OpenAI's fine-tuning guides through its client, with another base URL: methods with graders,
integrations, permissions of checkpoints, names of its models, graders that are tried."""

from typing import Any

import openai
import pytest

from coserve.train.objectives import objective_of
from serving import Play, World
from training import Trainer, create, started, upload

SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"label": {"type": "string"}},
            "required": ["label"],
            "additionalProperties": False,
        },
    },
}
CHECK = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{sample.output_json.label}}",
    "reference": "{{item.label}}",
}
JUDGE = {
    "type": "score_model",
    "name": "judge",
    "model": "tiny",
    "input": [{"role": "user", "content": "Rate {{sample.output_text}} for {{item.label}}"}],
    "range": [0, 1],
}
ALIASES = {"gpt-4.1-mini-*": "tiny", "gpt-4.1-nano-2025-04-14": "tiny"}


def reinforcement(grader: Any, **fields: Any) -> Any:
    return {"type": "reinforcement", "reinforcement": {"grader": grader, **fields}}


async def messages_of(world: World, job: str) -> list[tuple[str, str]]:
    events = (await world.client().fine_tuning.jobs.list_events(job)).data
    return [(event.level, event.message) for event in events]


def test_a_script_of_the_guides_runs_with_their_model_names(play: Play) -> None:
    async def story(world: World) -> None:
        file = await upload(world)
        hyperparameters = {
            "n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": "auto", "eval_interval": 7,
            "eval_samples": "auto", "compute_multiplier": 0.5, "reasoning_effort": "medium",
        }  # fmt: skip
        method = reinforcement(CHECK, hyperparameters=hyperparameters, response_format=SCHEMA)
        wandb = {"type": "wandb", "wandb": {"project": "mine", "tags": ["a"]}}
        job: Any = await create(
            world, model="gpt-4.1-mini-2025-04-14", training_file=file, validation_file=file, seed=42,
            suffix="rft", method=method, integrations=[wandb], metadata={"a": "b"},
        )  # fmt: skip
        assert job.model == "tiny" and job.integrations[0].wandb.project == "mine"
        shown = job.method.reinforcement
        assert shown.grader.operation == "eq" and shown.response_format == SCHEMA
        assert (shown.hyperparameters.eval_interval, shown.hyperparameters.compute_multiplier) == (7, 0.5)
        await world.until(lambda: bool(started(world)))
        (spec,) = started(world)
        assert spec.every == 7 and spec.objective["group_size"] == 4
        assert "label" in spec.objective["grammar"] and "response_format" not in spec.objective
        assert objective_of(spec.objective).grammar == spec.objective["grammar"]  # type: ignore[union-attr]
        told = await messages_of(world, job.id)
        assert [level for level, text in told if "stands for 'tiny'" in text] == ["info"]
        assert [level for level, text in told if "no wandb" in text or "reasoning_effort" in text] == [
            "warn"
        ] * 2
        again = await world.client().fine_tuning.jobs.retrieve(job.id)
        assert again.integrations == job.integrations and again.seed == 42
        world.say("yes")
        answer = await world.client().chat.completions.create(
            model="gpt-4.1-nano-2025-04-14", messages=[{"role": "user", "content": "x"}]
        )
        assert answer.model == "tiny"
        for name in ("gpt-4.1-nano-2025", "gpt-4.1"):
            with pytest.raises(openai.NotFoundError):
                await world.client().completions.create(model=name, prompt="x")

    play(story, model_aliases=ALIASES)


@pytest.mark.parametrize(
    ("method", "status", "said"),
    [
        (reinforcement({**JUDGE, "model": "none"}), 404, "'none' does not exist"),
        (reinforcement(CHECK, hyperparameters={"compute_multiplier": 2, "group_size": 4}), 400, "not both"),
        (reinforcement(CHECK, hyperparameters={"eval_samples": 40}), 400, "eval_samples"),
        (reinforcement(CHECK, hyperparameters={"compute_multiplier": 0}), 400, "compute_multiplier"),
        (reinforcement(CHECK, response_format={"type": "json_object"}), 400, "response_format"),
        (
            reinforcement(CHECK, response_format={
                "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}
            }),
            400,
            "Invalid schema",
        ),
    ],
)  # fmt: skip
def test_methods_that_are_refused(shared_play: Play, method: Any, status: int, said: str) -> None:
    async def story(world: World) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await create(world, method=method)
        assert caught.value.status_code == status and said in caught.value.message
        assert not (await world.client().fine_tuning.jobs.list()).data

    shared_play(story)


def test_in_a_job_the_base_grades(play: Play) -> None:
    async def story(world: World) -> None:
        trainer = Trainer(world)
        first = await create(world, method=reinforcement(JUDGE))
        await world.until(lambda: bool(started(world)))
        assert started(world)[0].objective["grader"] == JUDGE
        await trainer.succeed(first.id)
        name = (await world.client().fine_tuning.jobs.retrieve(first.id)).fine_tuned_model
        with pytest.raises(openai.BadRequestError, match="In a job the base grades answers") as refused:
            await create(world, method=reinforcement({**JUDGE, "model": name}))
        assert refused.value.param == "method.reinforcement.grader.model"

    play(story)


def test_graders_are_tried_on_an_answer(play: Play) -> None:
    async def story(world: World) -> None:
        graders = world.client().fine_tuning.alpha.graders
        assert (await graders.validate(grader=CHECK)).grader.name == "exact"  # type: ignore[arg-type,union-attr]
        found = await graders.run(grader=CHECK, model_sample='{"label": "a"}', item={"label": "a"})  # type: ignore[arg-type]
        assert (
            found.reward == 1.0 and found.metadata.name == "exact" and not found.metadata.errors.other_error
        )
        multi = {
            "type": "multi", "name": "both", "graders": {"exact": CHECK, "judge": JUDGE},
            "calculate_output": "exact + 2 * judge",
        }  # fmt: skip
        spoken = world.say('{"result": 0.25}')
        found = await graders.run(grader=multi, model_sample='{"label": "a"}', item={"label": "a"})  # type: ignore[arg-type]
        assert found.reward == 1.5 and found.sub_rewards == {"exact": 1.0, "judge": 0.25}
        (asked,) = world.submits()
        assert asked.sampling.grammar is not None and "result" in asked.sampling.grammar
        assert asked.sampling.temperature == 0.0 and asked.adapter is None
        usage: Any = found.to_dict()["model_grader_token_usage_per_model"]
        assert usage == {"tiny": len(asked.prompt) + len(spoken) + 1}
        world.say('{"result": 3}')
        found = await graders.run(grader=JUDGE, model_sample="a", item={"label": "a"})  # type: ignore[arg-type]
        assert found.reward == 0.0 and found.metadata.errors.other_error
        world.say('{"result": 0.')
        found = await graders.run(grader=JUDGE, model_sample="a", item={"label": "a"})  # type: ignore[arg-type]
        assert found.to_dict()["metadata"]["errors"]["model_grader_parse_error"]  # type: ignore[index]
        found = await graders.run(grader=CHECK, model_sample="a", item={})  # type: ignore[arg-type]
        assert found.reward == 0.0 and found.metadata.errors.invalid_variable_error
        for bad, words in (
            ({"type": "python", "name": "p", "source": "x"}, "would run a tenant's code"),
            ({"type": "http", "url": "http://127.0.0.1:1/"}, "no grader 'http'"),
            ({**CHECK, "operation": "is"}, "operation is one of"),
        ):
            for call in (graders.validate, graders.run):
                more = {"model_sample": "a"} if call == graders.run else {}
                with pytest.raises(openai.BadRequestError, match=words) as refused:
                    await call(grader=bad, **more)  # type: ignore[operator]
                assert refused.value.param == "grader"
        with pytest.raises(openai.NotFoundError):
            await graders.validate(grader={**JUDGE, "model": "none"})  # type: ignore[arg-type]

    play(story)


def test_a_checkpoint_is_used_by_those_who_may(play: Play) -> None:
    async def story(world: World) -> None:
        store, trainer = world.state.store, Trainer(world)
        keys = {name: (await store.tenants.create_key(name))[1] for name in ("one", "two", "three")}
        ids = {tenant.name: tenant.id for tenant in await store.tenants.list()}
        one, two, three = (world.client(keys[name]) for name in ("one", "two", "three"))
        job = await create(world, keys["one"])
        await world.until(lambda: bool(started(world)))
        await trainer.start(job.id)
        await trainer.step(job.id, 1)
        await trainer.checkpoint(job.id, 1)
        (made,) = (await one.fine_tuning.jobs.checkpoints.list(job.id)).data
        name, world_says = made.fine_tuned_model_checkpoint, world.say("yes")
        assert world_says
        permissions = one.fine_tuning.checkpoints.permissions
        page = await permissions.create(name, project_ids=[ids["two"], "nobody", ids["two"]])
        assert [given.project_id for given in page.data] == [ids["two"], "nobody"]
        assert (await permissions.create(name, project_ids=["nobody"])).data[0].id == page.data[1].id
        listed = await permissions.list(name, order="ascending", limit=1)
        assert [given.project_id for given in listed.data] == [ids["two"]] and listed.has_more
        answer = await two.completions.create(model=name, prompt="x")
        assert answer.choices[0].text == "yes" and world.submits()[-1].adapter == made.id
        assert name not in {model.id for model in (await two.models.list()).data}
        for client in (three, two):  # neither learns of the checkpoint's permissions, nor changes them
            with pytest.raises(openai.NotFoundError):
                await client.fine_tuning.checkpoints.permissions.list(name)
            with pytest.raises(openai.NotFoundError):
                await client.fine_tuning.checkpoints.permissions.create(name, project_ids=[ids["three"]])
            with pytest.raises(openai.NotFoundError):
                await client.fine_tuning.checkpoints.permissions.delete(
                    page.data[0].id, fine_tuned_model_checkpoint=name
                )
        with pytest.raises(openai.NotFoundError):
            await three.completions.create(model=name, prompt="x")
        with pytest.raises(openai.ConflictError):
            await two.models.delete(name)
        gone = await permissions.delete(page.data[0].id, fine_tuned_model_checkpoint=name)
        assert gone.deleted and gone.id == page.data[0].id
        with pytest.raises(openai.NotFoundError):
            await two.completions.create(model=name, prompt="x")
        with pytest.raises(openai.APIStatusError):
            await permissions.create(name, project_ids=[f"p{n}" for n in range(101)])

    play(story)
