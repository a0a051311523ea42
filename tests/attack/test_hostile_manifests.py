"""Zoos and folders to be added with anything in them: whatever a command does with one, nothing outside the
zoo and the target is written, read or removed, and what is refused is refused in a sentence, soon."""

import hashlib
import json
import os
import random
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.errors import CoserveError
from coserve.zoo.adding import add
from coserve.zoo.disk import write_file
from coserve.zoo.equivalence import evaluate
from coserve.zoo.store import Zoo
from zoo_made import make_fine_tune, make_lora, make_model

TRIED = int(os.environ.get("COSERVE_ATTACK_MANIFESTS", "12"))
LONGEST = 1.0  # CPU seconds of a refusal
SECRET = "the operator's own secret"
TEXT = "The council met on Tuesday to decide about the old bridge. " * 30
LIGHT: tuple[tuple[str, ...], ...] = (
    ("list",), ("show",), ("verify",), ("views",), ("export", "base", "OUT"), ("export", "tuned", "OUT"),
    ("export", "lora", "OUT"), ("remove", "lora"), ("gc",),
)  # fmt: skip
TRAINING = ("--text", "TEXT", "--max-steps", "1", "--window", "16", "--json")
HEAVY: tuple[tuple[str, ...], ...] = (
    ("evaluate", "tuned"), ("profile", "base", "--batch", "1", "--tokens", "2"),
    ("approximate", "tuned", "--text", "TEXT", "--least", "0.01", "--threshold", "0.01", "--name", "chains"),
    ("stitch", "base", "deep", "--name", "again", *TRAINING),
    ("prune", "base", "L1", "--name", "less", *TRAINING),
    ("depths", "tuned", "--text", "TEXT", "--window", "16"),
    ("finetune", "base", "DATA", "--name", "mine", "--max-steps", "1"), ("add", "BASE", "--name", "more"),
    ("add", "LORA", "--name", "more", "--parent", "base"),
)  # fmt: skip
MADE = ("again", "chains", "less", "more", "mine")
HUGE = (-1, 0, 2**31, 2**63, 2**64, 10**400, -(2**70), 1e308)
FILE_NAMES = (
    "../../../X", "..", ".", "", "/tmp/coserve-hostile-X", "a/b", "a\\b", "C:X", "x\x00y", "x\ny", "\x1b[2J",
    " ",
    "CONFIG.JSON", "Model.SafeTensors", "config.json ", "x" * 300, "é" * 150, ".hidden",
    ".config.json.partial",
    "../zoo/zoo.json", "../../decoy/secret.txt", "~/x", "a\u2044b", "\ud7ff", "model.safetensors/../X",
)  # fmt: skip
KEYS = (
    "", "0" * 63, "0" * 65, "g" * 64, "A" * 64, "../" * 20 + "etcx", "../../decoy/secret.txt", "0" * 64,
    "0" * 64 + "\n",
    "/" * 64, None, 7,
)  # fmt: skip
NAMES = ("", "..", "../x", "base/../x", "x" * 200, "lora", "tuned", "base", "a b", "\x00", 5, None)
Content = dict[str, Any]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    base = make_model(folder / "base")
    make_fine_tune(folder / "tuned", base, {"layers.1": 0.3})
    make_lora(folder / "lora", base)
    make_model(folder / "deep", seed=1, num_hidden_layers=3)
    (folder / "text.txt").write_text(TEXT)
    (folder / "data.jsonl").write_text('{"prompt": "a", "completion": "b c d"}\n' * 3)
    return folder


