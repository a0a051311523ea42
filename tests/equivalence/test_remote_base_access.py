"""An engine whose executors are known by TLS, and see noise or shares instead of rows: the same answers and
training."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from certificates import Authority
from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.cli.app import app
from coserve.errors import AdapterMismatch, ConfigError, WeightsUnreadable
from coserve.split.address import Address
from coserve.split.credentials import EXECUTOR_KEY
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import LinearCall
from coserve.split.service import SplitService
from coserve.split.tls import TlsFiles
from coserve.train.example import Example
from mixed import SAMPLING
from models import save, tiny
from split_served import differences, serving

TOLERANCE = {
    "none": 1e-5,
    "shares": 1e-5,
    "noise": 1e-3,
}  # of float32; noise is 8 times as large as rows of width 64
CONFIG = EngineConfig(calibrate=False, cache_tokens=1024, page_size=4)
# One step of AdamW that moves each number by its gradient, but for a thousandth of its square.
GRADIENTS = TrainingConfig(
    learning_rate=1e3, epsilon=1e3, batch_size=1, max_steps=1, warmup_ratio=0.0, rows=48, weight_decay=0.0
)
METHOD = LoRAConfig(rank=4, targets=("q_proj", "v_proj", "up_proj", "down_proj"))
EXAMPLE = Example(tuple(range(1, 13)), tuple(range(2, 14)))


def trained(config: EngineConfig) -> dict[str, Tensor]:
    """An adapter's weights after a step, and log-probabilities of an answer with it."""
    engine = Engine(tiny("llama"), config)
    engine.finetune([EXAMPLE], "mine", METHOD, GRADIENTS).result()
    answer = engine.generate([1, 5, 9], "mine", SAMPLING).result()
    chosen = torch.tensor([x.chosen for x in answer.logprobs])
    return {
        **engine.adapters.weights("mine").parameters(),
        "answer": chosen,
        "tokens": torch.tensor(answer.tokens),
    }


@pytest.fixture(scope="module")
def local() -> dict[str, Tensor]:
    return trained(CONFIG)


@contextmanager
def encrypted(files: TlsFiles, key: str) -> Iterator[str]:
    executor = BaseExecutor(BaseLinears(tiny("llama")))
    service = SplitService(executor, Address.parse("tls:127.0.0.1:0"), key, tls=files.context())
    try:
        yield str(service.address)
    finally:
        service.close()
        executor.close()


