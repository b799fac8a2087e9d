"""Pods of adopted workloads that others terminate while requests run on them: no request is lost."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.cluster.support.installations.adoption import OURS, Adopting, workload

WAIT_S_MAX = 180.0


@pytest.mark.parametrize("count", [1, 2])
async def test_rolling_update_of_a_deployment_loses_no_request(adopting: Adopting, count: int) -> None:
    """The default strategy: a new pod starts, an old one ends, and its request moves, but not to the next old pod."""
    notes = {OURS + "models": "ada", OURS + "slots": "2", OURS + "replicas-max": str(count),
             OURS + "replicas-min": str(count)}  # fmt: skip
    body = workload("ada", count, notes, "Deployment", "--tokens-per-s", "20", "--tokens", "40")
    await adopting.api.create(f"{adopting.apps}/deployments", body)
    path = f"{adopting.apps}/deployments/ada"
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        await adopting.until_replicas("ada", "ready", count)
        old = {pod["metadata"]["name"] for pod in await adopting.until_pods(count)}
        calls = [asyncio.create_task(adopting.call("ada")) for _ in range(count)]
        await adopting.api.patch(path, {"spec": {"template": {"metadata": {"annotations": {"version": "2"}}}}})
        while {pod["metadata"]["name"] for pod in await adopting.pods()} & old:
            if sum(not call.done() for call in calls) < 4 * count:  # more requests would only wait for a long time
                calls.append(asyncio.create_task(adopting.call("ada")))
            await asyncio.sleep(0.2)
        answers = await asyncio.gather(*calls)
        assert [status for status, _ in answers] == [200] * len(answers), answers
        await adopting.until_pods(count)
        assert (await adopting.scale("ada"))["spec"]["replicas"] == count
        assert (await adopting.embed("ada"))[0] == 200


async def test_requests_during_a_manual_scale_to_zero_get_status_200_or_503(adopting: Adopting) -> None:
    await adopting.api.create(f"{adopting.apps}/deployments", workload("ada", 0, {OURS + "models": "ada"}))
    adopting.write(adoption={"holdSeconds": 600})
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        assert (await adopting.embed("ada"))[0] == 200
        await adopting.by_hand("ada", 0)
        while (answer := await adopting.embed("ada"))[0] != 503:
            assert answer[0] == 200, answer
