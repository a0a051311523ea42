"""`/v1/embeddings`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from coserve.serve.answering.cost import LONGEST_NAME
from coserve.serve.schema.common import RequestBody, Words
from coserve.serve.schema.completions import TokenPrompt

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
