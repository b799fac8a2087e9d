"""Sleep and adapters of a fake vLLM, with the requests and the behavior that were observed with vLLM 0.32. Pure.

vLLM's `/health` is 200 while it sleeps, and a request to a sleeping engine waits until the engine wakes. After SIGTERM
during a stream, tokens stop and the connection stays open: `engine.py` does that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from urllib.parse import parse_qs

from loadtest.fake_engine.api_dialects import BadRequestError, Head, Json

WAKE_PATH = "/wake_up"
WAITING_FOR_CONNECTIONS = "Waiting for connections to close. (CTRL+C to force quit)"
"""Its log line after SIGTERM during a stream."""


class Vllm:
    """The sleep level and the adapters of an engine."""

    def __init__(self, model: str, has_files: Callable[[str], bool]) -> None:
        self.model = model
        self._has_files = has_files
        """Returns whether a folder with an adapter exists."""
        self.level: int | None = None
        """The level at which it sleeps. None: it is awake."""
        self.adapters: dict[str, str] = {}
        """Path by name."""
        self._routes: dict[str, Callable[[Head, bytes], tuple[int, Json | str]]] = {
            "/sleep": self._sleep,
            "/is_sleeping": lambda _head, _body: (200, {"is_sleeping": self.level is not None}),
            "/v1/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
        }

    @property
    def paths(self) -> Collection[str]:
        """The paths of `respond`."""
        return self._routes

    @property
    def models(self) -> list[str]:
        """The names that requests may use."""
        return [self.model, *self.adapters]

    def respond(self, head: Head, body: bytes) -> tuple[int, Json | str]:
        """Return status and document, or text, of a response. Raises BadRequestError."""
        return self._routes[head.path](head, body)

    def wake(self) -> Json:
        """Wake up."""
        self.level = None
        return {"status": "awake", "tags": None}

    def metrics(self, running: int, waiting: int) -> str:
        """Return the metrics with vLLM's names."""
        labels = f'{{engine="0",model_name="{self.model}"}}'
        values = {"num_requests_running": running, "num_requests_waiting": waiting, "kv_cache_usage_perc": 0.0}
        return "".join(f"vllm:{name}{labels} {float(value)}\n" for name, value in values.items())

    def _sleep(self, head: Head, _body: bytes) -> tuple[int, Json]:
        (level,) = parse_qs(head.query).get("level", ["1"])
        if level not in ("0", "1", "2"):
            raise BadRequestError("level must be 0, 1 or 2")
        self.level = int(level)
        return 200, {"status": "sleeping", "level": self.level}

    def _load(self, _head: Head, body: bytes) -> tuple[int, Json | str]:
        name, path = _members(body, "lora_name", "lora_path")
        if not self._has_files(path):
            return 404, _error(404, "NotFoundError", f"Loading lora {name} failed: No adapter found for {path}")
        self.adapters[name] = path
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, _head: Head, body: bytes) -> tuple[int, Json | str]:
        (name,) = _members(body, "lora_name")
        if self.adapters.pop(name, None) is None:
            return 404, _error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        return 200, f"Success: LoRA adapter '{name}' removed successfully."


def unknown_model(name: str) -> Json:
    """Return the document of a response for a model that is not served."""
    return _error(404, "NotFoundError", f"The model `{name}` does not exist.")


def _error(status: int, kind: str, message: str) -> Json:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _members(body: bytes, *names: str) -> list[str]:
    try:
        document = json.loads(body)
        return [str(document[name]) for name in names]
    except (ValueError, LookupError, TypeError) as error:
        raise BadRequestError(f"the body must have {' and '.join(names)}") from error
