"""`coserve zoo`: models and adapters stored as shared blocks."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from coserve.cli import zoo_alternatives
from coserve.cli.options import AsJson, ListsAlone, check_writable
from coserve.cli.zoo_options import (
    DEFAULT,
    Folder,
    Name,
    Picture,
    as_builtins,
    open_zoo,
    read_text,
    say_step,
    this_machine,
    without_bars,
)  # fmt: skip
from coserve.errors import ConfigError, ZooError

if TYPE_CHECKING:
    from coserve.zoo.manifest import Application

app = typer.Typer(
    help="Stores models and adapters as shared blocks; `coserve serve --zoo` serves them.",
    cls=ListsAlone,
    no_args_is_help=False,
)
for command in (
    zoo_alternatives.profile,
    zoo_alternatives.stitch,
    zoo_alternatives.prune,
    zoo_alternatives.approximate,
    zoo_alternatives.depths,
):
    app.command()(command)
EMBEDDED: Final = "coserve-tiny"
Threshold = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Similarity from which components are equivalent."),
]


@app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|ADAPTER",
            help=f"Folder or hub name of a model, folder of an adapter, or {EMBEDDED}.",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Its name in the zoo; by default the folder's.")] = None,
    parent: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The model in the zoo that a full fine-tune was made of, or an adapter is for.",
        ),
    ] = None,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate/--no-evaluate", help="Compare a full fine-tune with its parent at once."),
    ] = True,
    zoo: Folder = DEFAULT,
) -> None:
    """Adds a model or an adapter; makes the zoo if there is none. Weights that are there already are not
    stored again."""
    from coserve.core.size import show_size
    from coserve.zoo.adding import add as add_to
    from coserve.zoo.equivalence import evaluate as measure
    from coserve.zoo.store import Zoo

    without_bars()
    folder, default = _source(source)
    opened = Zoo.create(zoo)
    before = opened.nbytes(opened.applications())
    with _Progress("tensors") as told:
        added = add_to(opened, folder, name or default, parent, told)
    more = opened.nbytes(opened.applications()) - before
    print(
        f"{added.name}: {added.kind}{f' of {added.parent}' if added.parent else ''}, {show_size(more)} more"
    )
    if evaluate and added.parent and not added.is_adapter and added.tokenizer:
        _say_similar(measure(opened, added.parent, added.name), added.parent, added.name)


@app.command("list")
def list_(zoo: Folder = DEFAULT, as_json: AsJson = False) -> None:
    """Lists what is in the zoo, and the bytes that it takes there and would take beside it."""
    from dataclasses import asdict

    from coserve.cli.output import print_json, print_table
    from coserve.core.size import show_size
    from coserve.zoo.figures import storage

    opened = open_zoo(zoo)
    applications = opened.applications()
    bytes_ = storage(opened, applications)
    alternatives = opened.alternatives.all()
    if as_json:
        print_json({
            "applications": list(map(_told, applications.values())), "storage": asdict(bytes_),
            "alternatives": as_builtins(list(alternatives.values())),
        })  # fmt: skip
        return
    rows = [
        [one.name, one.method.lower() or one.kind, one.parent, str(one.layers), str(one.width)]
        for one in applications.values()
    ]
    rows += [[one.name, one.kind, ", ".join(one.models), "", ""] for one in alternatives.values()]
    print_table(("name", "kind", "parent", "layers", "width"), rows, "the zoo is empty")
    if rows:
        print(
            f"{show_size(bytes_.exact)} instead of {show_size(bytes_.separate)} as separate models; "
            f"{show_size(bytes_.with_alternatives)} where equivalents stand in for full fine-tunes"
        )


@app.command()
def show(
    name: Annotated[
        list[str] | None, typer.Argument(help="Names, with what they belong to; else all.", metavar="NAME")
    ] = None,
    picture: Picture = None,
    threshold: Threshold = 0.98,
    zoo: Folder = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Shows the chains and the blocks that they are cut into: E embedding, A attention, F feed-forward, H
    head."""
    check_writable("--picture", picture)
    from coserve.cli.output import print_json, print_table
    from coserve.zoo.figures import blocks_of, labels_of
    from coserve.zoo.partition import distinct
    from coserve.zoo.picture import draw_chains, rows_of
    from coserve.zoo.profile import block_profile, profiled_components, profiles

    opened = open_zoo(zoo)
    applications = opened.applications()
    blocks, labels = blocks_of(opened, applications, threshold), labels_of(applications)
    measured, refused = profiles(opened, applications, this_machine())
    known = profiled_components(measured.values())
    for one in name or ():
        opened.application(one)
    shown = {one: own for one, own in blocks.items() if not name or one in name}
    for reason in refused:
        print(reason, file=sys.stderr)
    if picture is not None:
        draw_chains(shown, labels, picture, threshold)
    if as_json:
        print_json({
            one: [
                {"id": b.id, "start": b.start, "stop": b.stop, "users": sorted(b.users),
                 "equivalents": sorted(b.equivalents), "profile": as_builtins(block_profile(b.keys, known))}
                for b in own
            ]
            for one, own in shown.items()
        })  # fmt: skip
        return
    print_table(("name", "blocks", "shared"), list(rows_of(shown, labels)), "the zoo is empty")
    print(f"{len(distinct(shown))} blocks in {len(shown)} chains")
    ladders = opened.alternatives.all().values()
    for columns, rows in (
        zoo_alternatives.profile_rows(shown, labels, known),
        zoo_alternatives.ladder_rows(ladders, {one: applications[one] for one in shown}),
    ):
        if rows:
            print_table(columns, rows, "")


