"""`coserve zoo` from outside."""

import json
import subprocess
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.errors import CoserveError, ZooError
from zoo_made import contents, make_fine_tune, make_lora, make_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a model, a full fine-tune of it, and a LoRA."""
    folder = tmp_path_factory.mktemp("made")
    base = make_model(folder / "base")
    make_fine_tune(folder / "tuned", base, {"layers.1": 1.0})
    make_lora(folder / "lora", base)
    return folder


@pytest.fixture(scope="module")
def zoo(made: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("command") / "zoo")
    assert "base: foundation" in run("add", str(made / "base"), "--zoo", folder)
    told = run("add", str(made / "tuned"), "--parent", "base", "--zoo", folder)
    assert "tuned: full fine-tune of base" in told and "3 of 6 components are equivalent" in told
    assert "lora: adapter of base" in run("add", str(made / "lora"), "--zoo", folder)
    return folder


def run(*arguments: str) -> str:
    """The command's output."""
    result = CliRunner().invoke(app, ["zoo", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def refusal(*arguments: str) -> str:
    """Its deliberate error."""
    with pytest.raises(CoserveError) as caught:
        CliRunner().invoke(app, ["zoo", *arguments], catch_exceptions=False)
    return str(caught.value)


def test_what_is_there_is_listed(zoo: str) -> None:
    printed = run("list", "--zoo", zoo)
    for word in ("base", "full fine-tune", "lora", "foundation", "as separate models"):
        assert word in printed, printed
    assert run("--zoo", zoo) == printed
    told = json.loads(run("list", "--zoo", zoo, "--json"))
    assert [one["name"] for one in told["applications"]] == ["base", "lora", "tuned"]
    assert 0 < told["storage"]["with_alternatives"] <= told["storage"]["exact"] < told["storage"]["separate"]


def test_chains_are_shown_as_a_table_and_a_picture(zoo: str, tmp_path: Path) -> None:
    picture = tmp_path / "chains.svg"
    printed = run("show", "--zoo", zoo, "--picture", str(picture))
    assert "[E]" in printed and "[A1]" in printed and "blocks in 3 chains" in printed
    assert "tuned" in picture.read_text()
    told = json.loads(run("show", "lora", "--zoo", zoo, "--json"))
    assert set(told) == {"lora"} and told["lora"][1]["users"] == ["lora"]
    assert "has no 'other'" in refusal("show", "other", "--zoo", zoo)


def test_similarity_is_measured_and_drawn(zoo: str, tmp_path: Path) -> None:
    text, picture = tmp_path / "text.txt", tmp_path / "heat.svg"
    text.write_text("a text of one's own " * 10)
    printed = run("evaluate", "tuned", "--text", str(text), "--picture", str(picture), "--zoo", zoo)
    assert "tuned and base" in printed and picture.stat().st_size > 0
    assert json.loads(run("evaluate", "tuned", "--zoo", zoo, "--json"))["tokens"] > 100
    assert "has no parent" in refusal("evaluate", "base", "--zoo", zoo)
    text.write_bytes(b"\xff\xfe\x00")
    assert "expected UTF-8" in refusal("evaluate", "tuned", "--text", str(text), "--zoo", zoo)


def test_a_profile_is_measured_and_shown_for_blocks(zoo: str, made: Path) -> None:
    assert "seq." not in run("show", "--zoo", zoo), "nothing was measured"
    sizes = ("--batch", "2", "--batch", "1", "--tokens", "4", "--zoo", zoo)
    printed = run("profile", "base", *sizes)
    for word in ("A1", "H", "load", "1 seq.", "2 seq.", "sequences of 4 tokens"):
        assert word in printed, printed
    told = json.loads(run("profile", "base", *sizes, "--json"))
    assert len(told["components"]) == 6 and told["batches"] == [1, 2]
    assert "2 seq." in run("show", "--zoo", zoo)
    blocks = json.loads(run("show", "--zoo", zoo, "--json"))
    assert set(blocks["base"][0]["profile"]["seconds"]) == {"1", "2"}
    assert [block["profile"] is None for block in blocks["tuned"]].count(True) == 1
    (file,) = (file for file in Path(zoo, "measured").iterdir() if "-" not in file.stem)
    file.write_text(file.read_text().replace("torch", "tarch"))
    result = CliRunner().invoke(app, ["zoo", "show", "--zoo", zoo], catch_exceptions=False)
    assert result.exit_code == 0 and "seq." not in result.stdout
    assert "the profile of base is damaged" in result.stderr
    file.unlink()


def test_alternatives_are_made_shown_and_drawn(zoo: str, made: Path, tmp_path: Path) -> None:
    run("add", str(make_model(tmp_path / "wide", hidden_size=96)), "--zoo", zoo)
    text, picture = tmp_path / "text.txt", tmp_path / "depths.svg"
    text.write_text("the cats sat on the mats and ate " * 8)
    how = ("--text", str(text), "--window", "16", "--zoo", zoo)
    printed = run("stitch", "base", "wide", "--max-steps", "1", "--epochs", "1", *how)
    for word in (
        "step 1/1  loss",
        "(64, 96)",
        "1 of base",
        "2 of wide",
        "base alone",
        "base-to-wide: 1 steps",
    ):
        assert word in printed, printed
    told = json.loads(run("stitch", "wide", "base", "--name", "back", "--max-steps", "1", *how, "--json"))
    assert told["made"]["type"] == "stitching block" and told["made"]["teacher"] == "wide"
    assert told["made"]["steps"] == 1, "--max-steps is of all epochs and points"
    printed = run("prune", "base", "L1", "--max-steps", "1", "--epochs", "2", *how)
    for word in ("step 1/1  loss", "behind it", "speedup", "base.L1: 1 steps; cosine similarities"):
        assert word in printed, printed
    assert "stitching block" in (listed := run("list", "--zoo", zoo)) and "surrogate" in listed
    kinds = [one["made"]["type"] for one in json.loads(run("list", "--zoo", zoo, "--json"))["alternatives"]]
    assert kinds == ["stitching block", "stitching block", "surrogate"]
    printed = run("depths", "base", "--with", "tuned", "--count", "1", *how, "--picture", str(picture))
    assert "50% pruned, 1 layer" in printed and "tuned, 1 layer" in picture.read_text()
    assert "base-to-wide" in json.loads(run("depths", "wide", *how, "--json"))["alternatives"]
    assert "has 2: with wide it can be behind 1" in refusal("stitch", "base", "wide", "--layer", "5",
                                                            "--name", "deep", *how)  # fmt: skip
    assert "is no component" in refusal("prune", "base", "L9", *how)
    assert "remove these first" in refusal("remove", "wide", "--zoo", zoo)
    for name in ("back", "base-to-wide", "base.L1", "wide"):
        assert f"removed {name}" in run("remove", name, "--zoo", zoo)
    run("gc", "--zoo", zoo)


def test_approximate_chains_are_made_shown_and_served(zoo: str, made: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cats sat on the mats and ate " * 8)
    how = ("--text", str(text), "--window", "16", "--zoo", zoo)
    near = make_fine_tune(tmp_path / "near", made / "base", {"layers": 0.01})
    run("add", str(near), "--parent", "base", "--zoo", zoo)
    printed = run("approximate", "near", "--chains", "2", *how)
    for word in ("of the foundation", "near~2", "near~4", "A1 F1 A2 F2", "near.ladder: compared with near"):
        assert word in printed, printed
    assert "near has a ladder, near.ladder" in refusal("approximate", "near", "--name", "more", *how)
    assert "is a foundation" in refusal("approximate", "base", *how)
    assert "ladder of chains" in run("list", "--zoo", zoo) and "near~4" in run("show", "--zoo", zoo)
    assert "near~4" not in run("show", "tuned", "--zoo", zoo)
    served = json.loads(run("views", "--zoo", zoo))
    assert list(served["chains"]) == ["near"] and list(served["chains"]["near"]) == ["near~2", "near~4"]
    assert Path(served["chains"]["near"]["near~2"]).is_dir() and served["chains"]["near"]["near~4"] == ""
    run("remove", "near.ladder", "--zoo", zoo)
    told = json.loads(run("approximate", "near", "--name", "own", *how, "--json"))
    assert told["made"]["type"] == "ladder of chains" and told["made"]["chains"][0]["name"] == "near~1"
    for name in ("own", "near"):
        run("remove", name, "--zoo", zoo)
    run("gc", "--zoo", zoo)


def test_verify_export_remove_and_gc(zoo: str, made: Path, tmp_path: Path) -> None:
    assert "3 applications are whole" in run("verify", "--zoo", zoo)
    run("export", "tuned", str(tmp_path / "out"), "--zoo", zoo)
    assert contents(tmp_path / "out") == contents(made / "tuned")
    run("add", str(made / "tuned"), "--name", "again", "--no-evaluate", "--zoo", zoo)
    assert "removed again" in run("remove", "again", "--zoo", zoo)
    assert "removed 0 files" in run("gc", "--zoo", zoo)
    assert "parent of lora, tuned" in refusal("remove", "base", "--zoo", zoo)


def test_damage_is_an_error(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "zoo"
    run("add", str(made / "base"), "--zoo", str(folder))
    for file in folder.glob("tensors/*/*"):
        file.write_bytes(b"")
    result = CliRunner().invoke(app, ["zoo", "verify", "--zoo", str(folder)])
    assert isinstance(result.exception, CoserveError) and "problems" in str(result.exception)
    assert "no whole file of safetensors" in result.stdout


def test_a_full_fine_tune_is_made(zoo: str, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"{n} cats"}) for n in range(4)))
    printed = run(
        "finetune", "base", str(data), "--name", "own", "--block", "L2", "--max-steps", "1", "--zoo", zoo
    )
    assert "step 1/1  loss" in printed and "components are equivalent" in printed
    run("remove", "own", "--zoo", zoo)
    run("gc", "--zoo", zoo)


def test_what_is_no_model_is_refused(zoo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no local folder or reachable hub name" in refusal("add", "nobody/nothing-there", "--zoo", zoo)
    assert "there is no zoo" in refusal("list", "--zoo", str(tmp_path / "gone"))
    assert "neither a model" in refusal("add", str(tmp_path), "--zoo", zoo)


@pytest.mark.usefixtures("forks")
def test_a_server_is_given_all_of_a_foundation(zoo: str, made: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--zoo", zoo, "--show-config"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    settings = json.loads(result.stdout)
    assert settings["name"] == "base" and set(settings["adapters"]) == {"lora", "tuned"}
    assert contents(Path(settings["model"])) == contents(made / "base")


def test_a_server_says_what_it_leaves_out(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of the command that makes the folders is a stand-in, as that takes seconds to start."""
    served = {
        "name": "base", "model": str(made / "base"), "adapters": {"lora": str(made / "lora")},
        "chains": {
            "lora": {"lora~2": str(made / "tuned"), "lora~4": ""}, "base": {"base.L1": str(made / "lora")},
        },
        "bases": {"large": str(made / "large")}, "adapter_bases": {"lora": "large"},
        "stitched": {"chain@1": {"folder": str(made / "chain"), "first": "base", "second": "large"}},
    }  # fmt: skip
    said = CompletedProcess([], 0, json.dumps({**served, "left_out": {"tuned": "it belongs to other"}}), "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    serve = ["serve", "--zoo", "zoo", "--show-config"]
    result = CliRunner().invoke(app, serve, catch_exceptions=False)
    assert "tuned is not served: it belongs to other" in result.stderr
    settings = json.loads(result.stdout)
    fields = ("chains", "bases", "adapter_bases", "stitched")
    assert {field: settings[field] for field in fields} == {field: served[field] for field in fields}
    renamed = CliRunner().invoke(app, [*serve, "--name", "mine"], catch_exceptions=False)
    assert set((told := json.loads(renamed.stdout))["chains"]) == {"lora", "mine"}
    assert told["stitched"]["chain@1"]["first"] == "mine", "what clients call the first base"
    for name in ("lora", "large"):
        with pytest.raises(CoserveError, match=f"--adapter {name}: the zoo has"):
            CliRunner().invoke(app, [*serve, "--adapter", f"{name}={made / 'lora'}"], catch_exceptions=False)
    said.returncode, said.stderr = 1, "coserve: the zoo has no 'other'\n"
    with pytest.raises(ZooError, match=r"^the zoo has no .other.$"):
        CliRunner().invoke(app, [*serve, "other"], catch_exceptions=False)
