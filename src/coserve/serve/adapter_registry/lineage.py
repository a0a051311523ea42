"""The lineage of an adapter: the job that trained it, that job's data, and the adapter before."""

from collections.abc import AsyncIterator
from typing import Any, Final

from coserve.serve.adapter_registry.catalog import Model
from coserve.serve.errors import ApiError
from coserve.serve.state import State
from coserve.serve.store.records import JobRecord, Tenant

MOST_ADAPTERS: Final = 32  # one behind the other


async def lineage_of(state: State, tenant: Tenant, model: Model) -> tuple[list[dict[str, Any]], bool]:
    """The ancestors of a model, itself first and its base last, and whether some were left out. Of another
    tenant's work only the name is told."""
    found: list[dict[str, Any]] = []
    current: Model | None = model
    for _ in range(MOST_ADAPTERS):
        assert current is not None
        adapter = current.adapter
        if adapter is None:
            break
        found.append({
            "kind": "adapter", "id": adapter.id, "name": adapter.name, "exists": True,
            "created_at": adapter.created, "bytes": adapter.bytes, "steps": adapter.step,
        })  # fmt: skip
        job = None if adapter.job is None else await state.store.jobs.get(tenant.id, adapter.job)
        if job is None:
            current = None
            break
        found += [one async for one in _of_job(state, tenant, job)]
        try:
            current = await state.catalog.find(tenant, job.model)
        except ApiError:  # it was deleted meanwhile
            found.append({"kind": "adapter", "id": job.start_from or "", "name": job.model, "exists": False})
            current = None
            break
    else:
        return found, current is not None and current.adapter is not None
    found.append({"kind": "base", "id": model.base, "name": model.base, "exists": True})
    return found, False


async def _of_job(state: State, tenant: Tenant, job: JobRecord) -> AsyncIterator[dict[str, Any]]:
    """A job and its files."""
    method = job.options.get("objective", {}).get("type", "supervised")
    yield {
        "kind": "job", "id": job.id, "name": job.id, "exists": True, "created_at": job.created,
        "method": method, "steps": job.step, "status": job.status,
    }  # fmt: skip
    for kind, id in (("training_file", job.training_file), ("validation_file", job.validation_file)):
        if id is None:
            continue
        file = await state.store.files.get(tenant.id, id)
        if file is None:
            yield {"kind": kind, "id": id, "name": id, "exists": False}
        else:
            yield {
                "kind": kind, "id": id, "name": file.filename, "exists": True, "created_at": file.created,
                "bytes": file.bytes, "examples": file.examples,
            }  # fmt: skip