@pytest.fixture(scope="module")
def whole(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zoo with an application of each kind, a measurement, a profile and an alternative of each kind."""
    zoo = Zoo.create(tmp_path_factory.mktemp("whole") / "zoo")
    for name, parent in (("base", None), ("tuned", "base"), ("lora", "base"), ("deep", None)):
        add(zoo, sources / name, name, parent)
    evaluate(zoo, "base", "tuned", TEXT)
    for command in (HEAVY[1], HEAVY[2], HEAVY[3], HEAVY[4], ("views",)):
        said, _ = run(command, zoo.folder, sources, sources)
        assert not said, said
    assert len(zoo.alternatives.names()) == 3
    return zoo.folder


def run(command: tuple[str, ...], zoo: Path, out: Path, sources: Path) -> tuple[str, float]:
    """The error that refused a command, empty where it worked, and the seconds of CPU that it took."""
    filled = {"OUT": str(out / command[1]) if len(command) > 1 else "", "TEXT": str(sources / "text.txt"),
              "DATA": str(sources / "data.jsonl"), "BASE": str(sources / "base"),
              "LORA": str(sources / "lora")}  # fmt: skip
    arguments = [filled.get(word, word) for word in command]
    started = time.process_time()
    said = ""
    try:
        result = CliRunner().invoke(app, ["zoo", *arguments, "--zoo", str(zoo)], catch_exceptions=False)
        assert result.exit_code == 0, (command, result.output)
    except CoserveError as error:
        said = str(error)
        assert said and len(said) < 1400, said
    return said, time.process_time() - started


def snapshot(folder: Path) -> dict[str, str]:
    """Everything in a folder by its path, with links as they are."""
    found = {}
    for path, names, files in os.walk(folder):
        for name in (*names, *files):
            one = Path(path, name)
            told = os.readlink(one) if one.is_symlink() else one.read_bytes() if one.is_file() else ""
            data = told if isinstance(told, bytes) else told.encode()
            found[str(one.relative_to(folder))] = (
                f"{one.lstat().st_mode:o} {hashlib.sha256(data).hexdigest()}"
            )
    return found


class Case:
    """A copy of a zoo deep in a folder of its own, with a decoy beside it that nothing may touch."""

    def __init__(self, folder: Path, whole: Path) -> None:
        self.root, self.inner = folder, folder / "1" / "2" / "3"
        self.decoy, self.zoo, self.out = folder / "decoy", self.inner / "zoo", self.inner / "out"
        for each in (self.inner, self.decoy / "views", self.decoy / "00", self.out, self.inner / "tmp"):
            each.mkdir(parents=True)
        for file in ("secret.txt", "config.json", "views/.mine", "00/.bashrc", "00/" + "0" * 64):
            (self.decoy / file).write_text(SECRET)
        shutil.copytree(whole, self.zoo, copy_function=os.link)  # every writer replaces files
        self.before = self._outside()

    def check(self) -> None:
        """Fails where anything outside the zoo and the target has changed, or has come into them."""
        assert self._outside() == self.before
        assert {one.name for one in self.out.iterdir()} <= {"base", "tuned", "lora"}
        for folder in (self.zoo, self.out):
            for path, _, files in os.walk(folder):
                for file in (Path(path, name) for name in files):
                    if not file.is_symlink() and file.is_file():
                        assert SECRET.encode() not in file.read_bytes(), file

    def _outside(self) -> dict[str, str]:
        inside = tuple(str(one.relative_to(self.root)) + os.sep for one in (self.zoo, self.out))
        return {name: told for name, told in snapshot(self.root).items() if not name.startswith(inside)}


def manifests(zoo: Path) -> list[Path]:
    return sorted(
        one for kind in ("applications", "alternatives", "measured") for one in (zoo / kind).glob("*")
    )


def content_of(file: Path) -> Content:
    found: Content = json.loads(file.read_text())["content"]
    return found


def seal(file: Path, content: Any, sealed: Content | None = None) -> None:
    """Writes a manifest with a checksum that fits, as an attacker does."""
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    envelope = {"format": 1, "sha256": hashlib.sha256(raw).hexdigest(), **(sealed or {})}
    head = json.dumps(envelope).encode()[:-1]
    write_file(file, [head, b', "content": ', raw, b"}\n"])


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all values within one."""
    found = [at]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in [*inner][:40]:
        found += places(one, (*at, key))
    return found


def put(content: Any, at: tuple[Any, ...], value: Any) -> None:
    for step in at[:-1]:
        content = content[step]
    content[at[-1]] = value


def hostile_field(draws: random.Random, case: Case) -> str:
    """Any value of any manifest becomes another."""
    file = draws.choice(manifests(case.zoo))
    content = content_of(file)
    at = draws.choice(places(content)[1:])
    anything = (
        *HUGE,
        *KEYS,
        *NAMES,
        [],
        {},
        [[]],
        {"": ""},
        True,
        0.5,
        "\x1b[31m",
        [2**64] * 5,
        {"A1": [2**40]},
    )
    put(content, at, value := draws.choice(anything))
    seal(file, content)
    return f"{file.name} {at} = {value!r:.60}"


def hostile_names(draws: random.Random, case: Case) -> str:
    file = case.zoo / "applications" / f"{draws.choice(('base', 'tuned', 'lora', 'deep'))}.json"
    content = content_of(file)
    table = content[draws.choice(("files", "weights"))]
    name = draws.choice([*FILE_NAMES, str(case.root / "X"), str(case.decoy / "secret.txt")])
    old = draws.choice([*table])
    table[name] = table.pop(old) if draws.random() < 0.5 else table[old]
    seal(file, content)
    return f"{file.name} has a file {name!r:.60}"


def hostile_keys(draws: random.Random, case: Case) -> str:
    file = draws.choice(manifests(case.zoo))
    content = content_of(file)
    keys = [at for at in places(content) if at and at[-1] in ("header", "tokenizer", "text", "digest")]
    keys += [at for at in places(content) if len(at) > 1 and at[-2] in ("files", "tensors", "models")]
    if not keys:
        return hostile_field(draws, case)
    put(content, at := draws.choice(keys), key := draws.choice(KEYS))
    seal(file, content)
    return f"{file.name} {at} = {key!r:.60}"


def hostile_parents(draws: random.Random, case: Case) -> str:
    """Applications that are their own ancestors, in a circle of any length."""
    length = draws.choice((1, 2, 3, 300))
    file = case.zoo / "applications" / "tuned.json"
    content = content_of(file)
    names = ["tuned", *(f"t{number}" for number in range(1, length))]
    for number, name in enumerate(names):
        parent = names[(number + 1) % length]
        seal(file.with_name(f"{name}.json"), {**content, "name": name, "parent": parent})
    return f"a circle of {length}"


def hostile_amounts(draws: random.Random, case: Case) -> str:
    """Too much of something."""
    file = case.zoo / "applications" / "tuned.json"
    content = content_of(file)
    match draws.randrange(6):
        case 0:
            (entry,) = content["weights"].values()
            entry["tensors"] |= {f"t{number}": "0" * 64 for number in range(200_000)}
        case 1:
            content["chain"] = content["chain"] * 4000
        case 2:
            content["files"] = {f"{number}.json": "0" * 64 for number in range(100_000)}
        case 3:
            seal(file, b"[" * 200_000)
            return "brackets"
        case 4:
            write_file(file, [b"{" + b" " * (65 << 20)])
            return "spaces"
        case 5:
            seal(file, content, {"format": draws.choice(HUGE), "sha256": draws.choice(KEYS)})
            return "an envelope"
    seal(file, content)
    return "amounts"


def hostile_tensor(draws: random.Random, case: Case) -> str:
    """A file of a tensor, or a header of an application, that says what cannot be."""
    zoo = Zoo(case.zoo)
    if draws.random() < 0.5:
        path = zoo.tensors.path(draws.choice(sorted(zoo.tensors.all_keys())))
        data = path.read_bytes()
        write_file(path, [made := hostile_header(draws, data)])
        return f"{path.name[:8]}: {made[:80]!r}"
    file = case.zoo / "applications" / f"{draws.choice(('base', 'tuned', 'lora'))}.json"
    content = content_of(file)
    for entry in content["weights"].values():
        data = zoo.files.read(entry["header"])
        entry["header"] = zoo.files.add(hostile_header(draws, data))
    seal(file, content)
    return f"a header of {file.name}"


def hostile_header(draws: random.Random, data: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    fields, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = next(one for one in fields if one != "__metadata__")
    match draws.randrange(9):
        case 0:
            fields[name]["shape"] = draws.choice(
                ([2**40] * 4, [-1], [-2, -2], [2**64], [1] * 100_000, "4", [1.5])
            )
        case 1:
            fields[name]["data_offsets"] = draws.choice(
                ([0, 2**63], [-4, 0], [8, 4], [0], "ab", [2**64, 2**65])
            )
        case 2:
            fields[name]["dtype"] = draws.choice(("F31", "", None, 4, "f32", "F" * 10_000))
        case 3:
            empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            fields |= {f"t{number}": empty for number in range(200_000)}
        case 4:
            fields["__metadata__"] = draws.choice(
                (
                    {"parent": "../../decoy/secret.txt"},
                    {"parent": "0" * 64},
                    {"parent": 5},
                    5,
                    [],
                    {"parent": ""},
                )
            )
        case 5:
            fields = draws.choice(([], {}, 5, {"tensor": []}, {"delta": fields[name]}, {"": fields[name]}))
        case 6:
            return draws.choice(
                (b"", b"\xff" * 8, data[:9], b"[" * 5000, struct.pack("<Q", 2**62) + data[8:])
            )
        case 7:
            return bytes(byte ^ (draws.random() < 0.02) for byte in data[:4096]) + data[4096:]
        case 8:
            rest = rest[: len(rest) // 2]
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + rest


def hostile_configuration(draws: random.Random, case: Case) -> str:
    """The configuration of a model, with the right hash."""
    zoo = Zoo(case.zoo)
    file = case.zoo / "applications" / "base.json"
    content = content_of(file)
    made = hostile_config(draws, zoo.files.read(content["files"]["config.json"]))
    content["files"]["config.json"] = zoo.files.add(made)
    seal(file, content)
    return f"a configuration {made[:200]!r}"


def hostile_config(draws: random.Random, data: bytes) -> bytes:
    fields = json.loads(data)
    numbers = [name for name, value in fields.items() if isinstance(value, int | float)]
    for _ in range(draws.choice((1, 1, 2))):
        name = draws.choice([*numbers, "num_hidden_layers", "hidden_size", "model_type", "layer_types", "x"])
        fields[name] = draws.choice([*HUGE, None, "x", [], {}, [2**64], 0.5, 10**6, 1025, 3, "gpt2", "mamba"])
    return draws.choice((json.dumps(fields).encode(),) * 8 + (b"{" * 3000, b"5", b"\xff", b'{"a":' * 900))


def hostile_links(draws: random.Random, case: Case) -> str:
    """A symbolic link, or what is no file, in place of any part of the zoo."""
    parts = [*case.zoo.rglob("*"), case.zoo / "lock", case.zoo / "zoo.json", case.zoo / "tensors" / "00",
             case.zoo / "applications" / "new.json", case.zoo / "applications" / ".x.json.partial",
             case.zoo / "views" / "new", case.zoo / "tensors" / "00" / ".x", case.zoo / "files" / "00",
             case.zoo / "measured" / ("0" * 64 + ".json"), *(case.zoo / "views").rglob("*")]  # fmt: skip
    tops = [one for one in parts if one.parent == case.zoo]
    part = draws.choice(tops if draws.random() < 0.3 else parts)
    target = draws.choice(
        [case.decoy, case.decoy / "00", case.decoy / "secret.txt", case.decoy / "missing", part]
    )
    shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink(missing_ok=True)
    part.parent.mkdir(exist_ok=True)
    if draws.random() < 0.1:
        os.mkfifo(part)
        return f"{part.relative_to(case.zoo)} is a pipe"
    shown = target if draws.random() < 0.5 else Path(os.path.relpath(target, part.parent))
    part.symlink_to(shown)
    return f"{part.relative_to(case.zoo)} -> {target.relative_to(case.root)}"


CHANGES: tuple[Callable[[random.Random, Case], str], ...] = (
    hostile_field, hostile_field, hostile_names, hostile_names, hostile_keys, hostile_parents,
    hostile_amounts,
    hostile_tensor, hostile_configuration, hostile_links, hostile_links, hostile_links,
)  # fmt: skip


def attack(number: int, case: Case, sources: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A hostile zoo, in the hands of some commands; the last two change it."""
    draws, outcomes = random.Random(number), Counter[str]()
    done = CHANGES[number % len(CHANGES)](draws, case)
    monkeypatch.setattr(tempfile, "tempdir", str(case.inner / "tmp"))
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    commands = [*draws.sample(LIGHT[:-2], 2), *LIGHT[-2:]]
    if draws.random() < 0.1:
        commands.insert(2, tuple(f"{word}2" if word in MADE else word for word in draws.choice(HEAVY)))
    for command in commands:
        try:
            said, seconds = run(command, case.zoo, case.out, sources)
            assert seconds < (LONGEST if said else 10 * LONGEST), f"{seconds:.2f} s: {said}"
            assert SECRET not in said
            case.check()
        except BaseException as error:
            error.add_note(f"case {number}: {' '.join(command)}; {done}")
            raise
        outcomes["refused" if said else "worked"] += 1
    return outcomes


def test_whatever_a_zoo_holds_nothing_outside_is_touched(
    whole: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = attack_many(range(TRIED), whole, sources, tmp_path, monkeypatch)
    assert outcomes["refused"] > TRIED // 2 and outcomes["worked"] > TRIED // 2, outcomes


@pytest.mark.slow
def test_many_hostile_zoos(
    whole: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = attack_many(range(1000, 1600), whole, sources, tmp_path, monkeypatch)
    assert min(outcomes["refused"], outcomes["worked"]) > 600, outcomes


def attack_many(
    numbers: range, whole: Path, sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    outcomes = Counter[str]()
    for number in numbers:
        outcomes += attack(number, Case(folder / str(number), whole), sources, monkeypatch)
        shutil.rmtree(folder / str(number))
    return outcomes


@pytest.mark.parametrize("kind", ["base", "lora"])
def test_whatever_a_folder_holds_is_added_or_refused(
    kind: str, whole: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a model or adapter with anything in them, and links in their place."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    draws, weights = random.Random(kind), "model" if kind == "base" else "adapter_model"
    case = Case(tmp_path / "case", whole)
    for number in range(max(TRIED // 3, 4)):
        folder = shutil.copytree(sources / kind, tmp_path / str(number))
        config = folder / ("config.json" if kind == "base" else "adapter_config.json")
        match number % 4:
            case 0:
                read = (
                    sorted(folder.iterdir())
                    if kind == "base"
                    else [config, folder / f"{weights}.safetensors"]
                )
                file = draws.choice(read)
                file.unlink()
                file.symlink_to(
                    draws.choice([case.decoy / "secret.txt", sources / kind / file.name, case.decoy])
                )
            case 1:
                file = folder / f"{weights}.safetensors"
                file.write_bytes(hostile_header(draws, file.read_bytes()))
            case 2:
                file = config
                file.write_bytes(hostile_config(draws, file.read_bytes()))
            case 3:
                file = folder / "model.safetensors.index.json"
                names = {"a": draws.choice([*FILE_NAMES, str(case.decoy / "secret.txt")])}
                file.write_text(json.dumps({"weight_map": names}))
        name = f"new{number}"
        said, seconds = run(("add", str(folder), "--name", name), case.zoo, case.out, sources)
        assert seconds < 2 * LONGEST, (said, seconds)
        case.check()
        if not said:
            run(("export", name, "OUT"), case.zoo, tmp_path / f"{number}out", sources)
        assert said or number % 4 != 0, file


def test_a_snapshot_of_the_hubs_cache_is_added(sources: Path, whole: Path, tmp_path: Path) -> None:
    """Its files are links to the blobs beside it; a link from there to anywhere else is refused."""
    zoo = Zoo(shutil.copytree(whole, tmp_path / "zoo"))
    snapshot_folder, blobs = (
        tmp_path / "models--a--b" / "snapshots" / "1",
        tmp_path / "models--a--b" / "blobs",
    )
    snapshot_folder.mkdir(parents=True)
    blobs.mkdir()
    for file in (sources / "base").iterdir():
        shutil.copy(file, blobs / f"blob-{file.name}")
        (snapshot_folder / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    added = add(zoo, snapshot_folder, "other")
    assert added.digest == zoo.application("base").digest
    (blobs / "blob-config.json").unlink()
    (blobs / "blob-config.json").symlink_to(sources / "base" / "config.json")
    with pytest.raises(CoserveError, match="is a symbolic link"):
        add(zoo, snapshot_folder, "another")
