"""`coserve bench`: the commands. Importing this loads neither torch nor anything that measures."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from coserve.cli.options import check_writable
from coserve.errors import ConfigError

app = typer.Typer(help="Measures this machine, beside other ways to do the same work.", no_args_is_help=True)
Figures = Annotated[Path | None, typer.Option("--json", help="File for all figures.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: a check that everything runs.")]
Only = Annotated[list[str] | None, typer.Option(metavar="GROUP", help="A group of figures; may be repeated.")]
Shape = Annotated[str, typer.Option(help="Name of the model shape.")]
EXTRA: Final = ("h11", "matplotlib", "peft", "psutil")  # what the bench extra installs


@app.callback()
def check_extra() -> None:
    """Measures this machine, beside other ways to do the same work."""
    require(EXTRA)


def require(packages: Sequence[str]) -> None:
    """Raises ConfigError that names the packages of the bench extra that are not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(
            f"`coserve bench` needs {', '.join(missing)}: pip install -e '.[bench]' in a checkout of coserve"
        )


@app.command()
def engine(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Shape = "255m",
    plans: Annotated[
        Path | None, typer.Option(help="File for the training in the co-serving run's plans.")
    ] = None,
    executor: Annotated[
        str,
        typer.Option(help="local; or remote: what steps cost in a process of their own."),
    ] = "local",
    compiled: Annotated[
        bool,
        typer.Option("--compiled", help="Try peers with torch.compile, too (minutes; needs a C++ compiler)."),
    ] = False,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH", help="Interpreter that has llama.cpp or vLLM, a further peer; may be repeated."
        ),
    ] = None,
) -> None:
    """Measures serving, training, and both at once, beside their floors and other programs."""
    check_writable("--json", json_file)
    check_writable("--plans", plans)
    from coserve_benchmarks.engine import run_engine
    from coserve_benchmarks.report import print_report

    print_report(
        run_engine(shape, quick, only or None, json_file, plans, executor, compiled, peer_python or ())
    )


@app.command()
def replicas(json_file: Figures = None, quick: Quick = False, only: Only = None) -> None:
    """Measures two servers behind a router: adapters that are loaded again, a server that dies, a job that is
    handed over, scaling, and the store on either database."""
    check_writable("--json", json_file)
    from coserve_benchmarks.replicas.run import run_replicas
    from coserve_benchmarks.report import print_report

    print_report(run_replicas(quick, only or None, json_file))


@app.command()
def cluster(
    json_file: Figures = None, quick: Quick = False, only: Only = None, shape: Shape = "255m"
) -> None:
    """Measures blocks on local workers: pages over 1 Gbit/s, a worker that dies; models the rest."""
    check_writable("--json", json_file)
    from coserve_benchmarks.clustered.run import run_cluster
    from coserve_benchmarks.report import print_report

    print_report(run_cluster(shape, quick, only or None, json_file))


@app.command()
def server(json_file: Figures = None, quick: Quick = False, only: Only = None, shape: Shape = "255m") -> None:
    """Measures the cost of HTTP beside the engine alone, of pages that watch, and the time to recover from a
    killed engine."""
    check_writable("--json", json_file)
    from coserve_benchmarks.report import print_report
    from coserve_benchmarks.server import run_server

    print_report(run_server(shape, quick, only or None, json_file))


@app.command()
def methods(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Shape = "255m",
    picture: Annotated[
        Path | None, typer.Option(help="File for the loss curves, as SVG or PNG by its ending.")
    ] = None,
) -> None:
    """Measures every adapter method: against its oracle, beside the others in one step, and while it
    learns."""
    check_writable("--json", json_file)
    check_writable("--picture", picture)
    from coserve_benchmarks.methods.curves import draw
    from coserve_benchmarks.methods.run import run_methods
    from coserve_benchmarks.report import print_report

    results = run_methods(shape, quick, only or None, json_file)
    if picture is not None:
        draw(results, picture)
    print_report(results)


