"""Plain completions, as the official client sees them."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from coserve import tiny
from coserve.core.plan import TokenLogprobs
from coserve.text import Text
from coserve.text.infill import infill
from coserve.wire.scores import Scores
from serving import Play, World
from spelling import sentence_pieces


def test_a_whole_answer_and_a_stream_of_it(play: Play) -> None:
    async def story(world: World) -> None:
        create = world.client().completions.create
        same: Any = {"model": "tiny", "prompt": "Once upon", "seed": 4, "n": 2}
        whole = await create(**same)
        assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
        sent = world.submits()[0]
        assert sent.prompt == world.state.text.encode("Once upon") and sent.sampling.max_tokens == 16
        assert whole.usage is not None and whole.usage.completion_tokens == 32
        assert whole.usage.prompt_tokens == len(sent.prompt)
        texts, usage = ["", ""], None
        async for chunk in await create(**same, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage = chunk.usage or usage
        assert texts == [choice.text for choice in whole.choices] and usage == whole.usage

    play(story)


def test_batches_of_texts_and_of_token_ids(play: Play) -> None:
    async def story(world: World) -> None:
        create = world.client().completions.create
        texts = await create(model="tiny", prompt=["one", "two", "three"], n=2, max_tokens=2)
        assert [choice.index for choice in texts.choices] == list(range(6))
        encode = world.state.text.encode
        prompts = [sent.prompt for sent in world.submits()]
        assert prompts == [encode(text) for text in ("one", "one", "two", "two", "three", "three")]
        await create(model="tiny", prompt=[7, 8, 9], max_tokens=1)
        await create(model="tiny", prompt=[[7, 8], [9]], max_tokens=1)
        assert [sent.prompt for sent in world.submits()[6:]] == [(7, 8, 9), (7, 8), (9,)]

    play(story)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_brings_the_prompt_and_its_scores(play: Play, stream: bool) -> None:
    async def story(world: World) -> None:
        answered = world.say("And so on")
        prompt = "Once upon a time"
        body: Any = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 2, "stream": stream}
        answer = await world.http.post("/v1/completions", json=body)
        parts = (
            [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]] if stream else [answer.json()]
        )
        text = "".join(part["choices"][0]["text"] for part in parts)
        lists = [part["choices"][0]["logprobs"] for part in parts]
        tokens, scores, tops, offsets = (
            [entry for one in lists for entry in one[name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        asked = world.state.text.encode(prompt)
        assert text == prompt + world.told(answered)
        assert len(tokens) == len(scores) == len(tops) == len(offsets) == len(asked) + len(answered)
        assert scores == [None, *[-0.5] * (len(scores) - 1)] and tops[0] is None
        assert all(
            len(top) == 2 and top[token] == -0.5 for token, top in zip(tokens[1:], tops[1:], strict=True)
        )
        assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
        assert world.submits()[0].sampling.prompt_logprobs == 2

    play(story)


def test_offsets_are_places_in_the_text(play: Play) -> None:
    async def story(world: World) -> None:
        answered = world.say(" 🐱 ✓ b")
        prompt = (1, *world.state.text.encode("é🐶 a"))  # a special token is no text
        answer = await world.client().completions.create(
            model="tiny", prompt=list(prompt), echo=True, logprobs=0, max_tokens=len(answered)
        )
        choice, pieces = (
            answer.choices[0],
            [world.state.text.tokens.bytes_of(t) for t in (*prompt, *answered)],
        )
        assert choice.text == "é🐶 a 🐱 ✓ b" and choice.logprobs is not None
        assert choice.logprobs.text_offset is not None
        begun, expected = b"", []
        for token, piece in zip((*prompt, *answered), pieces, strict=True):
            expected.append(len(begun.decode(errors="ignore")))
            begun += b"" if token == 1 else piece
        assert choice.logprobs.text_offset == expected

    play(story)


def test_an_answer_goes_on_where_its_prompt_ends(play: Play) -> None:
    async def story(world: World) -> None:
        world.state.text = Text(sentence_pieces())
        hi = world.state.text.tokenizer.convert_ids_to_tokens
        space_hi = next(token for token in range(300) if hi(token) == "▁hi")
        world.engine.script = lambda request, place: space_hi
        create = world.client().completions.create
        alone = (await create(model="tiny", prompt=[space_hi], max_tokens=2)).choices[0].text
        assert alone == " hi hi"  # after "hi", and not "hi hi"
        echoed = await create(model="tiny", prompt=[space_hi], max_tokens=2, echo=True)
        assert echoed.choices[0].text == "hi hi hi"

    play(story)


def test_a_prompt_can_be_scored_alone(play: Play) -> None:
    async def story(world: World) -> None:
        create = world.client().completions.create
        answer = await create(model="tiny", prompt="Once upon", echo=True, logprobs=0, max_tokens=0)
        (choice,) = answer.choices
        assert choice.text == "Once upon" and choice.finish_reason == "length" and choice.logprobs is not None
        assert len(choice.logprobs.tokens or []) == len(world.state.text.encode("Once upon"))
        assert choice.logprobs.top_logprobs is None
        assert answer.usage is not None and answer.usage.completion_tokens == 0
        assert (await create(model="tiny", prompt="Once", echo=True, max_tokens=0)).choices[0].text == "Once"

    play(story)


INVALID: list[tuple[str | None, dict[str, Any]]] = [
    ("prompt", {"prompt": []}),
    ("prompt.0", {"prompt": [[]]}),
    ("prompt.0", {"prompt": [1, "x"]}),
    ("prompt", {"prompt": [5000]}),
    ("prompt.0", {"prompt": [-1]}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ["x"] * 129}),
    ("prompt", {"prompt": [5] * 2040}),
    ("prompt", {"prompt": "x" * 300_000}),
    ("n", {"prompt": ["x"] * 100, "n": 16}),
    ("suffix", {"suffix": "end"}),
    (None, {"best_of": 1, "n": 2}),
    (None, {"best_of": 3, "stream": True}),
    ("n", {"best_of": 17}),
    (None, {"prompt_logprobs": 1, "stream": True}),
    (None, {"prompt_logprobs": 1, "echo": True, "logprobs": 1}),
    ("bad_words.0", {"bad_words": [""]}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("prompt", {"truncate_prompt_tokens": 0}),
    ("logprobs", {"logprobs": 21}),
    (None, {"max_tokens": 0}),
]


@pytest.mark.parametrize(("param", "fields"), INVALID)
def test_what_is_wrong_is_named(shared_play: Play, param: str | None, fields: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        answer = await world.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        assert not world.submits()

    shared_play(story)


def test_best_of_what_n_is_asks_for_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        answer = await world.client().completions.create(
            model="tiny", prompt="x", n=2, best_of=2, max_tokens=1
        )
        assert len(answer.choices) == 2

    play(story)


def test_texts_have_special_tokens_and_what_stopped_them_on_request(play: Play) -> None:
    """As vLLM's names say, whole and in pieces; chats take the same names."""

    async def story(world: World) -> None:
        text = world.state.text
        one, two = (text.encode(part, special=False) for part in ("one, ", "two, three"))
        (special_token, *_) = text.special
        tokens = [*one, special_token, *two]
        world.engine.script = lambda sent, place: tokens[place]
        body = {"model": "tiny", "prompt": "x", "max_tokens": len(tokens)}
        plain, spelled = text.decode(tokens), text.decode(tokens, special=True)
        special = {"skip_special_tokens": False}
        end = "wo,"
        before, before_special = plain.partition(end)[0], spelled.partition(end)[0]
        assert before != plain and before_special not in (before, spelled)
        stopped = {"stop": end, "include_stop_str_in_output": True}
        for fields, wanted in (
            ({}, plain), (special, spelled), ({"stop": end}, before), (stopped, before + end),
            ({**special, **stopped}, before_special + end), ({"skip_special_tokens": True}, plain),
        ):  # fmt: skip
            reply = await world.http.post("/v1/completions", json={**body, **fields})
            assert reply.json()["choices"][0]["text"] == wanted, fields
            sent = (await world.http.post("/v1/completions", json={**body, **fields, "stream": True})).text
            chunks = [json.loads(line[6:]) for line in sent.split("\n\n")[:-2]]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted, fields
        prompt = [special_token, *one]
        echoed = {**body, **special, "prompt": prompt, "echo": True}
        (choice,) = (await world.http.post("/v1/completions", json=echoed)).json()["choices"]
        assert choice["text"] == text.decode(prompt, special=True) + spelled
        (ending,) = world.engine.eos
        tokens.append(ending)  # the engine ends the answer with it
        told = {**special, "include_stop_str_in_output": True}
        for fields, wanted in (({}, plain), (special, spelled), (told, spelled + text.special[ending])):
            asked = {**body, **fields, "max_tokens": len(tokens) + 1}
            (choice,) = (await world.http.post("/v1/completions", json=asked)).json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")
        messages = [{"role": "user", "content": "x"}]
        chat = {"model": "tiny", "messages": messages, "max_tokens": len(tokens), **special, **stopped}
        reply = await world.http.post("/v1/chat/completions", json=chat)
        assert reply.json()["choices"][0]["message"]["content"] == before_special + end

    play(story)


