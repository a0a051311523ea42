"""Hostile bodies for the `tinker` client's endpoints: each gets one clear error, and nobody else notices."""

import asyncio
import json
import os
import random
import resource
import struct
from collections.abc import Iterator
from typing import Any, get_args

import zstandard
from pydantic import BaseModel
from test_bodies import MOST_SECONDS, longest_stop
from tinker.proto import tinker_public_pb2 as public

from coserve.serve.answering.cost import MOST_BODY_BYTES
from coserve.serve.tinker import schema
from coserve.serve.tinker.passes import MOST_DATA
from coserve.wire.messages import Forward, StepOptimizer
from serving import Play, World

MOST_GROWTH = 200 * 2**20  # bytes of the process, beyond what it had: bombs unfold to gigabytes
CASES = 150  # mutations of a good body


def good(model: str, number: int, data: int = 1) -> bytes:
    message = public.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    for _ in range(data):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = struct.pack("<3i", 5, 6, 7)
        for name, values, dtype in (("target_tokens", "<3q", 2), ("weights", "<3f", 1)):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = struct.pack(values, 1, 1, 1), dtype
            tensor.shape.append(3)
    return bytes(message.SerializeToString())


def changed(model: str, number: int, change: Any) -> bytes:
    """A good body, but for what `change` does to its message."""
    message = public.ForwardBackwardRequest()
    message.ParseFromString(good(model, number))
    change(message, message.data[0])
    return bytes(message.SerializeToString())


def tensor(name: str, **fields: Any) -> Any:
    def change(message: Any, datum: Any) -> None:
        for field, value in fields.items():
            if field == "shape":
                datum.loss_fn_inputs[name].shape[:] = value
            else:
                setattr(datum.loss_fn_inputs[name], field, value)

    return change


def _drop(message: Any, datum: Any) -> None:
    del datum.loss_fn_inputs["target_tokens"]


def _image(message: Any, datum: Any) -> None:
    datum.model_input.add().image.data = b"x"


def _sparse(message: Any, datum: Any) -> None:
    datum.loss_fn_inputs["weights"].sparse_csr.values = b"1234"


def _text(message: Any, datum: Any) -> None:
    message.loss_fn_config_v2["clip"].text = "high"


# What a pass that takes its turn is refused for, in words.
WRONG_DATA = [
    (tensor("weights", shape=[4]), "the shape"),
    (tensor("weights", shape=[1, 3]), "the shape"),
    (tensor("weights", shape=[-1]), "the shape"),
    (tensor("weights", shape=[2**62] * 300), "the shape"),
    (tensor("weights", dense=b"123"), "not whole numbers"),
    (tensor("weights", dense=struct.pack("<2f", 1, 1), shape=[2]), "3 tokens, and 2 numbers"),
    (tensor("weights", dense=struct.pack("<3f", 1, float("nan"), 1)), "not finite"),
    (tensor("weights", dense=struct.pack("<3f", 1, float("inf"), 1)), "not finite"),
    (tensor("weights", dtype=0), "must be of the type"),
    (tensor("weights", dtype=4), "must be of the type"),
    (tensor("weights", dtype=77), "must be of the type"),
    (tensor("target_tokens", dtype=1), "must be of the type int64"),
    (_drop, "lacks target_tokens"),
    (_image, "only text"),
    (_sparse, "dense"),
    (_text, "is a number"),
]


