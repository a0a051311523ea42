"""Tables of hardware: what they say, where it is from, and the seconds of counted work."""

from itertools import pairwise
from pathlib import Path

import pytest

from coserve.errors import ConfigError
from coserve.schedule.features import NAMES
from coserve.simulate.counting import PassKind, PassWork
from coserve.simulate.hardware import MeasuredTable, Roofline, hardware_named, hardware_names, read_hardware

ROOFLINE = """kind = "roofline"
name = "x"
memory_gb = 10
bandwidth_gbs = 100
link_gbs = 0
host_link_gbs = 10
[peak_tflops]
bfloat16 = 2
[efficiency]
rows = [[1, 0.1], [100, 0.5]]
bandwidth = 0.5
attention = 0.25
[overhead]
layer_us = 10
reduction_us = 100
update_us = 1000
host_us = 5
[jitter]
deviation = 0.01
[sources]
memory_gb = "a sheet"
"""


def written(tmp_path: Path, text: str = ROOFLINE) -> Path:
    path = tmp_path / "x.toml"
    path.write_text(text)
    return path


def test_every_device_that_is_promised_is_there_with_its_sources() -> None:
    promised = {"a100-40", "a100-80", "a10g", "l4", "l40s", "rtx-3090", "h100", "h200", "b200"}
    assert promised | {"two-cores"} == set(hardware_names())
    for name in promised:
        table = hardware_named(name)
        assert isinstance(table, Roofline)
        stated = {
            "memory_gb",
            "bandwidth_gbs",
            "peak_tflops",
            "link_gbs",
            "host_link_gbs",
            "efficiency",
            "overhead",
            "jitter",
        }
        assert stated == table.sources.keys() and all(table.sources.values())
        points = pairwise(table.efficiency.rows)
        assert all(low[0] < high[0] and low[1] < high[1] for low, high in points)
    own = hardware_named("two-cores")
    assert isinstance(own, MeasuredTable) and own.weights.keys() == set(NAMES)


def test_seconds_are_those_of_the_longer_of_computing_and_moving(tmp_path: Path) -> None:
    table = read_hardware(written(tmp_path))
    assert isinstance(table, Roofline)
    bound_by_bytes = PassWork(PassKind.FORWARD, 2, 1, flops=1e6, weight_bytes=1e9)
    assert table.seconds([bound_by_bytes], "bfloat16") == pytest.approx(1e9 / 50e9 + 20e-6)
    bound_by_rate = PassWork(PassKind.FORWARD, 1, 100, flops=1e12, weight_bytes=1e3, attention_flops=1e11)
    assert table.seconds([bound_by_rate], "bfloat16") == pytest.approx(
        1 / (2 * 0.5) + 0.1 / (2 * 0.25) + 10e-6
    )
    between = PassWork(PassKind.FORWARD, 1, 10, flops=1e12)  # halfway, by the logarithm
    assert table.seconds([between], "bfloat16") == pytest.approx(1 / (2 * 0.3) + 10e-6)
    beyond = PassWork(PassKind.FORWARD, 1, 10_000, flops=1e12)
    assert table.seconds([beyond], "bfloat16") == pytest.approx(1 / (2 * 0.5) + 10e-6)
    update = PassWork(PassKind.UPDATE, 1, 0, adapter_bytes=5e9)
    assert table.seconds([update], "bfloat16") == pytest.approx(0.1 + 1e-3)


def test_reductions_go_around_a_ring(tmp_path: Path) -> None:
    table = read_hardware(written(tmp_path))
    assert isinstance(table, Roofline)
    work = PassWork(PassKind.FORWARD, 1, 100, reductions=2, reduced_bytes=1e9)
    # Without a link of their own the devices meet over the host's: 10 GB/s, half of it reached.
    assert table.seconds([work], "bfloat16", 4) == pytest.approx(200e-6 + 1.5e9 / 5e9 + 10e-6)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory_gb = 10", "memory_gb = -1", r"`float` > 0.*\$\.memory_gb"),
        ("memory_gb = 10\n", "", "missing required field `memory_gb`"),
        ("bandwidth = 0.5", "bandwidth = 1.5", r"\$\.efficiency\.bandwidth"),
        ("bfloat16 = 2", 'bfloat16 = "fast"', r"\$\.peak_tflops"),
        ("host_us = 5", "host_us = 5\nluck = 1", "unknown field `luck`"),
        ('kind = "roofline"', 'kind = "guess"', "guess"),
        ("[sources]", "[sources", "x.toml"),
    ],
)
def test_a_wrong_table_names_its_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_hardware(written(tmp_path, ROOFLINE.replace(old, new)))


def test_weights_need_every_feature(tmp_path: Path) -> None:
    text = """kind = "weights"\nname = "x"\nshape = "tiny"\nlayers = 4\ncache_tokens = 64
    [weights]\nstep = 1.0\n[sources]\nweights = "measured"\n"""
    with pytest.raises(ConfigError, match="exactly the features step, forward_layers"):
        read_hardware(written(tmp_path, text))


def test_unknown_hardware_is_named_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no hardware 'h1000'; there are a100-40, a100-80, a10g, .*h100"):
        hardware_named("h1000")
    with pytest.raises(ConfigError, match="expected a table of hardware: No such file"):
        hardware_named(str(tmp_path / "none.toml"))
    assert hardware_named(str(written(tmp_path))).name == "x"
