"""`coserve finetune FILE`: uploads a file, creates a job, and follows it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coserve.cli.options import (
    ApiKey,
    AsJson,
    ModelName,
    ServerOptions,
    Url,
    given,
    in_flags,
    tell_wait,
    with_flags,
)
from coserve.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from coserve.cli.client import Client


@with_flags(
    "base_ca",
    "base_pin",
    "base_certificate",
    "base_key",
    "base_privacy",
    "tensor_parallel",
    "pipeline_parallel",
)
def finetune(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            exists=True,
            readable=True,
            help="Examples: .jsonl, .json, .csv, .tsv, .txt, also .gz, .parquet, or a folder of datasets.",
        ),
    ],
    model: ModelName = None,
    suffix: Annotated[str | None, typer.Option(help="Part of the adapter's name.")] = None,
    validation_file: Annotated[
        Path | None,
        typer.Option(exists=True, readable=True, help="Examples that are measured only."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Times the data is gone through.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples of one optimizer step.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of AdamW; short for --optimizer learning_rate=.")
    ] = None,
    learning_rate_multiplier: Annotated[float | None, typer.Option(help="Of the usual rate.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of an example; by default what the model takes.")
    ] = None,
    too_long: Annotated[
        Literal["error", "skip", "truncate"] | None,
        typer.Option(
            help="What becomes of longer examples: error (the default) refuses the job, skip leaves them "
            "out, truncate cuts them at the end. Plain texts are cut into pieces.",
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Of LoRA; short for --peft rank=.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same batches.")] = None,
    peft: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A field of the adapter, such as rank=16; may be repeated."),
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A field of the optimizer, such as learning_rate=1e-4."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="supervised, dpo or orpo (pairs of answers), kto (answers with a label), reinforcement "
            "(prompts and a --grader), distillation (examples and a --teacher)."
        ),
    ] = None,
    method_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A hyperparameter of the method, such as beta=0.1; may be repeated."
        ),
    ] = None,
    grader: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="JSON of the grader for reinforcement."
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model that distillation learns from, such as an adapter."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Train in this process, without a server: base executors at ADDRESS (several are separated "
            "by commas) compute the linears of --model, a folder. Needs --output.",
        ),
    ] = None,
    *,
    flags: dict[str, Any],
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Train nothing: tell what the data are, what would be left out, and how long it would take.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="With --base or --tensor-parallel: where the adapter is written."
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not stay to watch.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Fine-tunes an adapter on a file and shows how it goes. Ctrl-C asks: detach, pause or cancel.

    With --json the job is printed as it was created, and nothing is watched. With --base, and with ranks of
    its own (--tensor-parallel, --pipeline-parallel), there is no server and no job: the adapter is in the
    folder --output at the end. With --check nothing is created; the status is 1 where the job would be
    refused.
    """
    from coserve.cli.attach import attach
    from coserve.cli.chat import names_of
    from coserve.cli.output import print_json

    ours = given(
        peft=_pairs("--peft", peft, rank=rank),
        optimizer=_pairs(
            "--optimizer", optimizer, learning_rate=learning_rate, max_length=max_length, too_long=too_long
        ),
    )
    hyperparameters = given(
        n_epochs=epochs, batch_size=batch_size, learning_rate_multiplier=learning_rate_multiplier
    )
    own = _pairs("--method-option", method_option) or {}
    training = _method(method, own, hyperparameters, grader, teacher)
    access = given(base=base) | flags.get("engine", {})
    if access or output is not None:
        from coserve.cli.finetune_here import JobHere, check_here, finetune_here

        objective = {name: value for name, value in own.items() if value != "auto"} | given(type=method)
        if grader is not None and training is not None:
            objective["grader"] = training[training["type"]]["grader"]
        server = given(
            suffix=suffix,
            url=url,
            api_key=api_key,
            detach=detach or None,
            json=(as_json and not check) or None,
            teacher=teacher,
        )
        asked = JobHere(
            file, model, output, access, hyperparameters | given(seed=seed), ours.get("peft", {}),
            ours.get("optimizer", {}), objective, validation_file, server, check,
        )  # fmt: skip
        if check:
            _tell_check(check_here(asked), as_json)
        else:
            finetune_here(asked)
        return
    with ServerOptions(context, url, api_key).connect() as client, _told_in_flags():
        client.wait_ready(tell_wait)
        body = given(
            model=model or names_of(client)[0],
            training_file=_upload(client, file),
            validation_file=None if validation_file is None else _upload(client, validation_file),
            suffix=suffix,
            seed=seed,
            hyperparameters=hyperparameters or None if training is None else None,
            method=training,
            **ours,
        )
        if check:
            _tell_check(_checked(client, body), as_json)
            return
        job = client.post("/v1/fine_tuning/jobs", body)
        if as_json:
            print_json(job)
        elif detach:
            print(f"{job['id']}\n  coserve jobs attach {job['id']}")
        else:
            attach(client, str(job["id"]), in_words=in_flags)


