"""How a process ends on an error: an error that a user can fix is reported as such, wherever it was raised."""

from __future__ import annotations

import asyncio

import click
import pytest

from pilotlight import process


async def within_groups(error: Exception) -> None:
    """Raises the error like a gateway that opens its listening socket while tasks run."""
    async with asyncio.TaskGroup() as outer:
        outer.create_task(asyncio.sleep(60))
        async with asyncio.TaskGroup() as inner:
            inner.create_task(asyncio.sleep(60))
            raise error


def test_click_error_in_nested_task_groups_is_raised_unwrapped() -> None:
    with pytest.raises(click.ClickException, match="is taken"):
        process.run(within_groups(click.ClickException("127.0.0.1:80 is taken")))


def test_internal_error_in_a_task_group_is_raised_with_its_group() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        process.run(within_groups(ValueError("ours")))
    assert caught.value.subgroup(ValueError) is not None
