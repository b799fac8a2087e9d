"""A small disk that fills up during a pull: `unshare -m python -m tests.support.harness.faults.full_disk FOLDER HOST
FIRST SECOND`.

In its own mount namespace: a tmpfs on FOLDER, a store in it, and the real command. FIRST is pulled. After the first
part of SECOND another process fills the disk, and `GET /full` makes the registry continue. Then that file is removed
and SECOND is pulled again. Prints the outcome as one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

DISK_BYTES = 40 << 20
WAIT_S_MAX = 60.0
NO_SPARE = """
import sys
from artifacts.store.store import Store
from pilotlight.cli.main import cli
Store.__init__.__kwdefaults__["spare_bytes"] = 0
cli(sys.argv[1:], prog_name="pilotlight")
"""
"""The command, on a disk that is smaller than the space that a store leaves free."""


def command(store: Path, *words: str) -> list[str]:
    """`pilotlight weights ...` with this store."""
    return [sys.executable, "-c", NO_SPARE, "weights", *words, "--store", str(store)]


def why_no_mount() -> str | None:
    """Returns why a mount namespace is not available, if so."""
    try:
        done = subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else None


def main(folder: Path, host: str, first: str, second: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)], check=True)
    store = folder / "store"

    def ran(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(command(store, *words), capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)
        return done.returncode, done.stdout, done.stderr

    results: dict[str, object] = {"first": ran("pull", first)}
    with subprocess.Popen(command(store, "pull", second), stderr=subprocess.PIPE, text=True) as pulling:
        until_s = time.monotonic() + WAIT_S_MAX
        while not any(one.stat().st_size for one in store.rglob("*.parts")) and time.monotonic() < until_s:
            time.sleep(0.01)
        _fill(folder / "others")
        urllib.request.urlopen(f"http://{host}/full").close()
        _, body = pulling.communicate(timeout=WAIT_S_MAX)
    results |= {"full": (pulling.returncode, body), "copies": json.loads(ran("ls", "--output", "json")[1])}
    results["verify"] = ran("verify")
    results["half"] = [str(one.relative_to(store)) for one in (store / "copies").rglob("*") if one.is_file()]
    (folder / "others").unlink()
    results["again"] = ran("pull", second)
    results["verify again"] = ran("verify")
    print(json.dumps(results))


def _fill(path: Path) -> None:
    """Writes until the disk has no free byte left."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(number, bytes(1 << 16))
    except OSError:
        os.close(number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
