"""An engine whose frozen linears a base executor computes: the same answers and the same training."""

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, SavePolicy, TrainingConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.errors import AdapterMismatch, ConfigError, ModelError, NotOffered, Unreachable
from coserve.model.load import load_base
from coserve.model.probe import ProbeRows, drive
from coserve.split.load import load_remote
from coserve.streamed.load import load_streamed
from coserve.train.example import Example
from methods import SMALL
from mixed import SAMPLING, everything
from models import save, tiny
from split_served import differences, serving, spans_of

TOLERANCE = 1e-5  # float32: products of other numbers of rows round differently
# One step of AdamW that moves each number by its gradient, but for a thousandth of its square.
GRADIENTS = TrainingConfig(
    learning_rate=1e3, epsilon=1e3, batch_size=2, max_steps=1, warmup_ratio=0.0, rows=48, weight_decay=0.0
)
CONFIG = EngineConfig(calibrate=False, cache_tokens=2048, page_size=4)
SCALED = {"gpt2": ("c_attn", "mlp.c_proj"), "mixtral": ("q_proj",)}


def settings(name: str) -> dict[str, object]:
    scaled = SCALED.get(name, ("k_proj", "gate_proj"))
    return {
        "lora": LoRAConfig(rank=4),
        "ia3": IA3Config(targets=scaled, feedforward=scaled[-1:]),
        "prefix": PrefixTuningConfig(5),
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("llama", SavePolicy.PRUNED),
        ("gpt2", SavePolicy.PRUNED),
        ("gemma2", SavePolicy.EVERYTHING),
        ("mixtral", SavePolicy.INPUTS),
    ],
)
def test_answers_and_gradients_are_those_of_a_local_engine(
    name: str, keep: SavePolicy, tmp_path: Path
) -> None:
    """LoRA, IA3 and a prefix train at once beside answers, and answer afterwards."""
    training = replace(GRADIENTS, keep=keep)
    wanted = everything(Engine(tiny(name, vocab_size=SMALL), CONFIG), settings(name), training)
    with serving(tiny(name, vocab_size=SMALL), tmp_path) as served:
        engine = Engine(tiny(name, vocab_size=SMALL), replace(CONFIG, base=served.address))
        served.calls.clear()
        found = everything(engine, settings(name), training)
        assert {direction for direction, _ in served.calls} == {"forward", "backward"}
    apart = differences(found, wanted)
    assert len(apart) > 20 and max(apart.values()) <= TOLERANCE, max(apart.items(), key=lambda one: one[1])
    assert any(float(x.abs().max()) > 100 * TOLERANCE for key, x in wanted.items() if "lora_B" in key)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_training_asks_for_nothing_twice(name: str, tmp_path: Path) -> None:
    """One call a group forward, and one back where an input has a gradient; classes of work are told."""
    example = Example(tuple(range(1, 13)), tuple(range(2, 14)))
    method = LoRAConfig(rank=2, targets=("q_proj", "v_proj", "o_proj"))
    with serving(tiny(name), tmp_path) as served:
        engine = Engine(tiny(name), replace(CONFIG, base=served.address))
        job = engine.finetune([example], "mine", method, TrainingConfig(max_steps=1, batch_size=1))
        served.calls.clear(), served.work.clear()
        job.result()
        forward = Counter(paths for direction, paths in served.calls if direction == "forward")
        backward = Counter(paths for direction, paths in served.calls if direction == "backward")
        assert served.work.keys() == {"training"}
        engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=2, ignore_eos=True)).result()
        spans = spans_of(served.linears.hello, "module")
        within = {path for span in spans for path in span.linears}
        beside = [paths for paths in forward if paths[0] not in within]
        assert served.work["inference"] == 2 * (len(beside) + len(spans))
    groups = {tuple(group.outputs) for group in served.linears.hello.groups}
    assert set(forward) == groups and set(forward.values()) == {1}
    # Nothing below asks for the gradient of the first layer's input.
    assert set(backward) == {
        group for group in groups if not group[0].startswith("model.layers.0.self_attn.q")
    }
    assert set(backward.values()) == {1}
    assert max(map(len, groups)) == 3


