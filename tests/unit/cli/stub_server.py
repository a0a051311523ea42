"""A server that gives prepared answers."""

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stub:
    """Answers by `METHOD path`: an object (JSON), text, bytes, or (status, object); a list is used up one
    by one, its last stays. What was asked for is kept."""

    url: str = ""
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    def body(self, request: str) -> Any:
        """The JSON that the last request of that kind carried."""
        return json.loads([body for name, _, body in self.asked if name == request][-1])

    def requests(self) -> list[str]:
        return [name for name, _, _ in self.asked]

    def answer(self, request: str) -> tuple[int, bytes]:
        found = self.answers.get(request)
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        status, found = found if isinstance(found, tuple) else (200, found)
        if found is None:
            status, found = 404, {"error": {"message": f"nothing at {request}"}}
        if isinstance(found, str):
            found = found.encode()
        return status, found if isinstance(found, bytes) else json.dumps(found).encode()
