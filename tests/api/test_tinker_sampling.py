"""Sampling through the `tinker` client."""

import asyncio
from typing import Any

import pytest
import tinker
from starlette.responses import Response
from tinker import types

from coserve.serve.offload import Offload
from coserve.serve.tinker.futures import Payload
from coserve.serve.tinker.routes import futures
from serving import Play, World
from tinkering import tinkering


def prompt(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def test_the_base_is_sampled(play: Play) -> None:
    async def story(world: World) -> None:
        async with tinkering(world) as client:
            service = await client.service()
            sampler = await client.call(service.create_sampling_client, base_model="tiny")
            params = types.SamplingParams(max_tokens=5, seed=7, temperature=0.5, top_k=9, top_p=0.5)
            got = await client.call(sampler.sample, prompt(5, 6, 7), 3, params)
            assert [len(one.tokens) for one in got.sequences] == [5] * 3
            assert all(one.logprobs == [-0.5] * 5 and one.stop_reason == "length" for one in got.sequences)
            assert len({one.sequence_id for one in got.sequences}) == 3
            sent = world.submits()
            assert [one.sampling.seed for one in sent] == [7, 8, 9]
            assert {(s.prompt, s.sampling.temperature, s.sampling.top_k, s.sampling.top_p) for s in sent} == {
                ((5, 6, 7), 0.5, 9, 0.5)
            }
            await client.call(service.close, "success")

    play(story)


def test_prompts_are_scored(play: Play) -> None:
    async def story(world: World) -> None:
        async with tinkering(world) as client:
            service = await client.service()
            sampler = await client.call(service.create_sampling_client, base_model="tiny")
            assert await client.call(sampler.compute_logprobs, prompt(5, 6, 7, 8)) == [None, -0.5, -0.5, -0.5]
            last = await client.call(sampler.compute_logprobs, prompt(5, 6, 7, 8), prompt_logprobs_last_n=2)
            assert last == [None, None, -0.5, -0.5]
            got = await client.call(
                sampler.sample, prompt(5, 6, 7), 1, types.SamplingParams(max_tokens=2),
                include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3,
            )  # fmt: skip
            assert got.topk_prompt_logprobs == [None, [(6, -0.5), (7, -1.5)], [(7, -0.5), (8, -1.5)]]
            (one,) = got.sequences
            assert one.topk_logprobs is not None and [len(top or ()) for top in one.topk_logprobs] == [3, 3]
            assert one.topk_logprobs[0] is not None and one.topk_logprobs[0][0] == (one.tokens[0], -0.5)

    play(story)


def test_what_ends_a_sample_is_part_of_it(play: Play) -> None:
    """Of a stop string the sample has the tokens up to its end, with their log-probabilities."""

    async def story(world: World) -> None:
        async with tinkering(world) as client:
            service = await client.service()
            sampler = await client.call(service.create_sampling_client, base_model="tiny")
            said = world.say("one two three four", ends=True)

            async def ends(stop: Any, most: int = 40) -> tuple[str, str, list[int]]:
                params = types.SamplingParams(max_tokens=most, stop=stop)
                (one,) = (await client.call(sampler.sample, prompt(5), 1, params)).sequences
                assert one.logprobs is not None and len(one.logprobs) == len(one.tokens)
                return one.stop_reason, world.told(one.tokens), list(one.tokens)

            assert await ends(None) == ("stop", "one two three four", [*said, world.engine.eos[0]])
            for stop in ("two", ["two", "zzz"]):
                reason, text, tokens = await ends(stop)
                assert (reason, tokens) == ("stop", said[: len(tokens)]) and text.rstrip().endswith("two")
            assert (await ends([said[2]]))[2] == said[: said.index(said[2]) + 1]
            assert (await ends([], 60))[0] == "length"  # not even the end of the sequence ends it

    play(story)


def test_keys_are_those_of_everything_else(play: Play) -> None:
    async def story(world: World) -> None:
        _, key = await world.state.store.tenants.create_key("one")
        async with tinkering(world, f"tml-{key}") as client:
            service = await client.service()
            sampler = await client.call(service.create_sampling_client, base_model="tiny")
            few = types.SamplingParams(max_tokens=1)
            assert len((await client.call(sampler.sample, prompt(5), 1, few)).sequences) == 1
            (tenant,) = [one for one in await world.state.store.tenants.list() if one.name == "one"]
            assert world.submits()[0].scope == f"{tenant.id}/"
            assert (await world.client(key).models.list()).data
            client.key = f"tml-{key[:-1]}?"
            wrong = await client.service()
            with pytest.raises(tinker.AuthenticationError):
                await client.call(lambda: wrong.create_sampling_client(base_model="tiny"))
            (one,) = await world.state.store.tenants.keys()
            await world.state.store.tenants.revoke_key(one.id)
            with pytest.raises(tinker.AuthenticationError):
                await client.call(sampler.sample, prompt(5), 1, few)

    play(story)


def test_large_results_are_announced_before_they_are_sent(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "_INLINE", 10)
    announced = []
    sent = futures._sent

    async def watched(bodies: Offload, payload: Payload, may_announce: bool, *rest: Any) -> Response:
        announced.append(may_announce)
        return await sent(bodies, payload, may_announce, *rest)

    monkeypatch.setattr(futures, "_sent", watched)

    async def story(world: World) -> None:
        async with tinkering(world) as client:
            service = await client.service()
            sampler = await client.call(service.create_sampling_client, base_model="tiny")
            got = await client.call(sampler.sample, prompt(5), 1, types.SamplingParams(max_tokens=9))
            assert len(got.sequences[0].tokens) == 9 and announced == [True, False]

    play(story)


def test_wrong_samples_fail_alone(play: Play) -> None:
    async def story(world: World) -> None:
        async with tinkering(world) as client:
            service = await client.service()
            sampler = await client.call(service.create_sampling_client, base_model="tiny")
            few = types.SamplingParams(max_tokens=1)
            wrong: list[tuple[types.ModelInput, types.SamplingParams, dict[str, Any], str]] = [
                (prompt(), few, {}, "at least one token"),
                (prompt(4000), few, {}, "not one of the model's"),
                (prompt(*[5] * 2048), few, {}, "2048 tokens at most"),
                (prompt(5), types.SamplingParams(max_tokens=1, temperature=3.0), {}, "temperature"),
                (prompt(5, 6), few, {"topk_prompt_logprobs": 3}, "prompt_logprobs"),
            ]
            for text, params, named, says in wrong:
                with pytest.raises(tinker.RequestFailedError, match=says) as failed:
                    await client.call(sampler.sample, text, 1, params, **named)
                assert failed.value.category is types.RequestErrorCategory.User
            with pytest.raises(tinker.BadRequestError, match="not supported"):
                await client.call(sampler.sample, prompt(5, 6), 1, few, prompt_alt_tokens_k=2)
            many: Any = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 30}
            with pytest.raises(tinker.BadRequestError, match="less than or equal to 20"):
                await client.call(sampler.sample, prompt(5, 6), 1, few, **many)
            with pytest.raises(tinker.BadRequestError, match=r"257 samples; at most 256 .*max_queue_tenant"):
                await client.call(sampler.sample, prompt(5, 6), 257, few)
            with pytest.raises(tinker.NotFoundError, match="does not exist"):
                await client.call(service.create_sampling_client, base_model="none")
            assert len((await client.call(sampler.sample, prompt(5), 40, few)).sequences) == 40

    play(story)


