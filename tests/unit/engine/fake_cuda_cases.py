"""Run by `test_fake_cuda.py`: engines on a GPU that is not there answer and train; all tensors of a step are
on one device, and the host waits for it no oftener than it must."""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, SavePolicy, TrainingConfig
from coserve.core.plan import BasePlan
from coserve.kernels.triton import is_installed
from coserve.model.base import Base
from coserve.streamed.copier import Copier, PinnedBuffer
from coserve.streamed.files import WeightFile
from coserve.streamed.planner import RING, Streaming
from coserve.streamed.ring import Ring, Streamed
from coserve.streamed.shapes import stream_shapes
from coserve.streamed.stored import ALIGNED, Read, StoredBlock, tensors_of
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from coserve.worker import cuda_graphs, training_graphs
from coserve.worker.cuda_graphs import rerun
from coserve.worker.fused_pass import FusedPass
from coserve_benchmarks.plans import watch_plans
from fake_cuda import DEVICE, GPU, HostThread, Waits, install, on_fake_cuda, stub_triton
from mixed import TRAINED
from models import ARCHITECTURES

# The likeliest token, forced ones, and all that narrows a draw.
SAMPLINGS: Final = (
    SamplingParams(max_tokens=4, ignore_eos=True),
    SamplingParams(max_tokens=4, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=4, logit_bias={3: 2.0}, min_tokens=2, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=4, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1),
)
CASES: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {}),
    "gemma2": ("gemma2", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt2": ("gpt2", {}),
    "int8 cache": ("llama", {"cache_dtype": "int8"}),
    "8bit": ("llama", {"quantize": "8bit"}),
    "calibrated": ("llama", {"calibrate": True}),
    "spatial": ("llama", {"policy": "spatial"}),
    "streamed": ("llama", {"base_memory": "1GiB"}),
    "streamed spatial": ("llama", {"base_memory": "1GiB", "policy": "spatial"}),
}
# Of what is served and trained: low-rank bypasses of two ranks, scales, a module of two products, virtual
# tokens that are given and that are run.
ADAPTERS: Final = ("lora", "larger lora", "ia3", "bottleneck", "prefix", "prompt")
JOBS: Final = ("lora", "ia3", "prefix, bottleneck and bitfit", "prompt")
LACKING: Final = {"deepseek_v3": "prefix"}  # its keys and values have unlike widths
# Lines at which a decode step waits: for its tokens, and nowhere else.
MOST_WAITS: Final = 1


def main() -> None:
    install()
    mock.patch.object(cuda_graphs, "_WORTH", 1).start()
    mock.patch.object(FusedPass, "recorder", lambda _: rerun).start()  # there is nothing to capture
    for module in ("worker.streams", "streamed.ring", "executors.local"):  # modes are a thread's own
        mock.patch(f"coserve.{module}.ThreadPoolExecutor", HostThread).start()
    mock.patch("coserve.streamed.ring.wait", lambda reads, _: SimpleNamespace(done=reads)).start()
    mock.patch("coserve.worker.opening.stream_shapes", stream).start()
    launched: Counter[str] = Counter()
    if is_installed():
        stub_triton(launched)
    names, wanted = sys.argv[1:] or [*CASES], {"_shrink", "_expand", "_outer", "_attend"}
    # Windows of several jobs go back together where steps' seconds have it so: not in one run of six.
    for turn, name in enumerate((*names, names[0], names[0])):
        if turn >= len(names) and (wanted <= launched.keys() or not is_installed()):
            break
        kind, config = CASES[name]
        if turn == len(names):  # windows of several jobs go together where no graph has them
            mock.patch.object(training_graphs, "WORTH", sys.maxsize).start()
        started = time.process_time()
        with on_fake_cuda() as waits:
            is_streamed = "base_memory" in config
            engine = Engine(model(kind, 2 + 3 * is_streamed), EngineConfig(**{**settings(), **config}))
            assert str(engine.base.device) == DEVICE
            in_pages = is_installed() and name != "int8 cache"
            assert engine.executor.worker.attention.is_capturable is in_pages
            answers(engine, waits, LACKING.get(name, "-"))
            plans: list[BasePlan] = []
            with watch_plans(engine, plans.append):
                trains(engine, LACKING.get(name, "-"), tokens=60 if "policy" in config else 4)
            beside = sum(bool(plan.share and plan.inference and not plan.training) for plan in plans)
            assert beside > 5 or config.get("policy") != "spatial", (
                "training goes on through steps that answer"
            )
            if is_streamed:
                assert isinstance(engine.base.reader, Ring) and engine.base.reader.total.nbytes, (
                    "blocks passed"
                )
        if turn < len(names):
            print(f"{name} in {time.process_time() - started:.0f} s", flush=True)
    if is_installed():
        missing = wanted - launched.keys()
        assert not missing, f"{missing} were not launched"


