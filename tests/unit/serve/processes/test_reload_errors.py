"""A reload whose settings cannot even be looked for."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from coserve.serve.processes.supervisor import Supervisor
from coserve.serve.settings import ServerSettings


@pytest.mark.parametrize("error", [OSError("the folder is gone"), ValueError("not a path")])
def test_an_error_of_the_system_is_told_and_changes_nothing(error: Exception) -> None:
    said = list[str]()

    class Out:
        def say(self, text: str, style: str = "") -> None:
            said.append(text)

    def read() -> ServerSettings:
        raise error

    settings = ServerSettings("m", Path("s"))
    made: Any = Supervisor(settings, *cast(Any, (None, None, Out())), read_settings=read)
    asyncio.run(made._reload())
    assert said == [f"SIGHUP: nothing is reloaded: {error}"] and made._settings is settings
