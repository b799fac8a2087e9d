"""Whom of its peers a pull asks: a board, what it is told, and what it chooses."""

from __future__ import annotations

from collections import Counter

from artifacts.digest import Digest, compute_digest
from artifacts.peers import selection
from artifacts.peers.selection import Board, Peer, Wait, order_requests

ONE, TWO = compute_digest(b"one"), compute_digest(b"two")
A, B, C = (Peer(f"node-{letter}", f"https://{letter}:1") for letter in "abc")


def name(found: Peer | Wait | None) -> str:
    return found.name if isinstance(found, Peer) else str(found)


def test_who_is_known_to_have_it_is_asked_first_whatever_it_runs_already() -> None:
    knows = Peer("node-c", C.url, frozenset({ONE}))
    board = Board([A, B, knows], "me")
    board.began("node-c")
    assert board.choose(ONE, None, 0.0) == knows
    assert board.choose(TWO, ONE, 0.0) == knows, "it has the whole artifact"
    assert board.choose(TWO, None, 0.0) != knows


def test_requests_are_spread_by_how_many_run_and_nodes_begin_with_different_peers() -> None:
    board = Board([A, B, C], "me")
    chosen = list[str]()
    for _ in range(9):
        chosen.append(name(board.choose(ONE, None, 0.0)))
        board.began(chosen[-1])
    assert Counter(chosen) == {"node-a": 3, "node-b": 3, "node-c": 3}
    board.ended(chosen[4])
    assert name(board.choose(ONE, None, 0.0)) == chosen[4]
    firsts = {name(Board([A, B, C], f"node-{number}").choose(ONE, None, 0.0)) for number in range(20)}
    assert firsts == {"node-a", "node-b", "node-c"}


def test_we_are_no_peer_of_ours_and_without_peers_it_is_the_registrys_turn() -> None:
    assert Board([A], "node-a").choose(ONE, None, 0.0) is None
    assert Board([], "me").choose(ONE, None, 0.0) is None
    assert Board([A], "me").choose(ONE, None, 0.0, frozenset({"node-a"})) is None


def test_so_many_are_asked_and_first_those_that_are_known_to_have_something() -> None:
    many = [Peer(f"node-{number}", "https://x:1") for number in range(100)]
    knows = Peer("zz", "https://x:1", frozenset({TWO}))
    board = Board([*many, knows], "me")
    assert len(board.peers) == selection.PEERS_MAX
    assert knows in board.peers
    assert {one.name for one in board.peers} != {one.name for one in Board(many, "other").peers}


def test_a_busy_peer_is_left_for_as_long_as_it_asks_and_no_longer_than_the_bound() -> None:
    for asked_s, left_s in (
        (None, selection.BUSY_S),
        (7.0, 7.0),
        (86_400.0, selection.BUSY_S_MAX),
        (0.0, selection.BUSY_S),
    ):
        board = Board([A], "me")
        board.busy("node-a", asked_s, 100.0)
        assert board.choose(ONE, None, 100.0 + left_s - 0.01) is None
        assert board.choose(TWO, None, 100.0 + left_s) == A


def test_one_that_failed_is_left_for_all_and_one_that_lacks_a_digest_for_that_one() -> None:
    board = Board([A, B], "me")
    board.failed("node-a", 0.0)
    assert board.choose(ONE, None, selection.FAILED_S - 0.01) == B
    board.lacks("node-b", ONE, 0.0)
    assert board.choose(ONE, None, 1.0) is None
    assert board.choose(TWO, None, 1.0) == B
    assert board.choose(ONE, None, selection.LACKS_S) == B


def test_one_that_fetches_it_just_now_is_waited_for_and_asked_again_but_not_for_ever() -> None:
    board, now_s, waits = Board([A], "me"), 10.0, 0
    for _ in range(1000):
        found = board.choose(ONE, None, now_s)
        if isinstance(found, Wait):
            now_s += found.wait_s
            waits += 1
        elif found is None:
            break
        else:
            board.coming("node-a", ONE, now_s)
    assert found is None
    assert selection.COMING_S_MAX <= now_s - 10.0 <= selection.COMING_S_MAX + selection.COMING_EVERY_S
    assert waits == selection.COMING_S_MAX / selection.COMING_EVERY_S
    assert board.choose(TWO, None, now_s) == A


def test_nobody_waits_for_one_that_failed_meanwhile_nor_while_another_has_it() -> None:
    board = Board([A, B], "me")
    board.coming("node-a", ONE, 0.0)
    assert board.choose(ONE, None, 0.0) == B
    board.lacks("node-b", ONE, 0.0)
    assert isinstance(board.choose(ONE, None, 0.0), Wait)
    board.failed("node-a", 0.0)
    assert board.choose(ONE, None, 0.0) is None


def test_who_gave_of_a_digest_that_lied_is_never_asked_for_it_again_and_for_others_still() -> None:
    board = Board([A, B, C], "me")
    board.gave("node-b", ONE)
    board.gave("node-a", ONE)
    board.gave("node-c", TWO)
    assert board.lied(ONE) == ["node-a", "node-b"]
    assert board.lied(ONE) == []
    assert board.choose(ONE, None, 1e9) == C
    assert {name(board.choose(TWO, None, 0.0, frozenset({"node-c"})))} <= {"node-a", "node-b"}


def test_the_order_is_a_nodes_own_within_windows_and_keeps_to_the_front() -> None:
    count = 3 * selection.WINDOW + 5
    mine, yours = order_requests("a", "x", count), order_requests("b", "x", count)
    assert sorted(mine) == list(range(count))
    assert mine != yours
    assert mine == order_requests("a", "x", count)
    assert mine != order_requests("a", "y", count)
    for place, number in enumerate(mine):
        assert place // selection.WINDOW == number // selection.WINDOW


def test_of_four_nodes_few_begin_with_the_same_parts() -> None:
    first: Counter[int] = Counter()
    for node in "abcd":
        first.update(order_requests(f"node-{node}", Digest(ONE), selection.WINDOW)[:8])
    assert len(first) >= 24
