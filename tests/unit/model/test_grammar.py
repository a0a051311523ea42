"""Answers that must match a grammar: with random weights, at any temperature, cut and continued."""

import json
import random
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
import msgspec
import pytest
from llguidance import LLMatcher
from transformers import AutoTokenizer

import coserve
from called import PARAMETERS, template_of, tokenizer_for
from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.request import FinishReason
from coserve.errors import ConfigError, RequestError
from coserve.model import grammar as grammar_module
from coserve.model.grammar import Grammars
from coserve.text import Text
from coserve.text.deltas import joined
from coserve.text.tools.grammar import AnswerParts, answer_grammar
from coserve.text.tools.tool import Tool
from models import letter_tokenizer, tiny

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "inner"],
    "additionalProperties": False,
}
# Without a limit on white space a random model writes little else.
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


TOKENIZER = AutoTokenizer.from_pretrained(Path(coserve.__file__).parent / "tiny" / "weights")


class Person(msgspec.Struct, forbid_unknown_fields=True):
    """The schema once more."""

    name: Annotated[str, msgspec.Meta(max_length=8)]
    age: Annotated[int, msgspec.Meta(ge=0, le=120)]
    tags: Annotated[list[Literal["a", "b"]], msgspec.Meta(max_length=3)]
    inner: bool | None


def engine_of(**fields: object) -> Engine:
    config = {"calibrate": False, "cache_tokens": 2048, "page_size": 4, **fields}
    model = tiny("llama", vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    return Engine(model, EngineConfig(**config), tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


def matching(seed: int, **fields: object) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 120, "temperature": 1.5, "seed": seed, "grammar": GRAMMAR, **fields}
    )


def test_answers_parse_and_validate_beside_free_ones(engine: Engine) -> None:
    """Thirty of them in one batch, with other settings and without grammars in between."""
    free = SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)
    wanted = engine.generate([3, 4], sampling=free).result().tokens
    settings = ({}, {"temperature": 0.0}, {"top_p": 0.8, "presence_penalty": 1.0}, {"logit_bias": {95: 9.0}})
    answers = [
        engine.generate([5, i + 1], sampling=matching(i, **settings[i % len(settings)])) for i in range(30)
    ]
    others = [engine.generate([3, 4], sampling=free) for _ in range(3)]
    engine.run()
    for answer in answers:
        assert answer.finish_reason is FinishReason.STOP, answer.text
        msgspec.json.decode(answer.text, type=Person)
    assert len({answer.text for answer in answers}) > 20
    assert all(other.tokens == wanted for other in others)
    assert engine.executor.worker.table.sampling.is_plain  # nobody who comes later pays for it


def test_wherever_it_was_cut_it_goes_on_as_it_would_have(engine: Engine) -> None:
    whole = engine.generate([5, 9], sampling=matching(4)).result()
    for cut in range(1, len(whole.tokens) + 1):
        rest = engine.generate([5, 9], sampling=matching(4), continued=whole.tokens[:cut]).result()
        assert rest.tokens == whole.tokens and rest.finish_reason is FinishReason.STOP


def test_preempted_ones_are_followed_again() -> None:
    tight, roomy = engine_of(cache_tokens=200), engine_of()
    asked = [[random.Random(i).randrange(1, 96) for _ in range(5 + i)] for i in range(6)]
    wanted = [roomy.generate(p, sampling=matching(i)).result().tokens for i, p in enumerate(asked)]
    answers = [tight.generate(p, sampling=matching(i)) for i, p in enumerate(asked)]
    tight.run()
    assert [answer.tokens for answer in answers] == wanted
    assert any(answer.sequence.preemptions for answer in answers)


def test_a_regular_expression(engine: Engine) -> None:
    grammar = LLMatcher.grammar_from_regex(r"[ab]{3}-[0-9]{2}")
    answer = engine.generate([5], sampling=matching(1, grammar=grammar)).result()
    assert len(answer.text) == 6 and answer.text[3] == "-" and answer.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: nowhere", "nowhere"),
        ("}{", ""),
        (LLMatcher.grammar_from_json_schema({"type": "no such"}), "no such"),
        (LLMatcher.grammar_from_regex("("), ""),
    ],
)
def test_a_grammar_that_is_none_is_refused_and_nothing_waits(engine: Engine, grammar: str, said: str) -> None:
    engine.run()  # releases what ended last
    with pytest.raises(RequestError, match="cannot be compiled") as error:
        engine.generate([5], sampling=matching(1, grammar=grammar))
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not engine.has_work and not engine.completions


