"""The contract of engines, as tests: an engine behaves as `autoscaler.spec.engines` states.

Real engines and fakes pass the same suites. A test file provides the `rig` fixture and inherits the suites that apply:

class TestMine(StreamStopContract, GenerationContract, SleepContract):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> EngineRig: ...

The model of a rig has the name `ada`, and repeats SENTENCE until the limit of tokens. Its engine has one slot.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from autoscaler.engines.command_line import LaunchCommand
from autoscaler.spec.engine_definition import Engine
from tests.support.net.ports import HOST
from tests.support.real_services.engine_process import ANSWERS_S_MAX, Json, Reply, Running, events, running

SENTENCE = "Hello, I am Ada, asleep until you called."
TOKENS = len(SENTENCE.split(" "))
POLL_S = 1.5
"""llama.cpp notices closed connections only in seconds without a result, also of a request for metrics."""
COMPLETED_TOKENS = 100
"""Of a stream that an engine completes after SIGTERM."""


class Stop(StrEnum):
    """The reaction of an engine to SIGTERM during a stream."""

    CUTS = "ends the stream early, and exits"
    COMPLETES = "completes the stream, and exits"
    HOLDS = "keeps the connection open until the client closes it, or ends the stream with an error; then exits"


class Api(Protocol):
    """The API of an engine that the suite uses."""

    @property
    def path(self) -> str:
        """The path of whole responses."""

    @property
    def stream_path(self) -> str:
        """The path of streams."""

    def body(self, model: str, tokens: int, *, stream: bool) -> Json:
        """A request for that many tokens."""

    def text(self, document: Json) -> str:
        """The text of a whole response."""

    def usage(self, document: Json) -> tuple[int, int]:
        """The numbers of tokens of the prompt and of the response."""

    def piece(self, event: str) -> str:
        """The text in an event of a stream."""

    def is_last(self, event: str) -> bool:
        """Whether the event completes a stream."""


class Chat(NamedTuple):
    """OpenAI's chat completions."""

    path: str = "/v1/chat/completions"
    stream_path: str = "/v1/chat/completions"
    has_stream_options: bool = True
    has_done: bool = True
    """Whether a stream ends with the event `[DONE]`, and not with the finish reason."""

    def body(self, model: str, tokens: int, *, stream: bool) -> Json:
        """Decodes greedily."""
        messages = [{"role": "user", "content": "Who are you?"}]
        options = {"stream_options": {"include_usage": True}} if stream and self.has_stream_options else {}
        return {
            "model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream, **options,
        }  # fmt: skip

    def text(self, document: Json) -> str:
        """The content of the message."""
        return str(document["choices"][0]["message"]["content"])

    def usage(self, document: Json) -> tuple[int, int]:
        """The member `usage`."""
        return document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]

    def piece(self, event: str) -> str:
        """The content of the delta."""
        choices = [] if event == "[DONE]" else json.loads(event).get("choices", [])  # an error has none
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def is_last(self, event: str) -> bool:
        """The mark of the end, or the finish reason."""
        if self.has_done or event == "[DONE]":
            return event == "[DONE]"
        return any(choice.get("finish_reason") for choice in json.loads(event)["choices"])


class Embeddings(NamedTuple):
    """OpenAI's embeddings. There are no streams."""

    path: str = "/v1/embeddings"
    stream_path: str = ""

    def body(self, model: str, tokens: int, *, stream: bool) -> Json:
        """One text."""
        assert not stream
        return {"model": model, "input": " ".join(["word"] * tokens)}

    def text(self, document: Json) -> str:
        """The number of numbers."""
        return f"{len(document['data'][0]['embedding'])} numbers"

    def usage(self, document: Json) -> tuple[int, int]:
        """The member `usage`."""
        return document["usage"]["prompt_tokens"], 0

    def piece(self, event: str) -> str:
        """There are none."""
        raise NotImplementedError

    def is_last(self, event: str) -> bool:
        """There are none."""
        raise NotImplementedError


