"""A `tinker` client's training run on several servers, by hand: each request goes to any of them, and what
one does not answer another one is asked."""

import time
from collections.abc import Callable
from typing import Any, Final

import httpx

from replica_history import Notes
from replica_view import PATIENCE
from tinkering import passed

STEPS: Final = 5
SAVED: Final = "sampler_weights/end weights/middle"  # what there is of a run in the end
_MIDDLE: Final = 3  # the step after which the state is saved
_AGAIN: Final = 0.1  # seconds
Ask = Callable[..., httpx.Response | None]


def train(ask: Ask, notes: Notes, mark: str, base: str) -> None:
    """Makes a run, which trains a few steps, and saves twice. Each step's figures are noted: they are those
    of every other run, so that a pass or step that was lost or doubled shows."""

    def post(path: str, body: dict[str, Any] | bytes, **headers: str) -> Any:
        said: Any = {"content": body} if isinstance(body, bytes) else {"json": body}
        reply = ask("POST", f"/api/v1/{path}", headers=headers, **said)
        if reply is None:
            raise OSError("nobody answered")
        if reply.status_code != 200:
            notes.refuse(f"run {mark}: {path} {reply.status_code} {reply.text[:200]}")
            raise OSError(reply.text)
        return reply.json()

    def result(promise: dict[str, Any]) -> Any:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            body = {"request_id": promise["request_id"]}
            reply = ask("POST", "/api/v1/retrieve_future", json=body, headers=_PROTOBUF)
            if reply is not None and reply.status_code == 200:
                if "json" in reply.headers["content-type"]:
                    told = reply.json()
                    if "error" in told:
                        notes.refuse(f"run {mark}: {told['error']}")
                        raise OSError(told["error"])
                    return told
                return None
            if reply is not None and reply.status_code != 408:
                notes.refuse(f"run {mark}: {reply.status_code} {reply.text[:200]}")
                raise OSError(reply.text)
            time.sleep(_AGAIN)
        notes.refuse(f"run {mark}: no result of {promise['request_id']} within {PATIENCE:g} s")
        raise OSError(promise["request_id"])

    session = post("create_session", {"tags": []}, **{"X-Idempotency-Key": mark})["session_id"]
    lora = {"rank": 4, "seed": 1}
    made = {"session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": lora}
    run = result(post("create_model", made))["model_id"]
    asked = notes.ask("run", mark, SAVED)
    asked.ids.append(run)
    number = 0
    for step in range(1, STEPS + 1):
        tokens = tuple(range(5 + step, 21 + step))
        promises = [post("forward_backward", passed(run, number + 1, tokens), **_SENT)]
        body = {"model_id": run, "seq_id": number + 2, "adam_params": {"learning_rate": 1e-3}}
        promises.append(post("optim_step", body))
        number += 2
        if step == _MIDDLE:
            number += 1
            promises.append(post("save_weights", {"model_id": run, "seq_id": number, "path": "middle"}))
        for place, promise in enumerate(promises):
            told = result(promise)
            if place == 1:
                notes.figure(step, told["metrics"])
    body = {"model_id": run, "seq_id": number + 1, "path": "end"}
    result(post("save_weights_for_sampler", body))
    post("unload_model", {"model_id": run})
    notes.count("runs")


_PROTOBUF: Final = {"Accept": "application/x-protobuf"}
_SENT: Final = {"content-type": "application/x-protobuf"}
