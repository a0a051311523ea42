"""`/v1/files`."""

from typing import Any, Final, Literal

from pydantic import BaseModel, Field

from coserve.serve.schema.common import ListPage

LEAST_LIFE: Final = 3600  # seconds after which a file may expire
LONGEST_LIFE: Final = 2_592_000
Purpose = Literal["fine-tune", "evals", "fine-tune-results", "batch", "batch_output"]


class FileObject(BaseModel):
    """A file of the caller's."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = Field(
        default="processed", description="Files are checked while they come in."
    )
    status_details: str | None = Field(
        default=None, description="The keys of its records that are not read, if there are any."
    )
    expires_at: int | None = Field(
        default=None, description="When the file is deleted, unless an unfinished job reads it then."
    )


class FileList(ListPage):
    data: list[FileObject]


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


def form_of(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    """A form in the OpenAPI document, which FastAPI would describe if it parsed it."""
    schema = {"type": "object", "required": required, "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


BINARY: Final = {"type": "string", "format": "binary"}
_SECONDS: Final = {"type": "integer", "minimum": LEAST_LIFE, "maximum": LONGEST_LIFE}
_LIFE: Final = {"anchor": {"type": "string", "enum": ["created_at"]}, "seconds": _SECONDS}
UPLOAD: Final = form_of(
    ["file", "purpose"],
    {
        "file": BINARY,
        "purpose": {"type": "string", "enum": ["fine-tune", "batch", "evals"]},
        "expires_after": {"type": "object", "required": ["anchor", "seconds"], "properties": _LIFE},
    },
)
