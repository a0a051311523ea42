"""coserve-tiny: a five-million-parameter chat model that ships inside the package.

It exists so that the server can be started, tested and shown without downloading anything. Importing this
module costs nothing: neither torch nor transformers is loaded until a caller loads the weights itself.
"""

from pathlib import Path

WEIGHTS: Path = Path(__file__).resolve().parent / "weights"


def path() -> Path:
    """Folder to hand to ``AutoModelForCausalLM.from_pretrained``; raises if the weights were not shipped."""
    if not (WEIGHTS / "model.safetensors").is_file():
        rebuild = "python -m coserve_benchmarks.tiny.build"
        raise FileNotFoundError(f"no weights in {WEIGHTS}; rebuild them in a checkout with: {rebuild}")
    return WEIGHTS


__all__ = ["WEIGHTS", "path"]
