"""Training sessions on an engine: order, failures, states, memory."""

import itertools
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import AdamParams, Datum, Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.engine.aside import at_once
from coserve.engine.training_client import Operation, TrainingClient
from coserve.errors import (
    AdapterMismatch,
    ConfigError,
    CoserveError,
    JobError,
    LossNotFinite,
    OutOfMemory,
    RequestError,
)
from coserve.executors.executor import ReadMemory
from coserve.train.checkpoint import read_checkpoint
from coserve.train.example import Example
from coserve.train.tail import Tail
from models import tiny

DRAWS = Random(secrets.randbits(32))
LORA = LoRAConfig(rank=2)
STEP = AdamParams(1e-2)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
RATIO = {"logprobs": (-5.0,) * 4, "advantages": (1.0,) * 4}
OVERFLOW = Datum((1, 2, 3, 4), (2, 3, 4, 5), {**RATIO, "logprobs": (-1e6,) * 4})  # its ratio is infinite


def make_engine(dtype: str = "float32", **config: Any) -> Engine:
    made = EngineConfig(dtype=dtype, calibrate=False, cache_tokens=256, **config)
    return Engine(tiny("llama", getattr(torch, dtype)), made)


def datum(length: int) -> Datum:
    tokens = [DRAWS.randrange(3, 60) for _ in range(length + 1)]
    targets = (target if DRAWS.random() < 0.8 else -100 for target in tokens[1:-1])
    return Datum(tuple(tokens[:-1]), (*targets, tokens[-1]))


def batch(*lengths: int) -> list[Datum]:
    return [datum(length) for length in lengths]


def weights(engine: Engine, name: str = "mine") -> Tensor:
    return torch.cat([p.flatten() for _, p in sorted(engine.adapters.weights(name).parameters().items())])


def trained(engine: Engine, session: TrainingClient, *passes: list[Datum]) -> Tensor:
    """The weights after one step on these passes."""
    for data in passes:
        session.forward_backward(data)
    session.optim_step(STEP).result()
    return weights(engine, session.adapter)


def failure(operation: Operation[Any]) -> CoserveError:
    with pytest.raises(CoserveError) as raised:
        operation.result()
    return raised.value


def test_operations_run_in_order_and_an_answer_keeps_the_weights_it_began_with() -> None:
    engine = make_engine()
    session, data = engine.open_training("mine", LORA), batch(20, 9)
    done: list[str] = []

    def note(name: str) -> Callable[[object], None]:
        return lambda _: done.append(name)

    first = engine.generate([5, 6, 7], session.version, GREEDY)
    operations: dict[str, Operation[Any]] = {
        "forward": session.forward(data),
        "one": session.forward_backward(data),
        "step": session.optim_step(AdamParams(0.3)),
        "two": session.forward_backward(data),
        "after": session.forward(data),
    }
    for name, operation in operations.items():
        operation.add_done_callback(note(name))
    before = engine.generate([5, 6, 7], "mine", GREEDY)
    operations["step"].result()
    late = engine.generate([5, 6, 7], "mine", GREEDY)
    operations["after"].result()
    assert done == list(operations)
    assert before.sequence.request.adapter == "mine@0" and late.sequence.request.adapter == "mine@1"
    assert first.result().tokens == before.result().tokens != late.result().tokens
    forward, one, two, after = (operations[name].result() for name in ("forward", "one", "two", "after"))
    assert forward.loss == pytest.approx(one.loss, rel=1e-5)
    assert two.loss == pytest.approx(after.loss, rel=1e-5)
    old, new = (list(itertools.chain(*found.logprobs)) for found in (one, two))
    moved = [abs(a - b) for a, b in zip(old, new, strict=True)]
    assert max(moved) > 0.1
    targets = [[target >= 0 for target in one.targets] for one in data]
    assert [[logprob < 0 for logprob in found] for found in one.logprobs] == targets
    assert -sum(map(sum, one.logprobs)) == pytest.approx(one.loss, rel=1e-5)


