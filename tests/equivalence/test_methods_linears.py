"""PEFT's methods beside linears and in the embedding, all by one contract, against PEFT, one adapter at a
time: what is served alone and in one batch with all others, gradients, files both ways, merged weights,
bytes, and what is trained here. A new method adds a line to `peft_methods.THEIRS` and one to `OURS`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.c3a import layer as c3a
from peft.tuners.c3a.utils import get_circulant_fast
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from coserve import Engine, SamplingParams, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.elsewhere import check_peft
from coserve.adapters.files import read_adapter, read_outline
from coserve.adapters.merge import merge_adapter
from coserve.adapters.methods import method_of, methods, readers
from coserve.adapters.settings import settings_of
from coserve.errors import AdapterError
from coserve.model import native_layer
from coserve.train.needs import _adapter_bytes, bypass_bytes
from methods import SMALL, case_of, engine_of, served, windowed_errors, with_peft
from mixed import make_examples
from models import Exact, logits_of, save, tiny
from peft_methods import ALL, BOTH, THEIRS, TOKENS
from rounding import allowed, both_ways, error

LAYERS: dict[str, Any] = {"num_hidden_layers": 2}
WHOLE = ("norm", "layers.0.self_attn.o_proj")  # train whole beside these
WITH_WHOLE = ("lokr",)
# Settings of jobs here, in coserve's words and PEFT's.
OURS: Mapping[str, dict[str, Any]] = {
    "lokr": {"r": 3, "alpha": 5, "targets": ALL, "alpha_pattern": {"k_proj": 2}},
    "loha": {"rank": 2},
    "vera": {"r": 7, "vera_dropout": 0.1},
    "oft": {"block_size": 4, "modules_to_save": ["norm"]},
    "miss": {"r": 8, "miss_dropout": 0.1, "target_modules": BOTH},
    "randlora": {"r": 12, "projection_prng_key": 5},
    "hra": {"r": 2},
    "shira": {"r": 1},
    "fourierft": {"n_frequency": 30, "scaling": 900},
    "vblora": {"num_vectors": 8, "vector_length": 16, "vblora_dropout": 0.2},
    "c3a": {"block_size": 16},
    "road": {"group_size": 16, "variant": "road_2"},
    "trainable_tokens": {"token_indices": TOKENS},
}
AS_LORA = ("adalora", "vblora, chosen")  # that are read as LoRA, and written so
TURNED = ("vera", "randlora", "fourierft", "vblora", "adalora")  # that PEFT has beside GPT-2's linears
CHANGING = ("vblora",)  # fresh ones that change answers, as PEFT's do
FLOAT32 = ("fourierft",)  # PEFT transforms in float32 whatever the model's type is
COPIED = ("randlora_A", "randlora_B")  # that PEFT writes once more for each linear
PROMPT = [5, 9, 2, 14, 3, 3, 18, 7, 0]
ANSWER = SamplingParams(max_tokens=3, prompt_logprobs=SMALL, logprobs=SMALL, ignore_eos=True)


def fields_of(case: str) -> dict[str, Any]:
    """The fields of a case's model that differ from the usual."""
    return {**LAYERS, "tie_word_embeddings": "tied" in case}


def adapted(case: str, dtype: torch.dtype, name: str = "llama", **changes: Any) -> PeftModel:
    """PEFT's model with random weights. Of AdaLoRA some ranks are gone, of one linear all."""
    kind, fields = THEIRS[case]
    if case in WITH_WHOLE:
        fields = {**fields, "modules_to_save": list(WHOLE)}
    if name == "gpt2":
        fields = {**fields, "target_modules": ["c_attn", "mlp.c_proj"]}
    model = with_peft(name, kind(task_type="CAUSAL_LM", **fields), dtype, **{**fields_of(case), **changes})
    if case == "adalora":
        _prune(model)
    return model.to(dtype)


@torch.no_grad()
def _prune(model: PeftModel) -> None:
    pattern = {}
    for number, (name, e) in enumerate((n, p) for n, p in model.named_parameters() if ".lora_E." in n):
        kept = [place % 3 != number % 3 and number != 2 for place in range(len(e))]
        e.mul_(torch.tensor(kept, dtype=e.dtype)[:, None])
        pattern[name.removeprefix("base_model.model.").removesuffix(".default")] = kept
    model.peft_config["default"].rank_pattern = pattern


