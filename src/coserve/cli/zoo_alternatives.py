"""`coserve zoo profile`, `stitch`, `prune`, `approximate` and `depths`: seconds of blocks, and their
stand-ins."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coserve.cli.options import AsJson, check_writable, unfolded
from coserve.cli.zoo_options import (
    DEFAULT,
    Folder,
    Picture,
    as_builtins,
    open_zoo,
    read_text,
    say_step,
    this_machine,
    without_bars,
)  # fmt: skip
from coserve.zoo.alternatives import Criterion

if TYPE_CHECKING:
    from coserve.zoo.alternatives import Fidelity, StoredAlternative
    from coserve.zoo.distilling import DistillationSettings, OnStep
    from coserve.zoo.manifest import Application
    from coserve.zoo.partition import ChainBlock
    from coserve.zoo.profile import ComponentProfile, Profile

Model = Annotated[str, typer.Argument(help="Name of a model in the zoo.", metavar="MODEL")]
Text = Annotated[
    Path,
    typer.Option(
        exists=True, dir_okay=False, readable=True,
        help="File with the text; the last fifth of it is held out, to judge by.",
    ),
]  # fmt: skip
NewName = Annotated[str | None, typer.Option("--name", help="Its name in the zoo.")]
Window = Annotated[int, typer.Option(min=2, help="Tokens of a window.")]
Share = Annotated[float, typer.Option(help="Share of heads and neurons that is removed.")]
By = Annotated[
    Criterion,
    typer.Option("--criterion", help="Importance of a weight: |w · dL/dw|, or w²."),
]


@dataclass(frozen=True, slots=True)
class AlternativeOptions:
    """Options of the commands that train an alternative and add it to the zoo."""

    text: Text
    name: NewName = None
    epochs: Annotated[int, typer.Option(min=1, help="Times the text is gone through, at each point.")] = 2
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of one optimizer step.")] = 8
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Of AdamW, at the start.")] = 1e-3
    window: Window = 64
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps at most, of all epochs and points together.")
    ] = None
    seed: Annotated[int, typer.Option(help="The same seed, the same result.")] = 0
    zoo: Folder = DEFAULT
    as_json: AsJson = False

    @property
    def settings(self) -> "DistillationSettings":
        """The settings of training."""
        from coserve.zoo.distilling import DistillationSettings

        return DistillationSettings(
            self.epochs, self.batch_size, self.learning_rate, self.window, self.max_steps, self.seed
        )

    @property
    def on_step(self) -> "OnStep":
        """Prints a line about a step of training; with `--json` nothing, as JSON stands alone."""
        return _quiet if self.as_json else say_step


def profile(
    model: Model,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences of one pass; may be repeated.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of each sequence.")] = 32,
    zoo: Folder = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Measures seconds by batch size, seconds of loading and bytes of each component of a model, and stores
    them with the machine; `show` adds them up for blocks."""
    from coserve.cli.output import print_json, print_table
    from coserve.zoo.chain import label
    from coserve.zoo.profile import BATCHES
    from coserve.zoo.profile import profile as measure

    without_bars()
    opened = open_zoo(zoo)
    found = measure(opened, model, this_machine(), batch or BATCHES, tokens)
    if as_json:
        print_json(as_builtins(found))
        return
    chain = opened.application(model).chain
    rows = [
        [label(chain, place), *_cells(one.nbytes, one.load_seconds, one.seconds)]
        for place, one in enumerate(found.components)
    ]
    print_table(("component", "size", "load", *_of_sizes(found.batches)), rows, "")
    print(f"milliseconds of passes of that many sequences of {tokens} tokens, on {found.machine}")


