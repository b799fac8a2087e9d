"""Models with elastic memory or growth through a real `serve` and the real llama.cpp server.
A Model gets the free memory that is left, or memory of no use to others, and its engine a cache that fits into it.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest

from autoscaler.contract import ModelName
from autoscaler.spec.model import Gpu, Model, ModelSpec
from autoscaler.text import format_size
from loadtest import tiny_gguf
from pilotlight.models.document_loading import fill_memory_estimate
from tests.support.harness.serve.serve import Document, Serving, fake, model, serving, settings
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("real engine")

SENTENCE = "Hello, I am Ada, asleep until you called."
CONTEXT_TOKENS = 1 << 20
"""The tiny model keeps 128 bytes of each token: 128 MiB in all, or 32 MiB in each of four slots."""
FIXED = {"contextTokens": CONTEXT_TOKENS // 4}
"""The context of each slot."""
MIB = 1 << 20


def ada(folder: Path, gpu: Gpu, **spec: object) -> tuple[Document, int]:
    """Return the document and its memory request."""
    file = folder / "ada.gguf"
    tiny_gguf.make_model(file, SENTENCE, context_tokens=CONTEXT_TOKENS)
    memory = {"elastic": gpu.elastic_percent} if gpu.elastic_percent else {"growth": gpu.growth_percent}
    made = {"artifact": f"file://{file}", "args": ["--threads=1"], "gpu": memory, **spec}
    known = ModelSpec(
        engine="llama.cpp", artifact=f"file://{file}", context_tokens=CONTEXT_TOKENS // 4 if spec else None, gpu=gpu
    )
    asked = fill_memory_estimate(Model(name=ModelName("ada"), spec=known, slots=4)).memory_bytes
    return model("ada", engine="llama.cpp", **made), asked


def client(one: Serving) -> openai.AsyncOpenAI:
    """Return the official client. By default a connect may take 5 s; a busy machine may pause for longer."""
    return openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none-needed", max_retries=0, timeout=600)


def engine(one: Serving) -> tuple[list[str], list[dict[str, int]]]:
    """Return the command line of ada's engine, and what it reports of its slots."""
    (record,) = [record for record in one.records() if record.model == "ada"]
    with urllib.request.urlopen(f"http://127.0.0.1:{record.port}/slots", timeout=60) as response:
        return psutil.Process(record.pid).cmdline(), json.load(response)


@pytest.mark.parametrize("fixed", [True, False], ids=["fewer slots", "less context"])
@pytest.mark.standard
async def test_elastic_model_starts_with_the_free_memory_below_its_request(tmp_path: Path, *, fixed: bool) -> None:
    document, asked = ada(tmp_path, Gpu(elastic_percent=10), **(FIXED if fixed else {}))
    hole = asked - 16 * MIB
    bob = fake(tmp_path, "bob", gpu={"memory": "40Mi"}, replicas={"min": 1})
    async with serving(tmp_path, settings(str(40 * MIB + hole)), document, bob) as one:
        await one.ready("bob")
        before = one.engines("bob")
        async with client(one) as api:
            answer = await api.chat.completions.create(model="ada", messages=[{"role": "user", "content": "Who?"}])
        assert answer.choices[0].message.content == SENTENCE
        await until("bob is ready, also after a pause", lambda: one.replicas("bob") == {"ready": 1})
        assert one.engines("bob") == before, "no replica was evicted for it"
        (record,) = [record for record in one.records() if record.model == "ada"]
        assert record.memory_bytes == hole < asked
        argv, slots = engine(one)
        if fixed:
            assert (record.slots, len(slots), argv[argv.index("--slots") + 1]) == (3, 3, "3")
            assert {slot["n_ctx"] for slot in slots} == {CONTEXT_TOKENS // 4}
        else:
            kept = CONTEXT_TOKENS - 16 * MIB // 128
            assert (record.slots, len(slots)) == (4, 4)
            assert {slot["n_ctx"] for slot in slots} == {kept}, "of all slots together"
        explanation = one.get("/api/v1/explain/model/ada")
        assert isinstance(explanation, dict)
        words = "with 3 of 4 slots" if fixed else "tokens of context"
        assert any("granted " in line and words in line for line in explanation["sentences"]), explanation


@pytest.mark.parametrize("fixed", [True, False], ids=["more slots", "more context"])
async def test_model_with_gpu_growth_gets_the_memory_that_no_other_model_needs(tmp_path: Path, *, fixed: bool) -> None:
    """Of 72 MiB free, 32 are reserved for bob, which was never called; the rest suffices for one more slot, not two."""
    document, asked = ada(tmp_path, Gpu(growth_percent=50), **(FIXED if fixed else {}))
    bob = fake(tmp_path, "bob", gpu={"memory": "32Mi"})
    spare = 40 * MIB
    async with serving(tmp_path, settings(str(asked + 32 * MIB + spare)), document, bob) as one:
        async with client(one) as api:
            answer = await api.chat.completions.create(model="ada", messages=[{"role": "user", "content": "Who?"}])
        assert answer.choices[0].message.content == SENTENCE
        (record,) = [record for record in one.records() if record.model == "ada"]
        argv, slots = engine(one)
        if fixed:
            assert record.memory_bytes == asked + 32 * MIB, "a whole slot, of which the memory is used"
            assert (record.slots, len(slots), argv[argv.index("--slots") + 1]) == (5, 5, "5")
            assert {slot["n_ctx"] for slot in slots} == {CONTEXT_TOKENS // 4}
            words = "with 5 slots instead of 4"
        else:
            got = record.memory_bytes - asked
            assert spare - MIB < got <= spare
            assert (record.slots, len(slots)) == (4, 4)
            shared_tokens = int(argv[argv.index("--shared-context-tokens") + 1])
            assert shared_tokens == CONTEXT_TOKENS + got // 128, "of all slots together"
            assert {slot["n_ctx"] for slot in slots} == {CONTEXT_TOKENS}, "each the model's own, of what all have"
            (log,) = one.state.glob("logs/ada-*")
            assert f"({shared_tokens})" in log.read_text(), "which its engine has"
            words = f"with {shared_tokens} tokens of context instead of {CONTEXT_TOKENS}"
        requested = f"granted {format_size(record.memory_bytes)} instead of {format_size(asked)}, {words}"
        explained = one.get("/api/v1/explain/model/ada")
        assert isinstance(explained, dict)
        assert any(requested in line for line in explained["sentences"]), explained
        listed = one.get("/api/v1/devices")
        assert isinstance(listed, list)
        assert [held["memory_bytes"] for held in listed[0]["replicas"]] == [record.memory_bytes]

        assert (await one.call("bob")).status == 200
        ready = {"ready": 1}
        await until("both are ready, also after a pause", lambda: one.replicas("ada") == one.replicas("bob") == ready)
        (same,) = [record for record in one.records() if record.model == "ada"]
        assert same.pid == record.pid, "no replica was evicted for it"
