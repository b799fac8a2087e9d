"""An elastic Model through a real `serve` and the real llama.cpp server: beside another it gets the hole that there is,
and its engine a cache that fits into it.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest

from autoscaler.contract import ModelName
from autoscaler.model import Gpu, Model, ModelSpec
from loadtest import tinygguf
from pilotlight.gathering import completed
from tests.kit.serving import Document, Serving, fake, model, serving, settings

pytestmark = pytest.mark.xdist_group("real engine")

SENTENCE = "Hello, I am Ada, asleep until you called."
CONTEXT_TOKENS = 1 << 20
"""Of a token of it the tiny model keeps 128 bytes: 128 MiB, or 32 MiB of each of four slots."""
MIB = 1 << 20


def ada(folder: Path, **spec: object) -> tuple[Document, int]:
    """The document, and how much it asks for."""
    file = folder / "ada.gguf"
    tinygguf.make(file, SENTENCE, context_tokens=CONTEXT_TOKENS)
    made = {"artifact": f"file://{file}", "args": ["--threads=1"], "gpu": {"elastic": 10}, **spec}
    known = ModelSpec(
        engine="llama.cpp", artifact=f"file://{file}", context_tokens=CONTEXT_TOKENS // 4 if spec else None,
        gpu=Gpu(elastic_percent=10),
    )  # fmt: skip
    asked = completed(Model(name=ModelName("ada"), spec=known, slots=4)).memory_bytes
    return model("ada", engine="llama.cpp", **made), asked


def engine(one: Serving) -> tuple[list[str], list[dict[str, int]]]:
    """How the engine of ada was started, and what it says of its slots."""
    (record,) = [record for record in one.records() if record.model == "ada"]
    with urllib.request.urlopen(f"http://127.0.0.1:{record.port}/slots", timeout=60) as response:
        return psutil.Process(record.pid).cmdline(), json.load(response)


@pytest.mark.parametrize("fixed", [True, False], ids=["fewer slots", "less context"])
async def test_an_elastic_model_fits_beside_another_and_answers(tmp_path: Path, *, fixed: bool) -> None:
    document, asked = ada(tmp_path, **({"contextTokens": CONTEXT_TOKENS // 4} if fixed else {}))
    hole = asked - 16 * MIB
    bob = fake(tmp_path, "bob", gpu={"memory": "40Mi"}, replicas={"min": 1})
    async with serving(tmp_path, settings(str(40 * MIB + hole)), document, bob) as one:
        await one.ready("bob")
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none-needed", max_retries=0) as api:
            answer = await api.chat.completions.create(model="ada", messages=[{"role": "user", "content": "Who?"}])
        assert answer.choices[0].message.content == SENTENCE
        assert one.replicas("bob") == {"ready": 1}, "nobody went for it"
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
        told = one.get("/api/v1/explain/model/ada")
        assert isinstance(told, dict)
        words = "with 3 of 4 slots" if fixed else "tokens of context"
        assert any("granted " in line and words in line for line in told["sentences"]), told