def test_what_was_said_must_match(engine: Engine) -> None:
    with pytest.raises(RequestError, match="does not match"):
        engine.generate([5], sampling=matching(1), continued=TOKENIZER.encode("no JSON"))


def test_what_does_not_go_together(engine: Engine) -> None:
    for fields in ({"min_tokens": 3}, {"ignore_eos": True}):
        with pytest.raises(ConfigError, match="grammar"):
            matching(1, **fields)
    for tokenizer in (None, letter_tokenizer()):  # llguidance cannot tell the second one's bytes
        bare = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=64), tokenizer=tokenizer)
        with pytest.raises(ConfigError, match="tokenizer"):
            bare.generate([5], sampling=matching(1, max_tokens=9))


def test_an_answer_that_outgrows_the_parser_ends(engine: Engine) -> None:
    """llguidance gives up on it; nobody else notices."""
    table = engine.executor.worker.table.sampling
    matcher = table.grammars.matcher(GRAMMAR)
    matcher.advance(TOKENIZER.encode("x")[0])  # not allowed: it fails as one that outgrew its limits
    allowed = matcher.allowed(len(TOKENIZER), table.device)
    assert allowed.nonzero().flatten().tolist() == [TOKENIZER.eos_token_id]


def test_what_is_kept_is_bounded_by_number_and_size_and_what_somebody_holds_is_not_compiled_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 600 fields took 2.4 MB: without a bound on bytes clients could have hundreds of MB."""
    compiled: list[str] = []

    def counted(view: object, text: str, log_level: int) -> LLMatcher:
        compiled.append(text)
        return LLMatcher(view, text, log_level=log_level)

    monkeypatch.setattr(grammar_module, "LLMatcher", counted)
    grammars = Grammars(TOKENIZER, len(TOKENIZER), engine.executor.spec.eos_ids)
    draws = random.Random(3)
    held = grammars.compile(GRAMMAR)
    for number in range(200):
        length = draws.choice([10, 1000, 30_000])
        enum = LLMatcher.grammar_from_json_schema({"enum": [f"{number} " + "x" * length]})
        grammars.compile(enum)
        assert grammars.find(enum) is not None, "the newest one is kept"
        assert len(grammars._compiled) <= 64 + 1
        assert sum(map(len, grammars._newest)) == grammars._bytes <= 256 << 10
    grammars.matcher(GRAMMAR)
    assert compiled.count(GRAMMAR) == 1
    del held
    for number in range(65):
        grammars.compile(LLMatcher.grammar_from_json_schema({"enum": [number]}))
    assert grammars.find(GRAMMAR) is None


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_random_weights_call_a_tool_whose_marks_are_tokens(name: str) -> None:
    tokenizer = tokenizer_for(template_of(name))
    text = Text(tokenizer)
    tools = [Tool("get_weather", PARAMETERS)]
    parts = AnswerParts(text.markups.format(), tools, forced=True, parallel=False)
    grammar = answer_grammar(parts, text.markups.lark())
    model = tiny("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    config = EngineConfig(calibrate=False, cache_tokens=1024, page_size=4)
    engine = Engine(model, config, tokenizer=tokenizer)
    prompt = text.chat([{"role": "user", "content": "Ulm?"}])
    sampling = SamplingParams(max_tokens=200, temperature=1.5, seed=3, grammar=grammar)
    answer = engine.generate(prompt, sampling=sampling)
    engine.run()
    markup = text.markups.of(prompt, tools)
    stream, reader = text.stream(kept=markup.kept), markup.reader()
    deltas = [delta for token in answer.tokens for delta in reader.push(stream.push(token))]
    _, _, (call,) = joined([*deltas, *reader.push(stream.finish(), is_last=True)])
    assert call.name == "get_weather" and answer.finish_reason is FinishReason.STOP
    jsonschema_rs.validate(PARAMETERS, json.loads(call.arguments))
