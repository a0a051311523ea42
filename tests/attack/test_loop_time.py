"""No request stops the API's event loop: neither of any route and parameter, nor one that asks for all there
is.

`COSERVE_ATTACK=25000 pytest -m slow -s tests/attack/test_loop_time.py` sends so many; on a quiet machine of
two cores it takes two minutes. It prints how many were sent, how often each status came, and the longest
stops.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from asked import Asked, Generator
from test_tinker_bodies import good

from coserve import tiny
from coserve.core.request import Request
from coserve.serve.settings import ServerSettings
from fake_engine import FakeEngine
from hostile_bodies import CHAT, COUNT_TOKENS, JOB, MESSAGES, TEXT, chat, hostile, text
from serving import Play, World
from watched_api import LoopClock, watched_api

LONG: Final = int(os.environ.get("COSERVE_ATTACK", "25000"))
SEED: Final = int(os.environ.get("COSERVE_ATTACK_SEED", "15"))
AT_ONCE: Final = 6
MOST_STOP: Final = 0.1  # seconds
PATIENCE: Final = 60.0  # seconds
TINKER: Final = "/api/v1"
Post = Callable[[str, Any], Any]


@dataclass
class Campaign:
    """Requests sent, and what came of them; the status 0 is of clients that left, or whose large body was
    read no further."""

    http: httpx2.AsyncClient
    clock: LoopClock
    statuses: Counter[int] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    stops: list[tuple[float, float, str]] = field(default_factory=list)  # by the clock, computing, under way
    under_way: dict[int, str] = field(default_factory=dict)
    sent: int = 0

    async def send(self, asked: Asked, patience: float = PATIENCE) -> httpx2.Response | None:
        """The answer, None where the client leaves after `patience` seconds."""
        number, self.sent = self.sent, self.sent + 1
        self.under_way[number] = asked.what or f"{asked.method} {asked.path}"
        headers = {"content-type": "application/json", **asked.headers}
        try:
            async with asyncio.timeout(patience):
                answer = await self._asked(asked, headers)
        except TimeoutError:
            self.statuses[0] += 1
            if patience == PATIENCE:
                self.failed.append(f"no answer: {self.under_way[number]}")
            return None
        except httpx2.InvalidURL:
            return None
        except httpx2.TransportError as error:  # a body that is refused is read no further
            self.statuses[0] += 1
            if len(asked.body or b"") < 1 << 19:
                self.failed.append(f"{error!r}: {self.under_way[number]}")
            return None
        finally:
            self.look()
            del self.under_way[number]
        self.statuses[answer.status_code] += 1
        if answer.status_code >= 500:
            self.failed.append(f"{asked.what or asked.path}: {answer.text[:200]}")
        return answer

    async def _asked(self, asked: Asked, headers: dict[str, str]) -> httpx2.Response:
        """The answer; asked for again where the connection was closed first, as the server does with one
        that rests, or of whose last body it has read no more (RFC 9112, 9.3.1). A server that died stays so.
        """
        for again in (True, False):
            try:
                return await self.http.request(asked.method, asked.path, content=asked.body, headers=headers)
            except httpx2.TransportError:
                if not again or len(asked.body or b"") >= 1 << 19:
                    raise
        raise AssertionError

    def look(self) -> None:
        stopped, computed = self.clock.take()
        if stopped > MOST_STOP / 2:
            self.stops.append((stopped, computed, "; ".join(self.under_way.values())[:300]))

    def report(self, seconds: float) -> None:
        """Prints the figures."""
        errors = sum(count for status, count in self.statuses.items() if status >= 500)
        longest = max((stop[0] for stop in self.stops), default=0.0)
        computed = max((stop[1] for stop in self.stops), default=0.0)
        of_each = dict(sorted(self.statuses.items()))
        print(f"\n{self.sent} requests in {seconds:.0f} s: {of_each}, {errors} of 5xx")
        print(f"longest stop of the loop: {longest:.3f} s by the clock, {computed:.3f} s of computing")
        for stopped, own, what in sorted(self.stops, reverse=True)[:8]:
            print(f"  {stopped:.3f} s ({own:.3f} s): {what}")
        for what in self.failed[:8]:
            print(f"  {what}")


def largest(size: int, model: str, sampler: str, draw: random.Random) -> Iterator[tuple[Asked, float]]:
    """Requests that ask for all that they may, with the seconds after which their client leaves; `size` from
    1 to 128 is how large they are."""
    ids = [3 + number % 900 for number in range(1900)]

    def post(path: str, what: str, patience: float = PATIENCE, **fields: Any) -> tuple[Asked, float]:
        body = fields.pop("content", None)
        asked: Any = body if body is not None else httpx2.Request("POST", "http://x", json=fields).content
        return Asked("POST", path, asked, f"{what} {size}"), patience

    likely = {"logprobs": True, "top_logprobs": 20}
    scored = {"prompt": [ids] * size, "max_tokens": 0, "echo": True, "logprobs": 20}
    yield post(TEXT, "echo of prompts", **text(**scored))
    yield post(TEXT, "echo, streamed", **text(**scored, stream=True))
    yield post(TEXT, "echo, left", 0.3, **text(**scored, stream=True))
    yield post(TEXT, "prompts", **text(prompt=["word " * 300] * size, max_tokens=2, return_token_ids=True))
    yield post(
        TEXT, "ignore_eos", 0.5, **text(n=16, max_tokens=1900, ignore_eos=True, stream=True, logprobs=20)
    )
    many = max(size * 600 // 128, 8)
    for stream in (False, True):
        yield post(CHAT, "chat", **chat(n=16, max_tokens=many, ignore_eos=True, stream=stream, **likely))
    turns = [{"role": role, "content": "a b"} for role in ("user", "assistant")] * min(8 * size, 1000)
    for path in (CHAT, MESSAGES):
        yield post(path, "turns", **chat(messages=[*turns[1:], turns[0]]))
    blocks = [{"type": "text", "text": "a b " * size}] * 256
    counted = {"model": "tiny", "system": blocks, "messages": [{"role": "user", "content": blocks}]}
    yield post(COUNT_TOKENS, "blocks", **counted)
    yield post(MESSAGES, "streamed", **chat(max_tokens=15 * size, stream=True))
    numbers = b",".join([b"1e308"] * (8_000 * size))
    yield post(TEXT, "numbers", content=b'{"model":"tiny","prompt":[' + numbers + b"]}")
    for _ in range(4):
        path, body = hostile(draw, 60_000 * size)
        yield post(path, "hostile", content=body)
    yield post(f"{TINKER}/forward_backward", "pass", content=good(model, 1 << 20, 32 * size))
    sample = {
        "sampling_session_id": sampler, "seq_id": draw.randrange(1 << 30), "num_samples": min(2 * size, 256),
        "prompt": {"chunks": [{"tokens": ids[: 15 * size]}]}, "prompt_logprobs": True, "topk_prompt_logprobs":
        20, "topk_sample_logprobs": 20, "sampling_params": {"max_tokens": 4 * size, "stop": []},
    }  # fmt: skip
    yield post(f"{TINKER}/asample", "sample", **sample)
    request = f"{sampler}:{sample['seq_id']}"
    yield post(f"{TINKER}/retrieve_future", "result", request_id=request)
    yield post(f"{TINKER}/sessions/search", "search", limit=200)
    for path in (
        "/openapi.json", "/docs", "/metrics", "/v1/models", "/v1/files", f"{JOB}?limit=1000",
        f"{TINKER}/sessions?limit=1000", f"{TINKER}/training_runs?limit=1000",
        f"{TINKER}/checkpoints?limit=1000",
    ):  # fmt: skip
        yield Asked("GET", path), PATIENCE


def script(vocabulary: int, eos: int) -> Callable[[Request, int], int]:
    """Answers that end after some sixty tokens."""

    def token(request: Request, place: int) -> int:
        drawn = hash((request.sampling.seed, place))
        return eos if drawn % 61 == 0 and not request.sampling.ignore_eos else 3 + drawn % (vocabulary - 3)

    return token


def attack(app: Any, folder: Path, count: int, size: int) -> tuple[Campaign, str]:
    """`count` requests of all routes, and the largest of all kinds: what came of them, and the API's log."""
    draw = random.Random(SEED)
    state = folder / "attacked"
    state.mkdir()
    settings = ServerSettings(
        model=str(tiny.path()), state=state, name="tiny", max_requests_minute=0, adapter_root=folder
    )

    async def story() -> Campaign:
        engine = FakeEngine(settings.socket, step_seconds=0.001)
        engine.script = script(engine.vocabulary, engine.eos[0])
        with (folder / "log").open("wb") as log:
            async with (
                engine,
                watched_api(settings, log) as (url, clock),
                httpx2.AsyncClient(base_url=url, timeout=None) as http,
            ):
                campaign = Campaign(http, clock)
                known = await settled(campaign, size)
                began = time.monotonic()
                for asked, patience in largest(size, known["model_id"][0], known["sampler_id"][0], draw):
                    await campaign.send(asked, patience)
                generator = Generator(app, draw, known)
                each = list(generator.each())
                draw.shuffle(each)
                waiting = iter([*each[:count], *(generator.any() for _ in range(count - len(each)))])

                async def worker() -> None:
                    for asked in waiting:
                        await campaign.send(
                            asked, draw.choice((0.05, 1.0, 3.0)) if draw.random() < 0.1 else 20.0
                        )

                await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
                campaign.look()
                campaign.report(time.monotonic() - began)
                assert clock.looks > 0
                assert (await http.get("/health")).json()["status"] == "ok"
                return campaign

    campaign = asyncio.run(story())
    return campaign, (folder / "log").read_text(errors="replace")


