"""`coserve simulate`: tables, files, and one error for what is wrong."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.errors import CoserveError

SHORT = ["simulate", "--seconds", "2", "--rate", "4", "--train-length", "128"]


def test_a_sweep_is_a_table_and_files(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "a.svg", "a.perfetto.json")]
    flags = ["--policy", "hybrid", "--policy", "idle-only", "--rate", "8", "--seeds", "2"]
    out = CliRunner().invoke(
        app,
        [
            *SHORT,
            *flags,
            "--json",
            files[0],
            "--plot",
            files[1],
            "--perfetto",
            files[2],
            "--page",
            str(tmp_path / "a.html"),
            "--slo",
            "ttft=1,tpot=0.1",
        ],
    )
    assert out.exit_code == 0, out.output
    assert "idle-only" in out.output and "training tok/s" in out.output
    found = json.loads(Path(files[0]).read_text())
    assert [(cell["policy"], cell["rate"]) for cell in found["cells"]] == [
        ("hybrid", 4), ("idle-only", 4), ("hybrid", 8), ("idle-only", 8),
    ]  # fmt: skip
    assert "data sheet" in found["hardware"]["h100"]["sources"]["memory_gb"]
    page = (tmp_path / "a.html").read_text()
    assert "<svg" in page and "idle-only" in page and "NVIDIA H100 Tensor Core GPU data sheet" in page
    assert "<svg" in Path(files[1]).read_text() and "traceEvents" in Path(files[2]).read_text()


def test_two_policies_are_compared_over_seeds() -> None:
    out = CliRunner().invoke(app, [*SHORT, "--compare", "hybrid", "idle-only", "--seeds", "3"])
    assert out.exit_code == 0, out.output
    assert (
        "idle-only less hybrid, on h100 at 4 requests/s, 3 paired seeds" in out.output
        and "training" in out.output
    )


def test_advice_names_a_fleet(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    out = CliRunner().invoke(
        app,
        [*SHORT, "--advise", "--slo", "tpot=0.1", "--hardware", "l40s", "--most", "2", "--json", str(file)],
    )
    assert out.exit_code == 0, out.output
    assert json.loads(file.read_text())["advice"][0]["devices"] >= 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--hardware", "h1000"], "no hardware 'h1000'"),
        (["--model", "70b"], "does not fit on 1 x NVIDIA H100"),
        (["--slo", "luck=1"], "no bound 'luck'"),
        (["--slo", "ttft=soon"], "first_token needs a number"),
        (["--setting", "layers=2"], "no setting 'layers'"),
        (["--setting", "quantum=x"], "quantum needs a number"),
        (["--policy", "luck"], "no policy 'luck'"),
        (["--trace", "none.csv"], "expected a trace"),
        (["--advise", "--within", "2"], "--within is a share"),
        (["--advise", "--plot", "x.svg"], "--advise draws nothing: --plot"),
        (["--advise", "--price", "l4=1"], "'l4' is not among the hardware: h100"),
        (["--advise", "--price", "h100=0"], "h100 needs a positive price"),
        (["--seconds", "inf"], "positive number of seconds"),
        (["--seconds", "nan"], "positive number of seconds"),
        (["--base-memory", "lots"], "expected a number of bytes"),
        (["--base-memory", "1MB"], "are too few for this base"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json"),
    ],
)
def test_what_is_wrong_is_one_error(flags: list[str], said: str) -> None:
    out = CliRunner().invoke(app, [*SHORT, *flags])
    assert isinstance(out.exception, CoserveError) and said in str(out.exception)


def test_a_measured_table_is_hardware(tmp_path: Path) -> None:
    table = tmp_path / "here.toml"
    out = CliRunner().invoke(app, ["simulate", "--model", "tiny", "--measure", str(table)])
    assert out.exit_code == 0, out.output
    assert "measured by coserve simulate --measure" in table.read_text()
    flags = ["--seconds", "2", "--rate", "4", "--prompt", "16", "--answer", "4", "--train-length", "64"]
    out = CliRunner().invoke(app, ["simulate", "--model", "tiny", "--hardware", str(table), *flags])
    assert out.exit_code == 0 and "100.0 %" in out.output, out.output
    out = CliRunner().invoke(app, ["simulate", "--model", "19m", "--hardware", str(table), *flags])
    assert "was measured for one device and the shape tiny" in str(out.exception)


def test_a_trace_with_a_hole_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47,,1\n"
    )
    out = CliRunner().invoke(app, ["simulate", "--trace", str(path)])
    assert "trace.csv, line 3: expected ContextTokens" in str(out.exception)
