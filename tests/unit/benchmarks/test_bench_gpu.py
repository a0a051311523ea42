"""`make gpu` on a processor and the tiny shape: every part runs; one that fails or hangs ends no other."""

import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from coserve.errors import ConfigError
from coserve.workload.shapes import shape_named
from coserve_benchmarks.gpu import __main__ as command
from coserve_benchmarks.gpu import equivalence, streamed, wheels
from coserve_benchmarks.gpu.conductor import PART_SECONDS, PARTS, Conductor, Outcome, Part, seconds_for
from coserve_benchmarks.gpu.log import PartLog
from coserve_benchmarks.gpu.page import BARS, page_of
from coserve_benchmarks.gpu.place import Place, Rates
from coserve_benchmarks.gpu.profiling import covered
from coserve_benchmarks.gpu.sizes import sizes_of
from forking import forked

ROOT, TESTS = Path(__file__).parents[3], Path(__file__).parents[2]
OURS = {
    "coserve": ROOT / "src" / "coserve",
    "coserve_benchmarks": ROOT / "benchmarks" / "coserve_benchmarks",
}
CPU = torch.device("cpu")
ALONE = ("device", "kernels", "equivalence")  # what needs no place, and Triton's interpreter a process
WORDS = {  # of the figures that the parts are for
    "decode": ("decode.step[1]", "decode.rate[4]", "decode.step[4, 0 adapters]", "decode.with_4_adapters"),
    "prefill": ("prefill[2x32]",),
    "training": ("training[everything].rate", "training[everything].mfu", "training[inputs].rate"),
    "coserving": (
        "coserving.capacity",
        "coserving.alone",
        "coserving[500 ms].training",
        "coserving[500 ms].attainment",
        "coserving[500 ms, concurrent].training",
        "coserving[500 ms, 0.1 of capacity].training",
        "coserving[500 ms, concurrent, 0.1 of capacity].attainment",
    ),
    "like_for_like": ("like_for_like.rate",),
    "blocking": ("blocking.idle_p50", "blocking.ratio_p99"),
    "profile": ("profile.step",),
    "streamed": ("streamed.copies", "streamed.step[1]", "streamed.step[4]", "streamed.training"),
}


def found_by(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text()))


@pytest.fixture
def place() -> Place:
    return Place(CPU, shape_named("tiny"), sizes_of("tiny"), Rates(1e11, 1e12))


@pytest.mark.parametrize(
    "part", [part for part in PARTS if part.name not in ALONE], ids=lambda part: part.name
)
def test_every_part_finds_its_figures(part: Part, place: Place, tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    import_module(part.module).run(PartLog(file, 600.0), place)
    found = found_by(file)
    values = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert not found["failures"] and set(WORDS[part.name]) <= values.keys()
    assert all(values[figure] >= 0 for figure in WORDS[part.name])


def test_a_part_without_time_says_what_it_left_out(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    import_module("coserve_benchmarks.gpu.prefill").run(PartLog(file, 0.0), place)
    found = found_by(file)
    assert not found["figures"] and len(found["notes"]) == len(place.sizes.prompts)


@pytest.mark.slow
def test_every_figure_with_a_bar_is_found_at_the_sizes_of_the_large_shape(
    place: Place, tmp_path: Path
) -> None:
    """With its rows, prompts, numbers of adapters, bounds and loads; the model and the lengths are small."""
    large = sizes_of("8b")
    names = ("decode_rows", "adapter_rows", "adapters", "bounds", "loads")
    few = {"prompts": large.prompts[:2], "load_seconds": 0.2}  # of five loads in two ways each
    sizes = replace(place.sizes, **few, **{name: getattr(large, name) for name in names})
    found: set[str] = set()
    for part in PARTS:
        if part.name in ("decode", "prefill", "training", "coserving", "like_for_like"):
            file = tmp_path / f"{part.name}.json"
            import_module(part.module).run(PartLog(file, 600.0), replace(place, sizes=sizes))
            found |= {figure["name"] for figure in found_by(file)["figures"]}
    assert not BARS.keys() - found


def test_a_device_that_streams_no_base_is_told_so(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sentence, before a large model is written."""

    def refuse(*_: object) -> None:
        raise ConfigError("a base is streamed on a CPU only")

    monkeypatch.setattr(streamed, "Engine", refuse)
    file = tmp_path / "part.json"
    streamed.run(PartLog(file, 600.0), place)
    found = found_by(file)
    assert found["notes"] == ["refused: a base is streamed on a CPU only"] and not found["figures"]


@pytest.mark.slow
def test_the_device_is_as_exact_as_the_processor(tmp_path: Path) -> None:
    """In the seconds that there are; the comparisons come in the order of their worth."""
    file = tmp_path / "part.json"
    equivalence.run_bare(PartLog(file, 20.0), "cpu")
    found = found_by(file)
    assert not found["failures"]
    assert {"equivalence[llama, own forward, float32]", "equivalence[attention, tiled, float32]"} <= {
        figure["name"] for figure in found["figures"]
    }


def test_what_is_wrong_on_a_device_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that rounds like the processor, but for one number."""

    def case(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        rounded = torch.linspace(0, 1, 50, dtype=torch.float64).to(dtype)
        rounded[7] += 0.01 if device == "meta" else 0.0
        return {"good": rounded[:5], "bad": rounded}

    monkeypatch.setattr(equivalence.attention, "errors", lambda *_: {})
    monkeypatch.setattr(equivalence, "_cases", lambda dtype: {"case": case})
    file = tmp_path / "part.json"
    equivalence.run_bare(PartLog(file, 600.0), "meta")
    (failure,) = found_by(file)["failures"]  # in bfloat16 that is rounding
    assert "case, float32" in failure and "bad" in failure


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"x": torch.tensor([1.0, float("nan")])},
        {"x": torch.tensor([1.0])},
        {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([1.0])},
    ],
)
def test_what_is_missing_or_no_number_is_infinitely_wrong(found: dict[str, torch.Tensor]) -> None:
    assert equivalence.worst_error(found, {"x": torch.tensor([1.0, 2.0])})[0] == float("inf")


def conducted(tmp_path: Path, parts: list[Part], seconds: float) -> tuple[list[Outcome], list[int]]:
    known = os.environ.get("PYTHONPATH", "")
    environment = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT / "src"), known])}
    told: list[int] = []
    conductor = Conductor(tmp_path, "cpu", "tiny", environment)
    return conductor.run(parts, seconds, lambda outcomes: told.append(len(outcomes))), told