def test_passes_accumulate_as_one_however_they_are_cut_and_as_a_job() -> None:
    """A job's loss is the mean over its labels, a session's a sum: its weights are one over their number.

    In float64, as Adam's first step is a gradient's sign, which near zero is that of its rounding."""
    data = batch(17, 5, 22, 8)
    labels = sum(target >= 0 for one in data for target in one.targets)
    data = [Datum(d.tokens, d.targets, {"weights": (1 / labels,) * len(d.tokens)}) for d in data]
    found = []
    for rows, passes, most in ((64, [data], 512), (32, [data[:1], data[1:]], 7)):
        engine = make_engine(
            "float64", scheduler={"max_training_rows": most, "min_training_rows": min(most, 32)}
        )
        session = engine.open_training("mine", LORA, TrainingConfig(rows=rows, seed=3))
        found.append(trained(engine, session, *passes))
    engine = make_engine("float64")
    config = TrainingConfig(
        1e-2, "constant", 0.0, batch_size=4, seed=3, betas=(0.9, 0.95), epsilon=1e-12, max_grad_norm=None
    )
    engine.finetune([Example(d.tokens, d.targets) for d in data], "mine", LORA, config).result()
    for other in (*found[1:], weights(engine)):
        assert torch.allclose(found[0], other, rtol=1e-6, atol=1e-9)


def test_pairs_of_dpo_stay_together() -> None:
    """The loss of two equal answers is log 2 a pair, whichever micro-batches they are in."""
    session, pairs = make_engine().open_training("mine", LORA, TrainingConfig(rows=48)), list[Datum]()
    for length in (20, 7, 22, 11):
        pairs += [datum(length)] * 2
    scored = session.forward(pairs).result().logprobs
    reference = [
        Datum(d.tokens, d.targets, {"reference": logprobs}) for d, logprobs in zip(pairs, scored, strict=True)
    ]
    assert session.forward_backward(reference, "dpo").result().loss == pytest.approx(4 * 0.693147, rel=1e-4)
    assert session.optim_step().result().grad_norm == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"data": []}, RequestError, "at least one datum"),
        ({"data": [Datum((), ())]}, RequestError, "0 tokens"),
        ({"data": [Datum((1, 2), (2,))]}, RequestError, "2 tokens and 1 targets"),
        ({"data": [Datum((1, 96), (2, 3))]}, RequestError, "the token 96"),
        ({"data": [Datum((1, 2), (2, -1))]}, RequestError, "the token -1"),
        ({"data": [Datum((1, 2), (2, 3.5))]}, RequestError, "the token 3.5"),
        ({"data": [Datum((1, 2), (-100, -100))]}, RequestError, "none of the data has a target"),
        ({"data": [Datum((1,) * 65, (2,) * 65)]}, RequestError, "more than the 64"),
        ({"data": [Datum((1,) * 1000, (2,) * 1000)]}, RequestError, "positions"),
        ({"data": [Datum((1, 2), (2, 3), {"weights": (1.0,)})]}, RequestError, "1 numbers as weights"),
        ({"data": [Datum((1, 2), (2, 3), {"weights": (1.0, float("nan"))})]}, RequestError, "not finite"),
        ({"data": [Datum((1, 2), (2, 3), {"advantages": (1.0, 1.0)})]}, RequestError, "does not take"),
        ({"loss": "ppo"}, RequestError, "lacks logprobs"),
        ({"loss": "dpo"}, RequestError, "groups of 2"),
        ({"loss": "mse"}, ConfigError, "no loss 'mse'"),
        ({"loss_config": {"beta": 0.1}}, ConfigError, "no setting beta"),
        (
            {"loss": "ppo", "loss_config": {"clip_low_threshold": float("inf")}},
            RequestError,
            "clip_low_threshold",
        ),
    ],
)
def test_what_no_pass_can_take_is_refused_at_once(
    change: dict[str, Any], error: type[CoserveError], words: str, shared: TrainingClient
) -> None:
    with pytest.raises(error, match=words):
        shared.forward_backward(**{"data": [datum(4)], **change})
    assert failure(shared.optim_step()).args[0].startswith("an optimizer step needs gradients")


@pytest.fixture(scope="module")
def shared() -> TrainingClient:
    return make_engine().open_training("mine", LORA, TrainingConfig(rows=64))


