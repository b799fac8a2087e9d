"""Selection of the peers of a pull: what a board records, and which peers it selects."""

from __future__ import annotations

from collections import Counter

from artifacts.digest import Digest, compute_digest
from artifacts.peers import selection
from artifacts.peers.selection import Board, Peer, Wait, order_requests

ONE, TWO = compute_digest(b"one"), compute_digest(b"two")
A, B, C = (Peer(f"node-{letter}", f"https://{letter}:1") for letter in "abc")


def name(found: Peer | Wait | None) -> str:
    return found.name if isinstance(found, Peer) else str(found)


def test_peer_known_to_have_the_digest_is_chosen_despite_its_load() -> None:
    knows = Peer("node-c", C.url, frozenset({ONE}))
    board = Board([A, B, knows], "me")
    board.began("node-c")
    assert board.choose(ONE, None, 0.0) == knows
    assert board.choose(TWO, ONE, 0.0) == knows, "it has the whole artifact"
    assert board.choose(TWO, None, 0.0) != knows


def test_blob_requests_are_spread_evenly_over_the_peers() -> None:
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


def test_node_never_selects_itself_as_a_peer() -> None:
    assert Board([A], "node-a").choose(ONE, None, 0.0) is None
    assert Board([], "me").choose(ONE, None, 0.0) is None
    assert Board([A], "me").choose(ONE, None, 0.0, frozenset({"node-a"})) is None


def test_peer_known_to_have_a_digest_is_kept_when_peers_are_capped() -> None:
    many = [Peer(f"node-{number}", "https://x:1") for number in range(100)]
    knows = Peer("zz", "https://x:1", frozenset({TWO}))
    board = Board([*many, knows], "me")
    assert len(board.peers) == selection.PEERS_MAX
    assert knows in board.peers
    assert {one.name for one in board.peers} != {one.name for one in Board(many, "other").peers}


def test_busy_peer_is_skipped_for_its_requested_delay_up_to_a_limit() -> None:
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


def test_peer_that_lacks_a_blob_is_skipped_for_that_blob_only() -> None:
    board = Board([A, B], "me")
    board.failed("node-a", 0.0)
    assert board.choose(ONE, None, selection.FAILED_S - 0.01) == B
    board.lacks("node-b", ONE, 0.0)
    assert board.choose(ONE, None, 1.0) is None
    assert board.choose(TWO, None, 1.0) == B
    assert board.choose(ONE, None, selection.LACKS_S) == B


def test_peer_still_fetching_is_polled_until_the_time_limit() -> None:
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


def test_selection_waits_for_a_fetching_peer_only_if_no_other_is_usable() -> None:
    board = Board([A, B], "me")
    board.coming("node-a", ONE, 0.0)
    assert board.choose(ONE, None, 0.0) == B
    board.lacks("node-b", ONE, 0.0)
    assert isinstance(board.choose(ONE, None, 0.0), Wait)
    board.failed("node-a", 0.0)
    assert board.choose(ONE, None, 0.0) is None


def test_peer_that_sent_a_corrupt_blob_is_excluded_for_that_blob_only() -> None:
    board = Board([A, B, C], "me")
    board.gave("node-b", ONE)
    board.gave("node-a", ONE)
    board.gave("node-c", TWO)
    assert board.lied(ONE) == ["node-a", "node-b"]
    assert board.lied(ONE) == []
    assert board.choose(ONE, None, 1e9) == C
    assert {name(board.choose(TWO, None, 0.0, frozenset({"node-c"})))} <= {"node-a", "node-b"}


def test_part_request_order_differs_between_nodes_within_a_window() -> None:
    count = 3 * selection.WINDOW + 5
    mine, yours = order_requests("a", "x", count), order_requests("b", "x", count)
    assert sorted(mine) == list(range(count))
    assert mine != yours
    assert mine == order_requests("a", "x", count)
    assert mine != order_requests("a", "y", count)
    for place, number in enumerate(mine):
        assert place // selection.WINDOW == number // selection.WINDOW


def test_four_nodes_request_mostly_different_parts_first() -> None:
    first: Counter[int] = Counter()
    for node in "abcd":
        first.update(order_requests(f"node-{node}", Digest(ONE), selection.WINDOW)[:8])
    assert len(first) >= 24