@unfolded
def stitch(
    first: Annotated[str, typer.Argument(help="Model that chains begin in.", metavar="SMALL")],
    second: Annotated[str, typer.Argument(help="Model that they go on in.", metavar="LARGE")],
    options: AlternativeOptions,
    layer: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Layers of SMALL in front of the stitch; may be repeated. Else all."),
    ] = None,
) -> None:
    """Trains a stitching block, one linear for all points between two models of any widths, against the
    larger one's vocabulary distribution, and adds it to the zoo. LARGE may be the smaller one: then chains
    begin in the large model and end in the small one."""
    from coserve.cli.output import print_json, print_table
    from coserve.zoo.alternatives import Stitching
    from coserve.zoo.stitching import stitch as train

    settings = options.settings
    without_bars()
    opened, content = open_zoo(options.zoo), read_text(options.text)
    found = train(opened, first, second, content, options.name, layer or (), settings, options.on_step)
    if options.as_json:
        print_json(as_builtins(found))
        return
    made = found.made
    assert isinstance(made, Stitching)
    widths = tuple(opened.application(one).width for one in (first, second))
    rows = [
        [
            str(widths),
            f"{point.layers} of {first}",
            f"{point.enters + 1} of {second}",
            *_judged(point.fidelity),
        ]
        for point in made.points
    ]
    smaller = second if made.teacher == first else first
    rows.append([f"{smaller} alone", "", "", *_judged(made.alone)])
    print_table(("stitching block", "behind layer", "goes on at", *_JUDGED), rows, "")
    print(
        f"{found.name}: {made.steps} steps in {made.seconds:.0f} s; compared with {made.teacher} on held-out "
        "text"
    )


@unfolded
def prune(
    model: Model,
    block: Annotated[
        str,
        typer.Argument(help="What becomes smaller: A3, F3, L3 (both) or a range as L2-4.", metavar="BLOCK"),
    ],
    options: AlternativeOptions,
    share: Share = 0.5,
    criterion: By = Criterion.TAYLOR,
    rank: Annotated[int, typer.Option(min=1, help="Of the low-rank factors that recover it.")] = 8,
) -> None:
    """Makes a surrogate of a block: removes heads and neurons, recovers it with low-rank factors, and adds it
    to the zoo."""
    from coserve.cli.output import print_json, print_table
    from coserve.core.size import show_size
    from coserve.zoo.alternatives import Pruning
    from coserve.zoo.surrogates import make_surrogate

    settings = options.settings
    without_bars()
    found = make_surrogate(
        open_zoo(options.zoo),
        model,
        block,
        read_text(options.text),
        this_machine(),
        options.name,
        share,
        criterion,
        rank,
        settings,
        options.on_step,
    )
    if options.as_json:
        print_json(as_builtins(found))
        return
    made = found.made
    assert isinstance(made, Pruning)
    (before, after), (slow, fast) = made.nbytes, made.seconds
    row = [
        block, f"{1 - after / before:.1%}", f"{made.similarity:.4f}", f"{made.before.similarity:.4f}",
        f"{made.after.similarity:.4f}", show_size(before), show_size(after), f"{1000 * slow:.3f} ms",
        f"{1000 * fast:.3f} ms", f"{slow / fast:.2f} ×",
    ]  # fmt: skip
    columns = (
        "block", "pruned", "behind it", "at the end, pruned", "and recovered", "size", "surrogate", "time",
        "surrogate", "speedup",
    )  # fmt: skip
    print_table(columns, [row], "")
    print(
        f"{found.name}: {made.steps} steps; cosine similarities with {model} on held-out text, on "
        f"{made.machine}"
    )