@pytest.mark.local  # breaks the device from within
@pytest.mark.parametrize(
    ("how", "when"),
    [("not finite", "between"), ("not finite", "alone"), ("raised", "first"), ("no memory", "between")],
)
def test_a_pass_that_fails_adds_nothing(how: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its third micro-batch, after the first has added gradients; neighbours notice nothing."""
    data, more = batch(12, 9), batch(10)
    wanted = trained(*_opened("wanted"), data, more)
    engine, session = _opened("mine")
    beside = engine.open_training("beside", LORA, TrainingConfig(rows=16))
    job = engine.finetune([Example((1, 2, 3), (2, 3, 4))] * 4, "job", LORA, TrainingConfig(batch_size=2))
    neighbour = beside.forward_backward(data)
    if when == "between":
        session.forward_backward(data).result()
    with monkeypatch.context() as patched:
        if how != "not finite":
            patched.setattr(Tail, "loss", _breaking(Tail.loss, how, session.job))
        good = Datum((1, 2, 3, 4) * 3, (2, 3, 4, 5) * 3, {one: x * 3 for one, x in RATIO.items()})
        bad = [good, good, OVERFLOW if how == "not finite" else good]
        error = failure(session.forward_backward(bad, "importance_sampling"))
    kinds = {"not finite": LossNotFinite, "raised": JobError, "no memory": OutOfMemory}
    assert type(error) is kinds[how] and neighbour.result().loss > 0
    if when == "alone":
        assert isinstance(failure(session.optim_step()), RequestError)
    found = trained(engine, session, *([data] if when != "between" else []), more)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert len(job.result().history) == 2


def _opened(name: str) -> tuple[Engine, TrainingClient]:
    engine = make_engine()
    return engine, engine.open_training(name, LORA, TrainingConfig(rows=16))


def _breaking(real: Callable[..., None], how: str, job: str) -> Callable[..., None]:
    """`Tail.loss` that raises in each micro-batch of importance sampling but the first two."""
    seen: list[Tail] = []

    def loss(tail: Tail, *arguments: Any) -> None:
        if tail._spec.name == "importance_sampling":
            if tail not in seen:
                seen.append(tail)
            if len(seen) > 2:
                raise MemoryError if how == "no memory" else ValueError("broken")
        real(tail, *arguments)

    return loss


@pytest.mark.local
def test_a_pass_without_memory_runs_again_in_smaller_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batch(9, 10, 12, 11)
    wanted = trained(*_opened("wanted"), data)
    engine = make_engine()
    session = engine.open_training("mine", LORA, TrainingConfig(rows=32))
    real = Tail.loss

    def short(tail: Tail, *arguments: Any) -> None:
        if tail._store.rows > 16:
            raise MemoryError
        real(tail, *arguments)

    monkeypatch.setattr(Tail, "loss", short)
    assert torch.allclose(trained(engine, session, data), wanted, rtol=1e-4, atol=1e-6)


def test_an_optimizer_step_that_leaves_the_numbers_returns_to_the_last_version() -> None:
    engine, session = _opened("mine")
    before = trained(engine, session, batch(12))
    session.forward_backward(batch(12))
    assert isinstance(failure(session.optim_step(AdamParams(1e20))), LossNotFinite)
    assert torch.equal(weights(engine), before) and session.version == "mine@1"
    assert isinstance(failure(session.optim_step()), RequestError)
    after = trained(engine, session, batch(12))
    assert after.isfinite().all() and session.version == "mine@2"


@pytest.mark.parametrize(
    "field", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"]
)
def test_settings_of_the_optimizer_are_checked(field: str, shared: TrainingClient) -> None:
    for value in (-1.0, float("nan"), float("inf") if field != "grad_clip_norm" else 0.0):
        with pytest.raises(RequestError, match=field):
            shared.optim_step(AdamParams(**{field: value}))


def test_a_state_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Weights and moments; in this session, another one, or a job's. Other shapes are refused."""
    first, second = batch(12, 7), batch(9)
    engine, session = _opened("mine")
    trained(engine, session, first)
    state = session.save_state(tmp_path)
    session.forward_backward(second)
    session.optim_step(STEP).result()
    wanted, saved = weights(engine), state.result()
    other = engine.open_training("other", LORA, TrainingConfig(rows=16, seed=5))
    for client in (session, other):
        client.forward_backward(first)  # which is dropped
        assert client.load_state(saved).result() == client.version
        assert isinstance(failure(client.optim_step()), RequestError)
        assert torch.equal(trained(engine, client, second), wanted)
    assert session.load_state(saved, optimizer=False).result() == "mine@5"
    assert not torch.equal(trained(engine, session, second), wanted), "without its moments"
    large = engine.open_training("large", LoRAConfig(rank=3), TrainingConfig(rows=16))
    assert isinstance(failure(large.load_state(saved)), AdapterMismatch)
    assert isinstance(failure(large.load_state(tmp_path / "none")), JobError)
    assert large.forward(second).result().loss > 0
    for _ in range(2):  # the second in the place of the first
        saved = session.save_weights(tmp_path / "to" / "weights").result()
    assert [path.name for path in saved.parent.iterdir()] == ["weights"]
    assert engine.adapters.load("weights", saved).version == 0
    (tmp_path / "file").touch()
    assert "cannot be written" in str(failure(session.save_weights(tmp_path / "file" / "weights")))
    assert "cannot be written" in str(failure(session.save_state(tmp_path / "file" / "state")))
    assert torch.equal(weights(engine, "weights"), weights(engine))


class Held:
    """An `Aside` whose work waits until a test lets it run."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def do(self, what: str, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.waiting.append(partial(at_once, what, work, then))

    def close(self) -> None: ...


def test_a_step_waits_for_states_that_are_being_written(tmp_path: Path) -> None:
    """Passes go on; however many states are saved, those of one step alone are in memory."""
    engine, session = _opened("mine")
    trained(engine, session, batch(12, 7))
    before, held = weights(engine), Held()
    session.sessions.aside = held  # type: ignore[attr-defined]
    saved = [session.save_state(tmp_path / str(n)) for n in range(3)]
    passed, stepped = session.forward_backward(batch(9)), session.optim_step(STEP)
    assert passed.result().loss > 0
    while engine.step():
        pass
    assert len(held.waiting) == 3 and not stepped.is_done and torch.equal(weights(engine), before)
    for write in held.waiting:
        assert not stepped.is_done
        write()
    assert stepped.result().step == 2 and not torch.equal(weights(engine), before)
    states = [read_checkpoint(one.result(), "mine", engine.base, torch.float64) for one in saved]
    assert [state.step for state in states] == [1, 1, 1]


def test_a_session_waits_for_memory_and_frees_it() -> None:
    roomy = make_engine()
    fixed = roomy.memory.ledger.used
    roomy.open_training("mine", LORA, TrainingConfig(rows=2048))
    engine = make_engine(memory=int(fixed + 1.3 * (roomy.memory.ledger.used - fixed)))
    used = engine.memory.ledger.used
    first = engine.open_training("mine", LORA, TrainingConfig(rows=2048))
    with pytest.raises(OutOfMemory, match="rows="):
        engine.open_training("huge", LORA, TrainingConfig(rows=1 << 20))
    second = engine.open_training("other", LORA, TrainingConfig(rows=2048), session="second")
    waiting = second.forward_backward(batch(4))
    assert isinstance(failure(waiting), OutOfMemory) and not waiting.is_done and "waits for" in second.reason
    with pytest.raises(JobError, match="'second' already"):
        engine.finetune([Example((1, 2), (2, 3))], "third", LORA, job="second")
    with pytest.raises(JobError, match="being trained by second"):
        engine.adapters.unload("other")
    cut_off = first.forward_backward(batch(100))
    first.close(), first.close()
    assert isinstance(failure(cut_off), JobError) and waiting.result().loss > 0
    with pytest.raises(JobError, match="has ended"):
        first.forward(batch(3))
    second.close()
    engine.run()
    assert engine.executor.call(ReadMemory()).sessions == {} and not engine.sessions.clients
    engine.memory.audit()
    engine.adapters.unload("mine"), engine.adapters.unload("other")
    engine.memory.audit()
    assert engine.memory.ledger.used == used


def test_a_forward_has_no_dropout_and_a_forward_backward_has() -> None:
    session = make_engine().open_training("mine", LoRAConfig(rank=2, dropout=0.5), TrainingConfig(rows=64))
    data = batch(30)
    session.forward_backward(data)
    session.optim_step(AdamParams(0.1))
    forwards = [session.forward(data).result().loss for _ in range(2)]
    both = [session.forward_backward(data).result().loss for _ in range(2)]
    assert forwards[0] == forwards[1] and len({forwards[0], *both}) == 3


def test_a_version_of_an_adapter_that_has_gone_is_dropped() -> None:
    """With plans ahead its result may come after the adapter was removed."""
    engine, session = _opened("mine")
    session.forward_backward(batch(9))
    updated = session.optim_step(STEP).result()
    session.close()
    engine.adapters.bank.remove("mine")
    engine.adapters.publish([updated])
    assert "mine" not in engine.adapters.bank and engine.executor.call(ReadMemory()).adapters == 0


def test_a_pass_is_checked_and_packed_without_the_engine_s_lock() -> None:
    """By a thread that steps would wait for if it took the lock."""
    engine = make_engine()
    session = engine.open_training("mine", LORA, TrainingConfig(rows=64))
    with engine.loop.lock, ThreadPoolExecutor(1) as pool:
        work = pool.submit(session.prepare, batch(20, 30, 40), "cross_entropy", None, True).result(60)
    assert session.submit(work, backward=True).result().loss > 0
