"""Ownership of objects: identities differ, and objects of another installation are never owned."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from autoscaler.kubernetes.api import Object
from autoscaler.spec.installation_ownership import ANYBODYS, INSTALLATION, Ownership, installation_id

LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
NAMESPACES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
ONE, OTHER = Ownership(installation_id("team", "a-pilotlight")), Ownership(installation_id("team-a", "pilotlight"))


def labelled(**labels: str) -> Object:
    return {"metadata": {"name": "x", "labels": labels}}


@given(NAMESPACES, st.text(max_size=253), NAMESPACES, st.text(max_size=253))
def test_installation_ids_are_valid_labels_and_differ_per_installation(
    namespace: str, lease: str, other: str, others: str
) -> None:
    assert LABEL.fullmatch(installation_id(namespace, lease))
    is_same = (namespace, lease) == (other, others)
    assert (installation_id(namespace, lease) == installation_id(other, others)) == is_same


def test_objects_of_another_installation_are_not_owned() -> None:
    assert ONE.installation != OTHER.installation
    made = ONE.label(labelled(a="b"))
    assert made["metadata"]["labels"] == {"a": "b", INSTALLATION: ONE.installation}
    assert (ONE.owns(made), OTHER.owns(made), ANYBODYS.owns(made)) == (True, False, False)
    assert f"{INSTALLATION}={ONE.installation}" in ONE.engines


def test_unlabelled_objects_are_owned_by_every_installation() -> None:
    assert all(one.owns({"metadata": {"name": "x"}}) for one in (ONE, OTHER, ANYBODYS))
    assert ONE.unlabelled.endswith(f",!{INSTALLATION}")
    assert (ANYBODYS.unlabelled, ANYBODYS.label(labelled())) == ("", labelled())
