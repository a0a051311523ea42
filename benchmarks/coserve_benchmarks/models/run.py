"""`coserve bench models`: every type of models, one after the other."""

import json
import logging
import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from coserve.core.checkout import measured_code
from coserve.errors import ConfigError
from coserve_benchmarks.models import shrunk
from coserve_benchmarks.models.page import cell, kind_of
from coserve_benchmarks.models.sweep import ANSWERS, TRAINING, sweep
from coserve_benchmarks.results import Bar, Results

NAMES: Final = (
    *shrunk.NAMES,
    *shrunk.VARIANTS,
    *(n for n in shrunk.MULTIMODAL if n not in shrunk.NAMES),
)
_HEADER: Final = ("code", "date", "ended", "versions", "tolerances")
# Types of the sixty kinds of text models that are downloaded most, as the authors know the hub on
# 2026-11-30: a list of types written by hand, of no order; it is made of no query for numbers of downloads.
DOWNLOADED: Final = (
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "mistral", "mixtral", "ministral3", "gemma", "gemma2", "gemma3_text",
    "gemma3n_text", "gemma4_text", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "gpt_oss",
    "openai-gpt", "opt", "bloom", "phi", "phi3", "phimoe", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "deepseek_v4", "falcon", "falcon_h1", "mamba", "mamba2", "mpt", "stablelm", "starcoder2", "codegen",
    "cohere", "cohere2", "granite", "granitemoe", "granitemoehybrid", "olmo", "olmo2", "olmo3", "olmoe",
    "smollm3", "glm4", "glm4_moe", "ernie4_5", "exaone4", "nemotron", "nemotron_h", "lfm2",
    "minimax_m2", "llama4_text", "recurrent_gemma",
)  # fmt: skip
# Of all types that transformers builds small, the share that answers and trains exactly; that of the types
# `DOWNLOADED`; and the number of those that are neither exact nor refused.
BARS: Final[Mapping[str, Bar | None]] = {
    "exact_share": Bar(0.85),
    "exact_share.downloaded": Bar(0.95),
    "faults": Bar(0, at_most=True),
}


def run_models(
    only: Collection[str] | None = None, json_path: str | Path | None = None, part: str = "1/1"
) -> dict[str, Any]:
    """Tries types (all, by default), or a `part` of them, and returns what `--json` writes. Raises
    ConfigError for a type that transformers does not know, and for a part that is none."""
    if unknown := set(only or ()) - set(NAMES):
        raise ConfigError(f"transformers has no language models of the type {sorted(unknown)[0]}")
    chosen = _part_of(tuple(only or NAMES), part)
    header = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "code": measured_code(),
        "date": _now(),
        "ended": None,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "tolerances": {"answers": ANSWERS, "training": TRAINING},
    }
    results, types = Results(header, json_path, BARS), dict[str, Any]()
    with _quiet():
        for outcome in sweep(chosen):
            types[outcome.name] = asdict(outcome)
            _count(results, types)
            print(f"{outcome.name:28} {cell(types[outcome.name])[:150]}", flush=True)
    header["ended"] = _now()
    results.save()
    return results.as_dict()


def join_runs(files: Sequence[Path], json_path: str | Path | None = None) -> dict[str, Any]:
    """Joins runs of some types each, whose JSON these files are, and returns what `--json` writes. Raises
    ConfigError for other files."""
    runs = [_read(file) for file in files]
    first = {key: runs[0].get(key) for key in _HEADER}
    header = {
        "command": "coserve bench models",
        **first,
        "earlier": [
            *({key: run.get(key) for key in _HEADER} for run in runs[1:]),
            *(header for run in runs for header in run.get("earlier", ())),
        ],
    }
    results = Results(header, json_path, BARS)
    _count(results, {name: one for run in runs for name, one in run["types"].items()})
    return results.as_dict()


def _count(results: Results, types: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes down types, and the share of those that are exact."""
    kinds = Counter(map(kind_of, types.values()))
    built = len(types) - kinds["not built"]
    results.row("exact_share", kinds["exact"] / built if built else 0.0)
    downloaded = [kind_of(types[name]) for name in DOWNLOADED if name in types]
    if downloaded:
        results.row("exact_share.downloaded", downloaded.count("exact") / len(downloaded))
    results.row("faults", kinds["fault"])
    results.section("types", dict(types))


def _part_of(names: Sequence[str], part: str) -> Sequence[str]:
    """Every n-th of the names, from the k-th on, for a part "k/n"."""
    found = re.fullmatch(r"([1-9]\d{0,2})/([1-9]\d{0,2})", part)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"--part is one of several parts, such as 2/8, not {part!r}")
    return names[int(found[1]) - 1 :: int(found[2])]


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file}: expected the JSON of a run: {error}") from error
    if not isinstance(found, dict) or "types" not in found:
        raise ConfigError(f"{file} is no JSON of `coserve bench models`")
    return found


def print_models(results: Mapping[str, Any], console: Console | None = None) -> None:
    """The numbers of types by what became of them, and the faults."""
    console = Console() if console is None else console
    kinds = Counter(map(kind_of, results["types"].values()))
    console.print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), highlight=False)
    for key in ("exact_share", "exact_share.downloaded"):
        if key in results:
            console.print(f"{key} {results[key]:.3f}", highlight=False)
    for name, one in results["types"].items():
        if one["fault"]:
            console.print(f"{name}: {one['fault']}", highlight=False, markup=False)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without warnings of the log and bars of transformers: there are hundreds."""
    from transformers.utils import logging as transformers_logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(before)
        transformers_logging.enable_progress_bar()
