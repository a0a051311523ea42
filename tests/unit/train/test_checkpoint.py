"""Checkpoints: what goes on from one is what would have been, and half of one never counts."""

import itertools
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.loaded import LoadedAdapters
from coserve.core import disk
from coserve.core.plan import Updated
from coserve.errors import JobError
from coserve.train.checkpoint import newest_checkpoint, read_checkpoint, write_checkpoint
from coserve.train.example import Example, digest
from coserve.train.fresh import fresh_adapter
from coserve.train.state import TrainingState
from models import prompts, tiny
from training_runs import TrainingRun, adopt, there_and_back

FIELDS = {"batch_size": 3, "epochs": 2, "learning_rate": 3e-2, "rows": 40, "seed": 5, "max_grad_norm": 0.05}


def examples(count: int = 13) -> list[Example]:
    draws = random.Random("checkpoint")
    made = prompts(draws, [draws.randint(3, 25) for _ in range(count)])
    return [Example(tuple(tokens), (*tokens[1:], -100)) for tokens in made]


def engine_of(dtype: torch.dtype) -> Engine:
    return Engine(tiny("llama", dtype), EngineConfig(calibrate=False, cache_tokens=64))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(torch.float32)


def run_of(
    engine: Engine, data: list[Example] | None = None, resume: TrainingState | None = None, **fields: object
) -> TrainingRun:
    data = data or examples()
    start = fresh_adapter(engine.base, "mine", LoRAConfig(rank=2, dropout=0.2), 0)
    training = TrainingConfig(**{**FIELDS, **fields})
    run = TrainingRun(
        engine.base, LoadedAdapters(), "job", start, data, training, digest=digest(data), resume=resume
    )
    adopt(engine, run)
    return run


def one_step(engine: Engine, run: TrainingRun) -> Updated | None:
    batches = run.next_step(itertools.count(1))
    for batch in batches:
        there_and_back(engine, batch)
    return run.update() if batches else None


def steps_of(engine: Engine, run: TrainingRun) -> list[Updated]:
    """All that are left."""
    return list(iter(lambda: one_step(engine, run), None))


def outcome(updates: list[Updated]) -> list[tuple[int, float, float, float, int]]:
    return [(u.step, u.loss, u.grad_norm, u.learning_rate, u.labels) for u in updates]


