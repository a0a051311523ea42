"""Hostile bodies, ten at a time, from a process of their own: what sends them slows nothing that is measured.

`senders.py HOST PORT COUNT BYTES KEY`: writes a line when the bodies are made, sends them when given one,
and writes one line of JSON: how often each status came.
"""

import json
import random
import socket
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from hostile_bodies import hostile

AT_ONCE = 10


def main(address: tuple[str, int], count: int, nbytes: int, key: str) -> None:
    draw = random.Random(1)
    bodies = [hostile(draw, nbytes) for _ in range(count)]
    print("ready", flush=True)
    for _ in sys.stdin:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            statuses = threads.map(lambda one: post(address, *one, key), bodies)
        print(json.dumps(Counter(statuses)), flush=True)


def post(address: tuple[str, int], path: str, body: bytes, key: str) -> str:
    """The status of the answer to a body that is sent as fast as it goes; no matter how much is taken."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with closing(socket.create_connection(address, timeout=90)) as connection:
        with suppress(ConnectionError):
            connection.sendall(head.encode() + body)
        try:
            return connection.recv(65536)[9:12].decode() or "closed"
        except ConnectionError:
            return "closed"


if __name__ == "__main__":
    host, port, count, nbytes, key = sys.argv[1:]
    main((host, int(port)), int(count), int(nbytes), key)
