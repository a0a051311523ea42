"""Training methods of jobs and their graders, made to take long, to explode, to hang or to answer garbage."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from test_bodies import MOST_SECONDS, longest_stop

from coserve.errors import CoserveError, JobError
from coserve.train.grading import http
from coserve.train.grading.graders import PythonGrader, grader_from
from coserve.train.objectives import ALL_GRADERS
from coserve.wire.messages import JobStep
from desk import Desk, ask, job
from grader_server import grading, reply
from serving import Play, World
from training import upload

MOST_GRADED = 0.5  # seconds of processor time to make a grader and to grade an answer
MOST_METHODS = 120  # of one test

GOOD: list[dict[str, Any]] = [
    {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
    {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1}}},
    {"type": "orpo", "orpo": {"hyperparameters": {"beta": "auto", "learning_rate_multiplier": 2}}},
    {"type": "distillation", "distillation": {"teacher": "tiny", "hyperparameters": {"top_k": 4}}},
    *(
        {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": {"group_size": 4}}}
        for grader in (
            {"type": "string_check", "operation": "eq", "reference": "{{item.answer}}", "input": "x"},
            {"type": "regex", "pattern": "a+"},
            {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"pattern": "x"}}}},
            {"type": "http", "url": "https://example.org/grade", "timeout": 3},
            {"type": "text_similarity", "reference": "{{item.answer}}", "evaluation_metric": "fuzzy_match"},
            {
                "type": "multi",
                "graders": {
                    "a": {"type": "regex", "pattern": "a+"},
                    "b": {"type": "json_schema", "schema": {}},
                },
                "calculate_output": "0.5 * a + max(b, 0) ^ 2",
            },
        )
    ),
    {"type": "kto", "kto": {"hyperparameters": {"desirable_weight": 2, "undesirable_weight": "auto"}}},
]
VALUES: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**400, -0.0, 1e308, "", "auto", "x" * 70_000, "\ud800", "{{item.}}",
    "(((((a+)+)+)+)+)+$", "a{1000}{1000}", [], {}, [[]], {"type": "dpo"}, "http://127.0.0.1/", "file:///",
    {"$ref": "#"}, ["x"] * 5000, {str(i): i for i in range(3000)},
]  # fmt: skip


def hostile_method(draw: random.Random) -> Any:
    """A method that works, but for one to three of its values, names or places."""
    method = json.loads(json.dumps(draw.choice(GOOD)))
    for _ in range(draw.randint(1, 3)):
        places = [method]
        for place in places:
            places += [one for one in place.values() if isinstance(one, dict)]
        place = draw.choice(places)
        name = draw.choice([*place, "unknown", *GOOD[0], *GOOD[3]])
        match draw.randrange(4):
            case 0:
                place.pop(name, None)
            case 1:
                place[name] = json.loads(json.dumps(draw.choice(places)))  # of another level
            case _:
                place[name] = draw.choice(VALUES)
    return method


def _nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    schema: Any = {"properties": {"a": {}}}
    for _ in range(levels):
        schema = wrap(schema)
    return schema


def hostile_graders() -> Iterator[tuple[dict[str, Any], str]]:
    """Settings of graders that cost much more than they are long, or fail, and an answer for each."""
    object_, text = '{"a": 1}', json.dumps("a" * 3000)
    for key in ("unevaluatedProperties", "unevaluatedItems"):
        for levels in (16, 30):
            for word in ("allOf", "anyOf"):
                yield schema(_nested(levels, lambda s, k=key, w=word: {w: [s], k: False})), object_
    yield schema(_nested(30, lambda s: {"not": {"not": s}})), object_
    yield schema(_nested(12, lambda s: {"anyOf": [s, s]})), object_
    yield schema({"anyOf": [{"pattern": f"[^a]{{640}}{i}"} for i in range(2000)]}), text
    yield schema({"patternProperties": {f"[^a]{{640}}{i}": {} for i in range(2000)}}), object_
    yield schema({"anyOf": [{"pattern": f"[^a]{{900}}{i}"} for i in range(32)]}), text
    yield schema({"items": {"enum": list(range(10_000))}}), json.dumps([-1] * 1000)
    yield schema({"items": {"anyOf": [*({"minLength": 9 + i} for i in range(2000)), {}]}}), '["a"]'
    yield schema({"uniqueItems": True}), json.dumps([{"a": [i]} for i in range(1000)])
    yield schema({"multipleOf": 1e-300}), "1e300"
    yield schema({"minItems": 10**400}), "[]"
    yield schema({"const": 10**400}), "1" + "0" * 4000
    yield schema({"pattern": "(((a+)+)+)+$"}), json.dumps("a" * 3000 + "b")
    yield schema({"format": "regex"}), json.dumps("(" * 3000)
    yield {"type": "regex", "pattern": "(((a+)+)+)+$"}, "a" * 3000 + "b"
    yield {"type": "regex", "pattern": "(a{1000}){1000}"}, "a"
    yield {"type": "regex", "pattern": "(.*a){900}"}, "a" * 3000
    yield {"type": "regex", "pattern": "(" * 9000}, "a"
    for formula in (
        "9^9^9^9^9",
        "2^(2^(2^(2^a)))",
        "-" * 990 + "a",
        "(" * 400 + "a" + ")" * 400,
        "1" * 1000,
        "a*" * 499 + "a",
        "a" + "^a" * 499,
        "max(" + "a," * 490 + "a)",
        "exp(exp(exp(exp(a + 9))))",
        "1/(a - a)",
        "1e308 * 10",
        "log(-1)",
        "sqrt(-a)",
        "(-2)^0.5",
        "(lambda: 0)()",
        "[a for a in range(10^9)]",
        "a if a else a",
        "__import__('os').system('true')",
        "a.__class__.__mro__",
        "'a' * 10^9",
        "a < a < a",
        "(a := 2)",
        "a, a",
        "f'{a!r:>999999999}'",
        "a\0b",
        "\ud800",
        "a ** 10000000000 ** 3",
        "min()",
        "min(*a)",
        "abs(x=a)",
        "a()",
        "0x" + "f" * 900,
        "1e999",
        "1j",
        "True",
        "None",
        "...",
        "await a",
        "a[0]",
        "not a",
        "a and a",
        "~a",
        "a // 2",
        "a % 2",
        "a @ a",
        "a << 64",
        "{a}",
        "{a: a}",
        "yield a",
        "# a",
        "\\\n" * 400,
        "a;a",
        "\u2460",
    ):
        yield multi(formula, a={"type": "regex", "pattern": "a+"}), "aaa"
    yield multi("a", **{f"g{i}": {"type": "regex", "pattern": "a"} for i in range(3000)}), "a"
    yield multi("a", a={"type": "multi", "graders": {}, "calculate_output": "1"}), "a"
    yield multi("a" * 10_000, a={"type": "regex", "pattern": "a"}), "a"
    yield {"type": "text_similarity", "reference": "ab" * 5000}, "ba" * 16_000
    yield {"type": "text_similarity", "reference": "{{item.long}}"}, "a"
    yield {"type": "text_similarity", "reference": "b"}, "ab" * 2**19
    many = "{{item.long}}" * 700
    for operation in ("eq", "like", "ilike"):
        yield {"type": "string_check", "operation": operation, "reference": many}, "a" * 3000
    yield {"type": "string_check", "reference": "x", "input": "{{sample.output_text}}" * 400}, "a" * 30_000
    yield {"type": "string_check", "reference": "{{" * 4000, "input": "{{item." + "a." * 4000 + "}}"}, "a"


def multi(formula: str, **graders: Any) -> dict[str, Any]:
    return {"type": "multi", "graders": graders, "calculate_output": formula}


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "schema": of}


def test_hostile_graders_are_refused_or_take_no_time() -> None:
    """The interpreter's lock is held meanwhile by some: so much would all other answers wait."""
    item, outcomes = {"long": "b" * 2**20, "answer": "x"}, []
    for settings, answer in hostile_graders():
        begun = time.process_time()
        try:
            grader = grader_from(settings, ALL_GRADERS)
            grader.check(item)
            outcomes.append(grader.grade(answer, item))
        except CoserveError as error:
            outcomes.append(error)
        spent = time.process_time() - begun
        assert spent < MOST_GRADED, (spent, str(settings)[:100], str(outcomes[-1])[:100])
    refused = [str(one) for one in outcomes if isinstance(one, CoserveError)]
    for words in (
        "exponential time", "2000 regular expressions", "1048576 characters", "no regular expr", "no formula",
        "has no value for", "levels", "finite number", "16 graders", "at most 1000 characters",
    ):  # fmt: skip
        assert any(words in one for one in refused), words
    assert len(refused) < len(outcomes) - 8  # most of the others are graders, and graded
    assert all(len(one) < 500 for one in refused)


