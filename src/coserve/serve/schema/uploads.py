"""`/v1/uploads`."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

from coserve.serve.schema.batches import OutputExpiresAfter
from coserve.serve.schema.common import RequestBody
from coserve.serve.schema.files import FileObject

MOST_UPLOAD_PARTS: Final = 1024
LONGEST_FILENAME: Final = 255
_MOST_BYTES: Final = 1 << 40  # the server's `max_file_bytes` bounds them further
PartId = Annotated[str, Field(pattern=r"^part_[A-Za-z0-9]{24}$")]


class UploadRequest(RequestBody):
    """A file that comes in parts."""

    filename: str = Field(min_length=1, max_length=LONGEST_FILENAME)
    purpose: Literal["fine-tune", "batch"]
    bytes: int = Field(ge=1, le=_MOST_BYTES, description="Of all parts together.")
    mime_type: str = Field(max_length=LONGEST_FILENAME, description="Accepted, not used.")
    expires_after: OutputExpiresAfter | None = Field(None, description="As of a file.")


class CompleteUploadRequest(RequestBody):
    part_ids: Annotated[list[PartId], Field(fail_fast=True, min_length=1, max_length=MOST_UPLOAD_PARTS)]
    md5: str | None = Field(None, pattern=r"^[0-9a-fA-F]{32}$", description="Of the whole file.")


class UploadObject(BaseModel):
    """An upload of the caller's."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileObject | None = None


class UploadPartObject(BaseModel):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


# The form in the OpenAPI document, which FastAPI would describe if it parsed it.
PART: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["data"],
                    "properties": {"data": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}
