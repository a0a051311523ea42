"""The README and the pages in docs claim what the code has: endpoints, models, adapter methods, commands."""

import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from typer.main import get_command

from coserve.adapters import methods
from coserve.cli.app import app
from coserve.serve import routes
from models import ARCHITECTURES
from recurrent import SHAPES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "LOG.md"})]
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


def section(start: str, end: str) -> str:
    """The README's text between two passages."""
    found = re.search(re.escape(start) + "(.*?)" + re.escape(end), README, re.DOTALL)
    assert found, f"the README has no {start!r} before {end!r}"
    return " ".join(found.group(1).split())


def test_models_are_those_that_equivalence_tests_compare() -> None:
    named = section("**Unmodified transformers models**: ", ", in float32").split(", ")
    plain = [(re.sub("[ -]", "", name).lower(),) for name in named if name not in CALLED]
    assert {one for types in (*plain, *(CALLED[n] for n in named if n in CALLED)) for one in types} == set(
        ARCHITECTURES
    )


def test_recurrent_models_are_those_that_equivalence_tests_compare() -> None:
    named = section("With recurrent layers:", "([docs/recurrent.md").split(", ")
    called = {
        "Qwen 3.5 (text)": ("qwen3_5_text", "qwen3_5_moe_text"), "Qwen3-Next": ("qwen3_next",),
        "Granite 4": ("granitemoehybrid",), "Falcon H1": ("falcon_h1",), "Nemotron H": ("nemotron_h",),
        "Mamba 2": ("mamba2",),
    }  # fmt: skip
    assert {one for name in named for one in called.get(name, (name.lower(),))} == set(SHAPES)


def test_adapter_methods_are_those_that_have_a_file() -> None:
    there = {info.name for info in pkgutil.iter_modules(methods.__path__)}
    named = section("adapter methods, any mix in one step**: ", ", and lists of these")
    spelled = {
        "prefix tuning", "prompt tuning", "P-tuning", "bottleneck adapters", "LoRA", "IA3", "BitFit",
        "LN tuning", "LoKr", "LoHa", "VeRA", "OFT", "HRA", "RoAd", "MiSS", "RandLoRA", "SHiRA", "FourierFT",
        "VBLoRA", "C3A", "trainable tokens", "AdaLoRA",
    }  # fmt: skip
    assert {re.sub(r"[ -]", "_", one.lower()).removesuffix("_adapters") for one in spelled} == there
    assert all(one in named for one in spelled)
    assert f"**{len(methods.methods())} adapter methods" in README


def test_endpoints_are_those_that_have_a_route() -> None:
    there = set[str]()
    for info in pkgutil.iter_modules(routes.__path__):
        router = getattr(import_module(f"{routes.__name__}.{info.name}"), "router", None)
        there |= {one.path for one in getattr(router, "routes", ()) if isinstance(one, APIRoute)}
    named = set(re.findall(r"`(/[\w/]+)`", section("Of OpenAI's API there are ", "There are no ")))
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_shown(page: Path) -> None:
    commands = list(commands_in(page.read_text()))
    assert page.name != "README.md" or len(commands) > 20
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
