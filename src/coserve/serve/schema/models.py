"""`/v1/models`, and vLLM's endpoints for adapters."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints

from coserve.serve.answering.cost import LONGEST_NAME
from coserve.serve.schema.common import RequestBody


class ModelCard(BaseModel):
    """A model that requests can name."""

    id: str = Field(examples=["coserve-tiny"])
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str = Field(description="The base model.")
    parent: str | None = Field(description="The model that an adapter was trained from; null for the base.")
    max_model_len: int | None = Field(None, description="Most tokens of prompt and answer together.")
    pinned: bool = Field(False, description="Whether an adapter stays in memory when others need room.")
    warning: str | None = Field(
        default=None,
        description="Of an adapter that was brought in: that it names another base, though it fits.",
    )
    location: Literal["disk", "memory"] | None = Field(
        None, description="Where an adapter's weights were a moment ago; null for the base."
    )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ModelDeleted(BaseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: bool = True


# Printable, and no space at either end.
AdapterName = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=LONGEST_NAME,
        pattern=r"^[^\x00-\x20\x7f]([^\x00-\x1f\x7f]*[^\x00-\x20\x7f])?$",
    ),
]


class LoadAdapterRequest(RequestBody):
    """An adapter in PEFT's format, in a folder below the server's adapter root."""

    lora_name: AdapterName
    lora_path: str = Field(min_length=1, max_length=4096, description="Absolute, or relative to the root.")
    load_inplace: bool | None = Field(
        None,
        description="Replaces your adapter of that name, if there is one: each answer is of the old one or "
        "of the new one as a whole.",
    )


class UnloadAdapterRequest(RequestBody):
    lora_name: str = Field(min_length=1, max_length=LONGEST_NAME)
    lora_int_id: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="Accepted, not used: names are enough."
    )
