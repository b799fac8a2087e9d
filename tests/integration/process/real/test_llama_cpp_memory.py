"""Memory use of the real llama.cpp server, compared with the estimate made before its start."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import psutil
import pytest

from autoscaler.contract import ModelName
from autoscaler.spec.model import Model, ModelSpec
from pilotlight.models.model_memory import estimate_memory
from tests.support.builders.artifacts import model_files
from tests.support.real_services.llama_cpp import started

MIB = 1 << 20
FIXED_BYTES = 320 * MIB
"""Allowed excess of the estimate, on top of half of the used memory: the overhead reserved for any process."""


def model(folder: Path, slots: int, context_tokens: int, *args: str) -> Model:
    """Return the Model that `started` starts."""
    spec = ModelSpec(
        engine="llama.cpp", artifact=f"file://{folder / 'ada.gguf'}", context_tokens=context_tokens, args=args
    )
    return Model(name=ModelName("ada"), spec=spec, slots=slots)


def asked(port: int, turns: int, tokens: int, slots: int) -> None:
    """Hold a conversation on each slot, each turn so many tokens longer: it leaves context checkpoints behind."""
    for turn in range(1, turns + 1):
        for slot in range(slots):
            body = {"prompt": "abcdefghij"[slot] + "x" * (tokens * turn), "max_tokens": 4, "id_slot": slot}
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            connection.close()


@pytest.mark.parametrize(
    ("kind", "slots", "context_tokens"),
    [
        ("plain", 1, 4096), ("plain", 4, 8192), ("plain", 8, 2048),
        ("window", 4, 8192), ("window", 8, 1024),
        ("recurrent", 2, 4096), ("recurrent", 4, 4096),
    ],
)  # fmt: skip
def test_memory_estimate_is_at_least_the_measured_llama_cpp_memory(
    tmp_path: Path, kind: str, slots: int, context_tokens: int
) -> None:
    path = tmp_path / "ada.gguf"
    match kind:
        case "plain":
            model_files.attending(path)
        case "window":
            model_files.attending(path, layers=6, length=128, window=256)
        case _:
            model_files.recurrent(path, state=256)
    of = model(tmp_path, slots, context_tokens)
    made = estimate_memory(of)
    assert made is not None
    counted_bytes = made.total_bytes(gpus=False)
    with started(tmp_path, slots=slots, context_tokens=context_tokens) as (process, port, statuses):
        assert 200 in statuses
        asked(port, 5, 40 if kind == "recurrent" else 180, slots)
        used_bytes = psutil.Process(process.pid).memory_info().rss
    print(f"{kind} {slots} x {context_tokens}: counted {counted_bytes / MIB:.0f} MiB, used {used_bytes / MIB:.0f} MiB")
    assert used_bytes <= counted_bytes <= 1.5 * used_bytes + FIXED_BYTES


def test_memory_of_context_checkpoints_stays_within_its_estimate(tmp_path: Path) -> None:
    """By default llama.cpp keeps 32 for each slot; with a lower setting it keeps fewer."""
    model_files.attending(tmp_path / "ada.gguf", layers=6, length=128, window=256)
    used_bytes = []
    for many in (0, 3):
        flag = f"--ctx-checkpoints={many}"
        with started(tmp_path, flag, slots=4, context_tokens=1024) as (process, port, _):
            asked(port, 5, 180, 4)
            used_bytes.append(psutil.Process(process.pid).memory_info().rss)
        made = estimate_memory(model(tmp_path, 4, 1024, flag))
        assert made is not None
        assert sum(item.bytes for item in made.items if item.name == "checkpoints") == many * 4 * 5 * 768 * 4096
    assert 10 * MIB < used_bytes[1] - used_bytes[0] <= 3 * 4 * 5 * 768 * 4096
