"""coserve-tiny: a five-million-parameter chat model that ships inside the package.

With it the server can be started, tested and shown without downloads. Importing this module loads neither
torch nor transformers.
"""

from pathlib import Path

WEIGHTS: Path = Path(__file__).resolve().parent / "weights"


def path() -> Path:
    """Folder to hand to ``AutoModelForCausalLM.from_pretrained``; raises if the weights are missing."""
    if not (WEIGHTS / "model.safetensors").is_file():
        rebuild = "python -m coserve_benchmarks.tiny.build"
        raise FileNotFoundError(f"no weights in {WEIGHTS}; rebuild them in a checkout with: {rebuild}")
    return WEIGHTS


__all__ = ["WEIGHTS", "path"]
