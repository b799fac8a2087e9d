"""The malformed objects of the cluster tests cover every kind that Pilotlight lists or watches."""

from __future__ import annotations

from tests.cluster import poison


def test_each_listed_kubernetes_kind_has_malformed_test_objects() -> None:
    """A new kind needs an entry in `tests.cluster.poison.ALL`."""
    assert {(one.group, one.plural) for one in poison.ALL} == poison.listed()


def test_each_listed_kubernetes_kind_has_several_malformed_objects() -> None:
    for one in poison.ALL:
        found = list(poison.bodies(one))
        assert len(found) > 2 * len(poison.LEVELS), one
        assert not any("name" in body.get("metadata", {}) for body in found), one
