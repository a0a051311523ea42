"""Many clients at once, as one process that costs next to nothing: raw sockets and epoll.

`crowd.py HOST PORT COUNT PID fresh|open BODY`: COUNT requests for text, on connections that are made with
them or before them. Writes one line of JSON: for each request [status, seconds to connect, seconds from
sending to the first byte of the answer, seconds from the first sending], and the processor time that the main
thread of the process PID had used when the last refusal came, since the first connection (fresh) or request.
"""

import contextlib
import json
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

SETTLED = 1.0  # seconds without an answer, after which no refusal comes any more
GIVEN_UP = 60.0  # seconds


def used(pid: int) -> float:
    """Processor time of the main thread, in seconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main(host: str, port: int, count: int, pid: int, fresh: bool, body: bytes) -> dict[str, Any]:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    poll, sockets = select.epoll(), dict[int, socket.socket]()
    connected, sent, answered = dict[int, float](), dict[int, float](), dict[int, tuple[str, float]]()

    def ask(number: int) -> None:
        sent[number] = time.monotonic()
        sockets[number].send(head.encode() + body)
        poll.modify(number, select.EPOLLIN)

    before = used(pid)
    for _ in range(count):
        made = socket.socket()
        made.setblocking(not fresh)
        began = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            made.connect((host, port))
        made.setblocking(False)
        sockets[made.fileno()], connected[made.fileno()] = made, began if fresh else time.monotonic() - began
        poll.register(made, select.EPOLLOUT if fresh else 0)
    if not fresh:
        time.sleep(1.0)  # until all are accepted
        before = used(pid)
        for number in sockets:
            ask(number)
    last, after, end = time.monotonic(), before, time.monotonic() + GIVEN_UP
    while len(answered) < count and time.monotonic() < end:
        if answered and time.monotonic() - last > SETTLED:
            break
        for number, _ in poll.poll(0.1):
            now = time.monotonic()
            if number not in sent:
                connected[number] = now - connected[number]
                ask(number)
                continue
            with contextlib.suppress(ConnectionError):
                answered[number] = sockets[number].recv(4096)[9:12].decode(), now
            poll.unregister(number)
            if number in answered and answered[number][0] in ("429", "503"):
                last, after = now, used(pid)
    first = min(sent.values())
    rows = [
        [status, connected[number], when - sent[number], when - first]
        for number, (status, when) in answered.items()
    ]
    return {"rows": rows, "processor": after - before}


if __name__ == "__main__":
    host, port, count, pid, kind, body = sys.argv[1:]
    print(json.dumps(main(host, int(port), int(count), int(pid), kind == "fresh", body.encode())))
