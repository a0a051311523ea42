"""Save policies as files and command lines say them."""

import pytest

from coserve import SavePolicy, TrainingConfig
from coserve.errors import ConfigError
from coserve.serve.schema.jobs import OptimizerSettings


@pytest.mark.parametrize(
    ("given", "meant"),
    [*((keep.value, keep) for keep in SavePolicy), (SavePolicy.PRUNED, SavePolicy.PRUNED), (5, 5)],
)
def test_a_name_stands_for_its_setting(given: object, meant: object) -> None:
    assert TrainingConfig(keep=given).keep == meant  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["most", "Keep.PRUNED", 0, -1, 1.5, True, None])
def test_what_is_neither_a_name_nor_bytes(given: object) -> None:
    with pytest.raises(ConfigError, match="is inputs, pruned, everything or a number"):
        TrainingConfig(keep=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [*(keep.value for keep in SavePolicy), 1 << 20])
def test_what_is_asked_for_over_http_is_one_of_them(given: object) -> None:
    asked = OptimizerSettings.model_validate({"keep": given}).model_dump()["keep"]
    assert TrainingConfig(keep=asked).keep == (given if isinstance(given, int) else SavePolicy(given))
