"""`coserve adapters`: lists, imports, exports, checks, merges and deletes adapters."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.adapters.folder import CONFIG, WEIGHTS, unreadable
from coserve.cli.complete import complete_adapters
from coserve.cli.options import AdapterName, AsJson, ListsAlone, ServerOptions, unfolded
from coserve.errors import ConfigError

if TYPE_CHECKING:
    from coserve.cli.client import Client

app = typer.Typer(help="Adapters; alone it lists them.", cls=ListsAlone)
LocalAdapter = Annotated[
    str,
    typer.Argument(
        help="A PEFT adapter's folder, or the name of one on the server.",
        autocompletion=complete_adapters,
    ),
]
BaseModel = Annotated[
    str | None, typer.Option(help="Folder or hub name of the base; the embedded one by default.")
]


@app.command("list")
@unfolded
def list_adapters(server: ServerOptions, as_json: AsJson = False) -> None:
    """The adapters that you may use. Checkpoints of jobs are listed by `coserve jobs checkpoints`."""
    from coserve.cli.output import moment, print_json, print_table

    with server.connect() as client:
        found = [model for model in client.get("/v1/models")["data"] if model.get("parent")]
    if as_json:
        return print_json(found)
    rows = [(one["id"], one["parent"], one["owned_by"], moment(one["created"]), _place(one)) for one in found]
    print_table(("adapter", "parent", "owner", "created", "in"), rows, "no adapters yet")
    for one in found:
        if one.get("warning"):
            print(f"{one['id']}: {one['warning']}")


@app.command("import")
@unfolded
def import_adapter(
    server: ServerOptions,
    source: Annotated[
        str,
        typer.Argument(
            help="A PEFT adapter's folder, a zip file of it, a hub name (owner/name or owner/name@revision), "
            "or the URL of a folder: https://, s3://, gs://, az://.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="What to call it; by default the last part of where it comes from.")
    ] = None,
    sha256: Annotated[
        str | None, typer.Option("--sha256", help="Refuse other weights: the SHA-256 of their file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copies a PEFT adapter to the server, where it stays. Only its JSON and its safetensors are sent. One
    from elsewhere is fetched by this command first, with your own access; a .bin file is rewritten as
    safetensors by a process with limits."""
    from coserve.cli.fetching import fetch_adapter, is_elsewhere

    if not is_elsewhere(source):
        path = Path(source)
        if not path.is_dir() and not _is_archive(path):
            raise ConfigError(f"{source!r} is no folder, zip file, hub name or URL of an adapter")
        if sha256 is not None:
            raise ConfigError("--sha256 is for adapters from elsewhere")
        own = path.resolve()
        named = name or (own.stem if _is_archive(path) else own.name)
        return _send(server, path, named, {}, as_json)
    with tempfile.TemporaryDirectory(prefix="coserve-adapter-") as scratch:
        found = fetch_adapter(source, Path(scratch, "adapter"), sha256)
        came = {"source": source, "sha256": found.sha256, "revision": found.revision}
        named = name or source.rstrip("/").rpartition("/")[2].partition("@")[0]
        _send(server, found.folder, named, came, as_json)


def _send(server: ServerOptions, path: Path, name: str, came: dict[str, str | None], as_json: bool) -> None:
    """Sends a folder, or a zip file of one, to the server; says where it `came` from."""
    from coserve.cli.output import print_json

    files = {"config": path / CONFIG, "weights": path / WEIGHTS}
    if _is_archive(path):
        files = {"archive": path}
    for file in files.values():
        if not file.is_file():
            raise unreadable(file, f"there is no {file.name}; a PEFT adapter's folder is needed")
    with server.connect() as client:
        found = client.upload("/v1/adapters", {"name": name}, files)
    if as_json:
        return print_json(found | came)
    if came:
        commit = f" at {came['revision']}" if came["revision"] else ""
        print(f"fetched {came['source']}{commit}\n  weights' SHA-256 {came['sha256']}")
    print(f"imported {found['id']}\n  coserve chat --model {found['id']}")


def _is_archive(path: Path) -> bool:
    return path.suffix.lower() == ".zip" and path.is_file()


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(exists=True, help="An adapter_model.bin, or its folder.")],
    to: Annotated[
        Path | None,
        typer.Argument(help="Folder to write; by default beside the old one, with -safetensors in its name."),
    ] = None,
) -> None:
    """Rewrites a PEFT adapter's .bin file, a pickle, as safetensors. It is read in a process with limits that
    makes tensors of it and runs nothing else. Needs no server."""
    from coserve.adapters.convert import convert_adapter

    folder, count = convert_adapter(file, to)
    print(f"wrote {count} tensors to {folder}\n  coserve adapters import {folder}")


@app.command()
@unfolded
def export(
    server: ServerOptions,
    name: AdapterName,
    to: Annotated[
        Path, typer.Argument(help="Folder to write, which must not exist or be empty; or a new .zip file.")
    ],
    as_json: AsJson = False,
) -> None:
    """Downloads an adapter or a checkpoint in PEFT's format, into a folder or a zip file."""
    from coserve.cli.client import in_path
    from coserve.cli.output import print_json

    _check_empty(to)
    with server.connect() as client:
        if to.suffix.lower() == ".zip":
            size = client.download(f"/v1/adapters/{in_path(name)}/archive", to)
        else:
            size = _download(client, name, to)
    if as_json:
        return print_json({"id": name, "path": str(to), "bytes": size})
    print(f"{name}: {size / 1e6:.1f} MB in {to}")


