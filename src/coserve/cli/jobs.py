"""`coserve jobs`: lists fine-tuning jobs, shows their events and checkpoints, pauses, resumes and cancels
them."""

from typing import Annotated, Any

import typer

from coserve.cli.options import AsJson, JobId, ListsAlone, ServerOptions, unfolded

app = typer.Typer(help="Fine-tuning jobs; alone it lists them.", cls=ListsAlone)
Limit = Annotated[int, typer.Option(min=1, max=100, help="The newest so many.")]
PATH = "/v1/fine_tuning/jobs"


@app.command("list")
@unfolded
def list_jobs(server: ServerOptions, limit: Limit = 20, as_json: AsJson = False) -> None:
    """Lists the newest jobs."""
    from coserve.cli.output import moment, print_json, print_table

    with server.connect() as client:
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
@unfolded
def show(server: ServerOptions, job: JobId, as_json: AsJson = False) -> None:
    """Shows all fields of one job."""
    from coserve.cli.output import moment, print_fields, print_json

    found = _ask(server, job)
    if as_json:
        return print_json(found)
    times = {key: moment(found.get(key)) or None for key in ("created_at", "finished_at", "estimated_finish")}
    print_fields({**found, **times})


@app.command()
@unfolded
def events(server: ServerOptions, job: JobId, limit: Limit = 20, as_json: AsJson = False) -> None:
    """Lists a job's events, the newest at the bottom."""
    from coserve.cli.output import moment, print_json

    found = _ask(server, job, "events", limit)["data"][::-1]
    if as_json:
        return print_json(found)
    for event in found:
        print(f"{moment(event['created_at'])}  {event['message']}")


@app.command()
@unfolded
def checkpoints(server: ServerOptions, job: JobId, limit: Limit = 20, as_json: AsJson = False) -> None:
    """Lists a job's checkpoints: each can be chatted with by its name."""
    from coserve.cli.output import moment, print_json, print_table

    found = _ask(server, job, "checkpoints", limit)["data"]
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
    @unfolded
    def tell(server: ServerOptions, job: JobId, as_json: AsJson = False) -> None:
        from coserve.cli.client import in_path
        from coserve.cli.output import print_json

        with server.connect() as client:
            found = client.post(f"{PATH}/{in_path(job)}/{verb}")
        if as_json:
            return print_json(found)
        print(f"{found['id']}: {found['status']}")


_add_verb("pause", "Stops a job's training at a checkpoint; it can go on later.")
_add_verb("resume", "Lets a paused job go on.")
_add_verb("cancel", "Ends a job for good; its checkpoints stay.")


@app.command()
@unfolded
def attach(server: ServerOptions, job: JobId) -> None:
    """Watches a job until it is over. Ctrl-C asks: detach, pause or cancel."""
    from coserve.cli.attach import attach as stay

    with server.connect() as client:
        stay(client, job)


def _ask(server: ServerOptions, job: str, part: str = "", limit: int | None = None) -> dict[str, Any]:
    from coserve.cli.client import in_path

    with server.connect() as client:
        return client.get(f"{PATH}/{in_path(job)}{'/' if part else ''}{part}", limit=limit)


def _loss(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""
