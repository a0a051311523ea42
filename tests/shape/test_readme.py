"""The README and the pages in docs claim what the code has: endpoints, models, adapter methods, commands."""

import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from typer.main import get_command

from coserve.adapters import methods
from coserve.cli.app import app
from coserve.serve.app import ROOMS
from documented import PAGES
from models import ARCHITECTURES
from recurrent import SHAPES

ROOT = Path(__file__).parents[2]
MOST_WORDS = 60  # of a table's cell
README = (ROOT / "README.md").read_text()
# What the README calls transformers' model types, where that is not the type in other letters.
CALLED = {
    "Qwen 2 and 3": ("qwen2", "qwen3"),
    "Gemma 2 and 3 (text)": ("gemma2", "gemma3_text"),
    "GPT-NeoX": ("gpt_neox",),
    "GPTBigCode": ("gpt_bigcode",),
    "GPT-OSS": ("gpt_oss",),
    "Phi-3": ("phi3",),
    "DeepSeek-V3": ("deepseek_v3",),
}


def section(page: str, start: str, end: str) -> str:
    """A page's text between two passages."""
    found = re.search(re.escape(start) + "(.*?)" + re.escape(end), (ROOT / page).read_text(), re.DOTALL)
    assert found, f"{page} has no {start!r} before {end!r}"
    return " ".join(found.group(1).split())


def test_models_are_those_that_equivalence_tests_compare() -> None:
    named = section("docs/models.md", "Compared in every run of the tests are ", ", in float32").split(", ")
    plain = [(re.sub("[ -]", "", name).lower(),) for name in named if name not in CALLED]
    assert {one for types in (*plain, *(CALLED[n] for n in named if n in CALLED)) for one in types} == set(
        ARCHITECTURES
    )


def test_recurrent_models_are_those_that_equivalence_tests_compare() -> None:
    named = section("docs/models.md", "With recurrent layers:", "([recurrent layers").split(", ")
    called = {
        "Qwen 3.5 (text)": ("qwen3_5_text", "qwen3_5_moe_text"), "Qwen3-Next": ("qwen3_next",),
        "Granite 4": ("granitemoehybrid",), "Falcon H1": ("falcon_h1",), "Nemotron H": ("nemotron_h",),
        "Mamba 2": ("mamba2",),
    }  # fmt: skip
    assert {one for name in named for one in called.get(name, (name.lower(),))} == set(SHAPES)


def test_adapter_methods_are_those_that_have_a_file() -> None:
    there = {info.name for info in pkgutil.iter_modules(methods.__path__)}
    table = section("docs/methods.md", "| name | `peft_type`", "A job chooses its method")
    assert set(re.findall(r"\| `(\w+)` \| `", table)) | {"adalora"} == there
    told = {
        (page.name, n)
        for page in PAGES
        for n in re.findall(r"\b(\d+) (?:adapter )?methods\]", page.read_text())
    }
    assert len(told) >= 2 and {int(n) for _, n in told} == {len(methods.methods())}, told


def test_the_readme_is_short_and_its_figures_are_those_of_the_results() -> None:
    """The table of what was measured, against the JSON or the page that it links."""
    assert len(README.splitlines()) <= 150
    results = ROOT / "docs" / "results"
    demo, engine, adapters, memory, gpu = (
        json.loads((results / f"{name}.json").read_text())
        for name in ("demo", "engine", "adapters", "memory", "gpu")
    )
    ways = {way["name"]: way["slowdown"] for way in demo["ways"]}
    gpu_figures = [one for part in gpu["parts"] for one in part["found"]["figures"]]
    (decode,) = (one["share"] for one in gpu_figures if one["name"] == "decode.step[32]")
    rows = dict(re.findall(r"^\| (\S[^|]+) \| ([^|]+) \| \[", README, re.MULTILINE))
    said = {title: re.search(r"\d+(\.\d+)?", text) for title, text in rows.items()}
    figures = {
        "Answers beside training, at half of the machine's capacity": ways["coserve"],
        "The same load on a server and a trainer in two processes": ways["two processes"],
        "Fine-tuning speed over PEFT, alone on the machine": engine["finetune.vs_peft"],
        "Batched answers over transformers' `generate`": engine["inference.vs_generate"],
        "Answers of 32 adapters in one batch over PEFT's mixed batches": adapters[
            "rank8.decode.vs_peft_mixed"
        ],
        "Activations kept for training LoRA, over PEFT's": memory["activations.vs_peft[lora]"],
        "Decoding an 8B shape on an H200, 32 answers": decode,
    }
    assert figures.keys() <= said.keys(), rows
    for title, figure in figures.items():
        found = said[title]
        assert found is not None and f"{figure:.{len(found[0].partition('.')[2])}f}" == found[0], title


def test_endpoints_are_those_that_have_a_route() -> None:
    there = {one.path for room in ROOMS for one in room.router.routes if isinstance(one, APIRoute)}
    named = set(
        re.findall(r"`(/[\w/]*)`", section("docs/serving.md", "Of OpenAI's API there are ", "There are no "))
    )
    for path in named:
        assert any(route == path or route.startswith(f"{path}/") for route in there), f"there is no {path}"
    for route in there:
        assert any(route == path or route.startswith(f"{path}/") for path in named), f"not told: {route}"


def commands_in(text: str) -> Iterator[list[str]]:
    """The words behind `coserve` in each command line of a page's code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in "\n".join([*blocks, *inline]).replace("\\\n", " ").splitlines():
        if found := re.match(r"(?:.*[/ ])?coserve (?!import)([a-z].*)", line.partition(" #")[0]):
            yield [word.strip("[]") for word in found[1].split()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_shown(page: Path) -> None:
    commands = list(commands_in(page.read_text()))
    assert page.name != "README.md" or len(commands) >= 7
    for words in commands:
        command, options = get_command(app), {"--help"}
        for word in words:
            if (nested := getattr(command, "commands", None)) is not None and not word.startswith("-"):
                assert word in nested, f"there is no `coserve {' '.join(words)}`"
                command = nested[word]
            options |= {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        for word in words:
            if word.startswith("--"):
                assert word.partition("=")[0] in options, (
                    f"{word} is no option of `coserve {' '.join(words)}`"
                )


@pytest.mark.parametrize("path", re.findall(r"\]\((docs/[^)#]+)\)", README))
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_files_that_pages_name_are_there() -> None:
    """LOG.md tells of those that are gone."""
    parts = [ROOT / one for one in ("src", "benchmarks", "tests", "examples", "deploy", "docs")]
    there = {str(one) for part in parts for one in part.rglob("*.*")}
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`(\w[\w/]*\.(?:py|js|c|toml))`", page.read_text()):
            is_there = any(one.endswith(f"/{name}") for one in there)
            assert is_there or page.name == "LOG.md", f"{page.name} names {name}"


def test_cells_of_tables_are_short() -> None:
    """More words than a few lines are text, or belong on a page of their own."""
    lines = [line for page in PAGES for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [cell for line in lines for cell in re.split(r"(?<!\\)\|", line)]
    assert len(cells) > 1000 and not [cell for cell in cells if len(cell.split()) > MOST_WORDS]