def bombs(model: str) -> Iterator[tuple[str, bytes, str]]:
    """Bodies that would unfold to far more than they are, their encodings, and words of the refusal."""
    start = public.ForwardBackwardRequest(model_id=model, seq_id=1).SerializeToString()
    compress = zstandard.ZstdCompressor(level=1).compress
    yield "", start + b"\x1a\x00" * 2_000_000, "more than"  # empty data
    chunks = b"\x0a\x00" * 2_000_000  # empty chunks of one datum
    yield "", start + b"\x1a" + _varint(len(chunks)) + chunks, "more than"
    yield "zstd", compress(start + b"\x1a\x00" * 2_000_000), "more than"
    yield "zstd", compress(bytes(MOST_BODY_BYTES + 1)), "at most"
    huge = zstandard.ZstdCompressor(level=1).compressobj()  # tells no size
    yield "zstd", huge.compress(bytes(64 * 2**20)) + huge.flush(), "tells its size"
    lying = bytearray(compress(bytes(2**20)))
    assert lying[4] >> 6 == 2  # its size lies in four bytes
    lying[5 : 5 + 4] = struct.pack("<I", 100) if not lying[4] & 32 else lying[5 : 5 + 4]
    yield "zstd", bytes(lying), "zstd"
    whole = compress(good(model, 1, 50))
    yield "zstd", whole[: len(whole) // 2], "zstd"
    yield "zstd", whole[:-1], "zstd"
    yield "zstd", b"", "zstd"
    yield "zstd", b"no zstd at all", "zstd"
    yield "gzip", good(model, 1), "Content-Encoding"


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def mutations(body: bytes, draws: random.Random) -> Iterator[bytes]:
    """Truncated, overwritten, repeated and random bodies."""
    for _ in range(CASES):
        made = bytearray(body)
        match draws.randrange(4):
            case 0:
                made = made[: draws.randrange(len(made))]
            case 1:
                for _ in range(draws.randrange(1, 8)):
                    made[draws.randrange(len(made))] = draws.randrange(256)
            case 2:
                at = draws.randrange(len(made))
                made[at:at] = draws.randbytes(draws.randrange(1, 40))
            case 3:
                made = bytearray(draws.randbytes(draws.randrange(1, 200)))
        yield bytes(made)


WRONG_JSON: list[Any] = [
    None, [], 1, "x", {}, {"model_id": None}, {"model_id": "x" * 300, "seq_id": 1},
    {"model_id": "m", "seq_id": -1}, {"model_id": "m", "seq_id": 2**40}, {"model_id": "m", "seq_id": 1.5},
    {"session_id": "s", "model_seq_id": "0", "base_model": "tiny"}, {"path": "../../x", "optimizer": True},
    {"source_path": "tinker://../../etc"}, {"tinker_path": "tinker://a/weights/../b"}, {"request_id": ["x"]},
    {"model_id": "m", "seq_id": 1, "path": "../x"}, {"model_id": "m", "seq_id": 1, "path": "a/b"},
    {"unknown": 1}, {"tags": ["x"] * 1000}, {"user_metadata": {str(i): i for i in range(1000)}, "tags": []},
]  # fmt: skip
JSON_PATHS = [
    "client/config", "create_session", "session_heartbeat", "create_sampling_session", "asample",
    "retrieve_future", "cancel_future", "create_model", "get_info", "optim_step", "save_weights",
    "save_weights_for_sampler", "save_weights_external", "load_weights", "unload_model", "weights_info",
    "copy_weights", "sessions/search", "sessions/none/finish",
]  # fmt: skip


def test_hostile_bodies_harm_nobody(play: Play) -> None:
    async def story(world: World) -> None:
        post = world.http.post

        async def submit(body: bytes, encoding: str = "") -> Any:
            return await post(
                "/api/v1/forward_backward", content=body, headers={"content-encoding": encoding}
            )

        session = (await post("/api/v1/create_session", json={"tags": []})).json()["session_id"]
        begin = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 1}}
        made = (await post("/api/v1/create_model", json=begin)).json()
        run = made["model_id"]
        await post("/api/v1/retrieve_future", json={"request_id": made["request_id"]})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        others = asyncio.create_task(
            world.client().completions.create(model="tiny", prompt=[5], max_tokens=2000, seed=1)
        )

        async def attack() -> None:
            for encoding, body, says in bombs(run):
                refused = await submit(body, encoding)
                assert refused.status_code == 400 and says in refused.json()["error"]["message"], says
            too_large = await submit(bytes(MOST_BODY_BYTES + 2**20))
            assert too_large.status_code == 413
            draws = random.Random(7)
            for path in JSON_PATHS:
                for body in draws.sample(WRONG_JSON, 7):
                    answer = await post(f"/api/v1/{path}", json=body)
                    assert answer.status_code in (200, 400, 404), (path, body, answer.text)

        assert await longest_stop(attack) < MOST_SECONDS
        assert not [one for one in world.engine.said if isinstance(one, Forward | StepOptimizer)]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MOST_GROWTH
        number = 1  # the turn that the refused bodies took
        for change, says in WRONG_DATA:
            number += 1
            future = (await submit(changed(run, number, change))).json()["request_id"]
            failed = (await post("/api/v1/retrieve_future", json={"request_id": future})).json()
            assert failed["category"] == "user" and says in failed["error"], (says, failed)
        many = await submit(good(run, number + 1, MOST_DATA + 1))
        failed = (
            await post("/api/v1/retrieve_future", json={"request_id": many.json()["request_id"]})
        ).json()
        assert f"{MOST_DATA} data at most" in failed["error"]
        assert not [one for one in world.engine.said if isinstance(one, Forward | StepOptimizer)]
        assert len((await others).choices[0].text) > 0
        fine = (await submit(good(run, number + 2))).json()["request_id"]
        result = (await post("/api/v1/retrieve_future", json={"request_id": fine})).json()
        assert len(result["loss_fn_outputs"]) == 1

    play(story)


