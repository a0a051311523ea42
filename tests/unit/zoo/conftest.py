"""Folders of a foundation and what was made of it, made once."""

from pathlib import Path

import pytest

from zoo_made import make_fine_tune, make_lora, make_model


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`; `tuned`, of which embedding and first layer changed little and the second much; `head`, whose
    last norm alone changed; `lora` beside attention; `wide`, of another width."""
    folder = tmp_path_factory.mktemp("sources")
    base = make_model(folder / "base")
    little, much = 1e-4, 1.0
    make_fine_tune(
        folder / "tuned", base, {"embed": little, "layers.0": little, "layers.1": much, "lm_head": little}
    )
    make_fine_tune(folder / "head", base, {"model.norm": 0.5})
    make_lora(folder / "lora", base)
    make_model(folder / "wide", hidden_size=96, num_attention_heads=6, num_hidden_layers=3)
    return folder