@app.command()
def adapters(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Shape = "255m",
    picture: Annotated[
        Path | None,
        typer.Option(help="File for throughput over adapters and batches, as SVG or PNG by its ending."),
    ] = None,
) -> None:
    """Measures many adapters in one step: beside one and none, beside PEFT, training, and paged in from
    disk."""
    check_writable("--json", json_file)
    check_writable("--picture", picture)
    from coserve_benchmarks.adapters.drawing import draw
    from coserve_benchmarks.adapters.run import run_adapters
    from coserve_benchmarks.report import print_report

    results = run_adapters(shape, quick, only or None, json_file)
    if picture is not None and "figure" in results:
        draw(results, picture)
    print_report(results)


@app.command()
def policies(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Annotated[str | None, typer.Option(help="255m, or 19m when --quick.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="Azure LLM trace to replay too."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="CSV or JSONL with texts that requests ask."
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds that requests arrive in, each run.")
    ] = None,
    further: Annotated[
        bool, typer.Option("--further", help="Keep what FILE of --json has of other groups.")
    ] = False,
    server: Annotated[
        bool, typer.Option("--server", help="Replay over HTTP, against a server for each round.")
    ] = False,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated",
            help="On predicted seconds: 220 requests at each load from 10 to 100 % of capacity.",
        ),
    ] = False,
    page: Annotated[Path | None, typer.Option(help="File for the report, as HTML.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="File for the summary picture, as SVG or PNG by its ending.")
    ] = None,
) -> None:
    """Measures every scheduling policy on the papers' traffic and a recorded one, beside alternatives to
    coserve."""
    for flag, path in (("--json", json_file), ("--page", page), ("--picture", picture)):
        check_writable(flag, path)
    if simulated:
        _simulated(json_file, picture, only, trace, further)
        return
    from coserve_benchmarks.policies.figures import draw
    from coserve_benchmarks.policies.page import write_page
    from coserve_benchmarks.policies.run import run_policies
    from coserve_benchmarks.report import print_report

    results = run_policies(shape, quick, only or None, json_file, trace, prompts, seconds, further, server)
    if page is not None:
        write_page(results, page)
    if picture is not None:
        draw(results, picture)
    print_report(results)


def _simulated(
    json_file: Path | None, picture: Path | None, only: list[str] | None, trace: Path | None, further: bool
) -> None:
    from coserve_benchmarks.policies.sheet import draw, render
    from coserve_benchmarks.policies.simulate import run_simulated

    results = run_simulated(only or None, json_file, trace, further)
    if picture is not None:
        draw(results, picture)
    print(render(results))


@app.command()
def memory(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Shape = "255m",
    picture: Annotated[
        Path | None, typer.Option(help="File for the ablation, as SVG or PNG by its ending.")
    ] = None,
) -> None:
    """Measures activations kept for training, the errors of ledger and plan, prefix sharing and quantized
    weights."""
    check_writable("--json", json_file)
    check_writable("--picture", picture)
    from coserve_benchmarks.memory.ablation import draw_ablation
    from coserve_benchmarks.memory.run import run_memory
    from coserve_benchmarks.report import print_report

    results = run_memory(shape, quick, only or None, json_file)
    if picture is not None and "ablation" in results:
        draw_ablation(results, picture)
    print_report(results)


@app.command()
def streamed(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Annotated[
        str | None, typer.Option(help="1.5b where the processor multiplies bfloat16 fast, else 780m.")
    ] = None,
) -> None:
    """Measures a base four times as large as memory, beside peers under the same limit."""
    check_writable("--json", json_file)
    from coserve_benchmarks.report import print_report
    from coserve_benchmarks.streamed.run import run_streamed

    print_report(run_streamed(shape, quick, only or None, json_file))


@app.command()
def split(json_file: Figures = None, quick: Quick = False, only: Only = None, shape: Shape = "255m") -> None:
    """Measures clients of one base executor, beside processes that each have a base of their own."""
    check_writable("--json", json_file)
    from coserve_benchmarks.report import print_report
    from coserve_benchmarks.split.run import run_split

    print_report(run_split(shape, quick, only or None, json_file))


