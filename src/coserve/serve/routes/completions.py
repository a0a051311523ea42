"""`POST /v1/completions`."""

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request, Response

from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.answering.call import Call, CallUsage
from coserve.serve.answering.cost import RequestSize
from coserve.serve.answering.logprobs import LogprobWriter
from coserve.serve.answering.replies import reply
from coserve.serve.errors import error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import WrittenJson, written_later
from coserve.serve.routes.choices import ChoicesFormat, builder_for, sampling_of
from coserve.serve.schema.common import JsonObject
from coserve.serve.schema.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    CreateCompletionResponse,
)
from coserve.serve.state import Shared
from coserve.text import Text
from coserve.wire.messages import Hello
from coserve.wire.scores import Scores, numbers

router = APIRouter(route_class=JsonRoute, tags=["Answers"])


@router.post(
    "/v1/completions",
    response_model=CreateCompletionResponse,
    responses=error_responses(404, 500),
    summary="Continue a text",
)
async def create_completion(
    body: CompletionRequest, request: Request, caller: Caller, state: Shared
) -> Response:
    """Continues texts or token ids, whole or (`stream`) as server-sent events that end with `data: [DONE]`.

    With `echo` and `max_tokens` 0 it only scores the prompt.
    """
    scores = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    if body.max_tokens == 0 and scores is None:
        scores = 0  # an answer may be empty only where the prompt is scored
    told = body.n or 1
    made = body.best_of or told
    builder = await builder_for(state, caller, body, "cmpl-")
    prompts: Sequence[str | Sequence[int]] = body.prompts
    if body.suffix:
        prompts = [await builder.infilled(prompt, body.suffix) for prompt in prompts]
    call = await builder.completion(
        prompts,
        sampling_of(
            body,
            state.text,
            0 if made > told and body.logprobs is None else body.logprobs,
            scores,
            builder.defaults,
        ),
        RequestSize(
            choices=made,
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        ),
        body.structure,
    )
    shape = _CompletionFormat(body, call, builder.hello, state.text, state.logprobs)
    return await reply(request, state, call, shape)


class _CompletionFormat(ChoicesFormat):
    def __init__(
        self, body: CompletionRequest, call: Call, hello: Hello, text: Text, writer: LogprobWriter
    ) -> None:
        super().__init__(body, call, hello, "text_completion")
        self._text, self._writer = text, writer
        self._echo, self._logprobs = bool(body.echo), body.logprobs
        self._told, self._scores_prompt = body.n or 1, body.prompt_logprobs is not None
        self._offsets: dict[int, int] = {}  # by answer that has begun: characters before its own

    def size(self, piece: AnswerPiece) -> int:
        echoed = len(self.call.prompt(piece.index)) if piece.index not in self._offsets else 0
        scores = len(piece.scores.ids) + len(piece.prompt_scores.ids)
        return len(piece.tokens) + (echoed if self._echo else 0) + scores // 4

    def chunks(self, piece: AnswerPiece) -> Iterator[JsonObject]:
        yield {"choices": [self._choice(piece)]}

    def whole(self, answers: list[AnswerPiece], usage: CallUsage) -> JsonObject:
        choices = [
            WrittenJson(written_later(self._numbered, piece, number))
            for number, piece in enumerate(self._best(answers))
        ]
        return {**self.common, "choices": choices, "usage": self.usage(usage)}

    def _best(self, answers: list[AnswerPiece]) -> Iterator[AnswerPiece]:
        """The likeliest answers to each prompt, as many as are told."""
        made = self.call.choices
        for at in range(0, len(answers), made):
            its = answers[at : at + made]
            yield from its if self._told == made else sorted(its, key=_likelihood)[-self._told :][::-1]

    def _numbered(self, piece: AnswerPiece, number: int) -> JsonObject:
        choice = {**self._choice(piece), "index": number}
        if self._scores_prompt:
            prompt = self.call.prompt(piece.index)
            choice["prompt_logprobs"] = self._writer.prompt(prompt, piece.prompt_scores)
        return choice

    def _choice(self, piece: AnswerPiece) -> JsonObject:
        prompt, is_first = self.call.prompt(piece.index), piece.index not in self._offsets
        echoed = self._text.decode(prompt, self.call.form.has_special) if is_first and self._echo else ""
        offset = self._offsets.setdefault(piece.index, len(echoed))
        asked = self.choice(piece)
        if self.tells_ids and is_first:
            asked["prompt_token_ids"] = list(prompt)
        logprobs = None
        if self._logprobs is not None:
            count = len(piece.starts)  # those of the text: the token that ends an answer is not told
            tokens, scores = piece.tokens[:count], piece.scores.rows(0, count)
            starts = [start + offset for start in piece.starts]
            if is_echo := is_first and self._echo:
                tokens, starts = (*prompt, *tokens), [*self._text.starts(prompt), *starts]
                scores = Scores.joined((piece.prompt_scores, scores))
            logprobs = self._writer.completion(tokens, starts, scores, self._logprobs, is_echo)
        return {"text": echoed + piece.text, "logprobs": logprobs, **asked}


def _likelihood(piece: AnswerPiece) -> float:
    """The mean log-probability of an answer's tokens."""
    chosen = numbers("f", piece.scores.chosen)
    return sum(chosen) / len(chosen) if chosen else 0.0
