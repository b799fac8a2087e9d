"""Engine images on nodes: their names, sizes and locations. Pure.

Owns the names: people write `vllm/vllm-openai:v1`, nodes report `docker.io/vllm/vllm-openai:v1`; both are the same
image. Kubelets report the largest images with their sizes (Node.status.images); agents report all images without sizes.
A new report replaces earlier ones from the same source only. `autoscaler.placement.index.node_filter` uses the
locations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import lru_cache
from typing import Final, NamedTuple

DOCKER: Final = "docker.io"
SHARED_MAX: Final = 16_384
"""The number of images whose records nodes share. Beyond this, some records are stored more than once."""


class Image(NamedTuple):
    """An image on a node. Equal images of several nodes share one record (`make_image`)."""

    names: tuple[str, ...]
    """Full names (`normalize_image_name`), sorted."""
    size_bytes: int = 0
    """The compressed size in the registry. 0: unknown."""


class NodeImages(NamedTuple):
    """The images of one node."""

    seen: tuple[Image, ...] = ()
    """Images that the kubelet reports."""
    agent_images: tuple[Image, ...] = ()
    """Images that the agent reports."""


NONE: Final = NodeImages()


@lru_cache(maxsize=SHARED_MAX)
def make_image(names: tuple[str, ...], size_bytes: int = 0) -> Image:
    """Return the image with these names, as a node reports them."""
    return Image(tuple(sorted({normalize_image_name(name) for name in names})), size_bytes)


@lru_cache(maxsize=SHARED_MAX)
def normalize_image_name(name: str) -> str:
    """Return the full name: with the registry, and with the tag or digest. An invalid name is returned unchanged."""
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
    """Return `before` with the current reports of all kubelets; the same object if nothing changed."""
    if all(before.get(node, NONE).seen == now.get(node, ()) for node in before.keys() | now.keys()):
        return before
    after = {node: _kept(before.get(node, NONE), there) for node, there in now.items()}
    return after | {
        node: NodeImages((), one.agent_images) for node, one in before.items() if node not in now and one.agent_images
    }


def update_agent_images(before: dict[str, NodeImages], node: str, names: Iterable[str]) -> dict[str, NodeImages]:
    """Return `before` with the current report of one node's agent; the same object if nothing changed."""
    known = before.get(node, NONE)
    one = NodeImages(known.seen, tuple(make_image((name,)) for name in names))
    if one == known:
        return before
    others = {other: there for other, there in before.items() if other != node}
    return {**others, node: one} if one != NONE else others


def _kept(before: NodeImages, there: tuple[Image, ...]) -> NodeImages:
    return before if before.seen == there else NodeImages(there, before.agent_images)


class Whereabouts:
    """An incrementally updated index of the nodes that have each image."""

    def __init__(self) -> None:
        self._nodes: Mapping[str, NodeImages] = {}
        self._on: dict[Image, set[str]] = {}
        self._called: dict[str, set[Image]] = {}
        self.version = 0
        """Increases with every change."""

    def update(self, nodes: Mapping[str, NodeImages]) -> None:
        """Update the index to the current images of all nodes."""
        if nodes is self._nodes:
            return
        before, self._nodes = self._nodes, nodes
        for node in before.keys() | nodes.keys():
            old, new = before.get(node, NONE), nodes.get(node, NONE)
            if old is not new:
                was, now = {*old.seen, *old.agent_images}, {*new.seen, *new.agent_images}
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
        """Return the nodes that have the image of this name, in any spelling."""
        return frozenset(node for one in self._called.get(normalize_image_name(name), ()) for node in self._on[one])

    def size_bytes(self, name: str) -> int:
        """Return the largest size that a node reports for the image; 0: unknown."""
        return max((one.size_bytes for one in self._called.get(normalize_image_name(name), ())), default=0)
