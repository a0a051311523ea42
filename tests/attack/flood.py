"""Streams without end, as one process that costs next to nothing: raw sockets and epoll.

`flood.py HOST PORT COUNT KEY BODY`: COUNT streams, each begun again when it ends, until it is killed.
"""

import contextlib
import select
import socket
import sys


def main(host: str, port: int, count: int, key: str, body: bytes) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    poll, sockets = select.epoll(), dict[int, socket.socket]()

    def begin() -> None:
        made = socket.create_connection((host, port))
        made.sendall(head.encode() + body)
        made.setblocking(False)
        sockets[made.fileno()] = made
        poll.register(made, select.EPOLLIN)

    for _ in range(count):
        begin()
    while True:
        for number, _ in poll.poll():
            came = b""
            with contextlib.suppress(ConnectionError):
                came = sockets[number].recv(65536)
            if not came:
                poll.unregister(number)
                sockets.pop(number).close()
                begin()


if __name__ == "__main__":
    host, port, count, key, body = sys.argv[1:]
    main(host, int(port), int(count), key, body.encode())
