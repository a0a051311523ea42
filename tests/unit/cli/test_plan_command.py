"""`coserve plan` from outside."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.core.checkout import measured_code
from coserve.errors import CoserveError

FIELDS = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}
SMALL = ("--batch", "2", "--length", "16", "--cache-tokens", "64")


def plan(*arguments: str) -> str:
    """The command's output."""
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def refusal(*arguments: str) -> str:
    """Its deliberate error, in one line."""
    with pytest.raises(CoserveError) as caught:
        CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    return str(caught.value)


def test_the_table_has_answers_full_fine_tuning_and_the_adapter() -> None:
    printed = plan(json.dumps(FIELDS), "--adapter", "lora:rank=4", *SMALL, "--memory", "1GiB")
    for word in ("inference", "full fine-tuning", "lora:rank=4", "torch", "coserve", "1 GiB", "yes"):
        assert word in printed, printed
    assert " no" not in printed.replace(" no-grad", "")


def test_a_budget_that_is_too_small_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    printed = plan(str(tmp_path), "--adapter", "ia3", *SMALL, "--memory", "30KB")
    assert " no" in printed.replace(" no-grad", "") and "yes" not in printed
    assert "too few even to stream them" in printed and "of engine.memory with" in printed


def test_a_base_that_is_streamed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, "n_layer": 5}))
    asked = (str(tmp_path), "--adapter", "ia3", *SMALL, "--memory", "1GiB", "--base-memory")
    printed = plan(*asked, "300KB")
    assert "the engine streams the base" in printed and "(assumed, as no file could be read)" in printed
    assert "no" not in printed.split("ia3, inputs")[1].splitlines()[0]
    printed = plan(*asked, "300KB", "--device", "cuda", "--host-memory", "10KB")
    assert "of it from the host's memory); at 954 MiB/s (assumed, as no device or file" in printed, "disk"
    assert "in the host's memory: 9.77 KiB of the base's blocks (9.77 KiB are for them)" in printed
    assert "with engine.offload the optimizer's moments are there, too: ia3 " in printed
    found = json.loads(plan(*asked, "1KB", "--json"))
    streamed, rows = found["streamed"], [row for row in found["rows"] if row["system"] == "coserve"]
    assert streamed["room"] == 1000 < streamed["least"] and streamed["read"] is None
    assert rows and all(row["least"] > streamed["least"] and not row["fits"] for row in rows)


