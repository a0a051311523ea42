"""Sampling: a request of a sampling session is checked, and answered like any request for text."""

import asyncio
from typing import Final

from coserve.core.request import SamplingParams
from coserve.serve.answering.answers import answer
from coserve.serve.answering.call import Call
from coserve.serve.answering.cost import RequestSize, at_most
from coserve.serve.answering.replies import whole_answers
from coserve.serve.answering.request_builder import RequestBuilder
from coserve.serve.errors import ApiError
from coserve.serve.state import State
from coserve.serve.store.records import Tenant, TinkerSampler
from coserve.serve.tinker.futures import Payload, TinkerFuture, Waiting
from coserve.serve.tinker.sampled import PromptScores, sample_payload
from coserve.serve.tinker.schema import SampleRequest
from coserve.serve.tinker.sessions import ClientSessions

KIND: Final = "Sample"
_RETRY_SECONDS: Final = 0.2  # between two attempts to enter a queue that is full


async def submit_sample(sessions: ClientSessions, tenant: Tenant, body: SampleRequest) -> TinkerFuture:
    """The future of a sample. Raises ApiError 404 for an unknown sampling session, and 429 while the tenant
    has as much waiting as the queue takes."""
    at_most("num_samples", "samples", body.num_samples, _most_samples(sessions.state), "max_queue_tenant")
    sampler = await sessions.sampler(tenant, body.sampling_session_id)
    await sessions.open_session(tenant, sampler.session)
    id = f"{sampler.id}:{body.seq_id}"
    if sessions.futures.find(tenant.id, id) is None:
        waiting = sum(one.kind == KIND and one.outcome is None for one in sessions.futures.of(tenant.id, ""))
        sessions.state.queue.check(0, waiting)

    async def work(future: TinkerFuture) -> Payload:
        return await _sample(sessions, tenant, sampler, body, future)

    return sessions.futures.begin(tenant.id, id, KIND, work)


async def _sample(
    sessions: ClientSessions,
    tenant: Tenant,
    sampler: TinkerSampler,
    body: SampleRequest,
    future: TinkerFuture,
) -> Payload:
    state = sessions.state
    builder = await RequestBuilder.of(
        state, tenant, sampler.model, "cmpl-", most_choices=_most_samples(state)
    )
    most = builder.hello.positions
    _check(body, most)
    room = min(most, builder.hello.cache_tokens) - body.prompt.length
    size = RequestSize(choices=body.num_samples, max_tokens=body.sampling_params.max_tokens or max(room, 1))
    call = await builder.completion([body.prompt.tokens], _sampling(body), size)
    future.why = lambda: _why(sessions, call, future)
    while True:
        try:
            answers = await whole_answers(answer(state, call), len(call))
            break
        except ApiError as refusal:
            if refusal.status != 429:
                raise
        await asyncio.sleep(_RETRY_SECONDS)
    prompt = None
    if body.prompt_logprobs:
        prompt = PromptScores(
            answers[0].prompt_scores, body.topk_prompt_logprobs, body.prompt_logprobs_last_n
        )
    return await state.bodies.run(tenant.id, sample_payload, answers, body.topk_sample_logprobs, prompt)


def _most_samples(state: State) -> int:
    return min(state.settings.max_queue, state.settings.max_queue_tenant)


def _check(body: SampleRequest, most: int) -> None:
    """Raises ApiError 400 for what a plain completion of `most` tokens does not have."""
    length = body.prompt.length
    if body.sampling_params.temperature > 2:
        raise ApiError(400, "Invalid value for 'temperature': at most 2 is allowed.", param="temperature")
    if not length:
        raise ApiError(400, "A prompt needs at least one token.", param="prompt")
    if length >= most:
        message = f"This model takes {most} tokens at most; the prompt has {length}."
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")
    if (body.topk_prompt_logprobs or body.prompt_logprobs_last_n) and not body.prompt_logprobs:
        raise ApiError(
            400, "Log-probabilities of the prompt need 'prompt_logprobs'.", param="prompt_logprobs"
        )
    if (body.prompt_logprobs_last_n or 0) >= length > 1:
        message = f"The prompt has {length} tokens, of which {length - 1} have log-probabilities."
        raise ApiError(400, message, param="prompt_logprobs_last_n")


def _sampling(body: SampleRequest) -> SamplingParams:
    """The sampling parameters of a sample, but for `max_tokens`."""
    asked = body.sampling_params
    stop = [asked.stop] if isinstance(asked.stop, str) else (asked.stop or [])
    alternatives = max(body.topk_prompt_logprobs, body.topk_sample_logprobs)
    return SamplingParams(
        temperature=asked.temperature,
        top_k=max(asked.top_k, 0),
        top_p=asked.top_p,
        seed=asked.seed,
        stop=tuple(one for one in stop if isinstance(one, str)),
        stop_token_ids=tuple(one for one in stop if isinstance(one, int)),
        ignore_eos=asked.stop == [],
        logprobs=alternatives,
        prompt_logprobs=alternatives if body.prompt_logprobs else None,
    )


def _why(sessions: ClientSessions, call: Call, future: TinkerFuture) -> Waiting:
    """The reason for which a sample is not done: it runs, or it waits for a place in the engine, for an
    engine, or for an adapter."""
    state, names = sessions.state, [f"{call.asked.id}-{index}" for index in range(len(call))]
    live = [name for name in names if name in state.link.live]
    if not state.link.ready:
        return Waiting("paused_capacity", "the engine is being started again")
    if any(state.link.live[name].tokens for name in live):
        return Waiting()
    if live:
        key = call.model.key
        is_loaded = key is None or key in state.link.resident
        return Waiting("active", None if is_loaded else "its weights wait for room in the engine's memory")
    own = [one for one in sessions.futures.of(future.tenant, "") if one.kind == KIND and one.outcome is None]
    place = own.index(future) + 1 if future in own else len(own)
    return Waiting(
        "paused_capacity",
        f"place {place} of your {len(own)} samples; {state.queue.waiting} answers of all callers wait for "
        f"the {state.queue.inside} that are being written",
    )