def settings() -> dict[str, Any]:
    cuts = {"max_training_rows": 32, "min_training_rows": 12, "max_prefill_rows": 32, "min_prefill_rows": 4}
    cuts |= {"quantum": 1e3, "max_quantum": 1e3}  # several jobs in a step, however slow this machine is
    return {"device": DEVICE, "calibrate": False, "cache_tokens": 2048, "page_size": 4, "scheduler": cuts}


def stream(base: Base, room: int) -> Streaming:
    """Streams a base without data, of whose blocks two stay: of the others two are in the host's memory, and
    the last one is read from a file that has nothing."""
    streaming = stream_shapes(base, base.nbytes - 1)
    copier, blocks = Copier(base.device), dict[int, StoredBlock]()
    for place, block in enumerate(base.chain):
        if place in streaming.plan.resident:
            continue
        placed, end = [], 0
        for tensor in tensors_of(block):
            placed.append((tensor, end))
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        blocks[place] = StoredBlock(block, [Read(cast(WeightFile, NoFile()), 0, 0, end)], placed)
        if len(blocks) < 3:
            blocks[place].held = PinnedBuffer(end, base.device)
    assert len(blocks) == 3
    base.reader = ring = Ring(blocks, RING, copier.buffer)
    for place in blocks:
        base.chain.blocks[place].stream(Streamed(ring, place))
    return streaming


class NoFile:
    """A `WeightFile` of nothing."""

    def read(self, start: int, into: memoryview) -> None:
        pass


def model(kind: str, depth: int) -> PreTrainedModel:
    """On the device from the beginning: tensors without data cannot be moved in place."""
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    layers = {"n_layer" if kind == "gpt2" else "num_hidden_layers": depth}  # from 2 on one of each kind
    config = AutoConfig.for_model(kind, **{**ARCHITECTURES[kind], **ends, **layers})
    with torch.device(DEVICE):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made.eval()


def answers(engine: Engine, waits: Waits, lacking: str) -> None:
    """Prompts of adapters of all methods side by side, in chunks, with every kind of sampling."""
    names: list[str | None] = [None]
    for name in (name for name in ADAPTERS if lacking not in name):
        drawn = fresh_adapter(engine.base, name, TRAINED[name], 0)
        engine.adapters.add(drawn.in_type(engine.base.dtype))
        names.append(name)
    for number, name in enumerate([*names, "lora", "larger lora"]):
        engine.generate([1 + number] * (5 + 4 * number), name, SAMPLINGS[number % len(SAMPLINGS)], text=False)
    engine.run()
    handles = [engine.generate([1, 2, 3], name, SAMPLINGS[0], text=False) for name in (None, "lora")]
    engine.step()
    engine.step()
    before, synchronized = len(waits.lines), len(GPU.waits)
    engine.step()
    waited = set(waits.lines[before:])
    if engine.executor.worker.fused.graphs is not None:  # the step was launched ahead
        waited |= {*GPU.waits[synchronized:]}
    assert len(waited) == MOST_WAITS, waited
    engine.run()
    assert all(len(handle.tokens) == 4 for handle in handles)


def trains(engine: Engine, lacking: str, tokens: int) -> None:
    """A job of each method at once, beside an answer, for two steps. Two low-rank ones are so short that
    their windows go back together."""
    long, short = ([Example((1,) * n, (1,) * n) for n in sizes] for sizes in ((9, 30, 14, 5), (4, 6, 5, 7)))
    paired = {"second lora": LoRAConfig(rank=3), "third lora": LoRAConfig(rank=5)}
    keeps = [SavePolicy.INPUTS, SavePolicy.EVERYTHING, SavePolicy.PRUNED]
    jobs = []
    asked = {name: TRAINED[name] for name in JOBS if lacking not in name}
    asked |= {**paired, "dora": LoRAConfig(rank=2, dora=True)}
    for number, (name, config) in enumerate(asked.items()):
        training = TrainingConfig(batch_size=2, max_steps=2, rows=48, keep=keeps[number % 3])
        data = short if name in paired else long
        jobs.append(engine.finetune(data, f"tuned {name}", config, training))
    sampling = replace(SAMPLINGS[0], max_tokens=tokens)
    answer = engine.generate([1, 2, 3] * 9, sampling=sampling, text=False)
    engine.run()
    assert len(answer.tokens) == tokens
    for job in jobs:
        assert job.status == "succeeded", f"{job.adapter}: {job.status}, {job.reason}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
