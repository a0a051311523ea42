"""All methods at once: one engine answers for adapters of every method and trains every method, in the same
steps, and what comes of it is what each gives alone. Faults put into the engine show that this would be seen.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_methods_linears import OURS
from torch import Tensor

from coserve import Engine, EngineConfig
from coserve.adapters import lora_batch
from coserve.adapters.bypass import Bypasses
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods import method_of, methods
from coserve.adapters.methods.ia3 import IA3Bypass
from coserve.core.plan import InferenceSegment
from coserve.kernels.lora.backend import LoraSegment
from coserve.worker import fused_pass, inference, sampler
from coserve.worker.fused_pass import FusedPass
from coserve.worker.sequence_table import SequenceTable
from methods import SHAPES, SMALL, case_of, engine_of, windowed_errors
from mixed import SAMPLING, STEPS, TRAINED, VIRTUAL, Logits, Mixture, make_engine, oracles, start, trained
from models import Exact, tiny
from plain import with_ia3_and_lora


def difference(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted)


def test_every_method_is_in_the_mixture() -> None:
    """Or, of those that differ in what stands at a linear alone, in that of `test_methods_linears`."""
    configs = [c for config in TRAINED.values() for c in (config if isinstance(config, tuple) else (config,))]
    assert {method_of(config).name for config in configs} == set(methods()) - set(OURS)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("guessed_costs")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in SHAPES), ("gemma2", torch.float64), ("mixtral", torch.float64)],
)
def test_each_is_what_it_is_alone(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Exactly in float64; in float32 but for rounding."""
    exact = dtype == torch.float64
    alone = oracles(name, tmp_path)
    with Exact() if exact else nullcontext():
        mixture = Mixture(make_engine(name, dtype, tmp_path))
        jobs = [start(mixture.engine, kind) for kind in TRAINED]
        before = {kind: trained(mixture.engine, kind) for kind in TRAINED}
        mixture.run(list(alone), jobs)
        errors = mixture.errors(alone)
        changes, misses = {}, {}
        other = engine_of(name, dtype, vocab_size=SMALL)  # whole windows, nothing cut
        for kind in TRAINED:
            start(other, kind).result()
            changes[kind] = difference(before[kind], trained(other, kind))
            misses[kind] = difference(trained(mixture.engine, kind), trained(other, kind))
    answers = 1e-10 if exact else mixture.allowed(alone, oracles(name, dtype=dtype))
    assert errors.keys() == alone.keys() and max(errors.values()) <= answers, (errors, answers)
    assert max(misses.values()) <= (1e-10 if exact else 1e-5), misses
    assert min(changes.values()) > 1e-3, "nothing was learnt, so nothing was shown"
    assert all(job.status == "succeeded" and len(job.history) == STEPS for job in jobs)
    together = [(len(answering), len(training)) for answering, training in mixture.steps]
    assert any(answering >= 6 and training >= 2 for answering, training in together), together
    assert {job for _, training in mixture.steps for job in training} == {job.job for job in jobs}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_parts_that_meet_at_the_same_linears(name: str, tmp_path: Path) -> None:
    """IA3 and LoRA as one adapter, window by window, against plain torch."""
    with Exact():
        plain = with_ia3_and_lora(name, torch.float64)
        plain.save_pretrained(tmp_path)
        errors = windowed_errors(case_of(name, plain, tmp_path, plain.trainable))
    assert max(errors.values()) <= 1e-10, errors


def test_in_the_deterministic_mode_bits_are_the_same(tmp_path: Path) -> None:
    """Alone or among all others: log-probabilities, and trained weights. Qwen 3 has norms over heads."""
    config = EngineConfig(
        deterministic=True,
        calibrate=False,
        cache_tokens=2048,
        page_size=4,
        scheduler={"slowdown": None, "quantum_with_inference": 9.0},
    )
    oracles("qwen3", tmp_path)
    made = []
    for _ in range(2):
        engine = Engine(tiny("qwen3", torch.bfloat16, vocab_size=SMALL), config)
        for adapter in sorted(tmp_path.iterdir()):
            engine.adapters.load(adapter.name, adapter)
        made.append(engine)
    mixture = Mixture(made[0])
    kinds = [None, *(folder.name for folder in tmp_path.iterdir())]
    mixture.run(kinds, [start(made[0], kind) for kind in TRAINED])
    for kind, answer in mixture.answers[: 2 * len(kinds)]:
        again = made[1].generate(answer.sequence.request.prompt, kind, SAMPLING)
        made[1].run()
        assert again.tokens == answer.tokens and again.logprobs == answer.logprobs, kind
        assert again.prompt_logprobs == answer.prompt_logprobs, kind
    for kind in TRAINED:
        start(made[1], kind).result()
        assert difference(trained(made[0], kind), trained(made[1], kind)) == 0.0, kind


