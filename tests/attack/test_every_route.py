"""Every route of the application is asked what no tenant should ask: ids of others, bodies that are none.

Routes come from the application. A new one that takes ids has to be asked here; one that takes a body is
asked by the generator of `asked.py` (`test_loop_time.py`), unless its body is no model.
"""

import itertools
import json
import random
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asked import routes_of
from test_before_keys import every_route
from test_dialect_bodies import owned as batches_and_evals
from test_response_bodies import owned as responses

from coserve.serve.web.routes import LIVE
from serving import Play, World
from tinkering import Caller
from training import CHAT, Trainer, create, jsonl, started

SAID: Any = [{"role": "user", "content": "x"}]
CONTENT = {"type": "file_content", "content": [{"item": {"a": "b"}}]}
# Of routes whose body needs more than {}.
BODIES: Mapping[str, Any] = {
    "/v1/chat/completions/{completion_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": SAID},
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_" + "a" * 24]},
    "/v1/fine_tuning/jobs/{job_id}/move": {"before": None},
    "/v1/fine_tuning/checkpoints/{checkpoint}/permissions": {"project_ids": ["ann"]},
    "/v1/evals/{eval_id}/runs": {"data_source": {"type": "jsonl", "source": CONTENT}},
    "/api/v1/sessions/{session_id}/finish": {"reason": {"type": "success"}},
    "/api/v1/sessions/{session_id}/project": {"project_id": "p"},
}
PARTS = "/v1/uploads/{upload_id}/parts"
FORMS = ("/v1/files", "/v1/adapters", PARTS)
# Routes that read their body themselves, and the module that sends hostile ones.
RAW = {
    "/api/v1/forward_backward": "test_tinker_bodies", "/web/api/login": "test_page_logins",
    "/v1/adapters": "test_adapter_archives", "/v1/files": "test_every_route", PARTS: "test_every_route",
}  # fmt: skip
# Routes that have none, and Tinker's telemetry, which is dropped unread.
BODILESS = (
    "/cancel", "/pause", "/resume", "/save", "/pin", "/publish", "/ping", "/trace", "/runs/{run_id}",
    "/telemetry",
)  # fmt: skip
NOBODYS = ("/web/", "/tinker/weights/")  # files of the page; links that are signed, and ask for no key


async def things(world: World, key: str, tenant: str) -> dict[str, list[str]]:
    """Ids of a tenant's own things of all kinds, by the names of parameters."""
    found: dict[str, list[str]] = {**await batches_and_evals(world, key)}
    for name, ids in (await responses(world, key)).items():
        found[name] = [*found.get(name, ()), *ids]
    job = await create(world, key)
    trainer = Trainer(world)
    await world.until(lambda: bool(started(world)))
    await trainer.succeed(job.id)
    jobs = world.client(key).fine_tuning.jobs
    name = (await jobs.retrieve(job.id)).fine_tuned_model or ""
    (kept,) = (await jobs.checkpoints.list(job.id)).data
    permissions = world.client(key).fine_tuning.checkpoints.permissions
    checkpoint = kept.fine_tuned_model_checkpoint
    made = await permissions.create(checkpoint, project_ids=[tenant])
    caller = Caller(world, key)
    run = await caller.run()
    saved = await caller.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
    await caller.result(saved)
    session = run.partition(":")[0]
    sampler = await caller.post(
        "create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"},
    )
    return {
        **found, "job_id": [job.id], "file_id": [found["input_file_id"][0], job.training_file],
        "model": [name, checkpoint], "name": [name], "checkpoint": [checkpoint, "weights/a"],
        "permission_id": [made.data[0].id], "session_id": [session], "run": [run],
        "sampler_id": [sampler.json()["sampling_session_id"]],
    }  # fmt: skip