class TritonText(NamedTuple):
    """Triton's extension `generate`, with the inputs and outputs of its vLLM backend."""

    model: str = "ada"

    @property
    def path(self) -> str:
        """For one response."""
        return f"/v2/models/{self.model}/generate"

    @property
    def stream_path(self) -> str:
        """For several responses."""
        return f"/v2/models/{self.model}/generate_stream"

    def body(self, model: str, tokens: int, *, stream: bool) -> Json:
        """The model is in the path."""
        assert model == self.model
        flags = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
        settings = json.dumps({"max_tokens": tokens, "ignore_eos": True})
        return {
            "text_input": "Who are you?", "stream": stream, "sampling_parameters": settings,
            **dict.fromkeys(flags, True),
        }  # fmt: skip

    def text(self, document: Json) -> str:
        """The output tensor."""
        return str(document["text_output"])

    def usage(self, document: Json) -> tuple[int, int]:
        """Two other tensors."""
        return document["num_input_tokens"], document["num_output_tokens"]

    def piece(self, event: str) -> str:
        """One token."""
        return str(json.loads(event).get("text_output", ""))

    def is_last(self, event: str) -> bool:
        """A finish reason."""
        return json.loads(event).get("finish_reason") in {"length", "stop"}


def metric(text: str, name: str) -> float | None:
    """Return the sum of a metric's samples in Prometheus' format, or None if there is none. `name` may have labels."""
    name, _, labels = name.rstrip("}").partition("{")
    rows = re.findall(rf"(?m)^{re.escape(name)}(?:\{{(.*)\}})? (\S+)", text)
    values = [float(value) for found, value in rows if labels in found]
    return sum(values) if values else None


class SleepCalls(NamedTuple):
    """The requests of an engine's sleep protocol, and their effects."""

    sleep: tuple[str, Json]
    """Path and body of a POST."""
    wake: tuple[str, Json]
    is_asleep: Callable[[Running], bool]
    readiness_status: int
    """Of the readiness path while the engine sleeps."""


VLLM_SLEEP = SleepCalls(
    ("/sleep?level=1", {}),
    ("/wake_up", {}),
    lambda engine: bool(engine.request("GET", "/is_sleeping").document["is_sleeping"]),
    200,
)
"""Sleeping vLLMs look ready."""


@dataclass(eq=False)
class EngineRig:
    """One engine with its model. It is started when a test needs it, and again after a test has stopped it."""

    definition: Engine
    launch: Callable[[int, int], LaunchCommand]
    """The command for a port and a port of metrics."""
    folder: Path
    api: Api = field(default_factory=Chat)
    model: str = "ada"
    """The name in requests."""
    model_in_responses: str = "ada"
    unknown_model_status: int = 404
    statuses_before_ready: frozenset[int] = frozenset()
    """Of the readiness path before its first 200, if the engine listens already."""
    metrics: frozenset[str] = frozenset()
    """Those of "waiting", "running" and "cache_use" that the engine has with this model. Others are unknown."""
    has_metrics_port: bool = False
    tokens_max: int = 4000
    """The length of the longest stream. It must take much longer than a short request."""
    stop: Stop = Stop.CUTS
    stop_log: str = ""
    """The log line of an engine that holds a connection after SIGTERM."""
    is_known_path: Callable[[Running, str], bool] = field(default=lambda _engine, _path: True)
    """Whether the engine has a path."""
    sleep: SleepCalls | None = None
    text: str = SENTENCE
    """The result of `Api.text`."""
    first_status: int = 0
    """Of a request at once after the readiness path returned 200."""
    _running: Running | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def engine(self) -> Running:
        """The running engine."""
        if self._running is None or self._running.process.poll() is not None:
            self.close()
            context = running(self.folder, self.launch, has_metrics_port=self.has_metrics_port)
            self._running = self._stack.enter_context(context)
            self.first_status = self.ask().status
        return self._running

    def close(self) -> None:
        """Kills the engine."""
        self._stack.close()

    def ask(self, tokens: int = TOKENS, model: str = "") -> Reply:
        """Sends a request for a whole response."""
        return self.engine.request("POST", self.api.path, self.api.body(model or self.model, tokens, stream=False))

    def streaming(self, tokens: int) -> contextlib.AbstractContextManager[Any]:
        """Sends a request for a stream."""
        return self.engine.response("POST", self.api.stream_path, self.api.body(self.model, tokens, stream=True))

    def running(self) -> float | None:
        """The number of running requests, or None if the engine does not report it."""
        recorded = self.definition.behavior.metrics
        text = self.engine.metrics(recorded.path) if recorded else ""
        found = [metric(text, name) for name in (recorded.running if recorded else ())]
        return next((value for value in found if value is not None), None)

    def longest_s(self) -> float:
        """An estimate of the time of `tokens_max` tokens, from a shorter response."""
        tokens = self.tokens_max // 64
        begin_s = time.monotonic()
        assert self.ask(tokens).status == http.HTTPStatus.OK
        return (time.monotonic() - begin_s) / tokens * self.tokens_max

    def readiness(self) -> int:
        """The status of the readiness path."""
        path = self.definition.readiness_path.replace("{name}", self.model)
        return self.engine.request("GET", path).status

    def is_answering(self) -> bool:
        """Whether the model answers as it should."""
        reply = self.ask()
        return reply.status == http.HTTPStatus.OK and self.api.text(reply.document) == self.text


