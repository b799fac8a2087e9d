"""Engine images on nodes: by which names they are known there, how large they are, and where one is. Pure.

Owns the names: people write `vllm/vllm-openai:v1`, nodes say `docker.io/vllm/vllm-openai:v1`, and both are one. What a
node has its kubelet tells (Node.status.images: the largest, with sizes), and its agent (all of them, without); each is
a level, and neither takes back what the other says. It chooses nothing; `autoscaler.placement.index.locality` weighs
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import lru_cache
from typing import Final, NamedTuple

DOCKER: Final = "docker.io"
SHARED_MAX: Final = 16_384
"""Images of which nodes that have the same one keep one record; of more, some are kept more than once."""


class Image(NamedTuple):
    """An image as one node has it. Equal ones of many nodes are one record (`make_image`)."""

    names: tuple[str, ...]
    """In full (`normalize_image_name`), sorted."""
    size_bytes: int = 0
    """As its registry sends it; 0: not known."""


class NodeImages(NamedTuple):
    """Those of one node."""

    seen: tuple[Image, ...] = ()
    """By its kubelet."""
    told: tuple[Image, ...] = ()
    """By its agent."""


NONE: Final = NodeImages()


@lru_cache(maxsize=SHARED_MAX)
def make_image(names: tuple[str, ...], size_bytes: int = 0) -> Image:
    """Of names as a node says them."""
    return Image(tuple(sorted({normalize_image_name(name) for name in names})), size_bytes)


@lru_cache(maxsize=SHARED_MAX)
def normalize_image_name(name: str) -> str:
    """In full: with its registry, and its tag or its digest. What is no name stays as it is."""
    name, pinned, digest = name.partition("@")
    first, slash, rest = name.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        first, rest = DOCKER, name
    elif first in {"index.docker.io", "registry-1.docker.io"}:
        first = DOCKER
    if first == DOCKER and "/" not in rest:
        rest = f"library/{rest}"
    before, colon, tag = rest.rpartition(":")
    repository = before if colon and "/" not in tag else rest
    if pinned:
        return f"{first}/{repository}@{digest}"
    return f"{first}/{repository}:{tag if repository != rest else 'latest'}"


def update_kubelet_images(before: dict[str, NodeImages], now: Mapping[str, tuple[Image, ...]]) -> dict[str, NodeImages]:
    """With what all kubelets say now; the very same where that is nothing new."""
    if all(before.get(node, NONE).seen == now.get(node, ()) for node in before.keys() | now.keys()):
        return before
    after = {node: _kept(before.get(node, NONE), there) for node, there in now.items()}
    return after | {node: NodeImages((), one.told) for node, one in before.items() if node not in now and one.told}


def update_agent_images(before: dict[str, NodeImages], node: str, names: Iterable[str]) -> dict[str, NodeImages]:
    """With what the agent of one node says now; the very same where that is nothing new."""
    known = before.get(node, NONE)
    one = NodeImages(known.seen, tuple(make_image((name,)) for name in names))
    if one == known:
        return before
    others = {other: there for other, there in before.items() if other != node}
    return {**others, node: one} if one != NONE else others


def _kept(before: NodeImages, there: tuple[Image, ...]) -> NodeImages:
    return before if before.seen == there else NodeImages(there, before.told)


class Whereabouts:
    """Where each image is, kept in step: only nodes that are told anew are looked at."""

    def __init__(self) -> None:
        self._nodes: Mapping[str, NodeImages] = {}
        self._on: dict[Image, set[str]] = {}
        self._called: dict[str, set[Image]] = {}
        self.version = 0
        """Rises with every change."""

    def tell(self, nodes: Mapping[str, NodeImages]) -> None:
        """All that there are now."""
        if nodes is self._nodes:
            return
        before, self._nodes = self._nodes, nodes
        for node in before.keys() | nodes.keys():
            old, new = before.get(node, NONE), nodes.get(node, NONE)
            if old is not new:
                was, now = {*old.seen, *old.told}, {*new.seen, *new.told}
                self._change(node, gone=was - now, come=now - was)

    def _change(self, node: str, *, gone: Set[Image], come: Set[Image]) -> None:
        self.version += bool(gone or come)
        for one in gone:
            self._on[one].discard(node)
            if not self._on[one]:
                del self._on[one]
                for name in one.names:
                    self._called[name].discard(one)
                    if not self._called[name]:
                        del self._called[name]
        for one in come:
            self._on.setdefault(one, set()).add(node)
            for name in one.names:
                self._called.setdefault(name, set()).add(one)

    def of(self, name: str) -> frozenset[str]:
        """The nodes that have the image of this name, as people write it."""
        return frozenset(node for one in self._called.get(normalize_image_name(name), ()) for node in self._on[one])

    def size_bytes(self, name: str) -> int:
        """The most that a node says of its size; 0: none does."""
        return max((one.size_bytes for one in self._called.get(normalize_image_name(name), ())), default=0)