@app.command()
def evaluate(
    name: Name,
    partner: Annotated[
        str | None, typer.Option("--with", metavar="NAME", help="Another model; by default the parent.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="File with the text; else a built-in one."
        ),
    ] = None,
    picture: Picture = None,
    zoo: Folder = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Measures how similar the components of two models are: the vocabulary distributions behind each, on
    the same text."""
    check_writable("--picture", picture)
    from coserve.cli.output import print_json
    from coserve.zoo.equivalence import evaluate as measure
    from coserve.zoo.picture import draw_similarity
    from coserve.zoo.text import TEXT

    without_bars()
    opened = open_zoo(zoo)
    other = partner or opened.application(name).parent
    if not other:
        raise ConfigError(f"{name} has no parent: say with which model to compare it (--with)")
    found = measure(opened, name, other, TEXT if text is None else read_text(text))
    if picture is not None:
        draw_similarity(found.layers, name, other, picture)
    if as_json:
        print_json(as_builtins(found))
    else:
        _say_similar(found, name, other)


@app.command()
def verify(zoo: Folder = DEFAULT) -> None:
    """Reads everything in the zoo, and says what is damaged or missing."""
    from coserve.zoo.equivalence import damaged_measurements
    from coserve.zoo.profile import damaged_profiles

    opened = open_zoo(zoo)
    problems = [*opened.verify(), *damaged_measurements(opened), *damaged_profiles(opened)]
    if not problems:
        print(f"{len(opened.names())} applications are whole")
        return
    for problem in problems:
        print(problem)
    raise ZooError(f"the zoo at {zoo} has {len(problems)} problems")


@app.command()
def gc(zoo: Folder = DEFAULT) -> None:
    """Frees what no application needs any more; beside a damaged manifest, whose needs are not known, it
    leaves what that may need, and says so."""
    from coserve.core.size import show_size

    freed = open_zoo(zoo).gc()
    for sentence in freed.left:
        print(sentence, file=sys.stderr)
    print(f"removed {freed.files} files, {show_size(freed.nbytes)}")


@app.command()
def remove(name: Name, zoo: Folder = DEFAULT) -> None:
    """Removes a model, an adapter or an alternative. `gc` then frees what only it had."""
    open_zoo(zoo).remove(name)
    print(f"removed {name}")


@app.command("export")
def export_(
    name: Name,
    folder: Annotated[Path, typer.Argument(help="Folder that is not there yet.", metavar="FOLDER")],
    zoo: Folder = DEFAULT,
) -> None:
    """Writes a model's or adapter's folder, byte for byte as it was added."""
    from coserve.zoo.export import export

    export(open_zoo(zoo), name, folder)
    print(folder)


@app.command()
def finetune(
    model: Annotated[
        str, typer.Argument(help="Name of the model in the zoo that is copied.", metavar="MODEL")
    ],
    file: Annotated[
        Path, typer.Argument(exists=True, readable=True, help="Examples, as `coserve finetune`.")
    ],
    name: Annotated[str, typer.Option(help="Name of the result in the zoo.")],
    block: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BLOCK",
            help="What trains: E, H, A3, F3, L3 (both) or a range as L2-4; may be repeated. Else everything.",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Times the data is gone through.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of one optimizer step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-5,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens of an example; more are cut.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps at most.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same batches.")] = 0,
    zoo: Folder = DEFAULT,
) -> None:
    """Trains a copy of a model's own weights, all or those of chosen blocks, and adds it to the zoo."""
    from coserve.zoo.equivalence import evaluate as measure
    from coserve.zoo.finetune import FullFineTuning
    from coserve.zoo.finetune import finetune as train

    settings = FullFineTuning(
        tuple(block or ()), epochs, batch_size, learning_rate, max_length, max_steps, seed
    )
    without_bars()
    opened = open_zoo(zoo)
    train(opened, model, file, name, settings, say_step)
    _say_similar(measure(opened, model, name), model, name)


@app.command(hidden=True)
def views(model: Annotated[str | None, typer.Argument(metavar="NAME")] = None, zoo: Folder = DEFAULT) -> None:
    """Prints what a server of the zoo serves, as JSON, once its folders are there."""
    from coserve.cli.output import print_json
    from coserve.zoo.views import serve_from

    served = serve_from(open_zoo(zoo), model)
    print_json({
        "name": served.name, "model": str(served.model.absolute()), "left_out": dict(served.left_out),
        "adapters": {name: str(folder.absolute()) for name, folder in served.adapters.items()},
        "chains": {
            name: {chain: str((folder and folder.absolute()) or "") for chain, folder in own.items()}
            for name, own in served.chains.items()
        },
        "bases": {name: str(folder.absolute()) for name, folder in served.bases.items()},
        "adapter_bases": dict(served.adapter_bases),
        "stitched": {
            name: {"folder": str(chain.folder.absolute()), "first": chain.first, "second": chain.second}
            for name, chain in served.stitched.items()
        },
    })  # fmt: skip


def _source(source: str) -> tuple[Path, str]:
    """The folder of what is to be added, and the name it has by default."""
    if Path(source).is_dir():
        return Path(source), Path(source).resolve().name
    if source == EMBEDDED:
        from coserve import tiny

        return tiny.path(), EMBEDDED
    from huggingface_hub import snapshot_download

    from coserve.model.hub import check_hub

    check_hub(source)
    try:
        found = snapshot_download(
            source, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
        )
    except (OSError, ValueError) as error:
        raise ZooError(
            f"{source!r} is no folder, and no name on the hub that can be reached: {error}"
        ) from error
    return Path(found), source.rpartition("/")[2]


class _Progress:
    """Context that shows how much of something is done, at a terminal."""

    def __init__(self, what: str) -> None:
        self._what, self._is_shown = what, sys.stderr.isatty()

    def __enter__(self) -> Any:
        return self._tell

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            print(file=sys.stderr)

    def _tell(self, done: int, count: int) -> None:
        if self._is_shown:
            print(f"\r{done} of {count} {self._what}", end="", file=sys.stderr, flush=True)


def _told(one: "Application") -> dict[str, Any]:
    return {
        "name": one.name, "kind": one.kind, "method": one.method or None, "parent": one.parent or None,
        "layers": one.layers, "width": one.width, "vocabulary": one.vocabulary, "digest": one.digest,
    }  # fmt: skip


def _say_similar(found: Any, one: str, other: str) -> None:
    """One line about a measurement."""
    from coserve.zoo.partition import THRESHOLD

    values = [group[-1] for group in found.groups]
    equivalent = sum(value >= THRESHOLD for value in values)
    print(
        f"{one} and {other}: {equivalent} of {len(values)} components are equivalent (similarity "
        f"{min(values):.4f} to {max(values):.4f} on {found.tokens} tokens)"
    )