def is_path_of_fastapi(engine: Running, path: str, prefix: str = "") -> bool:
    """Whether the description that FastAPI generates of an engine has a path, or the path is that of a page."""
    paths = engine.request("GET", f"{prefix}/openapi.json").document["paths"]
    is_listed = path in {re.sub(r"\{[^}]*\}", "{id}", one) for one in paths}
    return is_listed or engine.request("GET", path).status == http.HTTPStatus.OK


class EngineContract:
    """The contract of every engine."""

    def test_engine_serves_the_model_as_soon_as_its_readiness_path_returns_200(self, rig: EngineRig) -> None:
        engine = rig.engine
        assert rig.first_status == 200
        assert engine.statuses <= rig.statuses_before_ready, "another status before 200 would need a different rule"
        assert rig.readiness() == 200

    def test_request_for_an_unknown_model_gets_the_recorded_status(self, rig: EngineRig) -> None:
        body = rig.api.body(rig.model, 1, stream=False)
        path = rig.api.path.replace(f"/{rig.model}/", "/unknown/")
        reply = rig.engine.request("POST", path, body | ({"model": "unknown"} if "model" in body else {}))
        assert reply.status == rig.unknown_model_status

    def test_metrics_have_the_recorded_names_and_no_others(self, rig: EngineRig) -> None:
        assert rig.ask().status == 200  # some engines have a metric only after its first change
        recorded = rig.definition.behavior.metrics
        if recorded is None:
            assert not rig.metrics
            return
        text = rig.engine.metrics(recorded.path)
        groups = {"waiting": recorded.waiting, "running": recorded.running, "cache_use": recorded.cache_use}
        found = {group for group, names in groups.items() if any(metric(text, name) is not None for name in names)}
        assert found == rig.metrics


class NativePathsContract:
    """The contract of real engines. Fakes have few of these paths."""

    def test_native_paths_exist(self, rig: EngineRig) -> None:
        paths = rig.definition.behavior.native_paths
        assert [path for path in paths if not rig.is_known_path(rig.engine, path)] == []
        assert not rig.is_known_path(rig.engine, "/no-such-path"), "the check itself works"


