"""`POST /v1/embeddings`."""

from array import array
from base64 import b64encode
from collections.abc import Iterator
from math import hypot
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from coserve.core.request import SamplingParams
from coserve.serve.answering.cost import LONGEST_NAME, MOST_PROMPTS, RequestSize
from coserve.serve.answering.embedding import embed
from coserve.serve.answering.replies import version_header
from coserve.serve.answering.request_builder import RequestBuilder
from coserve.serve.errors import ApiError, error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import WrittenJson, json_reply, written_later
from coserve.serve.http.streams import ClientGone, unless_gone
from coserve.serve.schema.common import JsonObject, RequestBody, Words
from coserve.serve.schema.completions import TokenPrompt
from coserve.serve.state import Shared, State
from coserve.wire.scores import little, numbers

MOST_INPUTS = 2048  # texts of one request, as OpenAI has it
MOST_WIDTH = 1 << 20


class EmbeddingRequest(RequestBody):
    """Text, or token ids, to be embedded; or several of either. `normalize` is vLLM's, the rest OpenAI's."""

    model: str = Field(min_length=1, max_length=LONGEST_NAME, description="The base model, or an adapter.")
    input: (
        Words
        | Annotated[list[Words], Field(fail_fast=True, min_length=1, max_length=MOST_INPUTS)]
        | TokenPrompt
        | Annotated[list[TokenPrompt], Field(fail_fast=True, min_length=1, max_length=MOST_INPUTS)]
    )
    dimensions: int | None = Field(
        None, ge=1, le=MOST_WIDTH, description="Keeps the first numbers of each; all unless given."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 is float32, little-endian."
    )
    normalize: bool | None = Field(None, description="Whether each has the length 1; true.")
    user: str | None = Field(None, max_length=4096, description="Accepted, not used.")

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """One or more inputs, all of one kind."""
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else self.input


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Embeddings in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


router = APIRouter(route_class=JsonRoute, tags=["Answers"])
EMBEDDINGS: Final = "/v1/embeddings"
_GONE: Final = 499


@router.post(
    EMBEDDINGS, response_model=EmbeddingList, responses=error_responses(404, 500), summary="Embed texts"
)
async def create_embeddings(
    body: EmbeddingRequest, request: Request, caller: Caller, state: Shared
) -> Response:
    """Tells the hidden state of each text after the model's last layer: the mean of its tokens', or the last
    token's, as the server's `pooling_type` says."""
    builder = await RequestBuilder.of(state, caller, body.model, "embd-")
    if body.dimensions is not None and body.dimensions > builder.hello.width:
        message = f"Invalid value for 'dimensions': {body.dimensions}; the model has {builder.hello.width}."
        raise ApiError(400, message, param="dimensions", code="invalid_value")
    try:
        found, read = await unless_gone(request.receive, _embedded(state, builder, body))
    except ClientGone:
        return Response(status_code=_GONE)
    except ApiError as error:
        error.param = "input" if error.param == "prompt" else error.param
        raise
    data = [WrittenJson(written_later(_shown, body, at, one)) for at, one in enumerate(found)]
    usage = {"prompt_tokens": read, "total_tokens": read}
    told = {"object": "list", "data": data, "model": builder.model.name, "usage": usage}
    reply = await json_reply(state.bodies, caller.id, told)
    reply.headers.update(version_header(builder.model))
    return reply


async def _embedded(state: State, builder: RequestBuilder, body: EmbeddingRequest) -> tuple[list[bytes], int]:
    """The embeddings of all inputs, some at a time, and the number of tokens read."""
    found, read = list[bytes](), 0
    sampling = SamplingParams(max_tokens=0, pooling=state.settings.pooling)
    for some in _some(body.inputs):
        call = await builder.completion(some, sampling, RequestSize(max_tokens=0))
        found += await embed(state, call)
        read += sum(map(len, call.prompts))
    return found, read


def _some(inputs: list[str] | list[list[int]]) -> Iterator[list[str] | list[list[int]]]:
    for at in range(0, len(inputs), MOST_PROMPTS):
        yield inputs[at : at + MOST_PROMPTS]


def _shown(body: EmbeddingRequest, index: int, embedding: bytes) -> JsonObject:
    values = numbers("f", embedding)[: body.dimensions]
    if body.normalize is not False and (length := hypot(*values)) > 0.0:
        values = array("f", (value / length for value in values))
    told = b64encode(little("f", values)).decode() if body.encoding_format == "base64" else values.tolist()
    return {"object": "embedding", "index": index, "embedding": told}
