"""`coserve bench cluster`: its links are no faster than they say, and all of its rows come out."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from coserve_benchmarks.clustered.pacing import PacedLink
from coserve_benchmarks.clustered.run import BARS, run_cluster

NBYTES, RATE = 1 << 20, 8e6


def test_a_link_sends_no_faster_than_its_rate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as called:
        link = PacedLink(called.getsockname()[1], RATE)
        try:
            caller = socket.create_connection(("127.0.0.1", int(link.address.rpartition(":")[2])))
            accepted, _ = called.accept()
            sent = bytes(range(256)) * (NBYTES // 256)
            began = time.monotonic()
            threading.Thread(target=caller.sendall, args=(sent,), daemon=True).start()
            found = bytearray()
            while len(found) < NBYTES:
                found += accepted.recv(1 << 16)
            assert time.monotonic() - began >= 0.9 * NBYTES / RATE
            assert bytes(found) == sent
            caller.close()
            assert accepted.recv(1) == b""  # the end is passed on
            accepted.close()
        finally:
            link.close()


@pytest.mark.slow
def test_all_rows_come_out(tmp_path: Path) -> None:
    found = run_cluster("tiny", quick=True, json_path=tmp_path / "cluster.json")
    assert set(BARS) <= found.keys() == json.loads((tmp_path / "cluster.json").read_text()).keys()
    assert found["failover.changed"] == 0
    assert {name for name, note in found["notes"].items() if note.startswith("measured")} == {
        "kv.meet.vs_best_of_both", "failover.changed", "failover.gap_s", "speculation.p50",
        "speculation.wrong_p50",
    }  # fmt: skip
    assert all("modelled" in found["notes"][name] for name in BARS if name.startswith("modelled."))
