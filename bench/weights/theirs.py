"""One pull or push of oras-py in its own process: `python -m bench.weights.theirs pull|push REFERENCE PATH`.

Prints the cost as `bench.weights.ours` does; its imports are not included. oras-py verifies no digest. With `SYNC=1`
the files are also synced to the disk, which counts.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from bench.weights.cost import Cost


def _run(what: str, reference: str, path: Path) -> None:
    oras = importlib.import_module("oras.client")  # it has no type hints
    client = oras.OrasClient(hostname=reference.partition("/")[0], insecure=True)
    cost = Cost()
    if what == "push":
        client.push(reference, files=[str(path)], disable_path_validation=True, quiet=True)
    else:
        client.pull(reference, outdir=str(path))
        if os.environ.get("SYNC"):
            for one in [*path.iterdir(), path]:
                number = os.open(one, os.O_RDONLY)
                os.fsync(number)
                os.close(number)
    cost.report()


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