@dataclass(frozen=True)
class Alone:
    """Oracles in float64 and in float32, and where their adapters are."""

    exact: dict[str | None, Logits]
    single: dict[str | None, Logits]
    folder: Path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("llama")
    return Alone(oracles("llama", folder), oracles("llama", dtype=torch.float32), folder)


def test_numbers_that_are_none_harm_their_own_adapter_only(llama: Alone) -> None:
    """A broken adapter of each method answers and trains among the others, and is all NaN."""
    alone = llama.exact
    mixture = Mixture(make_engine("llama", torch.float32, llama.folder))
    engine = mixture.engine
    broken = []
    for kind in alone:
        if kind is not None:
            adapter = engine.adapters.weights(kind)
            spoilt = {name: torch.full_like(t, torch.nan) for name, t in adapter.parameters().items()}
            engine.adapters.add(replace(adapter.with_parameters(spoilt), name=f"broken {kind}"))
            broken.append(f"broken {kind}")
    jobs = {name: start(engine, name, start_from=name) for name in broken}
    healthy = start(engine, "bitfit")
    mixture.run([*broken, *alone], [*jobs.values(), healthy])
    errors = mixture.errors(alone)
    assert errors.keys() == alone.keys()
    assert max(errors.values()) <= mixture.allowed(alone, llama.single), errors
    for kind, answer in mixture.answers:
        scores = torch.tensor([score.chosen for score in answer.logprobs])
        assert bool(scores.isnan().all()) == (kind in broken), kind
    assert {job.status for job in jobs.values()} == {"failed"} and healthy.status == "succeeded"


def swapped_rows(patch: pytest.MonkeyPatch) -> None:
    """Each adapter of a run is given the rows of another."""
    real = inference.adapter_ranges

    def swapping(*given: Any) -> list[tuple[slice, Bypasses]]:
        found = real(*given)
        others = [bypasses for _, bypasses in found]
        others = [*others[1:], *others[:1]]
        return [(rows, other) for (rows, _), other in zip(found, others, strict=True)]

    for module in (fused_pass, sampler):
        patch.setattr(module, "adapter_ranges", swapping)


def missing_lora_scale(patch: pytest.MonkeyPatch) -> None:
    """One by one, and together."""

    added = LoRABypass.add_
    patch.setattr(LoRABypass, "add_", lambda self, x, y: added(replace(self, scale=1.0), x, y))
    patch.setattr(lora_batch, "LoraSegment", lambda *given: replace(LoraSegment(*given), scale=1.0))


def missing_ia3_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IA3Bypass, "add_", lambda self, x, y: None)


def dropped_offset(patch: pytest.MonkeyPatch) -> None:
    """Tokens of a prompt stand at the positions that they would have without the adapter's virtual ones."""
    batch = SequenceTable.batch
    embed = FusedPass._embed
    offsets: list[int] = []

    def noting(self: SequenceTable, segments: list[InferenceSegment], num_decodes: int) -> Any:
        chunks = segments[num_decodes:]
        offsets[:] = [0] * num_decodes + [s.context - s.start for s in chunks for _ in range(s.length)]
        return batch(self, segments, num_decodes)

    def from_zero(self: FusedPass, tokens: Tensor, positions: Tensor, adapters: Any) -> Any:
        if offsets:  # else an adapter's prompt fills its pages
            positions = positions - torch.tensor(offsets)
            offsets.clear()
        return embed(self, tokens, positions, adapters)

    patch.setattr(SequenceTable, "batch", noting)
    patch.setattr(FusedPass, "_embed", from_zero)


LORAS, SCALES = {"lora", "larger lora", "ia3 and lora"}, {"ia3", "ia3 and lora"}


@pytest.mark.local
@pytest.mark.parametrize(
    ("fault", "harmed"),
    [
        (swapped_rows, None),  # all adapters
        (missing_lora_scale, LORAS),
        (missing_ia3_scale, SCALES),
        (dropped_offset, set(VIRTUAL)),
    ],
)
def test_faults_are_seen(
    fault: Any, harmed: set[str] | None, llama: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison fails for those that the fault harms, by far, and for nobody else."""
    alone = llama.exact
    mixture = Mixture(make_engine("llama", torch.float32, llama.folder))
    fault(monkeypatch)
    mixture.run(list(alone))
    errors = mixture.errors(alone)
    expected = {kind for kind in alone if kind is not None} if harmed is None else harmed
    allowed = mixture.allowed(alone, llama.single)
    assert {kind for kind, error in errors.items() if error > allowed} == expected, (errors, allowed)
    assert min(errors[kind] for kind in expected) > 100 * allowed
