"""A Model with weights in a registry: packed, pushed, and served from zero by the real llama.cpp, also in an outage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from artifacts import reference
from artifacts.fetch import registry
from artifacts.fetch.registry import Registries
from artifacts.store.store import Store
from loadtest import tiny_gguf
from tests.support.builders.artifacts import packed_models
from tests.support.harness.serve.client_load import counted
from tests.support.harness.serve.serve import Document, Serving, model, serving, settings
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("real engine")

OUTAGE_S = float(os.environ.get("OUTAGE_SECONDS", "0"))
"""Duration of the registry outage, at least two starts; the fault list has 5 min: set OUTAGE_SECONDS=300 for it."""
SENTENCE = "Hello, I am Ada, asleep until you called."
ASK: Any = {"role": "user", "content": "Who is there?"}


def layout(folder: Path) -> Path:
    (folder / "model").mkdir()
    tiny_gguf.make_model(folder / "model" / "ada.gguf", SENTENCE)
    packed_models.packed(folder / "model", folder / "layout")
    return folder / "layout"


def ada(host: str, **spec: object) -> Document:
    weights = {"artifact": f"oci://{host}/{packed_models.NAME}:v1", "args": ["--threads=1"], "gpu": {}}
    return model("ada", engine="llama.cpp", **{**weights, "idleSeconds": 1, **spec})


async def response_text(one: Serving) -> str | None:
    # By default a connect may take 5 s. A busy machine may pause this process for longer.
    async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0, timeout=600) as api:
        answer = await api.chat.completions.create(model="ada", messages=[ASK])
        return answer.choices[0].message.content


def phases(one: Serving) -> dict[str, float]:
    """Return the phases of the last finished start."""
    found: Any = one.get("/api/v1/models/ada")
    return dict(found["last_start_phases"])


def memory(one: Serving) -> int:
    """Return the memory counted for one replica."""
    found: Any = one.get("/api/v1/models/ada")
    return int(found["memory_bytes"])


def cold_first_bytes(one: Serving) -> float:
    """Return how many requests waited for a start and were answered."""
    return counted(one, "pilotlight_first_byte_seconds_count", 'cold="1"')


def rows(one: Serving) -> list[dict[str, Any]]:
    """Return the rows of `pilotlight status`."""
    found: Any = one.get("/api/v1/status")
    return list(found)


async def at_zero(one: Serving) -> None:
    await until("it is at zero", lambda: one.states("ada")[-1:] == ["gone"] and not one.engines("ada"))


async def stop(one: Serving) -> None:
    """Stop the replica as an operator does: until then it runs, however long the test takes for its checks."""
    order = urllib.request.Request(f"{one.ops}/api/v1/models/ada/stop", b"{}", {"content-type": "application/json"})
    with urllib.request.urlopen(order, timeout=60) as response:
        assert response.status == 200
    await at_zero(one)


@pytest.mark.standard
async def test_model_restarts_from_stored_weights_during_a_registry_outage(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(packed_models.served(layout(tmp_path)))
        async with serving(tmp_path, settings("4Gi"), ada(host, idleSeconds=600)) as one:
            await until("its header was read in the registry", lambda: 0 < memory(one) < 1 << 30)
            assert not (one.state / "weights" / "copies").exists(), "nothing was pulled for that"
            assert await response_text(one) == SENTENCE
            first, store = phases(one), Store(one.state / "weights")
            assert {"decide", "pull", "place", "load"} == set(first)
            (row,) = store.rows()
            assert row.in_use
            await stop(one)
            assert not store.rows()[0].in_use
            stack.close()  # the registry is unavailable
            assert await response_text(one) == SENTENCE
            assert one.starts("ada") == 2
            print(first, phases(one))


async def coldstart(one: Serving, since: str) -> dict[str, Any]:
    """Return what the command reports for one round."""
    load = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pilotlight", "load", "coldstart", "--url", one.url, "--model", "ada", "--rounds", "1",
        "--from", since, "--ops", one.ops, "--output", "json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await load.communicate()
    found: dict[str, Any] = json.loads(output) if load.returncode == 0 else {"error": errors.decode()}
    return found


@pytest.mark.standard
async def test_coldstart_measures_every_phase_with_and_without_cached_weights(tmp_path: Path) -> None:
    with packed_models.served(layout(tmp_path)) as host:
        async with serving(tmp_path, settings("4Gi"), ada(host)) as one:
            assert "no node has the model's weights" in (await coldstart(one, "cached"))["error"]
            for since in ("gone", "cached"):
                ((made,), spreads) = (found := await coldstart(one, since))["rounds"], found["spreads_ms"]
                taken: dict[str, float] = made["phases_ms"]
                own = ["decide", "pull", "place", "load", "ready"]
                assert list(taken) == ["queue", *own, "upstream"], "no image: an engine here is a program"
                assert list(spreads)[-2:] == ["first byte", "total"]
                assert sum(taken[name] for name in own) == pytest.approx(taken["queue"], abs=2)


async def test_second_start_sends_no_request_to_the_registry(tmp_path: Path) -> None:
    """The pull phase of a second start sends no request at all."""
    asked = list[str]()
    with packed_models.served(layout(tmp_path), asked) as host:
        async with serving(tmp_path, settings("4Gi"), ada(host, idleSeconds=600)) as one:
            assert await response_text(one) == SENTENCE
            first = phases(one)
            assert set(first) >= {"decide", "pull", "place", "load"}
            assert cold_first_bytes(one) == 1
            assert any(f"/v2/{packed_models.NAME}/blobs/" in one for one in asked)
            await stop(one)
            asked.clear()
            assert await response_text(one) == SENTENCE
            await until("its phases are reported", lambda: set(phases(one)) == set(first))
            print(first, phases(one))
            assert cold_first_bytes(one) == 2
            assert asked == []
            assert rows(one)[0]["weights"] == "here"
            explanation = json.dumps(one.get("/api/v1/explain/model/ada"))
            assert re.search(rf"Its weights \(oci://{host}/{packed_models.NAME}:v1\) are on [^ ]+\.", explanation)


@pytest.mark.case("48")
@pytest.mark.parametrize("away", ["closed", "hangs"])
async def test_model_with_stored_weights_starts_without_a_registry_connection(tmp_path: Path, away: str) -> None:
    """From the first start of the process on, no step waits for a registry that is down or does not respond."""
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(packed_models.served(layout(tmp_path)))
        async with serving(tmp_path, settings("4Gi"), ada(host), start=False) as one:
            store = await asyncio.to_thread(Store(one.state / "weights").open)
            (
                await registry.fetch_from_registry(
                    reference.parse_reference(f"oci://{host}/{packed_models.NAME}:v1"), store, Registries()
                )
            ).close()
            stack.close()
            address = ("127.0.0.1", int(host.partition(":")[2]))
            hung = stack.enter_context(socket.create_server(address)) if away == "hangs" else None
            await one.start()
            assert await response_text(one) == SENTENCE
            if hung is not None:
                hung.setblocking(False)
                with pytest.raises(BlockingIOError):
                    hung.accept()


async def test_every_start_from_stored_weights_succeeds_in_a_registry_outage(tmp_path: Path) -> None:
    """Consecutive starts from zero until the time is over; none becomes slower, and none fails."""
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(packed_models.served(layout(tmp_path)))
        async with serving(tmp_path, settings("4Gi"), ada(host)) as one:
            assert await response_text(one) == SENTENCE
            await at_zero(one)
            stack.close()
            ends_s, starts = time.monotonic() + OUTAGE_S, 1
            while starts < 3 or time.monotonic() < ends_s:
                assert await response_text(one) == SENTENCE
                starts += 1
                await at_zero(one)
            assert cold_first_bytes(one) == starts, "each Call waited for a start, and was answered"
            assert "failed" not in {move.state for move in one.moves("ada")}
            print(f"{starts - 1} starts in {OUTAGE_S:.0f} s without a registry; the last: {phases(one)}")


async def test_failed_weights_pull_fails_the_start_with_its_reason(tmp_path: Path) -> None:
    with packed_models.served(layout(tmp_path)) as host:
        missing = ada(host, artifact=f"oci://{host}/{packed_models.NAME}:none", start={"retries": 0})
        async with serving(tmp_path, settings("4Gi"), missing) as one:
            with pytest.raises(openai.APIStatusError) as refused:
                await response_text(one)
            assert refused.value.status_code == 503
            failed = [move.reason for move in one.moves("ada") if move.state == "failed"]
            assert failed == [f"its weights: {host}: there is no manifest none of {packed_models.NAME}"]
