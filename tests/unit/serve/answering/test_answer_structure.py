"""Forms of answers: a model with random weights writes nothing else, and bad ones are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import coserve
from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.request import FinishReason
from coserve.serve.answering.structure import Structure
from coserve.serve.errors import ApiError
from coserve.text import Text
from models import tiny

TOKENIZER = AutoTokenizer.from_pretrained(Path(coserve.__file__).parent / "tiny" / "weights")
TEXT = Text(TOKENIZER)
PATTERN = r"[a-c]{2,5}/([0-9][0-9])?\n(yes|no)"
CHOICE = ["one", 'two "quoted"', "three\nlines", "<|im_end|>", "a/b\\"]
LARK = 'start: greeting " " NAME\ngreeting: "hello" | "bye"\nNAME: /[A-Z][a-z]{1,4}/\n'
GBNF = 'root ::= greeting " " name\ngreeting ::= "hello" | "bye"\nname ::= [A-Z] [a-z]\n'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, "x"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def holds(kind: str, value: Any, said: str) -> bool:
    match kind:
        case "regex":
            return re.fullmatch(value, said) is not None
        case "choice":
            return said in value
        case "grammar":
            return re.fullmatch("(hello|bye) [A-Z][a-z]{1,4}", said) is not None
    return json.loads(said)["a"] in (1, "x")


@pytest.mark.parametrize(
    ("kind", "value"),
    [("regex", PATTERN), ("choice", CHOICE), ("grammar", LARK), ("grammar", GBNF), ("json", SCHEMA)],
)
def test_a_model_of_random_weights_writes_nothing_else(kind: Any, value: Any) -> None:
    model = tiny("llama", vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    engine = Engine(model, EngineConfig(calibrate=False, cache_tokens=1024, page_size=8), tokenizer=TOKENIZER)
    grammar = Structure(kind, value).grammar(TEXT.markups.lark())
    handles = [
        engine.generate(
            [5, 6], sampling=SamplingParams(max_tokens=60, temperature=2.0, seed=seed, grammar=grammar)
        )
        for seed in range(12)
    ]
    engine.run()
    said = [handle.text for handle in handles if handle.finish_reason is FinishReason.STOP]
    assert len(said) >= 6 and len(set(said)) > 1
    assert all(holds(kind, value, one) for one in said), said


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(a"),
        ("regex", "a{1,"),
        ("regex", "(?=a)b"),
        ("grammar", "start: unknown"),
        ("grammar", 'start: "a'),
        ("grammar", "root ::= ("),
        ("grammar", "no grammar at all"),
        ("grammar", '#"[::=a('),
        ("grammar", 'root ::= "root ::= |#\n\\'),
        ("grammar", "root ::= " + "(" * 20_000),
        ("json", {"type": "nothing"}),
        ("json", {"$ref": "#/nowhere"}),
        ("choice", ["x" * 70_000]),
    ],
)
def test_a_bad_one_is_refused_with_its_place(kind: Any, value: Any) -> None:
    structure = Structure(kind, value, f"structured_outputs.{kind}")
    with pytest.raises(ApiError) as refused:
        structure.grammar(TEXT.markups.lark())
    assert (refused.value.status, refused.value.param) == (400, f"structured_outputs.{kind}")
    assert refused.value.message.startswith("Invalid ") and len(refused.value.message) > 30