def test_results_belong_to_their_tenant_and_are_one_for_a_request_sent_twice(play: Play) -> None:
    async def story(world: World) -> None:
        _, one = await world.state.store.tenants.create_key("one")
        _, other = await world.state.store.tenants.create_key("other")
        headers = [{"X-API-Key": f"tml-{key}"} for key in (one, other)]

        async def post(path: str, body: dict[str, Any], who: int = 0) -> Any:
            return await world.http.post(f"/api/v1/{path}", json=body, headers=headers[who])

        assert (await world.http.post("/api/v1/client/config", json={"sdk_version": "1"})).status_code == 401
        session = (await post("create_session", {"tags": [], "user_metadata": None})).json()["session_id"]
        begin = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        assert (await post("create_sampling_session", begin, 1)).status_code == 404
        sampler = (await post("create_sampling_session", begin)).json()["sampling_session_id"]
        sample = {
            "sampling_session_id": sampler, "seq_id": 3, "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 3},
        }  # fmt: skip
        assert (await post("asample", sample, 1)).status_code == 404
        first, second = await asyncio.gather(post("asample", sample), post("asample", sample))
        assert first.json() == second.json()
        request = {"request_id": first.json()["request_id"]}
        assert (await post("retrieve_future", request, 1)).status_code == 404
        results = [(await post("retrieve_future", request)).json() for _ in range(2)]
        assert results[0] == results[1] and len(results[0]["sequences"][0]["tokens"]) == 3
        assert len(world.submits()) == 1
        missing = await post("retrieve_future", {"request_id": f"{sampler}:99"})
        assert missing.status_code == 410  # the client sends its request again
        assert (
            await post("sessions/" + session + "/finish", {"reason": {"type": "success"}}, 1)
        ).status_code == 404
        assert (
            await post("sessions/" + session + "/finish", {"reason": {"type": "success"}})
        ).status_code == 204
        assert (await post("session_heartbeat", {"session_id": session})).status_code == 410
        assert (await post("asample", {**sample, "seq_id": 4})).status_code == 410

    play(story)


def test_who_waits_is_told_why_and_may_leave(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        monkeypatch.setattr(futures, "POLL_SECONDS", 0.05)
        async with tinkering(world) as client:
            service = await client.service()
            sampler = await client.call(service.create_sampling_client, base_model="tiny")
            world.engine.hangs = True
            long = types.SamplingParams(max_tokens=50)
            sent = [sampler.sample(prompt(5), 8, long) for _ in range(3)]
            await world.until(
                lambda: (
                    world.state.queue.waiting > 0
                    and len(world.app.state.tinker.sessions.futures.of("local", "")) == 3
                )
            )
            ids = [one.id for one in world.app.state.tinker.sessions.futures.of("local", "")]
            answer = await world.http.post("/api/v1/retrieve_future", json={"request_id": ids[-1]})
            told = answer.json()
            assert answer.status_code == 408 and told["queue_state"] == "paused_capacity"
            assert "place 3 of your 3 samples" in told["queue_state_reason"]
            assert (
                await world.http.post("/api/v1/cancel_future", json={"request_id": ids[-1]})
            ).status_code == 204
            world.engine.hangs = False
            ends = await asyncio.gather(
                *(asyncio.to_thread(one.result) for one in sent), return_exceptions=True
            )
            left = [end for end in ends if isinstance(end, tinker.RequestFailedError)]
            assert len(left) == 1 and "cancelled" in str(left[0])
            assert [len(end.sequences) for end in ends if isinstance(end, types.SampleResponse)] == [8, 8]
            assert world.state.queue.waiting == world.state.queue.inside == 0

    play(story, engine={"max_running": 4})
