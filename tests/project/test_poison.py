"""The malformed objects of the cluster tests cover every kind that Pilotlight lists or watches."""

from __future__ import annotations

from tests.integration.cluster.support.control_plane import malformed_objects


def test_each_listed_kubernetes_kind_has_malformed_test_objects() -> None:
    """A new kind needs an entry in `tests.integration.cluster.support.control_plane.malformed_objects.ALL`."""
    assert {(one.group, one.plural) for one in malformed_objects.ALL} == malformed_objects.listed()


def test_each_listed_kubernetes_kind_has_several_malformed_objects() -> None:
    for one in malformed_objects.ALL:
        found = list(malformed_objects.bodies(one))
        assert len(found) > 2 * len(malformed_objects.LEVELS), one
        assert not any("name" in body.get("metadata", {}) for body in found), one
