"""`coserve plan`: the memory that a model will take, before it is loaded."""

import gc
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.options import AsJson, check_writable
from coserve.config import MOST_RANKS
from coserve.core.checkout import measured_code
from coserve.core.compact import compact_json
from coserve.errors import ConfigError

if TYPE_CHECKING:
    from coserve.plan.rows import PlanRequest, Recipes
    from coserve.plan.subject import Subject
    from coserve.train.save_policy import SavePolicySetting

_COLUMNS = ("weights", "cache", "optimizer", "no_grad", "activations", "backward", "total")


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A model's folder, a configuration of transformers (a file, or JSON), a bench shape such as "
            "255m, or a kind of model such as gpt2."
        ),
    ],
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD[:OPTIONS]",
            help="An adapter, such as lora:rank=16,targets=q_proj+v_proj; may be repeated. Else all methods, "
            "or lora where they are measured.",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sequences at once; may be repeated, to compare. 4, or 1 where measured."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each; 512, or 128 where they are measured.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")] = "auto",
    keep: Annotated[
        str,
        typer.Option(
            help="Activations kept for backward: inputs, pruned, everything, or bytes such as 500MB."
        ),
    ] = "inputs",
    cache_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the engine's cache holds.")] = 32768,
    memory: Annotated[str, typer.Option(help="The budget, as 6GiB, a share, or auto.")] = "auto",
    base_memory: Annotated[
        str, typer.Option(help="Of that, for the base's weights, as in `coserve serve`; auto, or a size.")
    ] = "auto",
    host_memory: Annotated[
        str,
        typer.Option(help="Beside a GPU, the host's memory for what exceeds that, as in `coserve serve`."),
    ] = "auto",
    loss: Annotated[
        str, typer.Option(help="What plain torch goes back from: labels, or the sum of all logits.")
    ] = "labels",
    device: Annotated[
        str, typer.Option(help="Where the engine is, and where it is measured: cpu, or cuda, cuda:1, ...")
    ] = "cpu",
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Run it all in fresh processes, and compare; some 20 s for each row."),
    ] = False,
    activations: Annotated[
        bool,
        typer.Option(
            "--activations", help="Instead, tensor by tensor, which activations of a row are kept, and why."
        ),
    ] = False,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=2, max=MOST_RANKS, help="Instead, how an adapter is cut over so many ranks."),
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=MOST_RANKS,
            help="Instead, what each of so many stages holds; with --tensor-parallel, one of its ranks.",
        ),
    ] = None,
    link: Annotated[
        str,
        typer.Option(
            help="Between ranks: nvlink4, pcie5, infiniband, ethernet, processes (of two cores), or measured "
            "between processes of this machine."
        ),
    ] = "nvlink4",
    executor: Annotated[
        bool,
        typer.Option(
            "--executor",
            help="With --tensor-parallel: instead, what placements of a `coserve executor` over ranks cost.",
        ),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="File for a picture, SVG or PNG by its ending.")] = None,
    as_json: AsJson = False,
) -> None:
    """Says how much memory answers, full fine-tuning and adapters will take, before anything is loaded.

    Compares plain torch with coserve's engine. There are no formulas: the programs run on tensors without
    data, and every allocation is counted.
    """
    check_writable("--plot", plot)
    subject = _subject(model, dtype)
    if executor and (tensor_parallel is None or pipeline_parallel is not None):
        raise ConfigError("--executor is for --tensor-parallel alone: one rank has one placement")
    if tensor_parallel is not None and pipeline_parallel is None:
        from coserve.cli.ranks import show_placements, show_ranks

        rows = (batch or [4])[0] * (length or 512)
        if executor:
            return show_placements(subject, tensor_parallel, link, rows, as_json)
        parts = _one_of(_recipes(adapter or ["lora"], measure, subject), "--tensor-parallel")
        return show_ranks(subject, parts, tensor_parallel, link, rows, as_json)
    if pipeline_parallel is not None:
        from coserve.cli.stages import show_stages

        parts = _one_of(_recipes(adapter or ["lora"], measure, subject), "--pipeline-parallel")
        return show_stages(subject, parts, pipeline_parallel, tensor_parallel or 1, cache_tokens, as_json)
    recipes = _recipes(adapter, measure, subject)
    if activations:
        from coserve.cli.activations import activations as explain

        parts = _one_of(recipes, "--activations")
        return explain(subject.config, subject.dtype, parts, keep, as_json)
    from coserve.core.control_group import usable_processors
    from coserve.plan.rows import make_plan

    asked = _asked(recipes, batch, length, loss, keep, cache_tokens, memory, base_memory, device, measure)
    asked = replace(asked, host_memory=_host_memory(host_memory, device, measure))
    gc.freeze()  # imports stay: the collection in each run would walk them, 0.3 s each
    results = {
        "command": _command(),
        "code": measured_code(),
        "date": datetime.now(UTC).date().isoformat(),
        # A process that has used a GPU cannot be copied.
        **make_plan(subject, asked, _say, 1 if measure else usable_processors()),
    }
    if plot is not None:
        from coserve.plan.picture import draw

        draw(results, plot)
    if as_json:
        return print(compact_json(results), end="")
    _print(results)


