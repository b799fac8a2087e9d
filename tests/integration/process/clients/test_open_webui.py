"""A session of Open WebUI: the requests that its source sends through a connection of each kind, with their headers.

Sources: `backend/open_webui/routers/ollama.py`, `backend/open_webui/routers/openai.py` and
`backend/open_webui/utils/payload.py` of github.com/open-webui/open-webui.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from loadtest.tiny_gguf import make_model
from tests.support.go_programs import BuildError
from tests.support.harness.serve.serve import Serving, fake, serving, transcript
from tests.support.real_services import ollama
from tests.support.waiting import until

pytestmark = pytest.mark.standard
SENTENCE = "Hello, I am ada, asleep until you called."
JSON = {"Content-Type": "application/json"}
USER = {
    "X-OpenWebUI-User-Name": "Jane Doe", "X-OpenWebUI-User-Id": "7f0c", "X-OpenWebUI-User-Email": "jane@example.test",
    "X-OpenWebUI-User-Role": "admin", "X-OpenWebUI-Chat-Id": "b1c5",
}  # fmt: skip
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is there?"}]
TITLE = [{"role": "user", "content": '### Task:\nGenerate a concise title as JSON: {"title": "..."}'}]


class Browser(NamedTuple):
    """Open WebUI's server, with one session of aiohttp for each request, as in its source."""

    url: str

    async def send(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, str]:
        """Send a request and return the status and the body."""
        data = None if body is None else json.dumps(body)
        async with (
            aiohttp.ClientSession(trust_env=True) as session,
            session.request(method, self.url + path, data=data, headers=headers) as response,
        ):
            return response.status, await response.text()

    async def document(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        """Send a request and return the JSON of its answer, which must be a success."""
        status, text = await self.send(method, path, body, **headers)
        assert status == 200, text
        return json.loads(text)


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serving]:
    documents = [fake(tmp_path, "ada", slots=1), fake(tmp_path, "long", "--tokens=5000", "--tokens-per-s=20", slots=1)]
    async with serving(tmp_path, *documents) as started:
        yield started


@pytest.fixture
def browser(serve: Serving) -> Browser:
    return Browser(serve.url)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Browser]:
    """The real Ollama with the model `ada`; skips the test if it has not been built."""
    make_model(tmp_path / "ada.gguf", SENTENCE, pools=False)
    try:
        with ollama.serving(tmp_path) as server:
            server.create("ada", tmp_path / "ada.gguf", ollama.CHAT_TEMPLATE)
            yield Browser(server.url)
    except BuildError as error:
        pytest.skip(str(error))


NAME = "ada:latest"
"""Open WebUI appends the tag, and rejects a model that is not in the list."""


async def read_ollama_models(browser: Browser) -> None:
    """Verify a connection to Ollama, list the models, and show one."""
    verified = await browser.document("GET", "/api/version", **USER)
    assert [part.isdecimal() for part in verified["version"].split(".")] == [True] * 3, "it is compared by number"

    listed = (await browser.document("GET", "/api/tags", **JSON, **USER))["models"]
    known = {row["model"]: row for row in listed}
    assert all({"name", "model", "modified_at", "size", "digest", "details"} <= row.keys() for row in listed)
    loaded = await browser.document("GET", "/api/ps", **JSON, **USER)
    assert loaded == {"models": []}
    assert NAME in known
    shown = await browser.document("POST", "/api/show", {"model": NAME}, **JSON, **USER)
    assert "completion" in shown["capabilities"]


async def use_ollama_model(browser: Browser) -> None:
    """Chat, make a title, embed two texts, and unload the model."""
    options = {
        "temperature": 0.8,
        "num_ctx": 4096,
        "num_predict": 128,
        "num_keep": 24,
        "mirostat": 0,
        "stop": ["<|x|>"],
    }
    chat = {"model": NAME, "messages": CHAT, "options": options, "stream": True, "keep_alive": "5m"}
    status, text = await browser.send("POST", "/api/chat", chat, **JSON, **USER)
    lines = [json.loads(line) for line in text.splitlines()]
    assert (status, "".join(line["message"]["content"] for line in lines)) == (200, SENTENCE)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert {"eval_count", "prompt_eval_count", "eval_duration", "total_duration"} <= lines[-1].keys(), "it shows these"

    title = {"model": NAME, "messages": TITLE, "stream": False, "options": {"num_predict": 1000}}
    assert (await browser.document("POST", "/api/chat", title, **JSON, **USER))["message"]["content"] == SENTENCE
    texts = {"input": ["a", "b"], "model": NAME}
    vectors = await browser.document("POST", "/api/embed", texts, **JSON, **USER, Authorization="Bearer ")
    assert len(vectors["embeddings"]) == 2
    loaded = await browser.document("GET", "/api/ps", **JSON, **USER)
    assert [row["name"] for row in loaded["models"]] == [NAME]
    unloaded = {"model": NAME, "keep_alive": 0, "prompt": ""}
    assert (await browser.document("POST", "/api/generate", unloaded, **JSON, **USER))["done_reason"] == "unload"


async def test_open_webui_session_with_an_ollama_connection_succeeds(serve: Serving, browser: Browser) -> None:
    await read_ollama_models(browser)
    assert serve.starts("ada") == 0
    await use_ollama_model(browser)
    assert serve.starts("ada") == 1


@pytest.mark.deep
async def test_open_webui_session_succeeds_with_the_real_ollama(real: Browser) -> None:
    await read_ollama_models(real)
    await use_ollama_model(real)


async def test_open_webui_session_with_an_openai_connection_succeeds(browser: Browser) -> None:
    key = {"Authorization": "Bearer none-needed"}
    listed = await browser.document("GET", "/v1/models", **JSON, **USER, **key)
    assert [row["id"] for row in listed["data"]] == ["ada", "long"]
    assert all(row.get("name", "") is not None for row in listed["data"])

    chat = {
        "stream": True, "model": "ada", "messages": CHAT, "temperature": 0.8, "max_tokens": 128,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    status, text = await browser.send("POST", "/v1/chat/completions", chat, **JSON, **USER, **key)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert (status, events.pop()) == (200, "[DONE]")
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == SENTENCE
    assert json.loads(events[-1])["usage"]["completion_tokens"] == 8

    title = {"model": "ada", "messages": TITLE, "stream": False, "max_completion_tokens": 1000}
    answer = await browser.document("POST", "/v1/chat/completions", title, **JSON, **USER, **key)
    assert answer["choices"][0]["message"]["content"] == SENTENCE
    status, text = await browser.send("POST", "/v1/chat/completions", {**title, "model": "none"}, **JSON, **key)
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found"), "it shows error.message"


@pytest.mark.parametrize(
    ("path", "model"), [("/api/chat", "long:latest"), ("/v1/chat/completions", "long")], ids=["ollama", "openai"]
)
async def test_answer_stopped_in_open_webui_is_aborted_at_the_engine(
    browser: Browser, tmp_path: Path, path: str, model: str
) -> None:
    body = json.dumps({"model": model, "messages": CHAT, "stream": True})
    async with (
        aiohttp.ClientSession(trust_env=True) as session,
        session.post(browser.url + path, data=body, headers=JSON | USER) as response,
    ):
        assert await response.content.readany()
        response.close()  # as `cleanup_response` does
        await until("the engine notices", lambda: len(transcript(tmp_path, "long")) == 1)
    (call,) = transcript(tmp_path, "long")
    assert (call.aborted, call.finished) == (True, False)