def approximate(
    model: Annotated[str, typer.Argument(help="Name of a full fine-tune in the zoo.", metavar="MODEL")],
    text: Text,
    name: NewName = None,
    chains: Annotated[int, typer.Option(min=1, help="Most chains that are made.")] = 4,
    least: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Similarity that a chain needs with the model.")
    ] = 0.9,
    threshold: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Similarity from which components are equivalent.")
    ] = 0.98,
    window: Window = 64,
    zoo: Folder = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Makes approximate chains of a full fine-tune, with its foundation's components in place of equivalent
    ones, judges each as a whole, and allows a server to take them for requests that say `adaptive`. `remove`
    takes that back."""
    from coserve.cli.output import print_json, print_table
    from coserve.zoo.ladders import make_ladder

    without_bars()
    opened = open_zoo(zoo)
    found = make_ladder(opened, model, read_text(text), name, chains, least, threshold, window)
    if as_json:
        print_json(as_builtins(found))
        return
    columns, rows = ladder_rows([found], opened.applications())
    print_table(columns, rows, "")
    print(f"{found.name}: compared with {model} on held-out text")


def depths(
    model: Model,
    text: Text,
    partner: Annotated[
        str | None,
        typer.Option(
            "--with", metavar="NAME", help="Model of the same shape whose layers stand in; else none."
        ),
    ] = None,
    count: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Layers of an alternative; may be repeated. Else 1, 2 and 4."),
    ] = None,
    share: Share = 0.5,
    criterion: By = Criterion.TAYLOR,
    window: Window = 64,
    picture: Picture = None,
    zoo: Folder = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Measures how right a model is with each alternative at each depth: another model's layers, pruned ones,
    and stitching blocks of the zoo."""
    check_writable("--picture", picture)
    from coserve.cli.output import print_json, print_table
    from coserve.zoo.depths import measure_depths
    from coserve.zoo.picture import draw_depths

    without_bars()
    found = measure_depths(
        open_zoo(zoo), model, read_text(text), partner, count or (), share, criterion, window
    )
    if picture is not None:
        draw_depths(found.accuracies(), found.own.accuracy, model, picture)
    if as_json:
        print_json(as_builtins(found))
        return
    rows = [["none", "", *_judged(found.own)]]
    for name, own in found.alternatives.items():
        rows += [[name, str(depth.layers), *_judged(depth.fidelity)] for depth in own]
    print_table(("alternative", "layers in front", *_JUDGED), rows, "")


def profile_rows(
    blocks: Mapping[str, Sequence["ChainBlock"]],
    labels: Mapping[str, Sequence[str]],
    known: Mapping[str, tuple["Profile", "ComponentProfile"]],
) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of a table of the blocks that were measured."""
    from coserve.zoo.picture import title_of
    from coserve.zoo.profile import block_profile

    found = [
        (name, title_of(block, labels[name]), own)
        for name, chain in blocks.items()
        for block in chain
        if (own := block_profile(block.keys, known)) is not None
    ]
    sizes = sorted({size for _, _, own in found for size in own.seconds})
    rows = [
        [name, title, *_cells(own.nbytes, own.load_seconds, (own.seconds.get(size) for size in sizes))]
        for name, title, own in found
    ]
    return ["name", "block", "size", "load", *_of_sizes(sizes)], rows


def ladder_rows(
    alternatives: Iterable["StoredAlternative"], applications: Mapping[str, "Application"]
) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of a table of approximate chains, below the exact ones; those of applications that
    are not given are left out."""
    from coserve.core.size import show_size
    from coserve.zoo.alternatives import Ladder
    from coserve.zoo.chain import label

    rows: list[list[str]] = []
    for one in alternatives:
        if isinstance(one.made, Ladder) and one.made.model in applications:
            chain = applications[one.made.model].chain
            rows.append([one.made.model, "", show_size(one.made.nbytes), *_judged(one.made.own)])
            for own in one.made.chains:
                parts = " ".join(label(chain, place) for place in own.places)
                rows.append([own.name, parts, show_size(own.nbytes), *_judged(own.fidelity)])
    return ["chain", "of the foundation", "own weights", *_JUDGED], rows


_JUDGED = ("similarity", "agreement", "accuracy", "loss")


def _judged(found: "Fidelity") -> list[str]:
    return [
        f"{found.similarity:.4f}", f"{found.agreement:.4f}", f"{found.accuracy:.4f}", f"{found.loss:.3f}"
    ]  # fmt: skip


def _cells(nbytes: int, load: float, seconds: Iterable[float | None]) -> Iterator[str]:
    """Bytes and seconds in a table: milliseconds."""
    from coserve.core.size import show_size

    yield show_size(nbytes)
    yield f"{1000 * load:.2f}"
    yield from ("" if one is None else f"{1000 * one:.2f}" for one in seconds)


def _of_sizes(sizes: Iterable[int]) -> list[str]:
    return [f"{size} seq." for size in sizes]


def _quiet(step: int, steps: int, loss: float) -> None:
    """Says nothing: JSON stands alone."""
