"""Run by `test_fake_cuda.py`: counts the kernels of a decode step, by the operations and launches of the work
that its graph holds. A layer's are the difference of two models' by that of their layers."""

import sys
from collections import Counter
from typing import Any, Final
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams
from coserve.core.plan import BasePlan
from coserve.kernels import elementwise
from coserve.kernels.triton import is_installed
from coserve.model import load
from coserve.train.fresh import fresh_adapter
from coserve.worker import cuda_graphs
from coserve.worker.cuda_graphs import rerun
from coserve.worker.fused_pass import FusedPass
from fake_cuda import DEVICE, GPU, HostThread, install, on_fake_cuda, stub_triton

ROWS, DEPTHS = 32, (8, 16)
SHAPE: Final[dict[str, Any]] = {  # a Llama of eight billion parameters, but for its depth
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 2048,
}  # fmt: skip


def main() -> None:
    install()
    stub_triton(Counter())
    mock.patch.object(cuda_graphs, "_WORTH", 1).start()
    mock.patch.object(FusedPass, "recorder", lambda _: rerun).start()
    mock.patch.object(elementwise, "_is_on_gpu", lambda x: x.is_cuda and x.stride(-1) == 1).start()
    mock.patch("coserve.worker.streams.ThreadPoolExecutor", HostThread).start()
    mock.patch("coserve.executors.local.ThreadPoolExecutor", HostThread).start()
    found = {}
    for name, find in (("modules", lambda *_: None), ("fused", load.find_whole_layers)):
        for adapters in (0, 4):
            with mock.patch.object(load, "find_whole_layers", find):
                counts = [counted(depth, adapters) for depth in DEPTHS]
            found[name, adapters] = layer = (counts[1] - counts[0]).total() / (DEPTHS[1] - DEPTHS[0])
            whole = counts[0].total() + 24 * layer
            print(f"{name}, {adapters} adapters: {layer:g} kernels a layer, {whole:g} of 32 layers")
            print("  ", (counts[1] - counts[0]).most_common())
    assert found["fused", 0] <= 13.2, found
    assert found["modules", 0] - found["fused", 0] >= 4, found
    assert found["modules", 4] - found["fused", 4] >= 4, found


def counted(depth: int, adapters: int) -> Counter[str]:
    """The kernels of one decode step of as many rows of adapters, or else of the base."""
    with on_fake_cuda():
        config = AutoConfig.for_model("llama", **SHAPE, num_hidden_layers=depth)
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        scheduler = {"max_prefill_rows": 512}
        engine = Engine(
            model,
            EngineConfig(
                device=DEVICE, calibrate=False, cache_tokens=4096, max_running=ROWS, scheduler=scheduler
            ),
        )
        for number in range(adapters):
            engine.adapters.add(fresh_adapter(engine.base, f"a{number}", LoRAConfig(rank=16), 0))
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        for row in range(ROWS):
            name = f"a{row % adapters}" if adapters else None
            engine.generate([1, 2, 3], name, sampling, text=False)
        worker = engine.executor.worker  # type: ignore[attr-defined]
        real, counts = worker.fused.launch, list[Counter[str]]()

        def launch(plan: BasePlan) -> Any:
            before = len(GPU.kernels)
            launched = real(plan)
            if launched is not None and len(plan.inference) == ROWS:
                counts.append(Counter(GPU.kernels[before:]))
            return launched

        worker.fused.launch = launch
        engine.run()
    return counts[-1]


if __name__ == "__main__":
    sys.exit(main() if is_installed() else 0)
