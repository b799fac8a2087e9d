"""Hostile clients of one gateway, in a separate process and from many addresses (fault cases 35 to 37).

`python -m bench.attackers URL ATTACK`. Clients connect at a given pace, each with one habit; a client whose connection
is closed reconnects at once. The program prints THERE when nearly all clients are connected. On SIGTERM it prints the
maximum number of clients that were connected at once, and how often the gateway closed a connection. It manages all
connections in one epoll, so that twenty thousand idle ones cost nothing. It runs at low priority (nice), because the
measurement uses the same core.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from bench.documents import body
from bench.streams import request
from loadtest.client import target_of

ADDRESSES = tuple(f"127.0.1.{number}" for number in range(1, 21))
"""Enough addresses that none has more connections than the limit per address (2,000)."""
READERS, SILENT, HEADS, BODIES, IDLE, CONNECTS = 500, 100, 2000, 2000, 20_000, 5000
"""The numbers of clients in the fault cases."""
SPARE_FILES = 2000
"""Open files of a gateway that idle clients leave free. It accepts clients for half of the limit of open files."""
BODY_BYTES = 2 << 10
HEAD_CLOCK_S = 15
"""Slow clients are spread evenly over this time, so that the gateway also cuts them evenly."""
BURST_EVERY_S = 5.0
NEARLY_ALL = 0.95
STEP_S = 0.01
NICE = 10
FLOOD = "flood"
"""The Model whose streams never end."""
THERE = "there"

_COMES = select.EPOLLOUT | select.EPOLLET
_ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Habit(NamedTuple):
    """The behaviour of one kind of client."""

    clients: int
    first: bytes = b""
    """Sent after the client has connected."""
    each_s: Callable[[socket.socket], object] | None = None
    """Called once per second."""
    receive_bytes: int = 0
    """The size of the receive buffer. 0: the kernel's default."""


class Attacker:
    """One client, which connects from one address repeatedly."""

    def __init__(self, habit: Habit, address: str) -> None:
        self.habit = habit
        self.address = address
        self.socket: socket.socket | None = None
        """The socket while the client is connected."""

    def come(self, where: tuple[str, int]) -> socket.socket:
        """Start to connect."""
        sock = socket.socket()
        sock.setblocking(False)
        if self.habit.receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.habit.receive_bytes)
        sock.bind((self.address, 0))
        sock.connect_ex(where)
        return sock

    def act(self) -> None:
        """Perform the action of each second, if connected."""
        if self.socket is not None and self.habit.each_s is not None:
            with contextlib.suppress(OSError):  # nothing to read, no space to write, or just closed
                self.habit.each_s(self.socket)


class Crowd:
    """The clients of one attack; `per_s` of them start per second. Call `step` continuously."""

    def __init__(self, where: tuple[str, int], habits: Sequence[Habit], per_s: float) -> None:
        self._where, self._per_s = where, per_s
        kinds = [[habit] * habit.clients for habit in habits]
        mixed = [habit for turn in zip_longest(*kinds) for habit in turn if habit is not None]
        everyone = [Attacker(habit, ADDRESSES[number % len(ADDRESSES)]) for number, habit in enumerate(mixed)]
        self._due = deque(everyone)
        self._turns = deque(one for one in everyone if one.habit.each_s is not None)
        self._here: dict[int, tuple[Attacker, socket.socket]] = {}
        self._epoll = select.epoll()
        self._last_s: float | None = None
        self._may_come = self._may_act = 0.0
        self.held = 0
        """The number of connected clients."""
        self.most = 0
        """The maximum of `held` so far."""
        self.cut = 0
        """The number of connections that the gateway closed."""
        self.there = False
        """Whether nearly all clients have been connected at the same time; a slow one is cut and connects again."""

    def step(self, now_s: float, wait_s: float = STEP_S) -> None:
        """Start due clients, process events, and perform the actions that are due."""
        past_s, self._last_s = 0.0 if self._last_s is None else now_s - self._last_s, now_s
        self._may_come += past_s * self._per_s
        while self._due and self._may_come >= 1:
            self._may_come -= 1
            self._come(self._due.popleft())
        for file, events in self._epoll.poll(wait_s):
            one, sock = self._here[file]
            if events & _ENDS:
                self._ended(one, sock)
            elif one.socket is None:
                self._connected(one, sock)
        self._may_act += past_s * len(self._turns)
        while self._may_act >= 1:
            self._may_act -= 1
            self._turns[0].act()
            self._turns.rotate(-1)

    def leave(self) -> None:
        """Close all connections and start no new ones."""
        for _, sock in self._here.values():
            sock.close()
        self._here.clear()
        self._epoll.close()

    def _come(self, one: Attacker) -> None:
        sock = one.come(self._where)
        self._here[sock.fileno()] = one, sock
        self._epoll.register(sock, _COMES | _ENDS)

    def _connected(self, one: Attacker, sock: socket.socket) -> None:
        one.socket = sock
        self.held += 1
        self.most = max(self.most, self.held)
        self.there = self.there or (not self._due and self.held >= NEARLY_ALL * len(self._here))
        if one.habit.first:
            with contextlib.suppress(OSError):  # just closed; the next event reports it
                sock.send(one.habit.first)

    def _ended(self, one: Attacker, sock: socket.socket) -> None:
        if one.socket is not None:
            self.held -= 1
            self.cut += 1
            one.socket = None
        del self._here[sock.fileno()]
        sock.close()
        self._come(one)


def dribble(sock: socket.socket) -> object:
    """Send one more byte of an endless head or body."""
    return sock.send(b"x")


def sip(sock: socket.socket) -> object:
    """Read one byte."""
    return sock.recv(1)


def attack(name: str, url: str, files: int) -> tuple[list[Habit], float]:
    """Return the clients of an attack and their start rate per second, for a gateway with this limit of open files."""
    stream = request(url, body(FLOOD, tokens=10**9))
    slow = request(url, body(FLOOD, bytes_min=BODY_BYTES))[: -BODY_BYTES // 2]
    head = slow[: slow.index(b"\r\n\r\n")]
    return {
        "slow_readers": ([Habit(READERS, stream, sip, 4096), Habit(SILENT, stream, None, 4096)], 300.0),
        "slow_heads": ([Habit(HEADS, head, dribble), Habit(BODIES, slow, dribble)], (HEADS + BODIES) / HEAD_CLOCK_S),
        "idle": ([Habit(min(IDLE, (files - SPARE_FILES) // 2))], 4000.0),
        "connects": ([Habit(CONNECTS)], 1e9),
    }[name]


def main() -> None:
    """Attack until SIGTERM. Clients that only connect disconnect after a while and reconnect, all at once."""
    url, name = sys.argv[1:]
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # also if the benchmark has a real-time priority
    os.nice(NICE)
    ended = list[bool]()
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    target = target_of(url)
    habits, per_s = attack(name, url, files)
    held = cut = 0
    while not ended:
        crowd, now_s = Crowd((target.host, target.port), habits, per_s), time.monotonic()
        end_s = now_s + BURST_EVERY_S if name == "connects" else float("inf")
        while not ended and now_s < end_s:
            crowd.step(now_s)
            if crowd.there and not held:
                held = crowd.held
                print(THERE, flush=True)
            now_s = time.monotonic()
        held, cut = max(held, crowd.most), cut + crowd.cut
        crowd.leave()
    print(json.dumps({"held": held, "cut": cut}), flush=True)


if __name__ == "__main__":
    main()
