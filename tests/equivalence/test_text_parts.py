"""The text part of a multimodal checkpoint against transformers' whole model, and PEFT's on that."""

import ctypes
import json
import mmap
import random
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from bases import check_scored
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.merge import merge_adapter
from coserve.errors import AdapterMismatch
from coserve.streamed.files import WeightFile
from coserve.streamed.load import load_streamed
from coserve.train.example import Example
from coserve_benchmarks.models import shrunk
from models import edit_config, linear_paths, logits_of, prompts, save, with_lora

NAMES = (
    "gemma3", "gemma4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llama4", "phi4_multimodal",
    "internvl", "lfm2_vl", "llava_next", "kimi_k25", "qwen3_5",
)  # fmt: skip
TOLERANCE = 1e-5  # of log-probabilities in float32, of the largest logit
ANSWER = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=3)
ROWS = (9, 30, 4)


def engine(model: object, **settings: Any) -> Engine:
    return Engine(model, EngineConfig(calibrate=False, cache_tokens=512, page_size=4, **settings))


def check(oracle: Any, served: Engine, name: str, adapter: str | None = None) -> None:
    """Answers side by side are scored as the oracle scores each alone."""
    asked = prompts(random.Random(name), ROWS)
    given = [served.generate(prompt, adapter, ANSWER) for prompt in asked]
    served.run()
    for prompt, answer in zip(asked, given, strict=True):
        logits = logits_of(oracle, [*prompt, *answer.tokens[:-1]])
        check_scored(logits, prompt, answer, TOLERANCE * float(logits.abs().max()))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_text_part_answers_as_the_whole_model(name: str) -> None:
    whole = shrunk.build(name)
    served = engine(shrunk.build(name), scheduler={"max_prefill_rows": 16})
    assert served.base.parameters < whole.num_parameters()  # towers are gone
    check(whole, served, name)


def alone(whole: PreTrainedModel) -> PreTrainedModel:
    """The language model of a whole gemma3, as transformers has it for text alone."""
    text = AutoModelForCausalLM.from_config(whole.config.get_text_config()).float().eval()
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.tie_weights()
    return text


def text_linears(model: PreTrainedModel) -> list[str]:
    return [path for path in linear_paths(model) if "vision" not in path]


PATTERNS = {
    "endings": {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {r"layers\.2\..*": 9}},
    "paths": {
        "rank_pattern": {r"^DECODER\.layers\.1\.self_attn\.v_proj$": 2},
        "alpha_pattern": {r"DECODER\.layers\.[02]\.mlp\.up_proj": 3},
        "exclude_modules": r"DECODER\.layers\.0\.mlp\..*",
    },
    "expression": {"target_modules": r"DECODER\.layers\.[13]\.(self_attn|mlp)\.[a-z]*_proj"},
    "layers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 2]},
    "saved": {"target_modules": ["DECODER.layers.0.mlp.up_proj"], "modules_to_save": ["DECODER.norm"]},
}


def spelled(fields: dict[str, Any], decoder: str) -> dict[str, Any]:
    return json.loads(json.dumps(fields).replace("DECODER", decoder))


def test_adapters_load_by_either_spelling_and_are_saved_for_the_whole_model(tmp_path: Path) -> None:
    """One adapter is written by PEFT on the whole model, the same one by PEFT on its language model alone."""
    served = engine(shrunk.build("gemma3"))
    for number, (case, fields) in enumerate(PATTERNS.items()):
        for decoder, model in (
            ("model.language_model", shrunk.build("gemma3")),
            ("model", alone(shrunk.build("gemma3"))),
        ):
            own = spelled({"target_modules": text_linears(model), **fields}, decoder)
            if decoder == "model.language_model" and own["target_modules"] == ["q_proj", "down_proj"]:
                own["exclude_modules"] = ".*vision_tower.*"
            tuned = with_lora(model, number, **own)
            folder = tmp_path / case / decoder
            tuned.save_pretrained(str(folder))
            served.adapters.register(f"{case} {decoder}", folder)
            check(tuned, served, case, f"{case} {decoder}")
        written = tmp_path / case / "written"
        served.adapters.save(f"{case} model", written)
        beside = PeftModel.from_pretrained(shrunk.build("gemma3"), str(written)).eval()
        check(beside, served, case, f"{case} model")


