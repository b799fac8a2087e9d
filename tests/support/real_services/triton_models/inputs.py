"""A model for Triton's Python backend with inputs of TensorRT-LLM's ensemble. It returns them and the parameters."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as backend  # exists in Triton's process only

INPUTS = {
    "text_input": "STRING", "max_tokens": "INT32", "stop_words": "STRING", "temperature": "FP32", "top_k": "INT32",
    "seed": "UINT64", "stream": "BOOL", "exclude_input_in_output": "BOOL",
}  # fmt: skip
REQUIRED = ("text_input", "max_tokens")


class TritonPythonModel:
    """The class that the backend searches."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Declares the inputs and outputs, so that the model needs no config.pbtxt."""
        config.set_max_batch_size(4)
        for name, kind in INPUTS.items():
            shape = [-1] if name == "stop_words" else [1]
            config.add_input(
                {"name": name, "data_type": f"TYPE_{kind}", "dims": shape, "optional": name not in REQUIRED}
            )
        config.add_output({"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]})
        return config

    def execute(self, requests: list[Any]) -> list[Any]:
        """Returns the inputs and parameters of each request as JSON."""
        responses = []
        for request in requests:
            inputs = {one.name(): one.as_numpy().astype(str).tolist() for one in request.inputs()}
            text = json.dumps({"inputs": inputs, "parameters": json.loads(request.parameters() or "{}")})
            output = backend.Tensor("text_output", np.array([[text.encode()]], dtype=object))
            responses.append(backend.InferenceResponse([output]))
        return responses