def test_every_method_of_these_is_here() -> None:
    tested = {case.partition(",")[0] for case in THEIRS}
    elsewhere = {
        "lora",
        "ia3",
        "ln_tuning",
        "bitfit",
        "bottleneck",
        "prefix_tuning",
        "prompt_tuning",
        "p_tuning",
    }
    turned = {n for n, method in methods().items() if getattr(method, "transposed", False)}
    assert turned == set(TURNED) - {"adalora"}
    assert tested - {"adalora", "lora"} == set(OURS) == set(methods()) - elsewhere
    assert set(readers()) - {method.peft_type for method in methods().values()} == {"ADALORA"}


def exact(case: str, found: Tensor, oracle: PeftModel, answer: Callable[[Any], Tensor]) -> bool:
    """Tells whether answers are the oracle's, but for what rounding allows."""
    if case in FLOAT32:
        return error(found, answer(oracle).double()) <= 1e-5
    single, wanted = both_ways(oracle, answer)
    return error(found, wanted) <= allowed(single, wanted)


def logprobs(model: Any, prompt: Sequence[int] = PROMPT) -> Tensor:
    """Of all tokens after each of the prompt's but the last."""
    return logits_of(model, prompt)[:-1].log_softmax(-1)


@pytest.mark.parametrize(
    ("case", "name"), [*((case, "llama") for case in THEIRS), *((case, "gpt2") for case in TURNED)]
)
def test_served_saved_and_merged(case: str, name: str, tmp_path: Path) -> None:
    """PEFT's answers from its files, from those that coserve writes of them, and from a merged model."""
    fields = {**fields_of(case), "vocab_size": SMALL}
    theirs = adapted(case, torch.float32, name, vocab_size=SMALL)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    engine = engine_of(name, **fields)
    engine.adapters.load("mine", tmp_path / "theirs")
    mine = served(engine, PROMPT, "mine")
    assert exact(case, mine, theirs, logprobs)
    assert error(mine, served(engine, PROMPT, None).double()) > 1e-2
    engine.adapters.save("mine", tmp_path / "mine")
    if case not in AS_LORA:
        before, after = (
            load_file(tmp_path / who / "adapter_model.safetensors") for who in ("theirs", "mine")
        )
        copies = {n for n in before if n.startswith("base_model.model.") and n.endswith(COPIED)}
        assert before.keys() - copies == after.keys()
        assert all(torch.equal(before[n].to(after[n].dtype), after[n]) for n in after)
    again = PeftModel.from_pretrained(tiny(name, **fields), str(tmp_path / "mine")).eval()
    assert error(logprobs(again), logprobs(theirs).double()) <= 1e-5
    report = check_peft(tmp_path / "mine", tiny(name, **fields))
    assert not report.problems, report
    base = save(tiny(name, **fields), tmp_path / "base")
    if "tied" in case:
        with pytest.raises(AdapterError, match="shares its weight"):
            merge_adapter(base, tmp_path / "theirs", tmp_path / "out")
        return
    merged = AutoModelForCausalLM.from_pretrained(merge_adapter(base, tmp_path / "mine", tmp_path / "out"))
    assert exact(case, logprobs(merged.eval()), theirs, logprobs)


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", [case for case in THEIRS if case not in AS_LORA])
def test_gradients(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of windows that are cut and kept in every way. In float64, as PEFT's, where PEFT computes in it. (The
    gradient that PEFT 0.21.2 gives C3A's input is that of another product: its own matrix is the oracle.)
    """
    monkeypatch.setattr(c3a.BlockCircularConvolution, "apply", lambda x, w: x @ get_circulant_fast(w).t())
    if case in FLOAT32:
        oracle = adapted(case, torch.float32)
        made = case_of("llama", oracle, tmp_path, dtype=torch.float32, **fields_of(case))
        errors = windowed_errors(made)
        assert max(errors.values()) <= 1e-5, errors
        return
    with Exact():
        made = case_of("llama", adapted(case, torch.float64), tmp_path, **fields_of(case))
        errors = windowed_errors(made)
    assert max(errors.values()) <= 1e-10, errors


def test_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All adapters answer beside each other and the base, in the same steps. The base's rows are to the bit
    what they are where all rows are the base's, by the same modules: kernels of whole layers, which round
    otherwise, read none of these bypasses, and a linear that is replaced has fewer rows of the base."""
    monkeypatch.setattr(native_layer, "are_few", lambda *_: False)
    cases = [case for case in THEIRS if "tied" not in case and case not in WITH_WHOLE]
    oracles = {case: adapted(case, torch.float32, vocab_size=SMALL) for case in cases}
    config = {"cache_tokens": 4096}
    engine = engine_of("llama", config=config, vocab_size=SMALL, **LAYERS)
    for number, (case, oracle) in enumerate(oracles.items()):
        oracle.save_pretrained(str(tmp_path / str(number)))
        engine.adapters.load(case, tmp_path / str(number))

    names = [None, *cases, None]
    prompts = [
        [1 + number % 9, 1 + number // 9, *PROMPT] for number in range(len(names))
    ]  # no prefix is shared

    def answers(engine: Engine, names: list[str | None]) -> list[Tensor]:
        asked = [engine.generate(prompt, name, ANSWER) for prompt, name in zip(prompts, names, strict=True)]
        engine.run()
        assert all(len(one.tokens) == 3 for one in asked)
        return [_logprobs_of(one) for one in asked]

    found = answers(engine, names)
    for case, prompt, mine in zip(cases, prompts[1:], found[1:], strict=False):
        assert exact(case, mine, oracles[case], partial(logprobs, prompt=prompt)), case
    other = engine_of("llama", config=config, vocab_size=SMALL, **LAYERS)
    bare = answers(other, [None] * len(names))
    assert torch.equal(found[0], bare[0]) and torch.equal(found[-1], bare[-1])
    assert not torch.equal(found[1], bare[1])


def _logprobs_of(answer: Any) -> Tensor:
    found = torch.full((len(answer.prompt_logprobs), SMALL), float("nan"))
    for row, of_row in enumerate(answer.prompt_logprobs):
        for token, logprob in of_row.top:
            found[row, token] = logprob
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_here(dtype: torch.dtype, tmp_path: Path) -> None:
    """Fresh adapters of all methods, trained side by side, change nothing at first and something at last, and
    PEFT answers with their files as they are served; in bfloat16 as closely as the base answers."""
    fields = {**LAYERS, "vocab_size": SMALL}
    engine = engine_of("llama", dtype, config={"cache_tokens": 4096}, **fields)
    base = served(engine, PROMPT, None)
    rounding = error(base, logprobs(tiny("llama", **fields)).double())
    training = TrainingConfig(
        learning_rate=3e-2, batch_size=2, max_steps=4, warmup_ratio=0.0, weight_decay=0.0
    )
    jobs = {}
    for kind, own in {**OURS, "lora": {"r": 2, "trainable_token_indices": TOKENS}}.items():
        settings = settings_of({"type": kind, **own})
        jobs[kind] = engine.finetune(make_examples(kind), kind, settings, training)
        fresh = error(served(engine, PROMPT, f"{kind}@0"), base.double())
        if dtype is torch.float32:
            assert (fresh <= 1e-5) != (kind in CHANGING), (kind, fresh)
    for kind, job in jobs.items():
        job.result().save(tmp_path / kind)
        ours = served(engine, PROMPT, kind)
        assert error(ours, base.double()) > 1e-2, kind
        theirs = PeftModel.from_pretrained(tiny("llama", **fields), str(tmp_path / kind)).eval()
        if dtype is torch.float32:
            assert exact(kind, ours, theirs, logprobs), kind
        else:
            assert error(ours, logprobs(theirs).double()) <= 4 * rounding, kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    """An adapter counts as what it holds, each tensor once, whether it is read or looked at, and in a job's
    needs."""
    engine = engine_of("llama", dtype, **LAYERS)
    base = engine.base
    for kind, own in OURS.items():
        settings = settings_of({"type": kind, **own})
        engine.open_training(kind, settings).save_weights(tmp_path / kind).result()
        adapter = read_adapter(tmp_path / kind, kind, base, dtype, base.device)
        held = [t for _, bypass in adapter.placed() for t in (*bypass.parameters().values(), *bypass.fixed)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        made = sum(bypass.made for _, bypass in adapter.placed())
        assert adapter.nbytes == sum(storages.values()) + made, kind
        assert read_outline(tmp_path / kind, kind, base, dtype).nbytes == adapter.nbytes, kind
        assert _adapter_bytes(adapter, dtype)[1] == adapter.nbytes, kind


def test_bytes_of_rows_on_their_way_back() -> None:
    """Counted by the program itself without data, on top of a job's other needs."""
    engine = engine_of("llama", **LAYERS)
    of_rows = {
        kind: [
            bypass_bytes(engine.base, AdapterVersion(kind, 0, (part,)), rows)
            for rows in (64, 128)
            for part in [method_of(one).fresh(one, engine.base, torch.Generator())]
        ]
        for kind, own in {**OURS, "lora": {}}.items()
        for one in settings_of({"type": kind, **own})
    }
    assert of_rows["lora"] == of_rows["trainable_tokens"] == [0, 0]
    for kind in OURS.keys() - {"trainable_tokens"}:
        fewer, more = of_rows[kind]
        assert fewer >= 64 * 64 * 4 and 1.5 * fewer < more <= 2 * fewer, (kind, fewer, more)
