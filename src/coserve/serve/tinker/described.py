"""Rows in the client's formats."""

from datetime import UTC, datetime
from typing import Any, Final

from coserve.serve.store.records import TinkerCheckpoint, TinkerRun, TinkerSession

_TYPES: Final = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def told_time(seconds: float) -> str:
    """A time in Unix seconds as ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def told_checkpoint(row: TinkerCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": row.checkpoint_id,
        "checkpoint_type": _TYPES[row.kind],
        "time": told_time(row.created),
        "tinker_path": row.tinker_path,
        "size_bytes": row.bytes,
        "public": row.public,
        "user_metadata": told_metadata(row.user_metadata),
        "expires_at": None if row.expires is None else told_time(row.expires),
    }


def told_run(
    row: TinkerRun, last: TinkerCheckpoint | None, last_sampler: TinkerCheckpoint | None
) -> dict[str, Any]:
    """A training run, with its newest checkpoints of both kinds."""
    return {
        "training_run_id": row.id,
        "base_model": row.base,
        "model_owner": row.tenant,
        "is_lora": True,
        "lora_rank": row.lora["rank"],
        "last_request_time": told_time(row.used),
        "last_checkpoint": None if last is None else told_checkpoint(last),
        "last_sampler_checkpoint": None if last_sampler is None else told_checkpoint(last_sampler),
        "user_metadata": told_metadata(row.user_metadata),
    }


def told_session(row: TinkerSession, checkpoints: list[TinkerCheckpoint]) -> dict[str, Any]:
    """A session in a search's results."""
    status: dict[str, Any] = {"type": "active"}
    if row.finished is not None:
        reason = {"type": row.finished["type"]}
        status = {"type": "client_finished", "reason": reason, "detail": row.finished.get("detail")}
    return {
        "session_id": row.id,
        "created_at": told_time(row.created),
        "owner": row.tenant,
        "project_id": row.project or "",
        "status": status,
        "checkpoints_count": len(checkpoints),
        "display_name": row.display_name,
        "user_metadata": told_metadata(row.user_metadata),
        "checkpoint_storage_bytes": sum(one.bytes for one in checkpoints),
    }


def told_metadata(given: dict[str, Any] | None) -> dict[str, str] | None:
    """A client's own metadata, with values as text."""
    if given is None:
        return None
    return {key: value if isinstance(value, str) else str(value) for key, value in given.items()}
