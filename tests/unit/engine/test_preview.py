"""A job is looked at before it is created: what is told is what the job then is, and nothing stays."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from coserve import Engine, EngineConfig, tiny
from coserve.adapters.settings import settings_of
from coserve.engine import preview as preview_module
from coserve.engine.preview import judge, read_preview
from coserve.train.config import TrainingConfig
from coserve.train.job import PreparedJob
from coserve.train.needs import JobNeeds
from coserve.wire.messages import JobPreview, JobSpec

GRADER = {"type": "string_check", "reference": "{{item.answer}}"}
LONG = "word " * 60
DATA: dict[str, list[dict[str, Any]]] = {
    "supervised": [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}], "id": 1}
        for text in ("Hello there", LONG, "Yes", LONG, "No")
    ],
    "dpo": [{"prompt": "Hi", "chosen": text, "rejected": "no"} for text in ("yes", LONG, "no", "may be")],
    "orpo": [{"prompt": "Hi", "chosen": text, "rejected": "no"} for text in ("yes", LONG, "no", "may be")],
    "kto": [{"prompt": "Hi", "completion": text, "label": True} for text in ("yes", LONG, "may be")],
    "reinforcement": [{"prompt": text, "answer": "x"} for text in ("Hi", LONG, "So")],
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    **{name: {"type": name} for name in ("supervised", "dpo", "orpo", "kto")},
    "reinforcement": {"type": "reinforcement", "grader": GRADER, "max_tokens": 8},
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny.path(), EngineConfig(calibrate=False, cache_tokens=512))


def put(folder: Path, records: list[dict[str, Any]]) -> Path:
    file = folder / "file-123.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return file


def asked(file: Path, name: str = "supervised", **options: Any) -> JobSpec:
    method = {"r": 2, "target_modules": ["q_proj"]}
    return JobSpec("j", str(file), "", options, method, OBJECTIVES[name], data_name="mine.jsonl")


def look(engine: Engine, spec: JobSpec, records: int | None = None) -> JobPreview:
    found = judge(engine, *read_preview(engine, spec, records))
    assert not engine.jobs and not engine.adapters.bank.names and not engine.has_work
    return found


@pytest.mark.parametrize("too_long", ["skip", "truncate", "error"])
@pytest.mark.parametrize("name", DATA)
def test_a_preview_tells_what_the_job_then_is(
    engine: Engine, tmp_path: Path, name: str, too_long: Any
) -> None:
    file, options = put(tmp_path, DATA[name]), {"max_length": 40, "batch_size": 2, "epochs": 3}
    if name == "reinforcement" and too_long == "truncate":
        found = look(engine, asked(file, name, **options, too_long=too_long))
        assert found.fault is not None and "optimizer.too_long is 'error' or 'skip'" in found.fault.text
        return
    found = look(engine, asked(file, name, **options, too_long=too_long))
    assert (found.records, found.is_whole, found.container) == (len(DATA[name]), True, "JSON lines")
    assert found.format and found.limit == 40 and found.over == (2 if name == "supervised" else 1)
    assert found.tokens is not None and found.tokens.total > found.tokens.most > 40 > found.tokens.least
    bins = found.tokens.histogram
    assert sum(number for _, _, number in bins) == found.records
    assert all(last + 1 == first for (_, last, _), (first, _, _) in itertools.pairwise(bins))
    assert bins[0][0] <= found.tokens.least and found.tokens.most <= bins[-1][1]
    assert found.ignored == (("id",) if name == "supervised" else ())
    if too_long == "error":
        assert found.fault is not None and found.fault.kind == "DataError"
        assert found.longest_place == "mine.jsonl, line 2"
        assert f"has {found.tokens.most} tokens: optimizer.too_long 'skip' leaves" in found.fault.text
        return
    assert found.fault is None and found.seconds is None
    training = TrainingConfig(**options, too_long=too_long)
    method = settings_of({"r": 2, "target_modules": ["q_proj"]})
    job = engine.finetune(file, "mine", method, training, objective=OBJECTIVES[name])
    counts = (job.truncated, job.skipped, job.dropped)
    assert (found.truncated, found.skipped, found.dropped) == counts and sum(counts)
    assert found.steps == job.steps and found.memory is not None and found.memory_room is not None
    assert 0 < found.memory <= found.memory_room
    job.cancel()
    engine.run()
    engine.adapters.unload("mine")


def test_the_first_example_is_shown_as_it_is_rendered(engine: Engine, tmp_path: Path) -> None:
    text = engine.text
    assert text is not None
    found = look(engine, asked(put(tmp_path, DATA["supervised"][:1])))
    (example,) = engine.prepare(put(tmp_path, DATA["supervised"][:1])).examples
    assert "".join(one.text for one in found.first) == "".join(map(text.tokens.text_of, example.tokens))
    assert [one.text for one in found.first if one.trained] == ["Hello there<|end|>"]
    assert [one.trained for one in found.first] == [False, True] and found.rejected == ()
    found = look(engine, asked(put(tmp_path, DATA["dpo"]), "dpo"))
    trained = [[one.text for one in each if one.trained] for each in (found.first, found.rejected)]
    assert trained == [["yes<|end|>"], ["no<|end|>"]]
    assert look(engine, asked(put(tmp_path, DATA["kto"]), "kto", too_long="skip")).rejected == ()
    cut = look(engine, asked(put(tmp_path, [{"text": "été 🚀 " * 900}])))
    assert (cut.split, cut.pieces) == (1, cut.examples) and cut.examples > 1
    assert cut.first[1].trained and "été" in cut.first[1].text


@pytest.mark.parametrize(
    ("records", "spec", "kind", "said"),
    [
        ([{"text": 3}], {}, "DataError", 'mine.jsonl, line 1: expected "text"'),
        ([{"text": "a"}], {"method": {"target_modules": ["none"]}}, "AdapterMismatch", "none"),
        ([{"text": "a"}], {"options": {"schedule": "x"}}, "ConfigError", "schedule"),
        ([{"text": ""}], {}, "DataError", "mine.jsonl, line 1"),
        ([{"text": "a"}], {"validation": "none", "validation_name": "val.jsonl"}, "ValidationDataError",
         "validation val.jsonl: cannot be read"),
    ],
)  # fmt: skip
def test_what_the_job_would_be_refused_for_is_told(
    engine: Engine, tmp_path: Path, records: list[dict[str, Any]], spec: dict[str, Any], kind: str, said: str
) -> None:
    found = look(engine, structs.replace(asked(put(tmp_path, records)), **spec))
    assert found.fault is not None and found.fault.kind == kind and said in found.fault.text
    assert "file-123" not in found.fault.text


def test_a_job_without_room_is_told_with_its_data(engine: Engine, tmp_path: Path) -> None:
    spec = asked(put(tmp_path, DATA["supervised"]), rows=4096)
    preview, longest = read_preview(engine, spec)
    assert longest is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.memory), "job_room", lambda self: 1000)
        found = judge(engine, preview, longest)
    assert found.fault is not None and found.fault.kind == "OutOfMemory" and found.steps == preview.steps > 0


def test_needs_are_computed_once_between_two_steps(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preview, longest = read_preview(engine, asked(put(tmp_path, DATA["supervised"])))
    assert longest is not None
    computed: list[int] = []
    real = PreparedJob.needs

    def needs(self: PreparedJob, *args: Any) -> JobNeeds:
        computed.append(len(self.lengths))
        return real(self, *args)

    monkeypatch.setattr(PreparedJob, "needs", needs)
    assert judge(engine, preview, longest).memory
    assert len(computed) == 1


def test_a_file_that_takes_long_is_read_in_part(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(tmp_path, [{"text": "abc"}] * 200)
    monkeypatch.setattr(preview_module, "SECONDS", 0.0)
    found = look(engine, asked(file, batch_size=4, epochs=2), 200)
    assert (found.records, found.is_whole, found.steps) == (16, False, 100)


def test_seconds_follow_the_costs_of_steps(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(tmp_path, DATA["supervised"])
    assert look(engine, asked(file)).seconds is None
    monkeypatch.setattr(engine.cost, "is_measured", True)
    once, twice = (look(engine, asked(file, batch_size=2, epochs=n)).seconds for n in (2, 4))
    assert once and twice and math.isclose(twice, 2 * once)
    capped = look(engine, asked(file, batch_size=2, epochs=2, max_steps=3)).seconds
    assert capped and math.isclose(capped, once / 2)
    assert look(engine, asked(put(tmp_path, DATA["dpo"]), "dpo")).seconds is None


@pytest.mark.parametrize("name", ["supervised", "dpo"])
def test_the_first_records_are_shown_token_by_token(engine: Engine, tmp_path: Path, name: str) -> None:
    """Joined they are the stretches of the first example, and of a pair the second is the rejected one."""
    preview, _ = read_preview(engine, asked(put(tmp_path, DATA[name]), name), shown=2)
    group = 2 if name == "dpo" else 1
    assert [one.rejected for one in preview.shown] == [False, True][:group] * 2
    for shown, pieces in zip(preview.shown, (preview.first, preview.rejected)[:group], strict=False):
        assert shown.tokens == len(shown.pieces) > len(pieces) > 1
        for trained in (False, True):
            told = [
                ["".join(one.text for one in of if one.trained is trained)] for of in (shown.pieces, pieces)
            ]
            assert told[0] == told[1] != [""]
    few = read_preview(engine, asked(put(tmp_path, DATA[name]), name), shown=1)[0].shown
    assert len(few) == group and few == preview.shown[:group]
    assert not read_preview(engine, asked(put(tmp_path, DATA[name]), name))[0].shown
