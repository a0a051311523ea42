"""Arguments of the wrong type or value for `attach` and `Engine(base=...)`: one sentence, nothing else."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from coserve import Engine, EngineConfig
from coserve.errors import ConfigError, CoserveError
from coserve.split.attach import attach
from coserve.split.privacy.modes import Noise, Shares
from coserve.split.tls import ClientTls
from models import tiny
from split_served import serving

WRONG: Final[tuple[Any, ...]] = (
    0, -1, 1.5, -0.5, 10**30, 1e308, float("nan"), float("inf"), True, b"bytes", "", " ", "noise", "shares",
    "none", "\0", "\ud800", "ключ", "a" * 100_000, "unix:", "unix:/nowhere", "unix:\ud800", "tcp:x:y",
    "tcp:1.2.3.4:99999999999", f"tcp:{'a' * 300}:1", "tcp:\ud800:1", "tls:127.0.0.1:1", [], [""], [None], {},
    {"a": 1}, set(), object(), int, len, torch.ones(2), Noise, Noise(), Shares("unix:/nowhere"),
    Shares("unix:\0"), ClientTls(), ClientTls(pin="0"), ClientTls(ca="/nowhere"),
)  # fmt: skip
ARGUMENTS: Final = (
    "model", "address", "key", "patience", "privacy", "shared_memory", "tls", "spans", "blocks", "kernels",
)  # fmt: skip
SETTINGS: Final = (
    "base", "base_patience", "base_privacy", "base_ca", "base_pin", "base_certificate", "base_key",
)  # fmt: skip


def refusal(error: CoserveError) -> str:
    """The sentence of an error, which names no class and no module of this code."""
    said = str(error)
    assert said and "\n" not in said and "Traceback" not in said and "Error" not in said, said
    return said


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_arguments_of_attach(tmp_path: Path, count: int) -> None:
    """Each wrong value for each argument, and pairs of them: it is refused, or does what it says."""
    draws, refused = random.Random(0), 0
    with serving(tiny("llama"), tmp_path) as served:
        cases: list[Mapping[str, Any]] = [{name: value} for name in ARGUMENTS for value in WRONG]
        cases += [{n: draws.choice(WRONG) for n in draws.sample(ARGUMENTS, 2)} for _ in range(600)]
        tried = draws.sample(cases, count)
        for case in tried:
            given = {"model": tiny("llama", num_hidden_layers=3), "address": served.address, **case}
            try:
                calls = attach(**{"patience": 0.0, **given})
            except CoserveError as error:
                refusal(error)
                refused += 1
            else:
                calls.close()
    assert refused > len(tried) / 2


def test_a_mode_of_privacy_by_its_name(tmp_path: Path) -> None:
    ids = torch.ones(1, 3, dtype=torch.long)
    with serving(tiny("llama"), tmp_path) as served:
        for name, mode in (
            ("noise", "NoisyCalls"),
            ("none", "ExecutorConnection"),
            (None, "ExecutorConnection"),
        ):
            calls = attach(model := tiny("llama"), served.address, privacy=name)  # type: ignore[arg-type]
            assert type(calls).__name__ == mode
            torch.testing.assert_close(model(ids).logits, tiny("llama")(ids).logits, rtol=1e-3, atol=1e-3)
        with pytest.raises(
            ConfigError, match=r"with the second executor's address, Shares\(...\) .* not 'shares'"
        ):
            attach(tiny("llama"), served.address, privacy="shares")  # type: ignore[arg-type]


def test_settings_of_an_engine() -> None:
    model = tiny("llama", num_hidden_layers=1)
    for name in SETTINGS:
        for value in (one for one in WRONG if name != "base" or not isinstance(one, str) or one):
            with pytest.raises(CoserveError) as found:
                Engine(model, EngineConfig(**{"base": "unix:/nowhere", name: value}))
            refusal(found.value)
