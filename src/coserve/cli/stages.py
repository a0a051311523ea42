"""`coserve plan --pipeline-parallel`: the bytes that each stage of a pipeline holds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coserve.cli.output import print_json, print_table

if TYPE_CHECKING:
    from coserve.plan.subject import Subject

_COLUMNS = ("stage", "layers", "MB weights", "MB pages", "MB adapter in training")


def show_stages(
    subject: "Subject",
    parts: Sequence[Mapping[str, Any]],
    stages: int,
    ranks: int,
    cache_tokens: int,
    as_json: bool,
) -> None:
    """Prints the bytes of each stage, or of a rank of it. Raises AdapterError or UnsupportedModel."""
    from coserve.plan.pipeline import plan_stages

    found = plan_stages(subject, parts, stages, ranks, cache_tokens)
    if as_json:
        return print_json([asdict(one) for one in found])
    over = f" over {ranks} ranks each, of which one holds this" if ranks > 1 else ""
    print(f"{subject.name} in {stages} stages{over}, {cache_tokens:,} tokens of cache")
    rows = [
        (
            str(one.stage),
            f"{one.first} to {one.last - 1}",
            *(f"{nbytes / 1e6:,.2f}" for nbytes in (one.weights, one.pages, one.adapter)),
        )
        for one in found
    ]
    print_table(_COLUMNS, rows, "there is no stage")