@pytest.mark.slow
def test_parts_that_fail_or_hang_end_no_other(tmp_path: Path) -> None:
    parts = [
        Part("fails", "failing_part", 60.0),
        Part("hangs", "hanging_part", 6.0),
        Part("device", "coserve_benchmarks.gpu.device", 60.0),
    ]
    outcomes, told = conducted(tmp_path, parts, 600.0)
    fails, hangs, device = outcomes
    assert told == [1, 2, 3]
    assert fails.status == "failed with status 1" and "nothing works on cpu" in fails.tail[-1]
    assert [figure["name"] for figure in fails.found["figures"]] == ["before"]
    assert hangs.status == "was ended after 6 s" and not hangs.is_well
    (child,) = (int(figure["value"]) for figure in hangs.found["figures"])
    assert not is_running(child), "children of a part end with it"
    assert device.is_well and {"device.bandwidth", "device.matrix_rate"} <= {
        figure["name"] for figure in device.found["figures"]
    }
    logged = (tmp_path / "gpu.log").read_text()
    assert [line for line in logged.splitlines() if line.startswith("==")] == [
        "== fails",
        "== hangs",
        "== device",
    ]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_all_parts_share_the_seconds_of_the_whole() -> None:
    """By their weights; what a quick part leaves goes to the others, and one that is alone has four minutes
    with its process."""
    parts = [Part("a", "a", 100.0), Part("b", "b", 300.0)]
    assert seconds_for(parts, 40.0) == 10.0
    assert seconds_for(parts[1:], 30.0) == 30.0
    assert seconds_for(parts, 1000.0) == seconds_for(parts[:1], 525.0) == PART_SECONDS <= 240 - 10


@pytest.mark.slow
def test_kernels_are_compared_in_a_process_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    ((outcome,), _) = conducted(tmp_path, [part for part in PARTS if part.name == "kernels"], 300.0)
    assert outcome.is_well, outcome.tail
    assert [figure["name"] for figure in outcome.found["figures"]] == ["kernels.equal"]


def test_the_limits_are_nine_minutes_for_the_parts_that_matter_first() -> None:
    names = [part.name for part in PARTS]
    assert {*ALONE, *WORDS} == set(names)
    assert command._SECONDS <= 540 - 10
    weights = {part.name: part.weight for part in PARTS}
    shares = {name: command._SECONDS * weight / sum(weights.values()) for name, weight in weights.items()}
    assert all(share >= 25 for share in shares.values()), "time to import, to load, and to measure"


