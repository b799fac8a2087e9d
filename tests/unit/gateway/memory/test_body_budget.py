"""The budget for request bodies: never exceeded, large bodies whole and in order, and a share left for small ones."""

from __future__ import annotations

import pytest

from gateway.http.body_buffers import LARGE_BYTES, ChunkedBody
from gateway.memory.body_budget import DEFAULT_BYTES, STEP_BYTES, BodyBudget

MIB = 1 << 20


class Body:
    """A body that waits for admission."""

    def __init__(self, length: int) -> None:
        self.pieces = ChunkedBody()
        self.length = length
        self.entered = False

    def let_in(self) -> None:
        self.entered = True

    def ask(self, room: BodyBudget) -> bool:
        return room.admit(self.pieces, self.length) or (room.wait(self, self.pieces, self.length) and False)


def test_body_budget_is_half_of_the_memory_limit_or_a_default() -> None:
    room = BodyBudget(256 * MIB)
    assert (room.size_bytes, room.large_bytes) == (128 * MIB, 96 * MIB)
    assert BodyBudget(None).size_bytes == DEFAULT_BYTES


def test_large_bodies_wait_in_order_until_memory_budget_is_free() -> None:
    room = BodyBudget(256 * MIB)
    bodies = [Body(size * MIB) for size in (60, 60, 30, 1)]
    assert [body.ask(room) for body in bodies] == [True, False, False, False], "no request overtakes another"
    assert room.held_bytes == 60 * MIB
    room.release(bodies[0].pieces)
    assert [body.entered for body in bodies] == [False, True, True, True]
    assert (room.held_bytes, room.wanted) == (91 * MIB, False)


def test_cancelled_wait_of_a_body_admits_the_next_waiting_body() -> None:
    room = BodyBudget(256 * MIB)
    first, second, third = Body(60 * MIB), Body(60 * MIB), Body(30 * MIB)
    assert [body.ask(room) for body in (first, second, third)] == [True, False, False]
    room.forget(second)
    assert (second.entered, third.entered) == (False, True)


def test_small_bodies_are_admitted_when_large_bodies_use_their_share() -> None:
    room = BodyBudget(8 * MIB)
    assert Body(3 * MIB).ask(room)
    small = [Body(LARGE_BYTES) for _ in range(5)]
    assert all(room.admit(body.pieces, body.length) for body in small)
    assert room.held_bytes == 3 * MIB, "what has not come takes no room"
    for body in small:
        body.pieces.add(bytes(LARGE_BYTES))
    before = room.wanted
    assert [room.admit(body.pieces, body.length) for body in small] == [True] * 4 + [False]
    assert room.held_bytes == 4 * MIB == room.size_bytes
    refused = room.wanted
    room.looked()
    assert (before, refused, room.wanted) == (False, True, False), "slow ones shall make room"


def test_body_of_unknown_length_takes_budget_as_bytes_arrive() -> None:
    room, pieces = BodyBudget(8 * MIB), ChunkedBody()
    pieces.add(b"x" * 1000)
    assert room.admit(pieces, None)
    assert room.held_bytes == 1000
    while room.admit(pieces, None):
        pieces.add(bytes(100_000))
    assert pieces.size > room.held_bytes > 4 * MIB - STEP_BYTES
    room.release(pieces)
    assert room.held_bytes == 0


def test_bytes_already_received_of_a_waiting_body_count_in_the_budget() -> None:
    room, first, second = BodyBudget(4 * MIB), Body(MIB), Body(MIB)
    second.pieces.add(bytes(1000))
    assert first.ask(room)
    assert not second.ask(room)
    assert room.waits(second)
    assert room.held_bytes == MIB + 1000
    room.release(first.pieces)
    assert second.entered
    assert room.held_bytes == second.pieces.reserved == MIB


def test_released_body_admits_each_partly_received_body_in_turn() -> None:
    room = BodyBudget(64 * MIB)
    first = Body(20 * MIB)
    assert first.ask(room)
    waiting = []
    while room.wait(body := Body(20 * MIB), body.pieces, body.length, 512 << 10):
        waiting.append(body)
    assert len(waiting) == room.stakes_bytes // (512 << 10)
    small = Body(LARGE_BYTES)
    small.pieces.add(bytes(LARGE_BYTES))
    assert small.ask(room), "small ones still have room"
    done = first
    for body in waiting:
        room.release(done.pieces)
        assert body.entered
        done = body
    room.release(done.pieces)
    assert (room.held_bytes, room.staked_bytes) == (LARGE_BYTES, 0)


@pytest.mark.parametrize("step", [1000, 16 << 10, 300_000, 3 * MIB])
def test_chunked_body_of_several_mib_is_stored_in_mmap_buffers(step: int) -> None:
    sent = bytes(range(256)) * (5 * MIB // 256)
    pieces = ChunkedBody()
    for at in range(0, len(sent), step):
        pieces.add(sent[at : at + step])
    assert pieces.join() == sent
    assert len(pieces.parts) < 30
    tail = pieces.parts[-1]
    assert isinstance(tail, memoryview)
    assert type(tail.obj).__name__ == "mmap"


def test_replaced_body_is_counted_with_its_new_size() -> None:
    budget = BodyBudget(2000)
    before, other, after = ChunkedBody(), ChunkedBody(), ChunkedBody()
    before.size, other.size = 300, 500
    assert budget.admit(before, None)
    assert budget.admit(other, None)
    after.size = 450
    assert budget.exchange(before, after)
    assert (budget.held_bytes, before.reserved, after.reserved) == (950, 0, 450)
    larger = ChunkedBody()
    larger.size = 501
    assert not budget.exchange(after, larger), "no room"
    assert (budget.held_bytes, after.reserved, larger.reserved) == (950, 450, 0)
    larger.size = 50
    assert budget.exchange(None, larger)
    for body in (after, other, larger):
        budget.release(body)
    assert budget.held_bytes == 0