VALUES = int(os.environ.get("COSERVE_ATTACK_VALUES", "6"))  # of each field, of the 33 there are
FREE = [
    5, -1, 2**70, 1.5, True, "", "x", "\ud800", 'a"b', "$.[", "\x00", [], [5], ["\ud800"], [[[]]], {},
    {"x": 1}, {'a"b': 1}, {"$": "\ud800"}, {"": []}, {"\x00": None}, {"a.b[0]": [1]}, "x" * 5000, [{}] * 17,
    [{"type": "client_finished", "reasons": 5}], [{"type": "client_finished", "reasons": [5]}],
    [{"type": ["active"]}], [{"type": "active", "reasons": []}], [None],
    {"last_created_at": "x", "last_session_id": "y"}, {"rank": 10**9}, {"type": "adamw"}, {"type": "success"},
]  # fmt: skip


POSTED = [
    ("POST", "client/config", schema.ClientConfigRequest),
    ("POST", "create_session", schema.CreateSessionRequest),
    ("POST", "session_heartbeat", schema.SessionBody), ("POST", "asample", schema.SampleRequest),
    ("POST", "sessions/x/finish", schema.FinishSessionRequest),
    ("POST", "create_sampling_session", schema.CreateSamplingSessionRequest),
    ("POST", "retrieve_future", schema.RetrieveFutureRequest), ("POST", "get_info", schema.ModelBody),
    ("POST", "cancel_future", schema.CancelFutureRequest), ("POST", "unload_model", schema.ModelBody),
    ("POST", "create_model", schema.CreateModelRequest), ("POST", "optim_step", schema.OptimStepRequest),
    ("POST", "save_weights", schema.SaveWeightsRequest), ("POST", "load_weights", schema.LoadWeightsRequest),
    ("POST", "save_weights_for_sampler", schema.SaveWeightsForSamplerRequest),
    ("POST", "save_weights_external", schema.SaveWeightsExternalRequest),
    ("POST", "weights_info", schema.WeightsInfoRequest),
    ("POST", "copy_weights", schema.CopyWeightsRequest),
    ("PUT", "sessions/x/project", schema.ProjectRequest),
    ("POST", "sessions/search", schema.SearchSessionsRequest),
    ("PUT", "training_runs/x/checkpoints/weights/a/ttl", schema.TtlRequest),
]  # fmt: skip


def bodies_of(kind: type[BaseModel], draws: random.Random) -> Iterator[dict[str, Any]]:
    """A body with some values of `FREE` in each of its fields, and in the fields within these."""
    plain: dict[str, Any] = {
        "session_id": "s", "model_seq_id": 0, "sampling_session_seq_id": 0, "base_model": "tiny", "seq_id": 1,
        "request_id": "r", "model_id": "m", "tinker_path": "tinker://a/weights/b", "project_id": "p",
        "source_path": "tinker://a/weights/b", "path": "tinker://a/weights/b", "optimizer": True,
        "sdk_version": "1", "reason": {"type": "success"}, "adam_params": {}, "sampling_session_id": "s",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {"max_tokens": 2},
    }  # fmt: skip
    good = {name: plain[name] for name, one in kind.model_fields.items() if one.is_required()}
    for name, field in kind.model_fields.items():
        inner = [
            one for one in (field.annotation, *get_args(field.annotation)) if hasattr(one, "model_fields")
        ]
        for value in draws.sample(FREE, VALUES):
            yield {**good, name: value}
            for within in (part for one in inner for part in one.model_fields):
                start = good.get(name)
                yield {**good, name: {**(start if isinstance(start, dict) else {}), within: value}}