@pytest.mark.slow
def test_json_and_a_picture_over_batches(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    printed = plan("tiny", "--adapter", "ia3", *SMALL, "--batch", "4", "--plot", str(picture), "--json")
    found = json.loads(printed)
    assert found["code"] == measured_code() and found["date"]
    assert {row["batch"] for row in found["rows"]} == {2, 4}
    assert found["model"] == "tiny" and found["dtype"] == "bfloat16" and found["error"] is None
    rows = {(row["system"], row["name"], row["batch"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 2 * 5
    assert rows["torch", "ia3", 4]["total"] > rows["torch", "ia3", 2]["total"]
    assert rows["coserve", "ia3", 2]["keep"] == "inputs" and rows["torch", "ia3", 2]["keep"] is None
    assert "activations" in picture.read_text()


@pytest.mark.slow
def test_a_configuration_in_a_file_or_in_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    asked = ("--adapter", "lora", *SMALL, "--json")
    totals = [
        [row["total"] for row in json.loads(plan(model, *asked))["rows"]]
        for model in (str(tmp_path), json.dumps(FIELDS))
    ]
    assert totals[0] == totals[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "'nothing' is no model"),
        (['{"model_type": "nothing"}'], "no configuration of a transformers model"),
        (["{"], "no JSON"),
        (["tiny", "--adapter", "nothing"], "no adapter method 'nothing'"),
        (["tiny", "--adapter", "lora:colour=3"], "colour"),
        (["tiny", "--dtype", "int4"], "--dtype"),
        (["tiny", "--keep", "nothing"], "number of bytes"),
        (["tiny", "--memory", "much"], "memory"),
        (["tiny", "--memory", "0.5", "--device", "cuda"], "no such device; --memory in bytes plans one"),
        (["tiny", "--host-memory", "1GiB"], "beside a GPU"),
        (["tiny", "--loss", "much"], "--loss"),
        (["t5", "--adapter", "lora", *SMALL], "decoder-only"),
        (["tiny", "--activations"], "one --adapter"),
        (["opt", "--tensor-parallel", "2"], "no tensor-parallel plan"),
        (
            ["tiny", "--tensor-parallel", "2", "--adapter", '{"targets": ["embed_tokens"]}'],
            "plans no EmbeddingLoRA",
        ),
        (["tiny", "--tensor-parallel", "2", "--link", "string"], "no link between ranks"),
        (["tiny", "--tensor-parallel", "5"], "cannot be divided over 5 ranks"),
        (["tiny", "--executor"], "--executor is for --tensor-parallel"),
        (["tiny", "--plot", "/nowhere/to/be/found.svg"], "--plot"),
        ([json.dumps(FIELDS), "--length", "5000", "--batch", "2"], "1024"),
    ],
)
def test_nonsense_is_one_line(arguments: list[str], says: str) -> None:
    said = refusal(*arguments)
    assert says in said and len(said.splitlines()) == 1


def test_activations_are_explained() -> None:
    printed = plan("tiny", "--adapter", "lora", "--activations", "--keep", "pruned")
    assert "kept" in printed and "q_proj" in printed


def test_what_placements_of_an_executor_cost() -> None:
    """Of a call's inputs, products and sums a rank of two sends a half; of sums twice that."""
    width, q, kv, inner, layers, vocabulary, rows, nbytes = 32, 48, 24, 80, 3, 64, 8, 4
    fields = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocabulary}
    asked = [json.dumps({"model_type": "llama", **fields, **heads}), "--dtype", "float32", "--executor"]
    asked += ["--tensor-parallel", "2", "--batch", str(rows), "--length", "1"]
    assert "gathers at once" in plan(*asked, "--link", "ethernet")
    cut, gathered = json.loads(plan(*asked, "--json"))
    weights = nbytes * (layers * (2 * width * (q + kv) + 3 * width * inner) + width * vocabulary)
    assert cut["kept"] == gathered["kept"] == weights // 2
    crossing = layers * (3 * width + 2 * q + 2 * kv) + width + vocabulary
    assert cut["forward_sent"] == nbytes * rows * (crossing + 2 * layers * width) // 2
    assert gathered["forward_sent"] == (nbytes * rows * (crossing + layers * width) + weights) // 2
    assert cut["gathered"] == 0 and gathered["gathered"] == nbytes * width * inner
    crossing = layers * (15 * width + 3 * q + 2 * kv) + 2 * width + vocabulary
    assert cut["back_sent"] == nbytes * rows * crossing // 2
    crossing = layers * (5 * width + 2 * q + 2 * kv) + width + vocabulary
    weights += nbytes * layers * 3 * width * inner  # of feed-forward layers, which are computed anew
    assert gathered["back_sent"] == (nbytes * rows * crossing + weights) // 2
    assert all(one[f"{way}_seconds"] > 0 for one in (cut, gathered) for way in ("forward", "back"))


def test_what_each_stage_of_a_pipeline_holds() -> None:
    """Together what the whole holds, but for what all stages have."""
    asked = ("tiny", "--adapter", "lora", "--cache-tokens", "100", "--json")
    first, last = json.loads(plan(*asked, "--pipeline-parallel", "2"))
    assert (first["first"], first["last"]) == (0, last["first"]) and last["last"] > last["first"] > 0
    for one in (first, last):
        assert min(one["weights"], one["pages"], one["adapter"]) > 0
    for whole, part in zip(
        (first, last),
        json.loads(plan(*asked, "--pipeline-parallel", "2", "--tensor-parallel", "2")),
        strict=True,
    ):
        assert part["pages"] * 2 == whole["pages"]  # norms are whole, and of LoRA one matrix of two
        assert (
            0.5 < part["weights"] / whole["weights"] < 0.55 and 0.5 < part["adapter"] / whole["adapter"] < 0.9
        )
    assert "cannot be cut into 60 stages" in refusal("tiny", "--pipeline-parallel", "60")


def test_how_an_adapter_is_cut_over_ranks() -> None:
    """Of linears cut by columns A is whole and B cut, of those cut by rows the other way round: nothing is
    sent but one gradient."""
    adapter = ("--adapter", "lora:rank=4,targets=q_proj+down_proj")
    printed = plan("255m", "--tensor-parallel", "2", *adapter, "--link", "pcie5")
    assert "LoRABypass at q_proj (16 times, colwise" in printed and "down_proj (16 times, rowwise" in printed
    columns, rows = json.loads(plan("255m", "--tensor-parallel", "2", *adapter, "--json"))
    assert columns["plans"][0]["forward"] == "x = -lora_A=- = -lora_B|- |" and columns["names"] == ["q_proj"]
    assert rows["plans"][0]["forward"] == "x | -lora_A|- + -lora_B=- +"
    for one, summed in ((columns, "A"), (rows, "B")):
        assert one["found"] > len(one["plans"]) > 1 and one["plans"][0]["forward_seconds"] == 0
        assert one["plans"][0]["sends"] == [f"reduce lora_{summed}'s gradient once a step"]
        seconds = [plan["forward_seconds"] + plan["back_seconds"] for plan in one["plans"]]
        assert seconds == sorted(seconds)
