"""In which type an adapter's matrices are written."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from adapters import lora_adapter
from coserve.adapters.files import write_adapter
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.lora import LoRAConfig


def test_low_precision_matrices_are_written_in_float32(tmp_path: Path) -> None:
    """As PEFT keeps them: it would otherwise train them in bfloat16."""
    a, b = torch.randn(2, 6).bfloat16(), torch.randn(5, 2).bfloat16()
    config = LoRAConfig(rank=2)
    write_adapter(lora_adapter("a", 0, config, {"up": LoRABypass(a, b, 8.0)}), tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    assert torch.equal(written["base_model.model.up.lora_A.weight"], a.float())
    assert torch.equal(written["base_model.model.up.lora_B.weight"], b.float())
