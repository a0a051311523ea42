"""Tokens of texts and chats, and texts of tokens; the version, and a sign of life."""

from typing import Any

import pytest

from serving import Play, World


def test_tokens_are_those_of_requests(play: Play) -> None:
    async def story(world: World) -> None:
        text, post = world.state.text, world.http.post
        told = (await post("/tokenize", json={"prompt": "Once upon", "return_token_strs": True})).json()
        assert told["tokens"] == list(text.encode("Once upon")) and told["count"] == len(told["tokens"])
        assert told["max_model_len"] == 2048 and "".join(told["token_strs"]).endswith("Once upon")
        plain = (await post("/tokenize", json={"prompt": "Once upon", "add_special_tokens": False})).json()
        assert plain["tokens"] == [token for token in told["tokens"] if token != 1]
        assert (await post("/detokenize", json={"tokens": plain["tokens"]})).json() == {"prompt": "Once upon"}
        messages = [{"role": "user", "content": "Hello"}]
        chat = (await post("/tokenize", json={"model": "tiny", "messages": messages})).json()
        body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        assert (await post("/v1/chat/completions", json=body)).status_code == 200
        assert tuple(chat["tokens"]) == world.submits()[0].prompt and "token_strs" not in chat
        long = "a b c " * 2_000
        assert (await post("/tokenize", json={"prompt": long})).json()["count"] == len(text.encode(long))
        info = (await world.http.get("/tokenizer_info")).json()
        assert info["eos_token"] == text.tokenizer.eos_token and info["tokenizer_class"]
        assert info["chat_template"] == text.tokenizer.chat_template
        assert (await world.http.get("/version")).json()["version"]
        assert (await world.http.get("/ping")).status_code == (await post("/ping")).status_code == 200

    play(story)


INVALID: list[tuple[str, int, dict[str, Any]]] = [
    ("/tokenize", 400, {}),
    ("/tokenize", 400, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
    ("/tokenize", 400, {"prompt": "x" * 300_000}),
    ("/tokenize", 400, {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}),
    ("/tokenize", 404, {"prompt": "x", "model": "nobody"}),
    ("/detokenize", 400, {"tokens": [5000]}),
    ("/detokenize", 400, {"tokens": [-1]}),
    ("/detokenize", 400, {"tokens": ["x"]}),
]


@pytest.mark.parametrize(("path", "status", "body"), INVALID)
def test_what_has_no_tokens_is_refused(
    shared_play: Play, path: str, status: int, body: dict[str, Any]
) -> None:
    async def story(world: World) -> None:
        answer = await world.http.post(path, json=body)
        assert answer.status_code == status and answer.json()["error"]["message"]

    shared_play(story)


def test_tokens_need_a_key_where_there_are_keys(play: Play) -> None:
    async def story(world: World) -> None:
        _, key = await world.state.store.tenants.create_key("ann")
        assert (await world.http.get("/tokenizer_info")).status_code == 401
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            assert (await world.http.post(path, json=body)).status_code == 401
            headers = {"authorization": f"Bearer {key}"}
            assert (await world.http.post(path, json=body, headers=headers)).status_code == 200

    play(story)