def run_command(*options: str) -> "subprocess.CompletedProcess[str]":
    with forked():
        return subprocess.run(
            [sys.executable, "-m", "coserve_benchmarks.gpu", *options],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'benchmarks'}"},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = run_command("--out", str(tmp_path / "out"))
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and "cuda" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "word"),
    [(["--shape", "70b"], "70b"), (["--only", "decod"], "decod"), (["--wheels", "nowhere"], "nowhere")],
)
def test_what_cannot_run_is_refused_in_one_line(options: list[str], word: str, tmp_path: Path) -> None:
    done = run_command("--device", "cpu", "--out", str(tmp_path), *options)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and word in done.stderr


def test_a_run_leaves_figures_and_a_page_that_says_where_it_ran(tmp_path: Path) -> None:
    done = run_command("--device", "cpu", "--shape", "tiny", "--out", str(tmp_path), "--only", "device")
    assert done.returncode == 0, done.stdout + done.stderr
    run = found_by(tmp_path / "gpu.json")
    page = (tmp_path / "gpu.md").read_text()
    assert [part["part"] for part in run["parts"]] == ["device"] and run["device"] == "cpu"
    assert "has not run on a GPU" in page and torch.__version__ in page
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu.json", "gpu.log", "gpu.md"]


def test_the_page_shows_what_failed_and_what_was_reached() -> None:
    figure = {
        "name": "f",
        "value": 1234.5,
        "unit": "ms",
        "bound": 1.5,
        "share": 0.7,
        "note": "a|b",
    }
    met, missed = ({**figure, "name": "decode.step[1]", "value": value} for value in (4.7, 4.9))
    found = {
        "figures": [figure, met, missed],
        "notes": ["n"],
        "failures": ["w"],
        "tables": {"t": [["h"], [1]]},
    }
    part = {"part": "p", "status": "done", "seconds": 3.0, "tail": ["last words"], "found": found}
    run = {
        "device": "cuda", "device_name": "X", "shape": "8b", "commit": "c", "date": "d", "seconds": 4.0,
        "parts": [part],
    }  # fmt: skip
    page = page_of(run)
    for shown in (
        "done, 1 wrong",
        "≤ 4.8 (met)",
        "≤ 4.8 (missed)",
        "1,234",
        "a\\|b",
        "last words",
        "**wrong**: w",
    ):
        assert shown in page
    assert "has not run" not in page
    assert "4.8" not in page_of({**run, "shape": "tiny"}), "bars are of the large shape"


def test_spans_that_overlap_are_counted_once() -> None:
    assert covered([(0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (5.0, 6.0)]) == 4.0


def wheel(folder: Path, name: str) -> None:
    """A wheel of one module that holds its name."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"NAME = {name!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def run_at_import(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that a module makes when it is imported itself."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            yield from run_at_import(node)


def packages_of(modules: Iterable[str]) -> set[str]:
    """Packages of others that are imported with these modules of ours, read from their files."""
    found, known, left = set[str](), set[str](), list(modules)
    while left:
        package, _, rest = (name := left.pop()).partition(".")
        if package not in OURS:
            found.add(package)
            continue
        place = OURS[package].joinpath(*rest.split(".")) if rest else OURS[package]
        file = next((one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()), None)
        if name in known or file is None:  # a name within a module
            continue
        known.add(name)
        left += [name.rpartition(".")[0]] if rest else []
        for node in run_at_import(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                left += [each.name for each in node.names]
            else:
                assert node.module and not node.level
                left += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
    return found - sys.stdlib_module_names


def test_all_packages_that_the_parts_import_are_named() -> None:
    """A machine that lacks one is told at once, and not by the first part. torch and transformers bring
    others."""
    imported = packages_of(part.module for part in PARTS)
    assert {"torch", "msgspec", "re2"} <= imported
    assert imported - {"numpy", "tokenizers", "triton"} <= {*command._NEEDED}


def test_packages_that_are_missing_come_from_wheels(tmp_path: Path) -> None:
    given, into = tmp_path / "given", tmp_path / "into"
    given.mkdir()
    for name in ("a_package_of_nobody", "torch"):
        wheel(given, name)
    assert wheels.install_missing(given, into) == ["a_package_of_nobody-1.0-py3-none-any.whl"]
    assert (into / "a_package_of_nobody.py").exists() and not (into / "torch.py").exists()


def test_too_many_bytes_of_wheels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path, "a_package_of_nobody")
    monkeypatch.setattr(wheels, "MOST", 100)
    with pytest.raises(ConfigError, match="MB"):
        wheels.install_missing(tmp_path, tmp_path / "into")