class GenerationContract(EngineContract):
    """The contract of engines with a language model."""

    def test_response_has_the_exact_text_and_the_number_of_tokens(self, rig: EngineRig) -> None:
        document = rig.ask().document
        assert rig.api.text(document) == SENTENCE
        assert document.get("model", rig.model_in_responses) == rig.model_in_responses
        prompt_tokens, tokens = rig.api.usage(document)
        assert prompt_tokens > 0
        assert tokens == TOKENS

    def test_stream_has_the_exact_text_in_parts_and_an_end(self, rig: EngineRig) -> None:
        with rig.streaming(TOKENS) as response:
            assert response.status == 200
            found = list(events(response))
        pieces = [piece for piece in map(rig.api.piece, found) if piece]
        assert "".join(pieces) == SENTENCE
        assert len(pieces) > 1
        assert [event for event in found if rig.api.is_last(event)] == found[-1:]

    def test_connection_is_closed_after_a_stream_only_if_that_is_recorded(self, rig: EngineRig) -> None:
        body = json.dumps(rig.api.body(rig.model, TOKENS, stream=True))
        with contextlib.closing(http.client.HTTPConnection(HOST, rig.engine.port, timeout=ANSWERS_S_MAX)) as connection:
            connection.request("POST", rig.api.stream_path, body, {"Content-Type": "application/json"})
            connection.getresponse().read()
            socket_ = connection.sock
            connection.auto_open = 0
            try:
                connection.request("GET", rig.definition.readiness_path.replace("{name}", rig.model))
                is_closed = connection.getresponse().status != http.HTTPStatus.OK
            except (OSError, http.client.HTTPException):
                is_closed = True
        assert socket_ is not None, "the response announced keep-alive"
        assert is_closed == rig.definition.closes_after_stream

    def test_closed_stream_frees_the_only_slot(self, rig: EngineRig) -> None:
        all_s = rig.longest_s()
        with rig.streaming(rig.tokens_max) as response:
            next(events(response))
            assert rig.running() in {1, None}
        begin_s = time.monotonic()
        assert rig.is_answering()
        assert time.monotonic() - begin_s < all_s / 2, f"it seems to wait for the end of the stream, {all_s:.1f} s"


class RunningMetricContract:
    """The contract of engines that report the number of running requests."""

    def test_closed_connection_cancels_a_request_without_a_stream(self, rig: EngineRig) -> None:
        all_s = rig.longest_s()
        body = json.dumps(rig.api.body(rig.model, rig.tokens_max, stream=False))
        rig.engine.until("it is idle", lambda: rig.running() == 0)
        with contextlib.closing(http.client.HTTPConnection(HOST, rig.engine.port, timeout=ANSWERS_S_MAX)) as connection:
            connection.request("POST", rig.api.path, body, {"Content-Type": "application/json"})
            rig.engine.until("it runs the request", lambda: rig.running() == 1)
        begin_s = time.monotonic()
        rig.engine.until("it is idle again", lambda: rig.running() == 0, POLL_S)
        assert time.monotonic() - begin_s < all_s / 2, f"it seems to complete the request, in {all_s:.1f} s"


class SleepContract:
    """The contract of engines that can sleep."""

    def test_sleep_and_wake_change_the_state_and_the_woken_engine_answers(self, rig: EngineRig) -> None:
        calls, recorded, engine = rig.sleep, rig.definition.behavior.sleep, rig.engine
        assert calls is not None
        assert recorded is not None
        for (path, _), text in ((calls.sleep, recorded.sleep), (calls.wake, recorded.wake)):
            assert path.replace(f"/{rig.model}/", "/M/") in text, "the definition names the request"
        assert rig.is_answering()
        assert not calls.is_asleep(engine)
        assert engine.request("POST", *calls.sleep).status == 200
        engine.until("it sleeps", lambda: calls.is_asleep(engine))
        assert rig.readiness() == calls.readiness_status
        assert engine.request("POST", *calls.wake).status == 200
        engine.until("it is awake", lambda: not calls.is_asleep(engine))
        assert rig.readiness() == 200
        assert rig.is_answering()