def _subject(model: str, dtype: str) -> "Subject":
    """Finds the model called `model`. Raises ConfigError or ModelNotFound."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from coserve.plan.subject import read_subject, subject_from_fields, subject_of
    from coserve.workload.shapes import shape_named, shape_names

    if model in shape_names():
        return subject_of(model, shape_named(model).config, dtype)
    if model.lstrip().startswith("{"):
        try:
            fields = json.loads(model)
        except ValueError as error:
            raise ConfigError(f"the model's configuration is no JSON: {error}") from error
        return subject_from_fields(str(fields.get("model_type")), fields, dtype)
    if Path(model).exists():
        return read_subject(Path(model), dtype)
    if model in CONFIG_MAPPING_NAMES:
        return subject_of(model, AutoConfig.for_model(model), dtype)
    raise ConfigError(
        f"{model!r} is no model: expected a folder, a configuration, one of the shapes "
        f"{', '.join(shape_names())}, or a kind of model that transformers knows"
    )


def _recipes(adapters: list[str] | None, measured: bool, subject: "Subject") -> "Recipes":
    from coserve.plan.recipes import METHODS, methods_of, read_recipe

    if not adapters:
        names = ("lora",) if measured else methods_of(subject.config)  # each is two more processes
        return {name: [METHODS[name]] for name in names}
    return dict(read_recipe(adapter) for adapter in adapters)


def _one_of(recipes: "Recipes", option: str) -> "Sequence[Mapping[str, Any]]":
    """The parts of the only adapter. Raises ConfigError."""
    if len(recipes) != 1:
        raise ConfigError(f"{option} explains one --adapter at a time")
    (parts,) = recipes.values()
    return parts


def _asked(
    recipes: "Recipes",
    batches: list[int] | None,
    length: int | None,
    loss: str,
    keep: str,
    cache_tokens: int,
    memory: str,
    base_memory: str,
    device: str,
    measure: bool,
) -> "PlanRequest":
    """Checks the options of a plan. Raises ConfigError for one that is out of range."""
    import torch

    from coserve.core.size import read_memory
    from coserve.memory.budget import budget_of
    from coserve.memory.measured import device_capacity
    from coserve.plan.rows import PlanRequest
    from coserve.plan.stages import PlainLoss

    if loss not in set(PlainLoss):
        raise ConfigError(f"--loss must be {' or '.join(PlainLoss)}, not {loss!r}")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        if measure or not isinstance(read_memory(memory), int):
            raise ConfigError(f"--device {device}: torch finds no such device; --memory in bytes plans one")
        where = torch.device("cpu")
    return PlanRequest(
        recipes,
        tuple(batches or ((1,) if measure else (4,))),
        length or (128 if measure else 512),
        cache_tokens,
        PlainLoss(loss),
        _keep(keep),
        budget_of(memory, device_capacity(where)),
        device if measure else None,
        memory,
        base_memory,
        device,
    )


def _host_memory(text: str, device: str, measure: bool) -> str:
    """Checks --host-memory. Raises ConfigError where nothing of a plan would be in it."""
    from coserve.core.size import read_memory

    read_memory(text, "host_memory", may_be_none=True)
    if text != "auto" and (device == "cpu" or measure):
        why = "nothing is measured there" if measure else "on a CPU what exceeds --memory is read from disk"
        raise ConfigError(f"--host-memory is for a plan beside a GPU, as of --device cuda: {why}")
    return text


def _keep(text: str) -> "SavePolicySetting":
    """Parses --keep: the name of a setting, or a number of bytes."""
    from coserve.core.size import read_size
    from coserve.train.save_policy import SavePolicy, save_policy

    return save_policy(text if text in {keep.value for keep in SavePolicy} else read_size(text))


def _print(results: dict[str, Any]) -> None:
    """Prints a plan's table, programs that do not fit and settings that would, and the error of estimates."""
    from coserve.cli.output import print_table
    from coserve.core.size import show_size

    measured = results["error"] is not None
    rows = [
        (
            f"{row['name']}" + (f", {row['keep']}" if row["keep"] else ""),
            row["system"],
            str(row["batch"]),
            *(f"{row[column] / 1e6:,.0f}" for column in _COLUMNS),
            *(_measured(row) if measured else ()),
            "yes" if row["fits"] else "no",
        )
        for row in results["rows"]
    ]
    names = [column.replace("_", "-") for column in _COLUMNS]
    print(
        f"{results['model']} in {results['dtype']}, {results['length']} tokens a sequence; in MB (10^6 bytes)"
    )
    columns = ("", "by", "batch", *names, *(("measured", "error") * measured), "fits")
    print_table(columns, rows, "nothing to plan")
    budget, built, imports = (show_size(results[name]) for name in ("budget", "built", "imports"))
    print(f"the budget is {budget}; a server sets {built} of it aside for what libraries build")
    print(f"beside it: {imports} of imports in the engine's process, and the same in its standby's")
    if results["streamed"] is not None:
        _print_streamed(**results["streamed"])
    if results["host"] is not None:
        _print_host(**results["host"])
    for row in results["rows"]:
        if row["refused"] and row["system"] == "coserve":
            print(f"{row['name']}, batch {row['batch']}: {row['refused']}{_least(row, results['streamed'])}")
    if measured:
        print(f"measured: {results['measure']}; the largest error of any stage is {results['error']:.1%}")


