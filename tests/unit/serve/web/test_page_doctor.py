"""The checks of the server's machine, as the page gets them."""

import asyncio
import json
from pathlib import Path

import pytest

from coserve.serve.errors import ApiError
from coserve.serve.settings import ServerSettings
from coserve.serve.web import doctor
from coserve.serve.web.doctor import Doctor


def says(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, after: str = "") -> Path:
    """Has the command print this text; the file that it adds a line to each time."""
    runs = folder / "runs"
    code = f"open({str(runs)!r}, 'a').write('ran\\n'); {after or 'pass'}; print({text!r})"
    monkeypatch.setattr(doctor, "COMMAND", ("-c", code))
    return runs


def test_findings_are_made_once_and_name_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    told = [
        {"what": "state folder", "level": "good", "found": f"{state}, 9 GB free", "advice": ""},
        {"what": "scratch folder", "level": "good", "found": f"{state}/scratch, read", "advice": "x"},
        {"what": "server", "level": "note", "found": "process 77 serves from there", "advice": ""},
        {"what": "port 8000", "level": "note", "found": "taken", "advice": ""},
    ]
    runs = says(tmp_path, monkeypatch, json.dumps(told))

    async def story() -> None:
        asked = Doctor(ServerSettings(model="m", state=state))
        several = await asyncio.gather(*(asked.findings() for _ in range(3)))
        assert several[0] is several[1] is await asked.findings()
        assert [one.what for one in several[0].data] == ["state folder", "scratch folder"]
        assert [one.found for one in several[0].data] == [
            "the state folder, 9 GB free",
            "the state folder/scratch, read",
        ]
        assert runs.read_text() == "ran\n"
        asked._checked -= doctor.FRESH_SECONDS
        await asked.findings()
        assert runs.read_text() == "ran\nran\n"

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize(
    "text, after", [("no JSON", ""), ("[]", "import time; time.sleep(60)"), ('[{"a": 1}]', "")]
)
def test_checks_that_fail_or_hang_are_an_error_and_made_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, after: str
) -> None:
    monkeypatch.setattr(doctor, "_SECONDS", 0.3 if after else 60.0)
    runs = says(tmp_path, monkeypatch, text, after)

    async def story() -> None:
        asked = Doctor(ServerSettings(model="m", state=tmp_path))
        for number in range(4):
            with pytest.raises(ApiError) as refused:
                await asked.findings()
            assert refused.value.status == 503
            assert runs.read_text().count("ran") == 1 + number // 2
            if number == 1:
                asked._checked -= doctor.FAILED_SECONDS

    asyncio.run(asyncio.wait_for(story(), 60))
