"""Compares the tokens of the torch engine with transformers' own model on the CPU. Prints one line of JSON.

    compare.py FOLDER PROMPT TOKENS

`tokens`: those of the engine, in order. `again`: those of a second request, which uses the same cache. `behind`: by
how much the logit of each token is below the largest one, by the model that transformers loads from the same folder;
`deviation`: the standard deviation of those logits.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers

server, torch_model = map(importlib.import_module, ("server", "torch_model"))
"""Modules in the folder of this program, which is started by path."""


def main(folder: str, prompt: bytes, tokens: int) -> dict[str, object]:
    """Run both on the same prompt."""
    words = ["--port", "0", "--name", "compared", "--weights", folder, "--device", "cpu", "--slots", "1"]
    engine = torch_model.load(server.options(words), server.Phases(Path(os.devnull), "compared"))
    found = list(engine.generate(prompt, tokens))
    again = list(engine.generate(prompt, tokens))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([[*prompt, *found]])).logits[0, len(prompt) - 1 : -1].float()
    behind = logits.max(dim=1).values - logits[torch.arange(tokens), torch.tensor(found)]
    return {"tokens": found, "again": again, "behind": behind.tolist(), "deviation": logits.std().item()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as device:
        os.environ["SIMULATED_GPU"] = device
        print(json.dumps(main(sys.argv[1], sys.argv[2].encode(), int(sys.argv[3]))))
