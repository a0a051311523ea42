"""`/v1/models`, and vLLM's endpoints for adapters."""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, StringConstraints

from coserve.serve.answering.cost import LONGEST_NAME
from coserve.serve.schema.common import RequestBody

CODEX_INSTRUCTIONS: Final = (
    "You are a coding agent in the user's terminal. Read files before you change them, use the tools that "
    "you are given, and say in the end what you did."
)


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


class CodexTruncation(BaseModel):
    """The part of a call's output that Codex keeps."""

    mode: Literal["bytes", "tokens"] = "bytes"
    limit: int = 10_000


class CodexModel(BaseModel):
    """A model in the terms of Codex (`codex_protocol::openai_models::ModelInfo`), which lists
    it in its picker. A field without a value says that the model has no such thing."""

    slug: str
    display_name: str
    description: str | None = None
    default_reasoning_level: str | None = None
    supported_reasoning_levels: list[str] = []
    shell_type: Literal["shell_command"] = "shell_command"
    visibility: Literal["list"] = "list"
    supported_in_api: bool = True
    priority: int
    upgrade: None = None
    base_instructions: str = CODEX_INSTRUCTIONS
    supports_reasoning_summaries: bool = False
    support_verbosity: bool = False
    default_verbosity: None = None
    apply_patch_tool_type: None = None
    truncation_policy: CodexTruncation = CodexTruncation()
    supports_parallel_tool_calls: bool = True
    context_window: int | None
    experimental_supported_tools: list[str] = []
    input_modalities: list[Literal["text"]] = ["text"]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: list[CodexModel] = Field(description="The same for Codex.")


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
