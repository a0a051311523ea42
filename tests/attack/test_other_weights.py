"""Executors restarted with other weights, and streamed files that change: neither answers silently."""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.sequence import Direction
from coserve.errors import AdapterMismatch, WeightsUnreadable
from coserve.model import contents
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.split.attach import attach
from coserve.split.executor import BaseLinears
from coserve.split.load import load_remote
from coserve.streamed.files import read_header
from coserve.streamed.load import load_streamed
from models import save, tiny
from split_served import serving

SHORT, LONG = 3, 20 * int(os.environ.get("COSERVE_ATTACK", "1"))
SAMPLE: Final = 64  # values of a tensor that stay as they are
IDS: Final = torch.ones(1, 3, dtype=torch.long)
Change = Callable[[nn.Module, random.Random], None]


@torch.no_grad()
def shuffled(model: nn.Module, draws: random.Random) -> None:
    """All values but the first of each tensor are in other places."""
    for parameter in model.parameters():
        rest = parameter.view(-1)[SAMPLE:]
        rest.copy_(
            rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(draws.getrandbits(32)))]
        )


@torch.no_grad()
def one_value(model: nn.Module, draws: random.Random) -> None:
    """One value of one linear inside of a layer is another."""
    weights = [p for name, p in model.named_parameters() if "proj" in name]
    values = draws.choice(weights).view(-1)
    values[draws.randrange(SAMPLE, len(values))] += 2.0 ** -draws.randint(1, 10)


@torch.no_grad()
def norms(model: nn.Module, draws: random.Random) -> None:
    """One value of one norm inside of a layer is another."""
    weights = [p for name, p in model.named_parameters() if "layernorm" in name]
    draws.choice(weights)[draws.randrange(64)] += 2.0 ** -draws.randint(1, 10)


def seeds() -> Iterator[Any]:
    for seed in range(max(SHORT, LONG)):
        yield pytest.param(seed, marks=() if seed < SHORT else pytest.mark.slow)


@pytest.mark.parametrize("seed", seeds())
def test_an_executor_restarted_with_other_weights_is_refused(seed: int, tmp_path: Path) -> None:
    """By a script, by an engine, and by those that were attached before; the message names what differs."""
    draws = random.Random(seed)
    change = (shuffled, one_value, norms)[seed % 3]
    changed = tiny("llama")
    change(changed, draws)
    what = "norms" if change is norms else "linears? with other weights, of 2[12]"
    client, other = tiny("llama"), tiny("llama")
    with serving(tiny("llama"), tmp_path) as served:
        attach(client, served.address)
        wanted = client(IDS).logits
        engine = Engine(tiny("llama"), EngineConfig(base=served.address, calibrate=False, cache_tokens=64))
        right = served.linears
        served.stop()
        served.linears = type(right)(changed)
        served.start()
        with pytest.raises(AdapterMismatch, match=f"another base is at {served.address} now.*{what}"):
            client(IDS)
        answer = engine.generate([1, 5, 9], sampling=SamplingParams(max_tokens=2))
        with pytest.raises(WeightsUnreadable, match=f"another base is at {served.address} now.*{what}"):
            answer.result()
        if change is norms:  # a script has its own; an engine compares them with its own
            attach(other, served.address)
            torch.testing.assert_close(other(IDS).logits, wanted, rtol=1e-5, atol=1e-5)
        else:
            with pytest.raises(AdapterMismatch, match=f"executor at {served.address}.*{what}"):
                attach(other, served.address)
            with pytest.raises(AdapterMismatch, match=f"executor at {served.address}.*{what}"):
                Engine(tiny("llama"), EngineConfig(base=served.address))
        served.stop()
        served.linears = right
        served.start()
        assert len(answer.result().tokens) == 2


@pytest.mark.parametrize("seed", seeds())
def test_four_bytes_of_a_streamed_file_are_noticed_at_the_next_visit(seed: int, tmp_path: Path) -> None:
    """The file shows the time of its last change that it had before."""
    draws = random.Random(seed)
    folder = save(tiny("llama", num_hidden_layers=6), tmp_path)
    file = folder / "model.safetensors"
    base, streaming = load_streamed(folder, load_base(folder).nbytes * 7 // 10)
    blocks = [number for number in range(base.depth) if number not in streaming.plan.resident]
    changed = draws.choice(blocks)
    names = read_header(file)
    tensor = draws.choice([own for name, own in names.items() if f"layers.{changed}." in name])
    content, times = file.read_bytes(), file.stat()
    place = tensor.start + draws.randrange(tensor.nbytes - 4)
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(bytes(byte ^ draws.randint(1, 255) for byte in content[place : place + 4]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    fails = passed(base, blocks) | passed(base, blocks)  # buffers may still have it in the first pass
    assert changed in fails and all("has changed since it was loaded, in the b" in x for x in fails.values())
    file.write_bytes(content)
    assert not passed(base, blocks)


def passed(base: Base, blocks: Sequence[int]) -> dict[int, str]:
    """Visits blocks in order; those that cannot be read, with the reason."""
    found = {}
    for number in blocks:
        try:
            with base.chain.blocks[number].visit(Direction.TRAIN_FORWARD):
                pass
        except WeightsUnreadable as error:
            found[number] = str(error)
    return found


def test_hashes_are_remembered_for_files_that_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is changed in place, replaced, or was written a moment ago is hashed; so is what was kept
    in a damaged file."""
    monkeypatch.setattr(contents, "_WORTH", 1)
    monkeypatch.setattr(contents.platformdirs, "user_cache_path", lambda _: tmp_path / "cache")
    hashed = list[str]()
    hash_own = contents.content_of
    monkeypatch.setattr(contents, "content_of", lambda tensor: hashed.append("") or hash_own(tensor))
    folder = save(tiny("llama"), tmp_path / "model")
    file = folder / "model.safetensors"

    def loaded() -> tuple[str, bool]:
        """The base's fingerprint, and whether any tensor was hashed."""
        hashed.clear()
        base = load_base(folder)
        return base.fingerprint, bool(hashed)

    first, was_hashed = loaded()
    assert was_hashed and loaded() == (first, True)  # the files are too new
    monkeypatch.setattr(contents, "_SETTLED", 0.0)
    assert loaded() == (first, True) and loaded() == (first, False)
    with serving(tiny("llama"), tmp_path) as served:
        assert load_remote(folder, served.address).fingerprint == first
    hashed.clear()
    streamed, _ = load_streamed(folder, load_base(folder).nbytes * 9 // 10)
    assert streamed.fingerprint == first and not hashed
    assert BaseLinears.load(folder).hello == BaseLinears(tiny("llama")).hello
    hashed.clear()
    (kept,) = (tmp_path / "cache" / "contents").iterdir()
    kept.write_text(kept.read_text()[:-20])
    assert loaded() == (first, True) and loaded() == (first, False)
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(times.st_size - 4)
        opened.write(b"\x01\x02\x03\x3d")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    other, was_hashed = loaded()
    assert was_hashed and other != first and loaded() == (other, False)