def test_another_tenants_ids_are_unknown_at_every_route(play: Play) -> None:
    async def story(world: World) -> None:
        check_bodies(world)
        world.say("b")
        tenants = world.state.store.tenants
        bob, ann = [(await tenants.create_key(name))[1] for name in ("bob", "ann")]
        ids = {one.name: one.id for one in await tenants.list()}
        theirs = await things(world, bob, ids["bob"])

        async def ask(method: str, path: str, key: str, template: str) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            if template == PARTS:
                return await world.http.post(path, headers=headers, files={"data": b"x"})
            if method == "GET":
                return await world.http.get(path, headers=headers)
            headers["content-type"] = "application/json"
            content = json.dumps(BODIES.get(template, {})).encode()
            return await world.http.request(method, path, headers=headers, content=content)

        def paths(route: Any) -> list[str]:
            found = []
            for values in itertools.product(*(theirs[name] for name in route.path_names)):
                path = route.path
                for name, value in zip(route.path_names, values, strict=True):
                    path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
                found.append(path)
            return found

        routes = [one for one in routes_of(world.app) if one.path_names and not one.path.startswith(NOBODYS)]
        assert len(routes) > 60
        for route in routes:
            for path in paths(route):
                answer = await ask(route.method, path, ann, route.path)
                assert answer.status_code == 404, (route.method, path, answer.status_code, answer.text[:300])
        for route in routes:  # and its owner has all of it still
            if route.method == "GET" and not route.path.endswith("/live"):
                statuses = [(await ask("GET", path, bob, route.path)).status_code for path in paths(route)]
                assert set(statuses) - {404}, (route.path, statuses)

    play(story)


def check_bodies(world: World) -> None:
    """Asserts that each route's body is one that some generator draws."""
    routes = routes_of(world.app)
    without = [one.path for one in routes if one.method in ("POST", "PUT") and one.body is None]
    assert {path for path in without if not path.endswith(BODILESS)} == set(RAW)
    for path, module in RAW.items():
        name = path.removeprefix("/api/v1").removeprefix("/v1")
        assert name in Path(__file__).with_name(f"{module}.py").read_text(), path
    every = {(method, one.path) for one in every_route(world.app.routes) for method in one.methods or ()}
    assert every - {(one.method, one.path) for one in routes} == {("GET", LIVE)}


def forms(draw: random.Random) -> tuple[str, bytes]:
    """The content type and the body of a form that is none, or one with strange parts."""
    mark = draw.choice(["x", "--", "x" * 70, "x" * 3000, "\x80", "a b"])
    kind = draw.choice([f"multipart/form-data; boundary={mark}", "multipart/form-data", "multipart/mixed",
                        f'multipart/form-data; boundary="{mark}', "application/json", ""])  # fmt: skip
    parts = list[bytes]()
    for _ in range(draw.choice([0, 1, 2, 40, 2000])):
        name = draw.choice(["data", "file", "purpose", "name", "", "é", "a" * 5000, 'x"; filename="y'])
        file = draw.choice(
            ["", '; filename="a.jsonl"', '; filename="../../a"', '; filename="' + "a" * 5000 + '"']
        )
        headers = f'Content-Disposition: form-data; name="{name}"{file}\r\n'
        headers += draw.choice(
            ["", "Content-Type: text/plain\r\n", "X: " + "y" * 20_000 + "\r\n", "no header\r\n"]
        )
        content = draw.choice([b"", b"batch", b"fine-tune", b"\x00\xff" * 50, b"{}\n" * 200, b"\r\n--x"])
        parts.append(f"--{mark}\r\n{headers}\r\n".encode() + content + b"\r\n")
    body = b"".join(parts) + draw.choice([f"--{mark}--\r\n".encode(), b"", b"--", b"\r\n" * 500])
    return kind, body[: draw.choice([len(body), draw.randrange(len(body) + 1)])]


def test_forms_that_are_none_are_refused_and_take_nothing(play: Play) -> None:
    draw = random.Random(seed := secrets.randbits(32))
    print(f"seed {seed}")

    async def story(world: World) -> None:
        line = jsonl(CHAT)
        opened = {
            "bytes": len(line),
            "filename": "a.jsonl",
            "mime_type": "text/plain",
            "purpose": "fine-tune",
        }
        upload, other = [(await world.http.post("/v1/uploads", json=opened)).json()["id"] for _ in range(2)]
        statuses = set[int]()
        for path in FORMS * 8:
            kind, body = forms(draw)
            answer = await world.http.post(
                path.replace("{upload_id}", upload),
                content=body,
                headers={"content-type": kind.encode()} if kind else {},
            )
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (path, kind[:80], body[:200], answer.text)
            if answer.is_error:
                assert answer.json()["error"]["message"] and len(answer.content) < 10_000
        assert 400 in statuses
        part = (await world.http.post(f"/v1/uploads/{other}/parts", files={"data": line})).json()
        done = await world.http.post(f"/v1/uploads/{other}/complete", json={"part_ids": [part["id"]]})
        assert done.json()["status"] == "completed", done.text

    play(story)