def _checked(client: "Client", body: dict[str, Any]) -> dict[str, Any]:
    """A validation of a job with this body, whose files are deleted."""
    try:
        found = client.post("/v1/fine_tuning/validate", body)
    finally:
        for file in filter(None, (body["training_file"], body.get("validation_file"))):
            client.delete(f"/v1/files/{file}")
    if found.get("error"):
        found["error"]["message"] = in_flags(found["error"]["message"])
    return found


def _tell_check(found: dict[str, Any], as_json: bool) -> None:
    """Prints what a job would be. Raises typer.Exit with status 1 where it would be refused."""
    from coserve.cli.check import print_check
    from coserve.cli.output import print_json

    if as_json:
        print_json(found)
    else:
        print_check(found)
    if not found["valid"]:
        raise typer.Exit(1)


@contextmanager
def _told_in_flags() -> Iterator[None]:
    """Has errors of the server name flags."""
    try:
        yield
    except ServerError as error:
        raise type(error)(in_flags(str(error))) from error


def _upload(client: "Client", file: Path) -> str:
    if file.is_dir():
        with TemporaryDirectory() as folder:
            return _upload(client, _packed(file, Path(folder)))
    uploaded = client.upload("/v1/files", {"purpose": "fine-tune"}, {"file": file})
    return str(uploaded["id"])


def _packed(saved: Path, folder: Path) -> Path:
    """The rows of a folder that `datasets` saved, as JSONL in `folder`. Raises DataError."""
    from coserve.jobs.datasets import read_rows

    packed = folder / f"{saved.absolute().name}.jsonl"
    with packed.open("w", encoding="utf-8") as file:
        for row in read_rows(saved, saved.name):
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
    return packed


def _method(
    name: str | None,
    own: dict[str, Any],
    hyperparameters: dict[str, Any],
    grader: Path | None,
    teacher: str | None,
) -> dict[str, Any] | None:
    """The body's `method`; None where no flag asks for one. Raises ConfigError."""
    if name is None:
        if own or grader is not None or teacher is not None:
            raise ConfigError("--method-option, --grader and --teacher need a --method")
        return None
    settings: dict[str, Any] = {"hyperparameters": {**hyperparameters, **own}}
    if teacher is not None:
        settings["teacher"] = teacher
    if grader is not None:
        try:
            settings["grader"] = json.loads(grader.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"--grader {grader}: expected JSON; {error}") from error
    return {"type": name, name: settings}


def _pairs(flag: str, pairs: list[str] | None, **short: Any) -> dict[str, Any] | None:
    """KEY=VALUE pairs, and those that flags of their own give; a value is JSON where it can be, else text."""
    found = given(**short)
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"{flag} {pair}: expected KEY=VALUE")
        if short.get(key) is not None:
            raise ConfigError(f"{flag} {pair}: --{key.replace('_', '-')} gives it too")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found or None
