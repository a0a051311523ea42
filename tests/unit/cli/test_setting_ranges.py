"""The range of each number among the settings: its ends are taken, and what is just beyond them is not."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from coserve.config import EngineConfig
from coserve.core.setting import Range, noted
from coserve.errors import ConfigError
from coserve.serve.settings import ServerSettings

SERVER: Final = ServerSettings("coserve-tiny", Path("state"))
_ABOVE_0: Final = (0.0, 5e-324, 1e300)  # refused, then the least and a large one
_FROM_0: Final = (-5e-324, 0.0, 1e300)
_FROM_1: Final = (0.9, 1.0, 1e300)
_COUNT: Final = (0, 1, 10**12)
_LIMIT: Final = (-1, 0, 10**12)
RANGES: Final = {
    ServerSettings: {
        "port": (-1, 0, 65535, 65536),
        "max_queue": _COUNT,
        "max_queue_tenant": _COUNT,
        "max_requests_minute": _LIMIT,
        "max_bad_keys_minute": _LIMIT,
        "max_files_tenant": _COUNT,
        "max_bytes_tenant": _COUNT,
        "max_artifact_bytes": _COUNT,
        "max_records_tenant": _COUNT,
        "keep_days": _FROM_0,
        "keep_responses_days": _FROM_0,
        "keep_usage_days": _FROM_1,
        "keep_audit_days": _FROM_1,
        "max_idempotency_keys": _COUNT,
        "idempotency_seconds": _ABOVE_0,
        "max_jobs_tenant": _COUNT,
        "max_connections": _COUNT,
        "max_connections_address": _COUNT,
        "stall_seconds": _ABOVE_0,
        "max_jobs": _COUNT,
        "max_file_bytes": _COUNT,
        "max_n": _COUNT,
        "drain_seconds": _FROM_0,
        "engine_wait_seconds": _ABOVE_0,
        "checkpoint_steps": _COUNT,
    },
    EngineConfig: {
        "threads": (-1, 0, 1024, 1025),
        "tensor_parallel": (0, 1, 64, 65),
        "pipeline_parallel": (0, 1, 64, 65),
        "cluster_blocks": (-1, 0, 1024, 1025),
        "cluster_copies": (0, 1, 64, 65),
        "cluster_cache_tokens": _LIMIT,
        "cluster_queue": _LIMIT,
        "cluster_idle": _FROM_0,
        "cluster_speculation": (-0.01, 0.0, 1.0, 1.01),
        "cache_tokens": _COUNT,
        "max_running": _COUNT,
        "page_size": _COUNT,
        "approximation_delay": _FROM_0,
        "max_chat_turns": _COUNT,
        "max_text_characters": _COUNT,
    },
}


@pytest.mark.parametrize("settings", [SERVER, EngineConfig()], ids=["server", "engine"])
def test_the_ends_of_each_range_are_taken_and_nothing_beyond_them(
    settings: ServerSettings | EngineConfig,
) -> None:
    ranges = RANGES[type(settings)]
    assert noted(type(settings), Range).keys() == ranges.keys()
    for name, (below, least, most, *above) in ranges.items():
        for taken in (least, most):
            assert getattr(replace(settings, **{name: taken}), name) == taken
        for refused in (below, *above, math.inf, math.nan):
            with pytest.raises(ConfigError, match=rf"\b{name} must be .*, not {re.escape(str(refused))}$"):
                replace(settings, **{name: refused})


def test_a_watchdog_has_two_seconds_at_least_or_there_is_none() -> None:
    for taken in (0.0, 2.0, 1e6):
        assert replace(SERVER, watchdog_seconds=taken).watchdog_seconds == taken
    for refused in (-1.0, 1e-9, 1.999, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"watchdog_seconds must be .* >= 2, or 0"):
            replace(SERVER, watchdog_seconds=refused)
