"""A text model for Triton's Python backend, with the inputs and outputs of Triton's vLLM backend.

It repeats its sentence: once, or until `max_tokens` if `ignore_eos` is set. A token is a word, and a stream has one
response per token. Both settings may be members of `sampling_parameters` (JSON) or parameters of the request. It
processes one request after another.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as backend  # exists in Triton's process only

SENTENCE = "Hello, I am Ada, asleep until you called."
TOKEN_S = 0.005
"""Time that a token takes."""
FLAGS = ("stream", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")


class TritonPythonModel:
    """The class that the backend searches."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Declares the inputs and outputs, so that the model needs no config.pbtxt."""
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        config.add_input({"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_input({"name": "sampling_parameters", "data_type": "TYPE_STRING", "dims": [1], "optional": True})
        for name in FLAGS:
            config.add_input({"name": name, "data_type": "TYPE_BOOL", "dims": [1], "optional": True})
        for name, kind in (("text_output", "STRING"), ("finish_reason", "STRING")):
            config.add_output({"name": name, "data_type": f"TYPE_{kind}", "dims": [-1]})
        for name in ("num_input_tokens", "num_output_tokens"):
            config.add_output({"name": name, "data_type": "TYPE_UINT32", "dims": [-1]})
        return config

    def execute(self, requests: list[Any]) -> None:
        """Answers the requests."""
        for request in requests:
            self._answer(request)

    def _answer(self, request: Any) -> None:
        def value(name: str) -> Any:
            found = backend.get_input_tensor_by_name(request, name)
            return None if found is None else found.as_numpy()[0]

        def outputs(words: list[str], finish: str) -> Any:
            tensors = [backend.Tensor("text_output", np.array(["".join(words).encode()], dtype=object))]
            if value("return_finish_reason"):
                tensors.append(backend.Tensor("finish_reason", np.array([finish.encode()], dtype=object)))
            if value("return_num_input_tokens"):
                tensors.append(backend.Tensor("num_input_tokens", np.array([prompt_tokens], dtype=np.uint32)))
            if value("return_num_output_tokens"):
                tensors.append(backend.Tensor("num_output_tokens", np.array([len(words)], dtype=np.uint32)))
            return backend.InferenceResponse(tensors)

        sender = request.get_response_sender()
        prompt_tokens = len(value("text_input").split())
        settings = json.loads(request.parameters() or "{}") | json.loads(value("sampling_parameters") or b"{}")
        words = [f"{' ' if number else ''}{word}" for number, word in enumerate(SENTENCE.split(" "))]
        limit = int(settings.get("max_tokens", len(words)))
        repeated = itertools.islice(itertools.cycle(words), limit) if settings.get("ignore_eos") else words[:limit]
        tokens = list(repeated)
        finish = "stop" if len(tokens) == len(words) else "length"
        for number, word in enumerate(tokens, start=1):
            time.sleep(TOKEN_S)
            if sender.is_cancelled():
                break
            if value("stream"):
                sender.send(outputs([word], finish if number == len(tokens) else "None"))
        else:
            if not value("stream"):
                sender.send(outputs(tokens, finish))
        sender.send(flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
