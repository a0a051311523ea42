"""Files of weights while others write to them, and the scratch file."""

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coserve.errors import ConfigError, ModelError, WeightsUnreadable
from coserve.streamed import files, scratch
from coserve.streamed.files import PAGE, Mode, WeightFile, ranges, read_header, tensor_in
from coserve.streamed.scratch import ScratchFile, is_in_memory, memory_of
from coserve.streamed.stored import ReadBuffer

SIZE = 5 * PAGE + 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "weights"
    found.write_bytes(random.Random(0).randbytes(SIZE))
    return found


def read(file: WeightFile, start: int = 0, nbytes: int = 6 * PAGE) -> bytes:
    buffer = ReadBuffer(nbytes)
    file.read(start, buffer.bytes[:nbytes])
    return bytes(buffer.bytes)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("piece", [PAGE, 2 * PAGE, files.PIECE])
def test_bytes_are_those_of_the_file(
    path: Path, mode: Mode, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE", piece)
    file = WeightFile(path)
    file.mode = mode
    wanted = path.read_bytes()
    try:
        assert read(file)[:SIZE] == wanted
    except WeightsUnreadable:
        assert mode is Mode.DIRECT
        pytest.skip("no direct reads in this folder")
    assert read(file, 2 * PAGE, PAGE) == wanted[2 * PAGE : 3 * PAGE]


def test_what_was_read_is_not_kept_in_the_page_cache(tmp_path: Path) -> None:
    """So that later reads are the disk's, and other pages are not displaced."""
    path = tmp_path / "large"
    path.write_bytes(bytes(8 << 20))
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
    for mode in Mode:
        file = WeightFile(path)
        file.mode = mode
        for turn in range(3):
            before = disk_bytes()
            try:
                read(file, 0, 8 << 20)
            except WeightsUnreadable:
                continue
            if disk_bytes() is None or is_in_memory(str(tmp_path)):
                pytest.skip("nobody says what is read from the disk")
            if turn:  # what was written is in the cache
                assert disk_bytes() - before >= 8 << 20, mode  # type: ignore[operator]


def disk_bytes() -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_a_faster_mode_is_chosen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = WeightFile(path)
    assert file.choose_mode(0, SIZE) > 0 and read(file)[:SIZE] == path.read_bytes()
    own = WeightFile._read

    def refusing(self: WeightFile, start: int, into: memoryview, mode: Mode) -> None:
        if mode is Mode.DIRECT:
            raise OSError(22, "not here")
        own(self, start, into, mode)

    monkeypatch.setattr(WeightFile, "_read", refusing)
    assert file.choose_mode(0, SIZE) > 0 and file.mode is Mode.BUFFERED


def test_a_file_that_is_deleted_or_replaced_is_read_on(path: Path) -> None:
    file, wanted = WeightFile(path), path.read_bytes()
    assert read(file)[:SIZE] == wanted
    other = path.with_name("other")
    other.write_bytes(bytes(SIZE))
    other.rename(path)
    assert read(file)[:SIZE] == wanted
    path.unlink()
    assert read(file)[:SIZE] == wanted


@pytest.mark.parametrize("cut", [0, 3 * PAGE, SIZE - 1])
def test_a_short_file_is_refused_until_it_is_whole_again(path: Path, cut: int) -> None:
    file, wanted = WeightFile(path), path.read_bytes()
    assert read(file)[:SIZE] == wanted
    os.truncate(path, cut)
    for _ in range(2):
        with pytest.raises(
            WeightsUnreadable, match=f"weights is too short: it has {cut:,} bytes of {SIZE:,}"
        ):
            read(file)
    path.unlink()
    with pytest.raises(WeightsUnreadable, match=r"cannot be read from .*weights: No such file"):
        read(file)
    path.write_bytes(wanted)
    assert read(file)[:SIZE] == wanted


@pytest.mark.parametrize("place", [0, SIZE - 1])
def test_a_changed_file_is_refused_until_it_is_as_before(path: Path, place: int) -> None:
    file, wanted = WeightFile(path), path.read_bytes()
    read(file)
    changed = bytearray(wanted)
    changed[place] ^= 1
    path.write_bytes(changed)
    with pytest.raises(WeightsUnreadable, match="has changed since it was loaded"):
        read(file)
    path.write_bytes(wanted)
    assert read(file)[:SIZE] == wanted


def test_an_error_of_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = WeightFile(path)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        with pytest.raises(WeightsUnreadable, match=r"cannot be read from .*weights: Input/output error"):
            read(file)
    assert read(file)[:SIZE] == path.read_bytes()


def test_files_are_closed(path: Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    file = WeightFile(path)
    os.truncate(path, 1)
    for _ in range(20):
        with pytest.raises(WeightsUnreadable):
            read(file)
    assert opened() <= before + 2
    del file
    assert opened() == before


def test_headers_and_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.arange(4),
        "d": torch.tensor([True, False]),
        "e": torch.randn(2, 2, 2).double(),
    }
    save_file(tensors, path)
    stored = read_header(path)
    memory = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = tensor_in(memory, stored[name].start, stored[name])
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    ((start, end),) = ranges([*stored.values()])
    assert start == 0 and end == -(-len(memory) // PAGE) * PAGE


@pytest.mark.parametrize("change", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]"])
def test_damaged_headers(tmp_path: Path, change: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(change)
    with pytest.raises(ModelError, match="is no file of safetensors"):
        read_header(path)
    save_file({"a": torch.ones(100)}, path)
    os.truncate(path, 300)
    with pytest.raises(ModelError, match="too short"):
        read_header(path)


def test_scratch_files(tmp_path: Path) -> None:
    own = ScratchFile(str(tmp_path))
    one, two = torch.randn(100), torch.arange(9)
    starts = [own.write([(one, 0), (two, 448)], PAGE), own.write([(two, 64)], 2 * PAGE)]
    assert starts == [0, PAGE] and not [*tmp_path.iterdir()]
    found = read(own.file, 0, 3 * PAGE)
    assert found[:400] == bytes(memory_of(one)) and found[448:520] == bytes(memory_of(two))
    assert found[PAGE + 64 : PAGE + 136] == bytes(memory_of(two))


def test_a_full_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ScratchFile(str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"engine.scratch: .* cannot hold weights .* No space left"):
        own.write([(torch.ones(3), 0)], PAGE)
    with pytest.raises(ConfigError, match=r"engine.scratch: /nowhere"):
        ScratchFile("/nowhere")
    monkeypatch.setattr(scratch, "is_in_memory", lambda folder: True)
    with pytest.raises(ConfigError, match="is in memory, not on a disk"):
        ScratchFile(str(tmp_path))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory")
def test_folders_in_memory_are_known(tmp_path: Path) -> None:
    kinds = Path("/proc/self/mountinfo").read_text()
    assert is_in_memory("/dev/shm") == ("tmpfs" in next(k for k in kinds.splitlines() if " /dev/shm " in k))
    assert not is_in_memory("/proc")
