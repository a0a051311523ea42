"""`/v1/adapters`: adapters with what is kept of them, and where they come from."""

from typing import Literal

from pydantic import BaseModel, Field

from coserve.serve.schema.models import ModelCard


class AdapterCard(ModelCard):
    """An adapter or a checkpoint."""

    bytes: int = Field(description="Of its files on the disk; 0 of an adapter that the operator shares.")
    requests: int | None = Field(
        description="Answers and sessions that use it now; null of one that is shared with other tenants."
    )
    jobs: list[str] = Field(description="The caller's unfinished jobs that began with it or learn from it.")
    job: str | None = Field(description="The job that trained it; null of an imported one.")
    step: int | None = Field(description="Optimizer steps of a checkpoint; null of others.")


class AdapterList(BaseModel):
    object: Literal["list"] = "list"
    data: list[AdapterCard]
    has_more: bool


class Ancestor(BaseModel):
    """One thing that an adapter comes from. A deleted one has only its name."""

    kind: Literal["adapter", "job", "training_file", "validation_file", "base"]
    id: str
    name: str
    exists: bool
    created_at: int | None = None
    bytes: int | None = None
    examples: int | None = Field(default=None, description="Of a file.")
    method: str | None = Field(default=None, description="Of a job: its training method.")
    steps: int | None = Field(default=None, description="Of a job: the optimizer steps that it made.")
    status: str | None = Field(default=None, description="Of a job.")


class Lineage(BaseModel):
    """From an adapter back to its base: each adapter, the job that made it, and the data of that job."""

    object: Literal["adapter.lineage"] = "adapter.lineage"
    data: list[Ancestor]
    has_more: bool = Field(description="Whether there are more than 32 adapters one behind the other.")