async def settled(campaign: Campaign, size: int) -> dict[str, list[Any]]:
    """Makes something of each kind that requests can name; values by the names of parameters."""

    async def post(path: str, **fields: Any) -> Any:
        answer = await campaign.http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    line = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n'
    upload = {"file": ("data.jsonl", line * 20)}
    answer = await campaign.http.post("/v1/files", files=upload, data={"purpose": "fine-tune"})
    file = answer.json()["id"]
    job = (await post(JOB, model="tiny", training_file=file))["id"]
    metadata = {f"key-{number}": "x" * 240 for number in range(60)}
    sessions = [
        (await post(f"{TINKER}/create_session", tags=[], user_metadata=metadata))["session_id"]
        for _ in range(8 + size)
    ]
    one = sessions[0]
    sampler = (
        await post(
            f"{TINKER}/create_sampling_session", session_id=one, sampling_session_seq_id=0, base_model="tiny"
        )
    )["sampling_session_id"]
    made = await post(
        f"{TINKER}/create_model", session_id=one, model_seq_id=0, base_model="tiny", lora_config={"rank": 1}
    )
    await post(f"{TINKER}/retrieve_future", request_id=made["request_id"])
    for path in (CHAT, MESSAGES, TEXT):
        await post(path, **(text() if path == TEXT else chat()))  # what is built with the first request
    campaign.clock.take()
    return {
        "model": ["tiny"], "base_model": ["tiny"], "session_id": sessions[:3], "sampler_id": [sampler],
        "sampling_session_id": [sampler], "model_id": [made["model_id"]], "run": [made["model_id"]],
        "training_file": [file], "file_id": [file], "job_id": [job], "request_id": [made["request_id"]],
        "lora_name": ["none"], "type": [], "max_tokens": [1, 8, 60], "max_completion_tokens": [1, 8, 60],
    }  # fmt: skip


def test_no_request_stops_the_loop(play: Play, tmp_path: Path) -> None:
    check(play, tmp_path, 120, 4, is_quiet=False)


@pytest.mark.slow
def test_no_request_of_thousands_stops_the_loop(play: Play, tmp_path: Path) -> None:
    check(play, tmp_path, LONG, 128, is_quiet=True)


def check(play: Play, folder: Path, count: int, size: int, is_quiet: bool) -> None:
    """Attacks, and checks what came of it; by the clock where the machine is quiet, else by the shorter of
    that and what was computed."""
    found = list[Any]()

    async def story(world: World) -> None:
        found.append(world.app)

    play(story)
    campaign, log = attack(found[0], folder, count, size)
    assert not campaign.failed
    assert campaign.sent >= count
    for stopped, computed, what in campaign.stops:
        assert (stopped if is_quiet else computed) <= MOST_STOP, what
    for unwanted in ("Traceback", "socket.send() raised exception", "was never retrieved"):
        with suppress(ValueError):
            start = log.index(unwanted)
            raise AssertionError(log[max(start - 500, 0) : start + 1500])