def test_the_best_answers_are_told(play: Play) -> None:
    async def story(world: World) -> None:
        asked = world.state.text.encode
        world.engine._score = lambda token, most: Scores.of((TokenLogprobs(-float(token % 97)),))  # type: ignore[method-assign]
        body = {"model": "tiny", "prompt": ["x", "y"], "max_tokens": 3, "seed": 1, "return_token_ids": True}
        every = (await world.http.post("/v1/completions", json={**body, "n": 5})).json()["choices"]
        best = (await world.http.post("/v1/completions", json={**body, "n": 2, "best_of": 5})).json()
        assert [one["index"] for one in best["choices"]] == [0, 1, 2, 3]
        assert best["usage"]["completion_tokens"] == 30
        for prompt in range(2):
            its = [one["token_ids"] for one in every[5 * prompt : 5 * prompt + 5]]
            told = best["choices"][2 * prompt : 2 * prompt + 2]
            assert all(one["token_ids"] in its for one in told) and told[0]["logprobs"] is None
            sums = [[sum(token % 97 for token in one) for one in its]]
            sums.append([sum(token % 97 for token in one["token_ids"]) for one in told])
            assert sums[1] == sorted(sums[0])[:2]  # two may be equally good
            assert told[0]["prompt_token_ids"] == list(asked("xy"[prompt]))

    play(story)