@app.command()
def training(
    json_file: Figures = None, quick: Quick = False, only: Only = None, shape: Shape = "255m"
) -> None:
    """Measures training as a service: the tinker client's methods and steps, losses beside plain ones, and
    reinforcement learning whose sampling and training share steps."""
    require(("tinker",))
    check_writable("--json", json_file)
    from coserve_benchmarks.report import print_report
    from coserve_benchmarks.training.run import run_training

    print_report(run_training(shape, quick, only or None, json_file))


@app.command()
def zoo(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    picture: Annotated[
        Path | None, typer.Option(help="File for the chains, as SVG or PNG by its ending.")
    ] = None,
    depths: Annotated[
        Path | None, typer.Option(help="File for the accuracies of alternatives by depth, SVG or PNG.")
    ] = None,
    loads: Annotated[
        Path | None, typer.Option(help="File for accuracy and adapted answers by load, SVG or PNG.")
    ] = None,
) -> None:
    """Measures twenty applications in a zoo beside twenty separate models, and a model's alternatives."""
    check_writable("--json", json_file)
    check_writable("--picture", picture)
    check_writable("--depths", depths)
    check_writable("--loads", loads)
    from coserve_benchmarks.report import print_report
    from coserve_benchmarks.zoo.run import run_zoo

    print_report(run_zoo(quick, only or None, json_file, picture, depths, loads))


@app.command()
def ranks(json_file: Figures = None, quick: Quick = False, only: Only = None) -> None:
    """Measures one model over several processes, and plans of bypasses between real ones."""
    check_writable("--json", json_file)
    from coserve_benchmarks.ranks.run import run_ranks
    from coserve_benchmarks.report import print_report

    print_report(run_ranks(quick, only or None, json_file))


@app.command()
def models(
    json_file: Figures = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A type of models; all by default. May be given several times.")
    ] = None,
    join: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSON of a run of some types: such runs are joined.",
        ),
    ] = None,
    part: Annotated[
        str, typer.Option(help="One of n parts of the types, such as 2/8, by a run of its own.")
    ] = "1/1",
    hybrid: Annotated[
        bool,
        typer.Option(help="Measure a model with recurrent layers: its steps, training, prompts."),
    ] = False,
    quick: Annotated[bool, typer.Option(help="With --hybrid: a tiny model, for trying it out.")] = False,
) -> None:
    """Builds every type of language models small, and compares answers and training with transformers."""
    check_writable("--json", json_file)
    if hybrid:
        from coserve_benchmarks.models.hybrid import print_hybrid, run_hybrid

        print_hybrid(run_hybrid(quick, json_file))
        return
    from coserve_benchmarks.models.run import join_runs, print_models, run_models

    print_models(join_runs(join, json_file) if join else run_models(only or None, json_file, part))


@app.command()
def draw(
    results: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="File that --json wrote.")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            help="A page of policies (.html), a page with tables (.md), or a picture (.svg, .png)."
        ),
    ],
) -> None:
    """Draws the page or the picture of a finished run from its JSON."""
    check_writable("OUT", out)
    from coserve_benchmarks.redraw import redraw

    redraw(results, out)


@app.command()
def stale(
    folder: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of results; docs/results of the checkout."),
    ] = None,
    mark: Annotated[bool, typer.Option("--mark", help="Say so on the pages that present them.")] = False,
) -> None:
    """Lists committed results beside the commits that have changed what they depend on since."""
    from coserve_benchmarks.history import History
    from coserve_benchmarks.stale import mark as mark_pages
    from coserve_benchmarks.stale import print_standings, standings

    here = Path(__file__).resolve()
    root = here.parents[2]
    folder = folder or root / "docs" / "results"
    if not folder.is_dir():
        raise ConfigError(f"there are no results at {folder}; say where with --folder")
    found = standings(folder, History.around(here))
    print_standings(found)
    if mark:
        for page in mark_pages(root, found):
            print(f"marked {page.relative_to(root)}")