def test_what_is_no_reward_is_told() -> None:
    for value in (10**400, -(10**5000), float("nan"), 1e999, "1", None, []):
        with pytest.raises(JobError, match="must give a finite number") as refused:
            PythonGrader(lambda answer, item, value=value: value).grade("", {})
        assert len(str(refused.value)) < 200
    assert PythonGrader(lambda answer, item: True).grade("", {}) == 1.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_hostile_methods_are_refused_or_run_and_delay_nobody(play: Play, seed: int) -> None:
    draws = random.Random(seed)

    async def story(world: World) -> None:
        file, statuses = await upload(world), []
        others = asyncio.create_task(
            world.client().completions.create(model="tiny", prompt=[5], max_tokens=2000, seed=1)
        )
        for _ in range(MOST_METHODS):
            body = {"model": "tiny", "training_file": file, "method": hostile_method(draws)}
            content, headers = json.dumps(body).encode(), {"content-type": "application/json"}

            async def send(content: bytes = content, headers: dict[str, str] = headers) -> None:
                answer = await world.http.post("/v1/fine_tuning/jobs", content=content, headers=headers)
                statuses.append(answer.status_code)
                assert answer.status_code in (200, 400, 404), (content[:300], answer.text[:300])
                assert answer.status_code == 200 or 0 < len(answer.json()["error"]["message"]) < 2000

            assert await longest_stop(send) < MOST_SECONDS, content[:300]
        assert statuses.count(200) > 5 and statuses.count(400) > MOST_METHODS / 3
        assert (await others).choices[0].text

    play(story, max_jobs_tenant=1000)