def test_a_whole_models_adapter_loads_beside_the_language_model_alone(tmp_path: Path) -> None:
    whole = shrunk.build("gemma3")
    tuned = with_lora(whole, 7, target_modules=text_linears(whole))
    tuned.save_pretrained(str(tmp_path / "a"))
    served = engine(alone(shrunk.build("gemma3")))
    served.adapters.register("a", tmp_path / "a")
    check(tuned, served, "alone", "a")
    # Merged into the whole model, whose towers stay.
    save(shrunk.build("gemma3"), tmp_path / "whole")
    merged = AutoModelForImageTextToText.from_pretrained(
        merge_adapter(tmp_path / "whole", tmp_path / "a", tmp_path / "merged")
    )
    assert merged.num_parameters() == shrunk.build("gemma3").num_parameters()
    check(merged.eval(), served, "merged", "a")


def test_what_is_trained_loads_in_peft_on_the_whole_model(tmp_path: Path) -> None:
    served = engine(shrunk.build("llama4"))
    draws = random.Random(3)
    data = [Example(tuple(one[:-1]), tuple(one[1:])) for one in prompts(draws, (9, 12, 20))]
    served.finetune(data, "tuned", LoRAConfig(4), TrainingConfig(epochs=2, learning_rate=1e-2)).result()
    served.adapters.save("tuned", tmp_path)
    oracle = PeftModel.from_pretrained(shrunk.build("llama4"), str(tmp_path)).eval()
    check(oracle, served, "trained", "tuned")


def test_names_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    """Of a tower for images, and one tensor by two names."""
    whole = shrunk.build("gemma3")
    towers = [path for path in linear_paths(whole) if "vision" in path and path.endswith("q_proj")]
    with_lora(whole, 7, target_modules=[*towers, *text_linears(whole)[:1]]).save_pretrained(str(tmp_path))
    served = engine(shrunk.build("gemma3"))
    with pytest.raises(AdapterMismatch, match=r"vision_tower.*would go unused"):
        served.adapters.register("a", tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: one for name, one in load_file(file).items() if "vision" not in name}
    twice = {name.replace(".language_model", ""): one.clone() for name, one in tensors.items()}
    save_file({**tensors, **twice}, file)
    edit_config(tmp_path, target_modules=["layers.0.self_attn.q_proj"])
    with pytest.raises(AdapterMismatch):
        served.adapters.register("b", tmp_path)
    beside = engine(alone(shrunk.build("gemma3")))
    with pytest.raises(AdapterMismatch, match="is there twice"):
        beside.adapters.register("b", tmp_path)


WIDE_TOWER = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 16_384,
    "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip


def in_memory(file: Path) -> int:
    """Bytes of a file that the page cache holds."""
    size = file.stat().st_size
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        place = ctypes.c_void_p(ctypes.addressof(first))
        del first
        assert not ctypes.CDLL(None, use_errno=True).mincore(place, ctypes.c_size_t(size), pages)
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def write_hollow(model: PreTrainedModel, folder: Path) -> Path:
    """Saves a model with its tower's tensors in a file of their own, whose numbers are a hole that nobody
    ever wrote or read; returns that file."""
    save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places, header, end = {}, {}, 0
    for name, one in tensors.items():
        if "vision" in name:
            header[name] = {"dtype": "F32", "shape": [*one.shape], "data_offsets": [end, end + one.nbytes]}
            end += one.nbytes
        places[name] = "tower.safetensors" if "vision" in name else "text.safetensors"
    save_file(
        {n: t for n, t in tensors.items() if n not in header}, folder / "text.safetensors", {"format": "pt"}
    )
    written = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    tower = folder / "tower.safetensors"
    tower.write_bytes(len(written).to_bytes(8, "little") + written)
    with tower.open("r+b") as file:
        file.truncate(8 + len(written) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tower


def test_weights_of_towers_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower of 8 MiB in a hole of its file: what is read of it stays in memory, some 128 KiB behind its
    header. Streaming reads by calls, and leaves nothing there."""
    whole = shrunk.build("llava", most=10_000_000, vision_config=WIDE_TOWER)
    tower = write_hollow(whole, tmp_path)
    assert tower.stat().st_size > 8 << 20 and in_memory(tower) < 1 << 20
    served = engine(tmp_path)
    assert in_memory(tower) < 1 << 20
    check(whole, served, "llava")
    read: set[str] = set()
    own = WeightFile.read

    def noted(file: WeightFile, start: int, into: Any) -> None:
        read.add("scratch" if file.path is None else file.path.name)
        own(file, start, into)

    monkeypatch.setattr(WeightFile, "read", noted)
    streamed, _ = load_streamed(tmp_path, 700_000)
    assert "tower.safetensors" not in read and "text.safetensors" in read and in_memory(tower) < 1 << 20
    assert streamed.fingerprint == served.base.fingerprint