def _print_streamed(
    room: int,
    whole: int,
    least: int,
    blocks: int,
    read: int | None,
    held: int | None,
    rate_measured: bool,
    **found: Any,
) -> None:
    """Prints how the engine streams the base."""
    from coserve.core.size import show_size

    if read is None:
        print(
            f"the base's weights ({show_size(whole)}) may have {show_size(room)}: too few even to stream "
            f"them, which takes {show_size(least)}"
        )
        return
    missing = "no file could be read" if held is None else "no device or file could be tried"
    how = "measured" if rate_measured else f"assumed, as {missing}"
    beside = "" if held is None else f" ({show_size(held)} of it from the host's memory)"
    print(
        f"the engine streams the base ({show_size(whole)}): {show_size(found['resident'])} stay in memory, "
        f"with {found['resident_blocks']} of {blocks} blocks, and a pass reads {show_size(read)}{beside}; at "
        f"{show_size(found['rate'])}/s ({how}) it takes {found['seconds']:.2g} s or more"
    )


def _print_host(room: int, blocks: int, pages: int, tokens: int, moments: dict[str, int], total: int) -> None:
    """Prints what the engine keeps in the host's memory beside a GPU."""
    from coserve.core.size import show_size

    print(
        f"in the host's memory: {show_size(blocks)} of the base's blocks ({show_size(room)} are for them), "
        f"and up to {show_size(pages)} of pages of answers that wait, {tokens:,} tokens (engine.swap_space)"
    )
    if moments:
        told = ", ".join(f"{name} {show_size(nbytes)}" for name, nbytes in moments.items())
        print(
            f"with engine.offload the optimizer's moments are there, too: {told}; "
            f"in all up to {show_size(total)}"
        )


def _least(row: dict[str, Any], streamed: dict[str, Any] | None) -> str:
    """The smallest memory with which a row would fit, where its base is streamed."""
    from coserve.core.size import show_size

    if streamed is None:
        return ""
    return (
        f"; streamed with the least memory, it takes {show_size(row['least'])} of engine.memory with "
        f"{show_size(streamed['least'])} of engine.base_memory"
    )


def _measured(row: dict[str, Any]) -> tuple[str, str]:
    """A row's peak in its process, and the error of its worst stage."""
    return f"{max(row['measured'].values()) / 1e6:,.0f}", f"{max(row['errors'].values()):.1%}"


def _say(message: str) -> None:
    """Prints progress to stderr."""
    print(message, file=sys.stderr, flush=True)


def _command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
