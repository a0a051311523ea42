"""Every number, list and text of every body has a bound in its schema, so that nothing is made of what is too
large."""

import pytest
from asked import leaves, routes_of
from test_bodies import MOST_SECONDS, watched

from coserve.serve.answering.cost import MOST_BODY_BYTES
from coserve.serve.schema.common import MOST_TOKEN_ID
from serving import Play, World

# Numbers that may be as large as their type: nothing is counted by them.
NAMES = {"seed", "lora_int_id", "seq_id", "model_seq_id", "sampling_session_seq_id"}
# Counts that the model's own length bounds further, after validation and before anything is made of them.
LENGTHS = {"max_tokens", "max_completion_tokens", "min_tokens", "top_k"}


def test_every_value_of_every_body_is_bounded(play: Play) -> None:
    async def story(world: World) -> None:
        routes, count = routes_of(world.app), 0
        document = {
            (method.upper(), path) for path, each in world.app.openapi()["paths"].items() for method in each
        }
        plain = {(one.method, one.path.replace(":path}", "}")) for one in routes}
        assert document <= plain and len(plain) >= len(document) + 25  # Tinker's are in no document
        for route in routes:
            for place, leaf in leaves(route.body, route.body.get("$defs", {})) if route.body else ():
                count += 1
                where = f"{route.method} {route.path} {place}"
                match leaf.get("type"):
                    case "integer" | "number":
                        most = leaf.get("maximum", leaf.get("exclusiveMaximum"))
                        assert most is not None, where
                        assert "minimum" in leaf or "exclusiveMinimum" in leaf, where
                        name = place.rpartition(".")[2].removesuffix("[]")
                        if name not in NAMES:
                            limit = MOST_TOKEN_ID if name in LENGTHS or "token" in where else 1 << 53
                            assert most <= limit, where
                    case "string":
                        assert "maxLength" in leaf or "pattern" in leaf, where
                        assert leaf.get("maxLength", 0) <= MOST_BODY_BYTES, where
                    case "array":
                        assert "maxItems" in leaf, where
                    case "object":
                        is_free = leaf.get("additionalProperties", False) is not False
                        assert not is_free or "maxProperties" in leaf or "x-most-bytes" in leaf, where
                    case "boolean" | "null":
                        pass
                    case _:  # of any type: what holds it has a bound
                        assert "x-most-bytes" in leaf or "[]" in place or "{}" in place, where
        assert count > 200

    play(story)


@pytest.mark.parametrize("samples", [257, 4096, 8_000_000, 2**62])
def test_samples_are_counted_before_anything_is_made_of_them(shared_play: Play, samples: int) -> None:
    async def story(world: World) -> None:
        body = {
            "sampling_session_id": "s", "seq_id": 1, "num_samples": samples,
            "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1},
        }  # fmt: skip
        answer = await world.http.post("/api/v1/asample", json=body)
        assert answer.status_code == 400 and len(answer.content) < 1000
        assert answer.json()["error"]["param"] == "num_samples"

    shared_play(story)


NUMBERS = [b"1e308", b"9" * 4300]


@pytest.mark.parametrize("number", NUMBERS, ids=len)
def test_numbers_that_take_long_to_read_hold_nobody_up(play: Play, number: bytes) -> None:
    """msgspec takes 50 us for some of them, with the interpreter held: 50 s for a body."""

    async def story(world: World) -> None:
        many = b",".join([number] * min(7_900_000 // (len(number) + 1), 300_000))
        body = b'{"model":"tiny","prompt":[' + many + b"]}"
        headers = {"content-type": "application/json"}
        async with watched() as worst:
            answer = await world.http.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
        assert worst[0] < MOST_SECONDS

    play(story)
