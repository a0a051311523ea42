"""A base's fingerprint tells contents apart, and not the places where they are."""

from transformers import AutoConfig

from coserve import tiny
from coserve.model.origin import fingerprint_of


def test_the_same_weights_are_alike_in_whatever_folder_they_are() -> None:
    contents, linears = {"layer.weight": b"one", "norm.weight": b"two"}, ["layer"]

    def found(place: str = "/models/a", hidden: int = 64, **changed: bytes) -> str:
        config = AutoConfig.from_pretrained(tiny.path())
        config.name_or_path, config.hidden_size = place, hidden
        named = {name.replace("_", "."): content for name, content in changed.items()}
        return fingerprint_of(config, contents | named, linears, "none")

    assert found("/models/a") == found("/elsewhere/b")
    others = [found(), found(hidden=128), found(layer_weight=b"other"), found(norm_weight=b"other")]
    assert len(set(others)) == len(others)
