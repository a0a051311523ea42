"""The import of a child's module."""

import gc
import sys
from pathlib import Path

import pytest

from coserve.wire.launch import import_uncollected

MODULE = "import gc\nwas_enabled = gc.isenabled()\n"


@pytest.mark.parametrize("low_priority", [False, True])
def test_nothing_is_collected_while_a_module_is_imported(
    low_priority: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_child.py").write_text(MODULE)
    (tmp_path / "failing_child.py").write_text("raise RuntimeError('broken')")
    assert not import_uncollected("imported_child", low_priority).was_enabled
    del sys.modules["imported_child"]
    assert gc.isenabled() and frozen == [False]
    with pytest.raises(RuntimeError, match="broken"):
        import_uncollected("failing_child")
    assert gc.isenabled()
