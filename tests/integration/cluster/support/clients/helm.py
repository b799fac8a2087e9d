"""The commands of helm that the tutorials use, in place of the program: install, upgrade and test.

Values for the network of the tests are set in addition to those of the command.
Each command returns when everything is ready. The process kubelet serves no logs, so `test --logs` reads its files.

    python -m tests.integration.cluster.support.clients.helm VALUES_FILE LOGS_FOLDER COMMAND...
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import helm_python

Values = dict[str, Any]
TIMEOUT_S = 170


def merged(low: Values, high: Values) -> Values:
    """Merges values as helm does: mappings by key, everything else replaced."""
    both = {key: merged(low[key], high[key]) for key in low.keys() & high.keys() if isinstance(low[key], dict)}
    return {**low, **high, **both}


def parser() -> argparse.ArgumentParser:
    """Accepts only the options in the tutorials; another option fails the test of the page."""
    one = argparse.ArgumentParser("helm", allow_abbrev=False)
    verbs = one.add_subparsers(dest="verb", required=True)
    install, upgrade, test = (verbs.add_parser(verb, allow_abbrev=False) for verb in ("install", "upgrade", "test"))
    for each in (install, upgrade, test):
        each.add_argument("release")
        each.add_argument("-n", dest="namespace", required=True)
    for each in (install, upgrade):
        each.add_argument("chart", type=Path)
        each.add_argument("--set", action="append", default=[])
        each.add_argument("-f", dest="files", action="append", type=Path, default=[])
    install.add_argument("--create-namespace", action="store_true")
    upgrade.add_argument("--reset-then-reuse-values", action="store_true", required=True)
    test.add_argument("--logs", action="store_true")
    return one


def main(machine: Path, logs: Path, words: list[str]) -> None:
    """Runs one command. Raises helm_python.HelmError."""
    given = parser().parse_args(words)
    with helm_python.Config(kubeconfig_path=os.environ["KUBECONFIG"], namespace=given.namespace) as config:
        if given.verb == "test":
            config.test(given.release, timeout=TIMEOUT_S)
            sys.stdout.writelines(file.read_text() for file in logs.glob(f"{given.namespace}_*-doctor_*.log"))
            return
        values: Values = json.loads(machine.read_text())
        if given.verb == "upgrade":
            values = merged(values, config.get_values(given.release))
        for file in given.files:
            values = merged(values, helm_python.values_from_yaml(file.read_text()))
        for one in given.set:
            values = merged(values, helm_python.parse_set_string(one))
        options: Values = {"namespace": given.namespace, "wait": "watcher", "timeout": TIMEOUT_S}
        if given.verb == "install":
            config.install(given.chart, given.release, values, create_namespace=given.create_namespace, **options)
        else:
            config.upgrade(given.chart, given.release, values, **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