def test_over_tls_with_keys_and_certificates(
    local: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two executors of the same linears, each with a key and a certificate of its own; of two, the first is
    asked."""
    ours = Authority(tmp_path / "ours")
    one, other, client = ours.sign("one"), ours.sign("other"), ours.sign("client")
    files = [TlsFiles(own.certificate, own.key, ours.certificate) for own in (one, other)]
    own = {"base_certificate": str(client.certificate), "base_key": str(client.key)}
    monkeypatch.setenv(EXECUTOR_KEY, "secret,second")
    with encrypted(files[0], "secret") as first, encrypted(files[1], "second") as second:
        good = replace(CONFIG, base=f"{first},{second}", **own)  # type: ignore[arg-type]
        pins = ",".join(file.fingerprint() for file in files)
        for known in ({"base_ca": str(ours.certificate)}, {"base_pin": pins}):
            found = trained(replace(good, **known))  # type: ignore[arg-type]
            assert max(differences(found, local).values()) <= TOLERANCE["none"]
        for wrong, reason in (
            ({"base_pin": files[0].fingerprint()}, "executor at 127.0.0.1 is not the pinned one"),
            (
                {"base_pin": ",".join(reversed(pins.split(",")))},
                "executor at 127.0.0.1 is not the pinned one",
            ),
            ({"base_pin": f"{pins},{pins}"}, "engine.base_pin has 4 values for 2 executors"),
            ({}, "executor at 127.0.0.1 is not accepted"),
        ):
            with pytest.raises(ConfigError, match=reason):
                Engine(tiny("llama"), replace(good, **wrong))  # type: ignore[arg-type]
        monkeypatch.setenv(EXECUTOR_KEY, "second,secret")
        with pytest.raises(ConfigError, match="does not accept this key"):
            Engine(tiny("llama"), replace(good, base_ca=str(ours.certificate)))
        refused = finetune(tmp_path, f"--base={first}", f"--base-pin={files[1].fingerprint()}")
        assert str(refused) == "the certificate of the executor at 127.0.0.1 is not the pinned one"
        assert str(finetune(tmp_path, "--base-privacy=noise")).startswith("to train without a server --base")


def finetune(folder: Path, *flags: str) -> BaseException | None:
    """The error of a command that is refused."""
    data, model = folder / "t.jsonl", save(tiny("llama"), folder / "model")
    data.write_text(json.dumps({"prompt": "1?", "completion": " 1"}) + "\n")
    done = CliRunner().invoke(
        app, ["finetune", str(data), "--model", str(model), "--output", str(folder / "mine"), *flags]
    )
    assert done.exit_code
    return done.exception


@pytest.mark.parametrize("privacy", ["noise", "shares"])
def test_over_a_mode_of_privacy(local: dict[str, Tensor], tmp_path: Path, privacy: str) -> None:
    """No executor gets a row that an engine without privacy sends: one that is sent plain is noted."""
    with ExitStack() as stack:
        parties = []
        for number in range(2):
            (folder := tmp_path / str(number)).mkdir()
            parties.append(stack.enter_context(serving(tiny("llama"), folder)))
            parties[-1].plain = []
        base = ",".join(party.address for party in parties[: 2 if privacy == "shares" else 1])
        config = replace(CONFIG, base=base, base_privacy=privacy)
        found = trained(config)
        apart = differences(found, local)
        assert max(apart.values()) <= TOLERANCE[privacy], apart
        assert any(
            float(x.abs().max()) > 100 * TOLERANCE["none"] for key, x in local.items() if "lora_B" in key
        )
        seen = [call for call in parties[0].types if call != "field"]
        if privacy == "shares":
            assert parties[1].types.count("field") == parties[0].types.count("field") > 100
            # Rows of zeros, whose products are the biases, are all that was not shared.
            assert all(party.plain and not any(rows.any() for rows in party.plain) for party in parties)
        else:
            assert "field" not in parties[0].types and len(seen) > 50


def test_a_lie_stops_work_with_the_liars_address(tmp_path: Path) -> None:
    """As an executor that is away does; nothing is answered with it, and work goes on once that is over."""
    with ExitStack() as stack:
        parties = []
        for number in range(2):
            (folder := tmp_path / str(number)).mkdir()
            parties.append(stack.enter_context(serving(tiny("llama"), folder)))
        config = replace(CONFIG, base=",".join(p.address for p in parties), base_privacy="shares")
        engine = Engine(tiny("llama"), config)
        wanted = engine.generate([1, 5, 9], sampling=SAMPLING).result()
        compute = parties[1].linears.compute

        def lie(call: LinearCall, tensors: list[Tensor]) -> list[Tensor]:
            return [answer + 1 for answer in compute(call, tensors)]

        parties[1].linears.compute = lie  # type: ignore[method-assign,assignment]
        request = engine.generate([1, 5, 9], sampling=SAMPLING)
        with pytest.raises(WeightsUnreadable, match=f"at {parties[1].address} has answered wrongly"):
            request.result()
        parties[1].linears.compute = compute  # type: ignore[method-assign]
        assert request.result().tokens == wanted.tokens


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for wrong, reason in (
        ({"base_privacy": "secret"}, "must be none, noise or shares"),
        ({"base_key": "key.pem"}, "engine.base_key is the key of engine.base_certificate"),
    ):
        with pytest.raises(ConfigError, match=reason):
            EngineConfig(base="unix:/nowhere", **wrong)
    for name in ("base_ca", "base_pin", "base_certificate", "base_key", "base_privacy"):
        with pytest.raises(ConfigError, match=f"engine.{name} is for the executors of engine.base"):
            EngineConfig(**{name: "noise"})  # type: ignore[arg-type]
    (tmp_path / "other").mkdir()
    other = tiny("llama")
    other.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    with serving(tiny("llama"), tmp_path) as served, serving(other, tmp_path / "other") as second:
        for base, options, error, reason in (
            (served.address, {"base_pin": "0" * 64}, ConfigError, "no such address"),
            (served.address, {"base_privacy": "shares"}, ConfigError, "executors of two parties"),
            (
                f"{served.address},{served.address}",
                {"base_privacy": "shares"},
                ConfigError,
                "see both shares",
            ),
            (
                f"{served.address},{second.address}",
                {"base_privacy": "shares"},
                AdapterMismatch,
                r"1 linear with other weights, of 22 \(model.layers.0.mlp.up_proj\)",
            ),
        ):
            with pytest.raises(error, match=reason):
                Engine(tiny("llama"), replace(CONFIG, base=base, **options))  # type: ignore[arg-type]
    with (
        serving(tiny("llama", torch.bfloat16), tmp_path) as served,
        pytest.raises(ConfigError, match="noise needs a base in float32"),
    ):
        Engine(tiny("llama", torch.bfloat16), replace(CONFIG, base=served.address, base_privacy="noise"))
