"""Hostile input of simulations: damaged tables of hardware, models, traces, and numbers that cannot be. Each
is one clear error with the place, and none takes long or all memory."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.errors import ConfigError, CoserveError, DataError
from coserve.simulate.hardware import Roofline, hardware_names, read_hardware
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.models import model_shape
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.workload.requests import ServedAdapters
from coserve.workload.shapes import shape_named
from coserve.workload.trace_formats import TraceRow, read_trace

FOLDER = Path(read_hardware.__code__.co_filename).parent / "hardware"
ABSURD = ("-1", "0", "inf", "-inf", "nan", "1e300", '"fast"', "true", "[]", "{}", "1979-05-27", "")
TRACES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2023-11-16 18:15:{n:02}.68,{100 + n},{10 + n}\n" for n in range(6)),
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + "".join(f"{n},GPT-4,{100 + n},{10 + n},0,x\n" for n in range(6)),
    "mooncake.jsonl": "".join(
        json.dumps({"timestamp": 1000 * n, "input_length": 600, "output_length": 5, "hash_ids": [n, 9]})
        + "\n"
        for n in range(6)
    ),
}
CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 176, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024, "head_dim": 16,
}  # fmt: skip


# Tables of hardware


def damaged_tables(seed: int) -> Iterator[tuple[int, str, str]]:
    """(line, field, text): an own table with one number replaced."""
    draw = random.Random(seed)
    for name in draw.sample([name for name in hardware_names() if name != "two-cores"], 2):
        lines = (FOLDER / f"{name}.toml").read_text().splitlines()
        numbers = [n for n, line in enumerate(lines) if re.match(r"\w+ = [\d.]+$", line)]
        types = lines.index("[peak_tflops]") + 1  # of a mapping the table is named, not its key
        for place in numbers:
            field, wrong = lines[place].split(" = ")[0], draw.choice(ABSURD)
            line = types if field in ("bfloat16", "float16", "float32") and wrong else place + 1
            yield line, field, "\n".join([*lines[:place], f"{field} = {wrong}", *lines[place + 1 :]])


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_table_is_refused_with_line_and_field(tmp_path: Path, seed: int) -> None:
    path, refused = tmp_path / "x.toml", 0
    for line, field, text in damaged_tables(seed):
        path.write_text(text)
        try:
            table = read_hardware(path)
        except ConfigError as error:
            assert re.search(rf"line {line}\b", str(error)), (error, line, field)
            refused += 1
        else:  # zero is a number for overheads and links
            assert isinstance(table, Roofline) and f"{field} = 0" in text
    assert refused > 10


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rows = [[1,", "rows = [[64, 0.1], [1,", r"line \d+: `rows` need to ascend; 1 comes after 64"),
        ("longer = 1.5", "longer = -3", r"line \d+: jitter's field `longer` is from 0.1 to 100, not -3"),
        ("[overhead]", "[overheads]", r"line \d+: .*unknown field `overheads`"),
        ("memory_gb = 80\n", "", r"line 1: .*missing required field `memory_gb`"),
        ("attention = 0.35\n", "", r"line \d+: .*missing required field `attention`"),
        ("bfloat16 = 989", "bfloat16 =", "x.toml: .*line"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = (FOLDER / "h100.toml").read_text()
    assert old in text
    (tmp_path / "x.toml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=said):
        read_hardware(tmp_path / "x.toml")


@pytest.mark.parametrize("nbytes", [b"", b"\xff\xfe\x00", b"\x00" * 100, b"kind = 'roofline'", b"[" * 5000])
def test_what_is_no_table_is_one_error(tmp_path: Path, nbytes: bytes) -> None:
    (tmp_path / "x.toml").write_bytes(nbytes)
    with pytest.raises(ConfigError, match=r"x\.toml"):
        read_hardware(tmp_path / "x.toml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bandwidth_gbs": "1e-9"}, "a step takes .* s by this table"),
        ({"bfloat16": "1e-9"}, "a step takes .* s by this table"),
    ],
)
def test_steps_of_hours_are_refused(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    text = (FOLDER / "h100.toml").read_text()
    for field, value in changes.items():
        text = re.sub(rf"(?m)^{field} = [\d.]+$", f"{field} = {value}", text)
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Simulator(FleetSettings(shape_named("8b"), str(tmp_path / "x.toml")), SimulatedLoad(1.0, 1.0))


def test_weights_of_nothing_would_never_end(tmp_path: Path) -> None:
    text = re.sub(r"(?m)^(\w+) = [\d.e-]+$", r"\1 = 0.0", (FOLDER / "two-cores.toml").read_text())
    text = re.sub(r"(?m)^layers = .*$", "layers = 16", text)
    text = re.sub(r"(?m)^cache_tokens = .*$", "cache_tokens = 4096", text)
    text = re.sub(r"(?m)^longer = .*$", "longer = 1.5", text)
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match="a step takes 0 s by this table"):
        Simulator(FleetSettings(shape_named("255m"), str(tmp_path / "x.toml")), SimulatedLoad(1.0, 1.0))


# Models


@pytest.mark.parametrize("field", CONFIG)
def test_absurd_models_are_refused_with_the_field(tmp_path: Path, field: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    assert model_shape(str(tmp_path)).layers == 4
    wrongs: tuple[object, ...] = (0, -1, 10**30, 1.5, "4", True, [4], {})
    for wrong in wrongs:
        file.write_text(json.dumps({**CONFIG, field: wrong}))
        with pytest.raises(ConfigError, match=rf"config\.json: {field}: "):
            model_shape(str(tmp_path))


def test_heads_that_cannot_share_groups_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_key_value_heads": 3}))
    with pytest.raises(ConfigError, match="num_key_value_heads: 4 heads cannot share 3"):
        model_shape(str(tmp_path))


# Traces


@pytest.mark.parametrize("name", TRACES)
def test_damaged_traces_are_refused_with_line_and_field(tmp_path: Path, name: str) -> None:
    """A hole, a word, an absurd number, a time that goes back: in any field of any line."""
    path, draw = tmp_path / name, random.Random(1)
    path.write_text(TRACES[name])
    assert len(read_trace(path)) == 6
    lines = TRACES[name].splitlines()
    fields = {
        "azure.csv": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        "burst.csv": ("Timestamp", None, "Request tokens", "Response tokens"),
        "mooncake.jsonl": ("timestamp", "input_length", "output_length"),
    }[name]
    wrongs = ["", "x", "-5", "1e400", "nan", "99999999999999999999", "9" * 5000]
    for line in range(int(name != "mooncake.jsonl"), len(lines)):
        for place, field in enumerate(fields):
            wrong = draw.choice(wrongs)
            if field is None or (wrong == "-5" and place == 0 and line < 2):
                continue  # nothing comes before the first request
            if name == "mooncake.jsonl":
                value = wrong or None
                changed = json.dumps({**json.loads(lines[line]), field: value})
            else:
                cells = lines[line].split(",")
                changed = ",".join([*cells[:place], wrong, *cells[place + 1 :]])
            path.write_text("\n".join([*lines[:line], changed, *lines[line + 1 :]]))
            with pytest.raises(DataError, match=rf"line {line + 1}: .*{field}"):
                read_trace(path)


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_in_a_trace_are_one_error_or_none(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for name, text in TRACES.items():
        path = tmp_path / name
        for _ in range(30):
            nbytes = bytearray(text.encode())
            for _ in range(draw.randrange(1, 6)):
                nbytes[draw.randrange(len(nbytes))] = draw.randrange(256)
            path.write_bytes(nbytes)
            try:
                assert all(row.prompt >= 1 and row.at >= 0 for row in read_trace(path))
            except DataError as error:
                assert str(error).startswith(str(path))


def test_dates_with_a_zone_are_times(tmp_path: Path) -> None:
    """Of 2024's traces those at a whole second have no decimals."""
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.500000+00:00,5,6\n"
        "2024-05-10 00:00:01+00:00,5,6\n2024-05-10 02:00:02+02:00,5,6\n"
    )
    assert [row.at for row in read_trace(path)] == [0.0, 0.5, 1.5]


