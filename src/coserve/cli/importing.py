"""`coserve import openai FILE...`: jobs and data exported from OpenAI, as files and jobs of a server."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from coserve.cli.options import AsJson, ServerOptions, unfolded
from coserve.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from coserve.cli.client import Client

app = typer.Typer(help="Brings in what other services have exported.", no_args_is_help=True)
_MOST_BYTES: Final = 64 * 2**20  # of a file of jobs
_JOB, _FILE, _LIST = "fine_tuning.job", "file", "list"
_FILES: Final = ("training_file", "validation_file")
_METHODS: Final = ("supervised", "dpo", "reinforcement")
_MOST_METADATA: Final = 16


@app.callback()
def _group() -> None:
    """Keeps `openai` a command of its own."""


@dataclass(slots=True)
class Exported:
    """Contents of exported files: jobs, the names of uploads by their id, and data files."""

    jobs: list[Mapping[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    data: list[Path] = field(default_factory=list)

    def data_of(self, job: Mapping[str, Any], id: str) -> Path:
        """The data file that OpenAI has under an id: called as the id, or as the upload was. Raises
        ConfigError for none, and for several."""
        called = {id, self.names.get(id, id)}
        found = [one for one in self.data if one.name in called or one.name.split(".")[0] == id]
        if len(found) == 1:
            return found[0]
        how = "is not there" if not found else f"may be {found[0]} or {found[1]}"
        raise ConfigError(
            f"the file {id} of the job {job.get('id')} {how}: give its contents as {id}.jsonl "
            f"(`curl https://api.openai.com/v1/files/{id}/content`)"
        )


@app.command("openai")
@unfolded
def import_openai(
    server: ServerOptions,
    files: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            dir_okay=False,
            readable=True,
            help="Data files, called as their ids or their uploads; JSON of jobs and of files, as OpenAI's "
            "API gives it: one object, a list, or a line each.",
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="The base of all jobs, in place of the names that they have.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Send nothing; tell what would be sent.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Uploads data files and creates the jobs that were trained on them, with their methods, hyperparameters,
    seeds and suffixes. Without jobs it uploads all files."""
    from coserve.cli.output import print_json, print_table

    exported = read_exported(files)
    asked = [(job, body_of(job, model)) for job in exported.jobs]
    needed = {
        body[name]: exported.data_of(job, body[name])
        for job, body in asked
        for name in _FILES
        if name in body
    }
    uploads = [*dict.fromkeys(needed.values())] if asked else exported.data
    if dry_run:
        told = [{"file": str(path)} for path in uploads] + [dict(body) for _, body in asked]
        return print_json(told)
    made: list[dict[str, Any]] = []
    with server.connect() as client:
        for name in sorted({body["model"] for _, body in asked}):
            _check_model(client, name)
        ids = {path: _upload(client, path) for path in uploads}
        made += [{"from": str(path), "id": id} for path, id in ids.items()]
        for job, body in asked:
            own: dict[str, Any] = {name: ids[needed[body[name]]] for name in _FILES if name in body}
            found = client.post("/v1/fine_tuning/jobs", {**body, **own})
            made.append({"from": str(job.get("id")), "id": found["id"]})
    if as_json:
        return print_json(made)
    print_table(("from", "here"), [(one["from"], one["id"]) for one in made], "nothing to bring in")


def read_exported(files: Sequence[Path]) -> Exported:
    """Sorts files into jobs, descriptions of uploads, and data. Raises ConfigError."""
    found = Exported()
    for path in files:
        objects = [*_objects(path)]
        if not objects:
            found.data.append(path)
        for one in objects:
            if one["object"] == _JOB:
                found.jobs.append(one)
            else:
                found.names[str(one.get("id"))] = str(one.get("filename"))
    return found


def body_of(job: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """The body that creates an exported job again. Raises ConfigError for one that cannot be."""
    if not isinstance(job.get("training_file"), str):
        raise ConfigError(f"the job {job.get('id')} has no training_file")
    metadata = {**(job.get("metadata") or {})}
    if len(metadata) < _MOST_METADATA:
        metadata["openai_job"] = str(job.get("id"))
    body = {
        "model": model or job.get("model"),
        "training_file": job["training_file"],
        "validation_file": job.get("validation_file"),
        "suffix": job.get("user_provided_suffix") or job.get("suffix"),
        "seed": job.get("seed"),
        "metadata": metadata,
    }
    method = job.get("method")
    if isinstance(method, Mapping):
        kind = method.get("type")
        if kind not in _METHODS:
            raise ConfigError(
                f"the job {job.get('id')} has the method {kind!r}: there are {', '.join(_METHODS)}"
            )
        body["method"] = {"type": kind, kind: _given(method.get(kind) or {})}
    elif isinstance(job.get("hyperparameters"), Mapping):
        body["hyperparameters"] = _given(job["hyperparameters"])
    return {name: value for name, value in body.items() if value is not None}


def _given(value: Any) -> Any:
    """A value without members that are null, at any depth."""
    if isinstance(value, Mapping):
        return {name: _given(inner) for name, inner in value.items() if inner is not None}
    return [_given(inner) for inner in value] if isinstance(value, list) else value


def _objects(path: Path) -> Iterator[Mapping[str, Any]]:
    """The jobs and files that a JSON file describes; none for data. Raises ConfigError."""
    if path.suffix not in (".json", ".jsonl"):
        return
    with path.open("rb") as file:
        begins = file.read(1 << 16)
    if not any(f'"{kind}"'.encode() in begins for kind in (_JOB, _FILE, _LIST)):
        return
    if path.stat().st_size > _MOST_BYTES:
        return
    for value in _values(path.read_text(errors="replace")):
        if not isinstance(value, dict):
            return
        inner = value.get("data") if value.get("object") == _LIST else [value]
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, dict) and one.get("object") in (_JOB, _FILE):
                yield one


def _values(text: str) -> Iterator[Any]:
    """The value that a text is, or those of its lines; none for what is no JSON."""
    try:
        yield json.loads(text)
        return
    except (ValueError, RecursionError):
        pass
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            return


def _check_model(client: "Client", name: str) -> None:
    """Raises ConfigError for a model that the server does not have."""
    from coserve.cli.client import in_path

    try:
        client.get(f"/v1/models/{in_path(name)}")
    except ServerError as error:
        raise ConfigError(
            f"{str(error).rstrip('.')}: name a base of the server with --model, or let it stand for that one "
            "(model_aliases in its configuration)"
        ) from error


def _upload(client: "Client", path: Path) -> str:
    sent = client.upload("/v1/files", {"purpose": "fine-tune"}, {"file": path})
    return str(sent["id"])
