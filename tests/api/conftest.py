import asyncio
from pathlib import Path
from typing import Any

import pytest

from serving import SECONDS, Play, Story, world


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Runs a story with a server of its own. Keywords are settings; `engine` are attributes of the engine."""

    def run(story: Story, engine: dict[str, Any] | None = None, **settings: Any) -> None:
        async def whole() -> None:
            async with asyncio.timeout(SECONDS), world(tmp_path, engine or {}, settings) as it:
                await story(it)

        asyncio.run(whole())

    return run