def test_no_value_of_any_field_makes_the_server_fail(play: Play) -> None:
    async def story(world: World) -> None:
        tried, draws = 0, random.Random(5)
        for method, path, kind in POSTED:
            for body in bodies_of(kind, draws):
                content = json.dumps(body).encode()
                headers = {"content-type": "application/json"}
                answer = await world.http.request(method, f"/api/v1/{path}", content=content, headers=headers)
                tried += 1
                assert answer.status_code < 500, (path, body, answer.text)
        assert tried > 30 * VALUES
        search = "/api/v1/sessions/search"
        refused = {"statuses": [{"type": "client_finished", "reasons": 5}]}
        answer = await world.http.post(search, json=refused)
        assert answer.status_code == 400 and "reasons" in answer.json()["error"]["param"]
        for key in ("\x00", 'a"b', "$.["):  # SQLite's JSON paths cannot hold the first two
            answer = await world.http.post(search, json={"user_metadata": {key: 1}})
            assert answer.json()["sessions"] == []

    play(story)


def test_mutated_passes_are_refused_or_run(play: Play) -> None:
    """Whatever the bytes, the answer is an error or a future; nothing ends."""

    async def story(world: World) -> None:
        draws = random.Random(20)
        for body in mutations(good("session-x:train:0", 3, 2), draws):
            encoding = draws.choice(["", "zstd"])
            answer = await world.http.post(
                "/api/v1/forward_backward", content=body, headers={"content-encoding": encoding}
            )
            assert answer.status_code in (400, 404), answer.text
            assert answer.json()["error"]["message"]
        assert (await world.http.get("/api/v1/healthz")).json() == {"status": "ok"}

    play(story)


NAMES = [
    "..", "%2e%2e%2f%2e%2e", "a%00b", "%ff", "x" * 5000, "weights/%2e%2e/%2e%2e", "%F0%9F%92%A5", "weights/",
    "sampler_weights/a/b", "' OR 1=1 --", "weights/%5c", "-1", "tinker:%2f%2fa", "%0d%0aset-cookie: a=b",
]  # fmt: skip
ADDRESSES = [
    ("GET", "training_runs/{}"), ("GET", "training_runs/{}/checkpoints"),
    ("DELETE", "training_runs/x/checkpoints/{}"), ("DELETE", "training_runs/{}/checkpoints/weights/a"),
    ("POST", "training_runs/x/checkpoints/{}/publish"), ("PUT", "training_runs/x/checkpoints/{}/ttl"),
    ("GET", "training_runs/x/checkpoints/{}/external_weights_urls"), ("GET", "sessions/{}"),
    ("PUT", "sessions/{}/project"), ("GET", "samplers/{}"), ("GET", "checkpoints?limit={}"),
    ("GET", "training_runs?offset={}"), ("GET", "training_runs?project_id={}"),
    ("GET", "billing/usage/checkpoints/current?project_id={}"),
    ("GET", "../../tinker/weights/{}/adapter_config.json?expires=1&signature=x"),
    ("GET", "../../tinker/weights/x/{}?expires=99999999999999999999&signature={}"),
]  # fmt: skip


def test_hostile_addresses_are_refused(play: Play) -> None:
    """Of runs, checkpoints, sessions and files: no answer is an error of the server's."""

    async def story(world: World) -> None:
        answered = set()
        for method, address in ADDRESSES:
            for name in NAMES:
                body = {"content": b'{"ttl_seconds": -1e999}'} if method != "GET" else {}
                url = f"/api/v1/{address.replace('{}', name)}".replace("/api/v1/../..", "")
                answer = await world.http.request(method, url, **body)  # type: ignore[arg-type]
                answered.add(answer.status_code)
                assert answer.status_code in (200, 307, 400, 404, 405), (method, address, name, answer.text)
                is_error = answer.status_code >= 400  # 307: without the slash at its end it is an address
                assert not is_error or answer.json()["error"]["message"], (address, name)
                assert "set-cookie" not in answer.headers
        assert {200, 400, 404} <= answered

    play(story)
