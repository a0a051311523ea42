"""Kernels that cannot be compiled: torch computes in their place, and the reason is told."""

from pathlib import Path

import pytest
import torch

from coserve.kernels.native import build


def test_a_compiler_that_fails_or_takes_long_is_told_of_until_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if (made := build.library(torch.float32)) is None:
        pytest.skip("there is no C compiler")
    compiler, load = tmp_path / "cc", build.library.__wrapped__
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_PATIENCE", 0.5)
    works = f"while [ $1 != -o ]; do shift; done; cp {made._name} $2"
    for body, told in (
        ("echo 'x.c:1: error: no such type' >&2; exit 3", "ended with status 3: x.c:1: error: no such type"),
        ("exec sleep 60", "took longer than 0.5 s, as on a machine that is very busy"),
        (works, ""),
    ):
        caplog.clear()
        compiler.write_text(f"#!/bin/sh\n{body}\n")
        compiler.chmod(0o755)
        if not told:
            monkeypatch.setattr(build, "_PATIENCE", 60.0)
        assert (load(torch.float32) is None) is bool(told)
        problem = build.find_problem()
        assert problem == (f"the last attempt for float32 failed: {compiler} {told}" if told else "")
        assert told in caplog.text and len(caplog.records) == bool(told)
    monkeypatch.setenv("COSERVE_NATIVE", "0")
    assert load(torch.float32) is None and "COSERVE_NATIVE" in build.find_problem()
