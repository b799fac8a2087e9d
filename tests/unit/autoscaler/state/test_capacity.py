"""Names of capacity orders: equal for equal shortages, whichever process orders, and valid for all providers."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from autoscaler.contract import ModelName
from autoscaler.state.capacity import UNSEEN_S, Lease, LeaseId, Listed, lease_intent_key, lease_name, next_lease_name
from tests.support.builders.capacity import offer
from tests.support.builders.worlds import T0

RFC1123 = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@given(st.text(max_size=300), st.integers(0, 99))
def test_name_of_a_capacity_order_is_a_valid_dns_label(owner: str, number: int) -> None:
    name = lease_name("rack", ModelName(owner), number)
    assert RFC1123.fullmatch(name)
    assert name.endswith(lease_intent_key("rack", ModelName(owner), number))


def test_order_names_are_unique_per_provider_owner_and_number() -> None:
    names = {
        lease_name(provider, ModelName(owner), number)
        for provider in ("rack", "g4") for owner in ("a", "b", "A") for number in range(5)
    }  # fmt: skip
    assert len(names) == 30
    assert next_lease_name("rack", ModelName("a"), ()) == lease_name("rack", ModelName("a"), 0)
    taken = [
        lease_name("rack", ModelName("a"), 0),
        lease_name("rack", ModelName("a"), 2),
        lease_name("rack", ModelName("b"), 1),
    ]
    assert next_lease_name("rack", ModelName("a"), taken) == lease_name("rack", ModelName("a"), 1)


def test_order_is_awaited_until_overdue_failed_or_unlisted_for_too_long() -> None:
    lease = Lease(
        id=LeaseId("rack", "x"), offer=offer(), devices=1, owner=ModelName("a"), asked_s=T0, sent_s=T0, due_s=T0 + 300
    )
    assert lease.coming(T0 + UNSEEN_S - 1)
    assert not lease.coming(T0 + UNSEEN_S)

    def seen(**fields: object) -> Lease:
        listed = Listed(name="x", offer=offer(), devices=1, **fields)  # type: ignore[arg-type]  # fields of each test
        return Lease(
            id=lease.id, offer=lease.offer, devices=1, owner=lease.owner, asked_s=T0, sent_s=T0, due_s=T0 + 300,
            listed=listed,
        )  # fmt: skip

    assert seen().coming(T0 + 299)
    assert not seen().coming(T0 + 300)
    assert not seen(phase="failed").coming(T0 + 1)
    assert not seen(phase="leaving").coming(T0 + 1)
    assert seen(phase="here").committed
