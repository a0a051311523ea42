"""Makes the modules of a model without data. Runs in a sandbox, and imports no more than that takes."""

import tempfile

import torch
from transformers import AutoConfig

from coserve.adapters.text_part import auto_class

tempfile.gettempdir()  # torch asks for it, and it cannot be found by trial once no file may be written


def make_modules(folder: str) -> None:
    """Makes the modules that the configuration in a folder asks for, on the meta device."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        auto_class(config).from_config(config, trust_remote_code=False)
