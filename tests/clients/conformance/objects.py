"""Objects of a server's that take the place of the ids in tests that were written for a mock server."""

import hashlib
import json
import time
from functools import cached_property
from typing import Any

import httpx

MODEL = "coserve-tiny"
PATIENCE = 120.0  # seconds; only a hang takes so long
RECORD = b'{"prompt": "a", "completion": " b"}\n'
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"foo": {"type": "string"}}}
CRITERION = {
    "type": "string_check", "name": "same", "input": "{{item.foo}}", "reference": "bar", "operation": "eq",
}  # fmt: skip
ENTRIES = {"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {"foo": "bar"}}]}}


class Objects:
    """Makes objects on a server, each anew, but for those that take a job's training."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/v1", timeout=PATIENCE, trust_env=False)

    def made(self, path: str, body: Any) -> dict[str, Any]:
        return self._told(self._http.post(path, json=body))

    def read(self, path: str) -> dict[str, Any]:
        return self._told(self._http.get(path))

    def _told(self, reply: httpx.Response) -> dict[str, Any]:
        assert reply.is_success, f"{reply.request.url}: {reply.text}"
        found: dict[str, Any] = reply.json()
        return found

    def _ended(self, path: str, *status: str, patience: float = PATIENCE) -> dict[str, Any]:
        end = time.monotonic() + patience
        while (found := self.read(path))["status"] not in status:
            assert time.monotonic() < end, found
            time.sleep(0.05)
        return found

    def completion(self) -> str:
        """A stored chat completion."""
        # The client's type of a stored message is an answer's: it takes no other role.
        messages = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
        body = {
            "model": MODEL, "messages": messages, "max_tokens": 2, "store": True,
            "metadata": {"foo": "string"},
        }  # fmt: skip
        return str(self.made("/chat/completions", body)["id"])

    def file(self, data: bytes = RECORD, purpose: str = "fine-tune") -> str:
        return str(
            self._told(
                self._http.post("/files", files={"file": ("data.jsonl", data)}, data={"purpose": purpose})
            )["id"]
        )

    def batch_file(self, endpoint: str = "/v1/completions", lines: int = 1) -> str:
        """A batch's input."""
        said = {"/v1/responses": "input", "/v1/embeddings": "input"}.get(endpoint, "prompt")
        body = {"model": MODEL, said: "one"}
        each = [{"custom_id": str(i), "method": "POST", "url": endpoint, "body": body} for i in range(lines)]
        return self.file("\n".join(json.dumps(line) for line in each).encode(), "batch")

    def batch(self, lines: int = 1) -> str:
        endpoint = "/v1/completions"
        body = {
            "input_file_id": self.batch_file(endpoint, lines), "endpoint": endpoint,
            "completion_window": "24h",
        }  # fmt: skip
        return str(self.made("/batches", body)["id"])

    def message_batch(self, requests: int = 1, is_over: bool = False) -> str:
        """A batch of Anthropic's API."""
        params = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "one"}]}
        each = [{"custom_id": str(number), "params": params} for number in range(requests)]
        id = str(self.made("/messages/batches", {"requests": each})["id"])
        end = time.monotonic() + PATIENCE
        while is_over and self.read(f"/messages/batches/{id}")["processing_status"] != "ended":
            assert time.monotonic() < end, id
            time.sleep(0.05)
        return id

    def upload(self) -> str:
        body = {
            "bytes": len(RECORD), "filename": "a.jsonl", "mime_type": "text/plain", "purpose": "fine-tune",
        }  # fmt: skip
        return str(self.made("/uploads", body)["id"])

    def part(self, upload: str) -> str:
        """The only part of an upload."""
        reply = self._http.post(f"/uploads/{upload}/parts", files={"data": ("data", RECORD)})
        return str(self._told(reply)["id"])

    @property
    def md5(self) -> str:
        return hashlib.md5(RECORD).hexdigest()

    def conversation(self) -> str:
        item = {"type": "message", "role": "user", "content": "one"}
        return str(self.made("/conversations", {"items": [item, item]})["id"])

    def item(self, conversation: str) -> str:
        """The first item of a conversation."""
        return str(self.read(f"/conversations/{conversation}/items")["data"][0]["id"])

    def response(self, **more: Any) -> str:
        item = {"type": "message", "role": "user", "content": "one"}
        body = {"model": MODEL, "input": [item, item], "max_output_tokens": 2, **more}
        return str(self.made("/responses", body)["id"])

    def input_item(self, response: str) -> str:
        return str(self.read(f"/responses/{response}/input_items?order=asc")["data"][0]["id"])

    def job(self, epochs: int = 100, records: int = 500) -> str:
        """A job that trains: for longer than anyone waits, unless its epochs or records are few."""
        for left in self.read("/fine_tuning/jobs?limit=100")["data"]:  # those of tests before
            if left["status"] in ("validating_files", "queued", "running", "paused"):
                self.made(f"/fine_tuning/jobs/{left['id']}/cancel", {})
        body = {
            "model": MODEL, "training_file": self.file(RECORD * records),
            "hyperparameters": {"n_epochs": epochs}, "metadata": {"foo": "string"},
        }  # fmt: skip
        return str(self.made("/fine_tuning/jobs", body)["id"])

    def paused_job(self) -> str:
        id = self.job()
        self.made(f"/fine_tuning/jobs/{id}/pause", {})
        self._ended(f"/fine_tuning/jobs/{id}", "paused")
        return id

    def running_job(self) -> str:
        id = self.job()
        self._ended(f"/fine_tuning/jobs/{id}", "running")
        return id

    @cached_property
    def ended_job(self) -> str:
        id = self.job(2, 2)
        self._ended(f"/fine_tuning/jobs/{id}", "succeeded")
        return id

    def trained(self, body: Any) -> str:
        """The adapter that a job makes."""
        id = str(self.made("/fine_tuning/jobs", body)["id"])
        found = self._ended(f"/fine_tuning/jobs/{id}", "succeeded", "failed", patience=20 * PATIENCE)
        return str(found["fine_tuned_model"])

    @cached_property
    def checkpoint(self) -> str:
        """The name of a job's checkpoint."""
        found = self.read(f"/fine_tuning/jobs/{self.ended_job}/checkpoints")["data"]
        return str(found[0]["fine_tuned_model_checkpoint"])

    @cached_property
    def adapter(self) -> str:
        return str(self.read(f"/fine_tuning/jobs/{self.ended_job}")["fine_tuned_model"])

    def copied_adapter(self) -> str:
        """A further adapter with the weights of the job's."""
        files = {
            part: (part, self._http.get(f"/adapters/{self.adapter}/{part}").read())
            for part in ("config", "weights")
        }
        name = f"copied-{time.monotonic_ns()}"
        self._told(self._http.post("/adapters", data={"name": name}, files=files))
        return name

    def permission(self) -> str:
        """A permission of the checkpoint's."""
        made = self.made(f"/fine_tuning/checkpoints/{self.checkpoint}/permissions", {"project_ids": ["one"]})
        return str(made["data"][0]["id"])

    def eval(self) -> str:
        body = {
            "data_source_config": {"type": "custom", "item_schema": SCHEMA}, "testing_criteria": [CRITERION],
        }  # fmt: skip
        return str(self.made("/evals", body)["id"])

    def run(self, eval: str) -> str:
        """A run that is over."""
        id = str(self.made(f"/evals/{eval}/runs", {"data_source": ENTRIES})["id"])
        self._ended(f"/evals/{eval}/runs/{id}", "completed")
        return id

    def long_run(self, eval: str) -> str:
        """A run that goes on, as a model answers its items."""
        template = {"type": "template", "template": [{"role": "user", "content": "{{item.foo}}"}]}
        content = [{"item": {"foo": "bar"}}] * 200
        source = {
            "type": "completions", "model": MODEL, "input_messages": template,
            "source": {"type": "file_content", "content": content},
        }  # fmt: skip
        return str(self.made(f"/evals/{eval}/runs", {"data_source": source})["id"])

    def outcome(self, eval: str, run: str) -> str:
        return str(self.read(f"/evals/{eval}/runs/{run}/output_items")["data"][0]["id"])