@app.command()
@unfolded
def delete(
    server: ServerOptions,
    name: AdapterName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Deletes an adapter from the server for good, once the answers that use it have ended."""
    from coserve.cli.client import in_path
    from coserve.cli.output import print_json

    if not yes:
        typer.confirm(f"Delete {name} for good?", abort=True, err=True)
    with server.connect() as client:
        found = client.delete(f"/v1/models/{in_path(name)}")
    if as_json:
        return print_json(found)
    print(f"deleted {name}")


def _add_pin(verb: str, send: Callable[["Client", str], dict[str, Any]], help: str) -> None:
    @app.command(verb, help=help)
    @unfolded
    def tell(server: ServerOptions, name: AdapterName, as_json: AsJson = False) -> None:
        from coserve.cli.client import in_path
        from coserve.cli.output import print_json

        with server.connect() as client:
            found = send(client, f"/v1/adapters/{in_path(name)}/pin")
        if as_json:
            return print_json(found)
        print(f"{'pinned' if found['pinned'] else 'unpinned'} {name}")


_add_pin(
    "pin",
    lambda client, path: client.post(path),
    "Keeps an adapter in the server's memory. Others come from disk when they are asked for.",
)
_add_pin(
    "unpin",
    lambda client, path: client.delete(path),
    "Lets an adapter leave the server's memory when others need its room.",
)


@app.command()
@unfolded
def merge(
    adapter: LocalAdapter,
    to: Annotated[
        Path,
        typer.Argument(help="Folder for the model, which must not exist or be empty; or a new .gguf file."),
    ],
    server: ServerOptions,
    model: BaseModel = None,
    outtype: Annotated[
        str,
        typer.Option(help="Type of a .gguf file's matrices: auto (the model's own), f32, f16, bf16, q8_0."),
    ] = "auto",
    weights_only: Annotated[bool, typer.Option(help="Write a .gguf file without the tokenizer.")] = False,
) -> None:
    """Adds an adapter to its base's weights and writes a model of its own: a folder, or a GGUF file for
    llama.cpp. Needs no server for a folder."""
    if to.suffix.lower() != ".gguf":
        if weights_only or outtype != "auto":
            raise ConfigError("--outtype and --weights-only are for .gguf files")
        _check_empty(to)
    with _local_folder(server, adapter) as folder:
        if to.suffix.lower() == ".gguf":
            from coserve.adapters.gguf_model import write_merged_gguf

            count = write_merged_gguf(_base_of(model), folder, to, outtype, weights_only)
            print(f"merged {count} tensors into {to}\n  llama-cli -m {to}")
            return
        from coserve.adapters.merge import merge_adapter

        merge_adapter(_base_of(model), folder, to)
    print(f"merged into {to}\n  coserve serve {to}")


@app.command()
@unfolded
def gguf(
    adapter: LocalAdapter,
    to: Annotated[Path, typer.Argument(help="File to write; it must not exist.")],
    server: ServerOptions,
    model: BaseModel = None,
) -> None:
    """Writes a LoRA adapter as GGUF, for llama.cpp. Of the base only its configuration is read. Needs
    no server for a folder."""
    with _local_folder(server, adapter) as folder:
        from coserve.adapters.gguf_file import write_gguf
        from coserve.model.foreign import read_config

        count = write_gguf(folder, read_config(_base_of(model)), to)
    print(f"wrote {count} tensors to {to}\n  llama-cli -m base.gguf --lora {to}")


@app.command()
@unfolded
def check(
    adapter: LocalAdapter,
    server: ServerOptions,
    model: BaseModel = None,
    as_json: AsJson = False,
) -> None:
    """Looks whether coserve can load an adapter, and whether PEFT and vLLM read it alike; exit status 1 where
    one does not."""
    import dataclasses

    from coserve.cli.output import print_json

    with _local_folder(server, adapter) as folder:
        from coserve.adapters.elsewhere import check_adapter

        reports = check_adapter(folder, _base_of(model))
    if as_json:
        print_json([dataclasses.asdict(report) for report in reports])
    else:
        for report in reports:
            verdict = "does not read it" if report.problems else "reads it"
            print(f"{report.program} {verdict}{''.join(f', {note}' for note in report.notes)}")
            for problem in report.problems:
                print(f"  it {problem}")
    if any(report.problems for report in reports):
        raise typer.Exit(1)


def _place(model: dict[str, Any]) -> str:
    """Location of an adapter (disk, memory), and whether it is pinned there."""
    return f"{model.get('location') or '-'}{', pinned' if model.get('pinned') else ''}"


@contextmanager
def _local_folder(server: ServerOptions, adapter: str) -> Iterator[Path]:
    """The folder of an adapter: the given one, or a temporary one with the files of the server's."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    folder = Path(adapter)
    if folder.is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "adapter")
        with server.connect() as client:
            _download(client, adapter, folder)
        yield folder


def _base_of(model: str | None) -> str:
    from coserve import tiny

    return model or str(tiny.path())


def _download(client: "Client", name: str, to: Path) -> int:
    """Downloads an adapter's files into a folder; returns their bytes."""
    from coserve.cli.client import in_path

    parts = (("config", CONFIG), ("weights", WEIGHTS))
    return sum(client.download(f"/v1/adapters/{in_path(name)}/{part}", to / file) for part, file in parts)


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already: choose a folder that is not, or an empty one")
