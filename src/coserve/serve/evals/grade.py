"""Grades an answer in the server's process: graders run on threads, and models that they ask answer through
the queue, as any request of the tenant's."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coserve.core.request import SamplingParams
from coserve.errors import ConfigError
from coserve.serve.answering.answers import answer
from coserve.serve.answering.chat import Chat
from coserve.serve.answering.cost import RequestSize
from coserve.serve.answering.embedding import embed
from coserve.serve.answering.replies import whole_answers
from coserve.serve.answering.request_builder import RequestBuilder
from coserve.serve.answering.structure import Structure
from coserve.serve.errors import ApiError
from coserve.serve.schema.common import MOST_TOKEN_ID
from coserve.serve.state import State
from coserve.serve.store.records import Tenant
from coserve.text.deltas import joined
from coserve.train.grading.asking import EMBEDDED, AskingGrader, EmbeddingQuestion, ModelQuestion, Reply
from coserve.train.grading.graders import Grader, grader_from
from coserve.train.grading.multi import MultiGrader
from coserve.train.objectives import ALL_GRADERS
from coserve.wire.scores import numbers

# An `http` grader may wait for half a minute, on a thread that all tenants share: only jobs have their own.
KINDS: Final = {name: kind for name, kind in ALL_GRADERS.items() if name != "http"}


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A model's answer in a chat: its text without reasoning, why it ended, and the tokens that were read
    and written."""

    model: str
    text: str
    finish: str
    read: int
    written: int


@dataclass(frozen=True, slots=True)
class Grade:
    """A reward; those of a multi grader's parts by name, what models said, and the seconds that it took."""

    reward: float
    parts: Mapping[str, float]
    replies: Sequence[ChatAnswer]
    seconds: float


async def grader_of(state: State, tenant: Tenant, settings: Mapping[str, Any], param: str) -> Grader:
    """The grader of these settings. Raises ApiError 400, naming `param`."""
    try:
        return await state.graders.run(tenant.id, grader_from, settings, KINDS)
    except ConfigError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from error


async def grade(
    state: State, tenant: Tenant, grader: Grader, text: str, item: Mapping[str, Any], tier: str = "default"
) -> Grade:
    """Grades the answer `text`. Raises CoserveError where there is no reward, and ApiError for a model that
    cannot be asked."""
    began, replies, said = time.monotonic(), list[ChatAnswer](), list[Reply]()
    if isinstance(grader, AskingGrader):
        for question in await state.graders.run(tenant.id, grader.questions, text, item):
            if isinstance(question, EmbeddingQuestion):
                said.append(await _embedded(state, tenant, question, tier))
                continue
            replies.append(await _replied(state, tenant, question, tier))
            said.append(replies[-1].text)
    reward, parts = await state.graders.run(tenant.id, _rewards, grader, text, item, said)
    return Grade(reward, parts, replies, time.monotonic() - began)


async def ask(
    state: State,
    tenant: Tenant,
    model: str,
    chat: Chat,
    sampling: SamplingParams,
    size: RequestSize,
    tier: str,
) -> ChatAnswer:
    """The answer of a model to a chat. Raises what answers to requests may end with."""
    builder = await RequestBuilder.of(state, tenant, model, "eval-", most_choices=1, tier=tier)
    call = await builder.chat(chat, sampling, size)
    (piece,) = await whole_answers(answer(state, call), 1)
    said, _, _ = joined(call.markup.reader().push(piece.text, True))
    finish = "length" if piece.finish == "length" else "stop"
    return ChatAnswer(call.model.name, said, finish, len(call.prompts[0]), len(piece.tokens))


async def _replied(state: State, tenant: Tenant, question: ModelQuestion, tier: str) -> ChatAnswer:
    chat = Chat(
        [dict(message) for message in question.messages], structure=Structure.of_schema(question.schema)
    )
    sampling = SamplingParams(
        max_tokens=MOST_TOKEN_ID,
        temperature=question.temperature,
        top_p=question.top_p,
        seed=question.seed,
    )
    size = RequestSize(max_tokens=question.max_tokens)
    return await ask(state, tenant, question.model, chat, sampling, size, tier)


async def _embedded(state: State, tenant: Tenant, question: EmbeddingQuestion, tier: str) -> Sequence[float]:
    base = state.settings.base_name
    builder = await RequestBuilder.of(state, tenant, base, "eval-", most_choices=1, tier=tier)
    call = await builder.completion([question.text], EMBEDDED, RequestSize(max_tokens=0))
    (found,) = await embed(state, call)
    return numbers("f", found)


def _rewards(
    grader: Grader, text: str, item: Mapping[str, Any], replies: Sequence[Reply]
) -> tuple[float, Mapping[str, float]]:
    """The reward, and those of a multi grader's parts."""
    if isinstance(grader, MultiGrader):
        parts = grader.rewards_with(text, item, iter(replies))
        return grader.combined(parts), parts
    if isinstance(grader, AskingGrader):
        return grader.grade_with(text, item, iter(replies)), {}
    return grader.grade(text, item), {}
