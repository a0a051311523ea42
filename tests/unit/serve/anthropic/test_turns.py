"""Bodies of Anthropic's messages as turns, against a plain account of what a turn is."""

import random
import secrets
from typing import Any

from coserve.core.request import SamplingParams
from coserve.serve.anthropic.schema import CountTokensRequest, MessagesRequest
from coserve.serve.anthropic.turns import chat_of, sampling_of

NOTHING = frozenset[str]().__contains__  # no variable is read


def test_turns_are_the_texts_of_neighbours_of_one_role() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw, lengths = random.Random(seed), set[int]()

    def drawn() -> Any:
        texts = [draw.choice(("", "a", "b c", "\n")) for _ in range(draw.randint(0, 3))]
        if len(texts) == 1 and draw.random() < 0.5:
            return texts[0], texts
        return [{"type": "text", "text": text} for text in texts], texts

    for _ in range(200):
        body, plain = dict[str, Any](), list[tuple[str, list[str]]]()
        if draw.random() < 0.5:
            body["system"], texts = drawn()
            plain.append(("system", texts))
        body["messages"] = []
        roles = draw.choices(("user", "assistant", "system"), k=draw.randint(0, 5))
        for role in [*roles, draw.choice(("user", "system"))]:
            content, texts = drawn()
            body["messages"].append({"role": role, "content": content})
            plain.append((role, texts))
        wanted = list[dict[str, str]]()
        for role, texts in plain:
            if wanted and wanted[-1]["role"] == role:
                wanted[-1]["content"] += "\n" + "\n".join(texts)
            else:
                wanted.append({"role": role, "content": "\n".join(texts)})
        assert chat_of(CountTokensRequest(model="m", **body), NOTHING).turns == wanted
        lengths.add(len(wanted))
    assert {1, 2, 3} < lengths


def test_an_answer_that_has_begun_is_continued() -> None:
    chat: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert chat_of(CountTokensRequest(model="m", messages=chat), NOTHING).is_continued
    assert not chat_of(CountTokensRequest(model="m", messages=chat[:1]), NOTHING).is_continued


def test_sampling_parameters_are_those_of_the_body() -> None:
    chat: Any = [{"role": "user", "content": "x"}]
    plain = MessagesRequest(model="m", max_tokens=3, messages=chat)
    assert sampling_of(plain) == SamplingParams(temperature=1.0)
    all_set = MessagesRequest(
        model="m", max_tokens=3, messages=chat, temperature=0.0, top_p=0.5, top_k=4, stop_sequences=["a", "b"]
    )
    wanted = SamplingParams(top_p=0.5, top_k=4, stop=("a", "b"))
    assert sampling_of(all_set) == wanted


def test_variables_are_those_that_the_template_reads() -> None:
    chat: Any = [{"role": "user", "content": "x"}]
    both = frozenset({"enable_thinking", "reasoning_effort"}).__contains__
    for kind, effort, told in (
        ("adaptive", "max", {"enable_thinking": True, "reasoning_effort": "high"}),
        ("enabled", "low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("disabled", "medium", {"enable_thinking": False, "reasoning_effort": "medium"}),
    ):
        body = CountTokensRequest(
            model="m", messages=chat, thinking={"type": kind}, output_config={"effort": effort}
        )
        assert chat_of(body, both).variables == told
        assert chat_of(body, NOTHING).variables == {}
    assert chat_of(CountTokensRequest(model="m", messages=chat), both).variables == {}
    form = {"type": "json_schema", "schema": {"type": "object"}}
    structure = chat_of(
        CountTokensRequest(model="m", messages=chat, output_config={"format": form}), both
    ).structure
    assert structure is not None and structure.value == {"type": "object"}
