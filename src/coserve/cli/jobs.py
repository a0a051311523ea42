"""`coserve jobs`: lists fine-tuning jobs, shows their events and checkpoints, pauses, resumes and cancels
them."""

from typing import Annotated, Any

import typer

from coserve.cli.options import ApiKey, AsJson, JobId, ListsAlone, Url, connect

app = typer.Typer(help="Fine-tuning jobs; alone it lists them.", cls=ListsAlone)
Limit = Annotated[int, typer.Option(min=1, max=100, help="The newest so many.")]
PATH = "/v1/fine_tuning/jobs"


@app.command("list")
def list_jobs(
    context: typer.Context,
    limit: Limit = 20,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Lists the newest jobs."""
    from coserve.cli.output import moment, print_json, print_table

    with connect(context, url, api_key) as client:
        jobs = client.get(PATH, limit=limit)["data"]
    if as_json:
        return print_json(jobs)
    columns = ("job", "status", "model", "adapter", "tokens", "created", "waiting for")
    rows = [
        (
            job["id"],
            job["status"],
            job["model"],
            job.get("fine_tuned_model") or "",
            str(job.get("trained_tokens") or ""),
            moment(job["created_at"]),
            job.get("waiting_for") or "",
        )
        for job in jobs
    ]
    print_table(columns, rows, "no jobs yet: `coserve finetune FILE` makes one")


@app.command()
def show(
    context: typer.Context, job: JobId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None
) -> None:
    """Shows all fields of one job."""
    from coserve.cli.output import moment, print_fields, print_json

    found = _ask(context, url, api_key, job)
    if as_json:
        return print_json(found)
    times = {key: moment(found.get(key)) or None for key in ("created_at", "finished_at", "estimated_finish")}
    print_fields({**found, **times})


@app.command()
def events(
    context: typer.Context,
    job: JobId,
    limit: Limit = 20,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Lists a job's events, the newest at the bottom."""
    from coserve.cli.output import moment, print_json

    found = _ask(context, url, api_key, job, "events", limit)["data"][::-1]
    if as_json:
        return print_json(found)
    for event in found:
        print(f"{moment(event['created_at'])}  {event['message']}")


@app.command()
def checkpoints(
    context: typer.Context,
    job: JobId,
    limit: Limit = 20,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Lists a job's checkpoints: each can be chatted with by its name."""
    from coserve.cli.output import moment, print_json, print_table

    found = _ask(context, url, api_key, job, "checkpoints", limit)["data"]
    if as_json:
        return print_json(found)
    rows = [
        (
            str(one["step_number"]),
            one["fine_tuned_model_checkpoint"],
            _loss(one["metrics"].get("train_loss")),
            _loss(one["metrics"].get("valid_loss", one["metrics"].get("valid_reward"))),
            moment(one["created_at"]),
        )
        for one in found
    ]
    print_table(("step", "name", "loss", "validation", "created"), rows, "no checkpoints yet")


def _add_verb(verb: str, help: str) -> None:
    @app.command(verb, help=help)
    def tell(
        context: typer.Context, job: JobId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None
    ) -> None:
        from coserve.cli.client import in_path
        from coserve.cli.output import print_json

        with connect(context, url, api_key) as client:
            found = client.post(f"{PATH}/{in_path(job)}/{verb}")
        if as_json:
            return print_json(found)
        print(f"{found['id']}: {found['status']}")


_add_verb("pause", "Stops a job's training at a checkpoint; it can go on later.")
_add_verb("resume", "Lets a paused job go on.")
_add_verb("cancel", "Ends a job for good; its checkpoints stay.")


@app.command()
def attach(context: typer.Context, job: JobId, url: Url = None, api_key: ApiKey = None) -> None:
    """Watches a job until it is over. Ctrl-C asks: detach, pause or cancel."""
    from coserve.cli.attach import attach as stay

    with connect(context, url, api_key) as client:
        stay(client, job)


def _ask(
    context: typer.Context,
    url: str | None,
    api_key: str | None,
    job: str,
    part: str = "",
    limit: int | None = None,
) -> dict[str, Any]:
    from coserve.cli.client import in_path

    with connect(context, url, api_key) as client:
        return client.get(f"{PATH}/{in_path(job)}{'/' if part else ''}{part}", limit=limit)


def _loss(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""