def prompts(folder: Path) -> Path:
    """Two prompts with references."""
    file = folder / "prompts.jsonl"
    file.write_text(f"{json.dumps({'prompt': 'hi', 'answer': 'x'})}\n" * 2)
    return file


def rewarded(grader: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "reinforcement", "grader": dict(grader), "group_size": 2, "max_tokens": 3}


REPLIES: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "no JSON": lambda it: reply(it, b"\xff\xfe" * 100),
    "a huge number": lambda it: reply(it, b'{"reward": 1' + b"0" * 5000 + b"}"),
    "deep": lambda it: reply(it, b"[" * 60_000),
    "long": lambda it: reply(it, b" " * 2**17),
    "an error": lambda it: reply(it, b"", 500),
    "a redirect": lambda it: reply(it, b"", 302, location="http://127.0.0.1:1/"),
    "a lie": lambda it: reply(it, b'{"reward": 1}', **{"content-length": "9000"}),
}


def test_graders_elsewhere_fail_their_jobs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they reply; and while one hangs, answers of others are written as ever."""
    monkeypatch.setattr(http, "_PAUSE", 0.0)
    data, over, asked = prompts(tmp_path), threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler, _: Any) -> None:
        name = handler.path.rpartition("/")[2].replace("%20", " ")
        if name == "hangs":
            asked.set()
            over.wait(30)
        else:
            REPLIES[name](handler)

    desk = Desk(grader_hosts=("127.0.0.1",))
    desk.send(ask("alone", 12))
    desk.until(lambda: len(desk.tokens) == 12)
    wanted = [token.token for token in desk.tokens]
    with grading(answer) as url:
        try:
            for name in REPLIES:
                grader = {"type": "http", "url": url + "/" + name.replace(" ", "%20"), "timeout": 0.3}
                desk.send(job(data, tmp_path / name, name, objective=rewarded(grader)))
                ended = desk.ended()
                assert ended.status == "failed" and ended.fault is not None, name
                assert "grader" in ended.fault.text and len(ended.fault.text) < 300, ended.fault
            hanging = rewarded({"type": "http", "url": f"{url}/hangs", "timeout": 0.5})
            desk.send(job(data, tmp_path / "hangs", "hangs", objective=hanging))
            desk.until(asked.is_set)
            desk.send(ask("beside", 12))
            desk.until(lambda: sum(token.id == "beside" for token in desk.tokens) == 12)
            assert not [one for one in desk.news() if one.job == "hangs" and isinstance(one, JobStep)]
            ended = desk.ended()
            assert ended.job == "hangs" and ended.fault is not None and "failed 3 times" in ended.fault.text
        finally:
            over.set()
    assert [token.token for token in desk.tokens if token.id == "beside"] == wanted
    desk.send(job(data, tmp_path / "fine", "fine", objective=rewarded({"type": "regex", "pattern": ".*a.*"})))
    assert desk.ended().status == "succeeded"