def test_the_middle_is_filled_in_where_the_tokenizer_has_tokens_for_it(play: Play) -> None:
    async def story(world: World) -> None:
        text, body = (
            world.state.text,
            {"model": "tiny", "prompt": "def f(", "suffix": "): pass", "max_tokens": 1},
        )
        known = dict(text.tokenizer.added_tokens_decoder)
        marks = dict(enumerate(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), 100))
        marked = type("Marked", (), {"added_tokens_decoder": {**known, **marks}})()
        found = infill(marked, text.firsts, (7, 8), (9,))
        assert found == (*text.firsts, 100, 7, 8, 101, 9, 102)
        answer = await world.http.post("/v1/completions", json=body)  # this one has none
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
        assert (await world.http.post("/v1/completions", json={**body, "suffix": ""})).status_code == 200

    play(story)


def test_vllms_further_fields(play: Play) -> None:
    async def story(world: World) -> None:
        encode, post = world.state.text.encode, world.http.post
        body: Any = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 2, "prompt_logprobs": 2}
        tokens = encode("Once upon a time")
        chat = {**body, "messages": [{"role": "user", "content": "x"}]}
        del chat["prompt"]
        told = (await post("/v1/completions", json=body)).json()["choices"][0]["prompt_logprobs"]
        of_chat = (await post("/v1/chat/completions", json=chat)).json()["prompt_logprobs"]
        for scores, prompt in ((told, tokens), (of_chat, world.submits()[1].prompt)):
            assert scores[0] is None and len(scores) == len(prompt)
            for token, by_id in zip(prompt[1:], scores[1:], strict=True):
                own = by_id[str(token)]
                name = world.state.text.tokens.text_of(token)
                assert (own["logprob"], own["rank"], own["decoded_token"]) == (-0.5, 1, name)
                assert len(by_id) == 2
        for kept, most in ((3, 3), (-1, 2046), (5000, 5000)):
            body = {
                "model": "tiny",
                "prompt": [5, 6, 7, 8] * 600,
                "max_tokens": 2,
                "truncate_prompt_tokens": kept,
            }
            answer = await post("/v1/completions", json=body)
            assert answer.status_code == (400 if kept == 5000 else 200)
            if kept != 5000:
                assert world.submits()[-1].prompt == tuple(([5, 6, 7, 8] * 600)[-most:])
        await post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "x", "max_tokens": 1, "bad_words": ["a", "several words"]},
        )
        banned = world.submits()[-1].sampling.logit_bias
        assert {*banned.values()} == {-float("inf")}
        spelled = [encode(before + "a", special=False) for before in ("", " ")]
        assert {*banned} == {one[0] for one in spelled if len(one) == 1}
        longer = {encode(before + "several words", special=False) for before in ("", " ")}
        longer |= {one for one in spelled if len(one) > 1}
        assert {*world.submits()[-1].sampling.banned} == longer and all(len(one) > 1 for one in longer)

    play(story)


def test_too_much_at_once_is_told_to_come_back(play: Play) -> None:
    async def story(world: World) -> None:
        body: Any = {"model": "tiny", "prompt": ["x"] * 8, "n": 3}
        flood = asyncio.create_task(world.http.post("/v1/completions", json=body))
        await world.until(lambda: world.state.queue.waiting > 0)
        answer = await world.http.post("/v1/completions", json=body)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            await world.client().completions.create(**body)
        assert len((await flood).json()["choices"]) == 24
        assert world.state.queue.waiting == world.state.queue.inside == 0

    play(story, max_queue=30, max_queue_tenant=30, engine={"max_running": 4, "step_seconds": 0.002})


def test_what_a_request_leaves_out_may_be_the_models_own(play: Play, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.path(), folder)
    own = {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(own))

    async def story(world: World) -> None:
        world.say("yes")
        await world.client().completions.create(model="tiny", prompt="x")
        await world.client().completions.create(
            model="tiny", prompt="x", temperature=0.25, extra_body={"top_k": 0}
        )
        message = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
        assert (await world.http.post("/v1/messages", json=message)).status_code == 200
        left_out, given, other = (request.sampling for request in world.submits())
        for sampling in (left_out, other):
            found = sampling.temperature, sampling.top_k, sampling.repetition_penalty, sampling.top_p
            assert found == (0.5, 7, 1.5, 1.0)
        assert (given.temperature, given.top_k, given.repetition_penalty) == (0.25, 0, 1.5)

    play(story, model=str(folder), generation_config="auto")