class HangingSleeperContract(SleepContract):
    """The contract of vLLM: a request hangs while the engine sleeps. Therefore none may be sent."""

    def test_request_to_a_sleeping_engine_gets_no_answer_until_it_wakes(self, rig: EngineRig) -> None:
        calls, engine = rig.sleep, rig.engine
        assert calls is not None
        engine.request("POST", *calls.sleep)
        engine.until("it sleeps", lambda: calls.is_asleep(engine))
        with contextlib.closing(http.client.HTTPConnection(HOST, engine.port, timeout=ANSWERS_S_MAX)) as connection:
            body = json.dumps(rig.api.body(rig.model, TOKENS, stream=False))
            connection.request("POST", rig.api.path, body, {"Content-Type": "application/json"})
            for _ in range(20):  # other requests are answered meanwhile
                assert calls.is_asleep(engine)
            assert select.select([connection.sock], [], [], 0)[0] == []
            engine.request("POST", *calls.wake)
            with connection.getresponse() as response:
                assert rig.api.text(json.load(response)) == SENTENCE


class AdapterContract:
    """The contract of engines that load adapters while they run, with vLLM's requests."""

    def test_adapter_is_loaded_served_listed_and_unloaded(self, rig: EngineRig, adapter: Path) -> None:
        engine, name = rig.engine, "ada:quiet"
        assert "/v1/load_lora_adapter" in rig.definition.behavior.adapter_loading
        assert "/v1/unload_lora_adapter" in rig.definition.behavior.adapter_loading
        loaded = {"lora_name": name, "lora_path": str(adapter)}
        reply = engine.request("POST", "/v1/load_lora_adapter", loaded)
        assert (reply.status, reply.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
        assert name in {one["id"] for one in engine.request("GET", "/v1/models").document["data"]}
        assert rig.api.text(rig.ask(model=name).document) == SENTENCE
        assert engine.request("POST", "/v1/unload_lora_adapter", {"lora_name": name}).status == 200
        assert name not in {one["id"] for one in engine.request("GET", "/v1/models").document["data"]}
        assert rig.ask(model=name).status == 404

    def test_adapter_that_does_not_exist_is_404_and_affects_no_other_request(self, rig: EngineRig) -> None:
        missing = {"lora_name": "missing", "lora_path": "/no/such/adapter"}
        assert rig.engine.request("POST", "/v1/load_lora_adapter", missing).status == 404
        assert rig.is_answering()


class StopContract:
    """The contract of a stop. Name it first among the bases, so that its tests run last."""

    def test_sigterm_without_requests_ends_the_process(self, rig: EngineRig) -> None:
        engine = rig.engine
        assert rig.is_answering()
        engine.process.send_signal(signal.SIGTERM)
        engine.until_exit()


class StreamStopContract(StopContract):
    """The contract of a stop of engines with a language model."""

    def test_sigterm_during_a_stream_has_the_recorded_effect(self, rig: EngineRig) -> None:
        tokens = COMPLETED_TOKENS if rig.stop is Stop.COMPLETES else rig.tokens_max
        engine, seen = rig.engine, list[str]()

        def has_ended() -> bool:
            return engine.process.poll() is not None

        with rig.streaming(tokens) as response:
            found = events(response)
            seen.append(next(found))
            engine.process.send_signal(signal.SIGTERM)
            if rig.stop is Stop.HOLDS:
                engine.until("it waits or has ended", lambda: has_ended() or rig.stop_log in engine.log.read_text())
            if rig.stop is not Stop.HOLDS or has_ended():
                with contextlib.suppress(http.client.HTTPException, OSError):
                    seen.extend(found)
        engine.until_exit()
        words = [f"{' ' if number else ''}{word}" for number, word in enumerate(SENTENCE.split(" "))]
        text = "".join(itertools.islice(itertools.cycle(words), tokens))
        assert ("".join(map(rig.api.piece, seen)) == text) == (rig.stop is Stop.COMPLETES)
