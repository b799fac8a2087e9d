"""An engine that starts very fast: `python -S -E instant.py HOST PORT NOTES`, until it is killed.

It listens about 20 ms after its start, like the engine in the measurements of the peers (27 ms). The fake engine of the
load tests needs 60 ms for its imports, which would hide the cost of a cold start on a cluster. GET returns 200; a POST
streams one chunk and `[DONE]`. Each POST appends a line to NOTES: the time of this engine's first 200, in seconds of
the system clock.
"""

import _thread
import socket
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
CHUNK = (
    b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"instant","choices":'
    b'[{"index":0,"delta":{"role":"assistant","content":"awake"},"finish_reason":"stop"}]}\n\n'
)
ANSWER = CHUNK + b"data: [DONE]\n\n"
FOUND = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Instant:
    """One engine. `ready_unix_s` is the time of its first 200; 0 before."""

    def __init__(self, notes: str) -> None:
        self._notes = notes
        self.ready_unix_s = 0.0

    def serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection, one after the other, until the client disconnects."""
        with connection, connection.makefile("rb") as stream:
            while words := stream.readline().split():
                length = 0
                while (line := stream.readline()) not in {b"\r\n", b""}:
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                stream.read(length)
                self.ready_unix_s = self.ready_unix_s or time.time()
                if words[0] == b"POST":
                    connection.sendall(HEAD % len(ANSWER) + ANSWER)
                    with open(self._notes, "a", encoding="ascii") as notes:  # noqa: PTH123  pathlib costs its import
                        notes.write(f'{{"ready_time": {self.ready_unix_s!r}}}\n')
                else:
                    connection.sendall(FOUND)


def main(host: str, port: str, notes: str) -> None:
    """Serve without end."""
    engine = Instant(notes)
    with socket.create_server((host, int(port))) as listening:
        while True:
            connection, _ = listening.accept()
            _thread.start_new_thread(engine.serve, (connection,))


if __name__ == "__main__":
    main(*sys.argv[1:])