def test_a_base_is_the_same_wherever_its_linears_are(tmp_path: Path) -> None:
    """Its fingerprint tells other weights apart, remote ones and those that are here."""
    folder = save(tiny("llama"), tmp_path / "model")
    whole = load_base(folder)
    streamed, _ = load_streamed(folder, whole.nbytes * 9 // 10)
    with serving(tiny("llama"), tmp_path) as served:
        remote = load_remote(folder, served.address)
        assert whole.fingerprint == streamed.fingerprint == remote.fingerprint
        assert remote.parameters == whole.parameters and remote.nbytes < whole.nbytes / 8
        here = tiny("llama")
        here.model.norm.weight.data[0] += 1
        for module in here.modules():  # what a model has that was made on the meta device
            if isinstance(module, torch.nn.Linear):
                module.to("meta")
        other = load_remote(here, served.address).fingerprint
    there = tiny("llama")
    there.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    with serving(there, tmp_path) as served:
        assert len({whole.fingerprint, other, load_remote(folder, served.address).fingerprint}) == 3


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_of_remote_linears_are_not_read(name: str, tmp_path: Path) -> None:
    """They need not even be in the files. GPT-2's head shares the embedding's weight, and stays here."""
    folder = save(tiny(name), tmp_path / "model")
    wanted = Engine(folder, CONFIG).generate([1, 5, 9], sampling=SAMPLING).result()
    file = folder / "model.safetensors"
    with serving(tiny(name), tmp_path) as served:
        inside = [path for group in served.linears.hello.groups for path in group.outputs]
        tails = tuple(f"{path.removeprefix('transformer.')}." for path in inside)
        kept = {
            key: x
            for key, x in load_file(file).items()
            if not key.removeprefix("transformer.").startswith(tails)
        }
        save_file(kept, file, {"format": "pt"})
        with pytest.raises(ModelError, match="lacks"):
            load_base(folder)
        engine = Engine(folder, replace(CONFIG, base=served.address))
        served.calls.clear()
        found = engine.generate([1, 5, 9], sampling=SAMPLING).result()
        of_spans = {span.path: span.linears for span in served.linears.hello.spans}
        asked = {path for _, paths in served.calls for one in paths for path in of_spans.get(one, (one,))}
        assert ("lm_head" in asked) == (name == "llama") and len(asked) >= len(inside) - 1
    assert found.tokens == wanted.tokens
    assert [x.chosen for x in found.logprobs] == pytest.approx(
        [x.chosen for x in wanted.logprobs], abs=TOLERANCE
    )


def test_layers_on_several_executors_and_here(tmp_path: Path) -> None:
    """Each group is asked where it is; what nobody has is computed here, and must be in the files."""
    folder = save(tiny("llama"), tmp_path / "model")
    method, example = LoRAConfig(rank=4), Example(tuple(range(1, 13)), tuple(range(2, 14)))
    parts, found = [], []
    with (
        serving(tiny("llama"), tmp_path / "model", offers=lambda path: ".layers.0." in path) as one,
        serving(tiny("llama"), tmp_path, offers=lambda path: ".layers.2." in path) as two,
    ):
        for config in (CONFIG, replace(CONFIG, base=f"{one.address}, {two.address}")):
            engine = Engine(folder, config)
            engine.finetune([example], "mine", method, replace(GRADIENTS, batch_size=1)).result()
            answer = engine.generate([1, 5, 9], "mine", SAMPLING).result()
            found.append(
                engine.adapters.weights("mine").parameters()
                | {"answer": torch.tensor([x.chosen for x in answer.logprobs])}
            )
        for served, layer in ((one, 0), (two, 2)):
            asked = {path for _, paths in served.calls for path in paths}
            wanted = {p for group in served.linears.hello.groups for p in group.outputs}
            assert asked == wanted | {span.path for span in spans_of(served.linears.hello, "module")}
            assert {path.split(".")[2] for path in asked} == {str(layer)}
        elsewhere = {p for p, own in engine.base.linears.items() if own.placement.is_elsewhere}
        assert {path.split(".")[2] for path in elsewhere} == {"0", "2"}
        parts = [one.address, two.address]
        assert max(differences(*found).values()) <= TOLERANCE
        file = folder / "model.safetensors"
        save_file(
            {k: x for k, x in load_file(file).items() if "layers.1.mlp.up" not in k}, file, {"format": "pt"}
        )
        with pytest.raises(
            ModelError, match=r"lacks 1 of the model's tensors, such as 'model.layers.1.mlp.up"
        ):
            load_remote(folder, ",".join(parts))


def test_what_needs_weights_is_refused_by_name(tmp_path: Path) -> None:
    with serving(tiny("llama"), tmp_path) as served:
        engine = Engine(tiny("llama"), replace(CONFIG, base=served.address))
        examples = [Example((1, 2, 3), (2, 3, -100))]
        for method in (LoRAConfig(dora=True), LoRAConfig(modules_to_save=("up_proj",))):
            with pytest.raises(NotOffered, match=r"proj is computed by a (Remote|Shaped)Placement"):
                engine.finetune(examples, "mine", method, TrainingConfig(max_steps=1))
        engine.finetune(examples, "mine", LoRAConfig(), TrainingConfig(max_steps=1)).result()


def test_adapters_move_between_local_and_remote_bases(tmp_path: Path) -> None:
    folder, example = (
        save(tiny("llama"), tmp_path / "model"),
        Example(tuple(range(1, 13)), tuple(range(2, 14))),
    )
    with serving(tiny("llama"), tmp_path) as served:
        engines = [Engine(folder, CONFIG), Engine(folder, replace(CONFIG, base=served.address))]
        for number, engine in enumerate(engines):
            engine.finetune([example], "own", LoRAConfig(rank=2), replace(GRADIENTS, seed=number)).result()
            engine.adapters.save("own", tmp_path / str(number))
        for number in range(2):
            answers = []
            for engine in engines:
                engine.adapters.load("both", tmp_path / str(number))
                answers.append(engine.generate([1, 5, 9], "both", SAMPLING).result())
            own, other = ([x.chosen for x in answer.logprobs] for answer in answers)
            assert own == pytest.approx(other, abs=TOLERANCE)


def test_half_precision(tmp_path: Path) -> None:
    """Norms and other modules that stay here have native kernels where there are any."""
    ids = torch.arange(1, 9)
    with serving(tiny("gemma2", torch.bfloat16), tmp_path) as served:
        bases = [
            load_base(tiny("gemma2", torch.bfloat16)),
            load_remote(tiny("gemma2", torch.bfloat16), served.address),
        ]
        local, remote = (drive(base, [ProbeRows(8)], ids, ids - 1).float() for base in bases)
    assert bases[0].fingerprint == bases[1].fingerprint
    assert float((local - remote).norm() / local.norm()) < 6e-2


def test_what_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for wrong in (
        {"quantize": "8bit"},
        {"base_memory": "1GiB"},
        {"deterministic": True},
        {"base_patience": -1.0},
    ):
        with pytest.raises(ConfigError, match=f"engine.{next(iter(wrong))} "):
            EngineConfig(base="unix:/nowhere", **wrong)  # type: ignore[arg-type]
    with pytest.raises(Unreachable, match="no executor answers at unix:/nowhere"):
        load_remote(tiny("llama"), "unix:/nowhere")
    with serving(tiny("llama"), tmp_path) as served:
        with pytest.raises(
            ConfigError, match=r"engine.dtype is bfloat16, and the linears of engine.base are float32"
        ):
            load_remote(tiny("llama"), served.address, dtype=torch.bfloat16)
        with pytest.raises(AdapterMismatch, match=r"mlp.gate_proj of .* is 96x64, the model's is 80x64"):
            load_remote(tiny("llama", intermediate_size=80), served.address)
        with pytest.raises(AdapterMismatch, match=r"of the executor at unix:.* is no linear of gpt2"):
            load_remote(tiny("gpt2"), served.address)
        other = tiny("llama")
        other.model.layers[1].self_attn.o_proj.weight.data[0, 0] += 1
        with pytest.raises(
            AdapterMismatch,
            match=r"at unix:.* other weights, of 22 \(model.layers.1.self_attn.o_proj\)",
        ):
            load_remote(other, served.address)
        with pytest.raises(Unreachable):
            load_remote(tiny("llama"), f"{served.address},unix:/nowhere")
        deadline = time.monotonic() + 10
        while served.service.clients and time.monotonic() < deadline:
            time.sleep(0.01)
        assert served.service.clients == 0  # who was refused has left
