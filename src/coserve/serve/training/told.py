"""A job's preview as the API and the command line tell it."""

from typing import Any

from coserve.wire.messages import JobPreview, TextPiece


def told_preview(preview: JobPreview, records: int | None, too_long: str) -> dict[str, Any]:
    """The fields of a validation that come from a preview. The file has so many `records`, if that is
    known, and the job treats what is `too_long` so."""
    tokens = preview.tokens
    return {
        "container": preview.container or None,
        "format": preview.format or None,
        "records": {"total": records, "read": preview.records, "all_read": preview.is_whole},
        "tokens": None
        if tokens is None
        else {
            "total": tokens.total,
            "min": tokens.least,
            **tokens.quantiles,
            "max": tokens.most,
            "histogram": [
                {"from": first, "to": last, "count": number} for first, last, number in tokens.histogram
            ],
        },
        "examples": {
            "trained": preview.examples,
            "truncated": preview.truncated,
            "skipped": 0 if too_long == "error" else preview.skipped,  # else the job is refused
            "dropped": preview.dropped,
        },
        "too_long": {
            "count": preview.over,
            "limit": preview.limit,
            "setting": too_long,
            "longest": preview.longest_place or None,
            "split_texts": preview.split,
            "pieces": preview.pieces,
        },
        "ignored": list(preview.ignored),
        "first_example": _pieces(preview.first),
        "first_rejected": _pieces(preview.rejected) or None,
        "shown": [
            {"tokens": _pieces(one.pieces), "total_tokens": one.tokens, "rejected": one.rejected}
            for one in preview.shown
        ],
        "steps": preview.steps,
        "expected_seconds": preview.seconds,
        "memory": None
        if preview.memory is None
        else {"needed": preview.memory, "available": preview.memory_room},
    }


def _pieces(pieces: tuple[TextPiece, ...]) -> list[dict[str, Any]]:
    return [{"text": one.text, "trained": one.trained} for one in pieces]