def same_state(one: TrainingState, other: TrainingState) -> bool:
    mine, theirs = one.adapter.parameters(), other.adapter.parameters()
    return (
        (one.step, one.loss, one.identity) == (other.step, other.loss, other.identity)
        and mine.keys() == theirs.keys()
        and all(torch.equal(mine[name], theirs[name]) for name in mine)
        and one.moments.keys() == other.moments.keys()
        and all(torch.equal(one.moments[name], other.moments[name]) for name in one.moments)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_resumed_job_is_the_uninterrupted_one_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """Through the disk, at every step, in the middle of a step: losses, norms, weights and moments."""
    engine = engine_of(dtype)
    run = run_of(engine)
    states, updates, read_later = [run.state()], [], [run.snapshot()]
    for _ in range(run.steps):
        batch = run.next_step(itertools.count(1))
        if run.step % 2:  # what a step under way has gathered is not in the state
            there_and_back(engine, batch[0])
            states[-1], read_later[-1] = run.state(), run.snapshot()
            batch = batch[1:]
        for rest in batch:
            there_and_back(engine, rest)
        updates.append(run.update())
        states.append(run.state())
        read_later.append(run.snapshot())
    assert all(same_state(read(), state) for read, state in zip(read_later, states, strict=True))
    assert run.steps == 10 and any(u.grad_norm > 0.05 for u in updates)
    exact = torch.promote_types(dtype, torch.float32)
    for state in states:
        written = write_checkpoint(tmp_path, state)
        assert (written.step, written.loss) == (state.step, state.loss)
        back = read_checkpoint(written.path, "mine", engine.base, exact)
        assert same_state(back, state)
        resumed = run_of(engine, resume=back)
        assert resumed.step == state.step
        assert outcome(steps_of(engine, resumed)) == outcome(updates[state.step :])
        assert same_state(resumed.state(), states[-1])


def test_no_example_is_lost_or_repeated(engine: Engine) -> None:
    seen: list[list[tuple[int, ...]]] = []
    state = None
    for interrupted in (3, 1, 4, 9):
        run = run_of(engine, resume=state, learning_rate=1e-4)
        for _ in range(interrupted):
            if batches := run.next_step(itertools.count(1)):
                seen.append(
                    [
                        tuple(run.micro_batches[b.key].start.tokens[: b.length - sum(b.padding)])
                        for b in batches
                    ]
                )
                for batch in batches:
                    there_and_back(engine, batch)
                run.update()
        state = run.state()
    rows = sorted(token for step in seen for batch in step for token in batch)
    assert len(seen) == 10
    assert rows == sorted(token for e in examples() * 2 for token in e.tokens)
    for epoch in (seen[:5], seen[5:]):
        tokens = sorted(token for step in epoch for batch in step for token in batch)
        assert tokens == sorted(token for e in examples() for token in e.tokens)


def test_a_checkpoint_is_an_adapter(engine: Engine, tmp_path: Path) -> None:
    run = run_of(engine)
    steps_of(engine, run)
    path = write_checkpoint(tmp_path, run.state()).path
    assert path.name == "step-000010"
    adapted = PeftModel.from_pretrained(tiny("llama"), str(path))
    loaded = engine.adapters.load("loaded", path)
    prompt = [3, 4, 5, 6]
    (answer,) = engine.generate(prompt, "loaded", SamplingParams(max_tokens=1)).result().tokens
    assert answer == int(adapted(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())
    for name, bypass in loaded.bypasses.outputs.items():
        for letter, mine in bypass.parameters().items():
            theirs = adapted.get_submodule(f"base_model.model.{name}.{letter}.default").weight
            assert torch.equal(mine, theirs)


@pytest.fixture(scope="module")
def states(engine: Engine) -> list[TrainingState]:
    """After steps 1, 2 and 3."""
    run, found = run_of(engine), []
    for _ in range(3):
        one_step(engine, run)
        found.append(run.state())
    return found


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def forget(file: Path) -> None:
    manifest = file.parent / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields["files"].pop(file.name, None)
    manifest.write_text(json.dumps(fields))


FILES = ("adapter_config.json", "adapter_model.safetensors", "training.json", "training.safetensors")
DAMAGES: tuple[Callable[[Path], None], ...] = (
    flip, Path.unlink, lambda f: f.write_bytes(f.read_bytes()[:-1]), lambda f: f.write_bytes(b""), forget,
)  # fmt: skip


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_of_a_damaged_one_the_one_before_is_used(
    name: str,
    states: list[TrainingState],
    tmp_path: Path,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert newest_checkpoint(tmp_path) is None and newest_checkpoint(tmp_path / "none") is None
    for number, damage in enumerate(DAMAGES):
        if name == "manifest.json" and damage is forget:
            continue
        folder = tmp_path / str(number)
        first, second = (write_checkpoint(folder, state) for state in states[:2])
        assert newest_checkpoint(folder) == second
        damage(second.path / name)
        assert newest_checkpoint(folder) == first and "step-000002 is damaged" in caplog.text
        caplog.clear()
        with pytest.raises(JobError, match="damaged"):
            read_checkpoint(second.path, "mine", engine.base, torch.float32)
        again = write_checkpoint(folder, states[1])
        assert newest_checkpoint(folder) == again and again.path == second.path
        assert (folder / "step-000002.damaged-1").is_dir()


def test_writing_one_again_leaves_it(states: list[TrainingState], tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path, states[0])
    stamp = (first.path / "manifest.json").stat().st_mtime_ns
    assert write_checkpoint(tmp_path, states[0]) == first
    assert (first.path / "manifest.json").stat().st_mtime_ns == stamp


def test_another_server_s_attempt_is_beside_the_first_one_s(
    states: list[TrainingState], tmp_path: Path
) -> None:
    first = write_checkpoint(tmp_path, states[0])
    second = write_checkpoint(tmp_path, replace(states[0], loss=0.125), attempt=2)
    assert second.path.name == f"{first.path.name}.2" and second.digest != first.digest
    assert newest_checkpoint(tmp_path) == second
    assert write_checkpoint(tmp_path, states[0]) == first, "what the first server writes late changes nothing"
    (second.path / "training.json").unlink()
    assert newest_checkpoint(tmp_path) == first
    later = write_checkpoint(tmp_path, states[1])
    write_checkpoint(tmp_path, states[0], attempt=10)
    assert newest_checkpoint(tmp_path) == later


class Killed(BaseException):
    """The process ends here."""


def test_killed_at_any_moment_of_writing(
    states: list[TrainingState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each sync and each rename: what is on disk is the whole checkpoint, or does not count."""
    real = {"fsync": os.fsync, "rename": Path.rename}

    def killing(calls: int) -> None:
        left = iter(range(calls))

        def before(name: str) -> Callable[..., object]:
            def act(*args: object) -> object:
                if next(left, None) is None:
                    raise Killed
                return real[name](*args)

            return act

        monkeypatch.setattr(os, "fsync", before("fsync"))
        monkeypatch.setattr(Path, "rename", before("rename"))

    first = write_checkpoint(tmp_path, states[0])
    outcomes = []
    for calls in itertools.count():
        killing(calls)
        try:
            write_checkpoint(tmp_path, states[1])
            break
        except Killed:
            pass
        finally:
            monkeypatch.undo()
        found = newest_checkpoint(tmp_path)
        outcomes.append(found == first)
        assert found == first or (calls == len(outcomes) - 1 and found is not None and found.step == 2)
        if found != first:  # its name was there already: only whether it would survive a power cut was open
            break
    assert outcomes[:-1] == [True] * 7 and outcomes[-1] is False
    assert newest_checkpoint(tmp_path) == write_checkpoint(tmp_path, states[1])
    assert newest_checkpoint(tmp_path).step == 2


def test_everything_is_on_disk_before_it_has_its_name(
    states: list[TrainingState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = disk.sync_path, Path.rename
    monkeypatch.setattr(disk, "sync_path", lambda path: (done.append(path.name), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append(f"-> {to.name}"), rename(path, to)))
    write_checkpoint(tmp_path / "a" / "b", states[0])
    assert done[:2] == [tmp_path.name, "a"]  # the folders above, each in its parent
    assert sorted(done[2:6]) == sorted(FILES)
    assert done[6:] == ["manifest.json", ".step-000001.partial", "-> step-000001", "b"]


def test_a_full_disk_is_a_job_error(
    states: list[TrainingState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JobError, match="No space left"):
        write_checkpoint(tmp_path, states[0])


@pytest.mark.parametrize("change", ["data", "seed", "batch_size", "epochs"])
def test_another_job_does_not_go_on_from_it(change: str, states: list[TrainingState], engine: Engine) -> None:
    data = examples(12) if change == "data" else None
    fields = {} if change == "data" else {change: FIELDS[change] + 1}
    with pytest.raises(JobError, match=change):
        run_of(engine, data, states[0], **fields)