# Numbers


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({"rate": 1e9}, "1.2e.11 requests would come within 120 s; a run has at most 20,000,000"),
        ({"seconds": 1e12}, "requests would come within 1e.12 s"),
        ({"adapters": ServedAdapters(10**9)}, "at most 20,000,000 adapters"),
        ({"adapters": ServedAdapters(4, 8, float("nan"))}, "an exponent of at least 0, not nan"),
        ({"prompt": 10**8}, "prompts of 100,000,000 tokens and answers of 64 are longer than the 16,384"),
    ],
)
def test_loads_beyond_all_measure_are_refused(load: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made = SimulatedLoad(**{"seconds": 120.0, "rate": 4.0, **load})  # type: ignore[arg-type]
        Simulator(FleetSettings(shape_named("8b"), "h100"), made)


def test_a_trace_of_an_instant_is_not_begun_anew_for_ever() -> None:
    load = SimulatedLoad(120.0, trace=(TraceRow(0.0, 4, 4), TraceRow(1e-7, 4, 4)))
    assert len([*load.requests(0)]) == 2
    with pytest.raises(ConfigError, match="a run has at most"):
        next(load.requests(1))


@pytest.mark.parametrize(
    "training", [{"batch": 0}, {"length": -1}, {"jobs": -1}, {"batch": 10**9}, {"length": 10**9}]
)
def test_optimizer_steps_beyond_all_measure_are_refused(training: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="an optimizer step has at"):
        TrainingLoad(**{"jobs": 1, **training})


def test_a_batch_of_more_examples_than_repeat_is_whole() -> None:
    (job,) = TrainingLoad(1, 40, 8).make(1)
    assert len(job.examples) == 40 and len(TrainingLoad(1, 3, 8).make(1)[0].examples) == 18


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--engines", "1000000000"], "at most 100,000 engines"),
        (["--stages", "99"], "99 stages cannot share"),
        (["--cache-tokens", "99999999999"], "keys and values of 16 to 268,435,456"),
        (["--train-length", "20000"], "examples of 20,000 tokens are longer than the 16,384"),
        (["--setting", "training_window=1.5"], "training_window needs a whole number"),
        (["--setting", "quantum=nan"], "quantum needs a finite number"),
        (["--slo", "ttft=inf"], "first_token needs a finite number"),
        (["--advise", "--slo", "ttft=1", "--training", "nan"], "--training is a number of tokens"),
        (["--advise", "--price", "h100=inf"], "finite number"),
        (["--hold"], "--hold does not go with --rate"),
        (
            ["--advise", "--slo", "tpot=1e-5", "--most", "1"],
            "no fleet of at most 1 devices holds it; the nearest",
        ),
        (
            ["--advise", "--slo", "ttft=1", "--training", "1e9", "--most", "1"],
            "of 1,000,000,000 tokens/s trained",
        ),
    ],
)
def test_flags_that_cannot_be_are_one_error(flags: list[str], said: str) -> None:
    short = [
        "simulate",
        "--seconds",
        "1",
        "--rate",
        "2",
        *(["--train-length", "64"] * ("20000" not in flags)),
    ]
    out = CliRunner().invoke(app, [*short, *flags])
    assert isinstance(out.exception, CoserveError) and said in str(out.exception), out.exception
