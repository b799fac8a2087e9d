"""The tiers of the tests, the shards of the deep tier, and what a tier enforces. `tests/README.md` explains them.

Every test has exactly one of five markers. An explicit marker wins; otherwise the folder decides (FOLDERS).

* `fast`: starts no process and opens no socket. An audit hook (PEP 578) fails a test that does.
* `standard`: runs in `make test`, together with the fast tests.
* `deep`: runs only in `make test-deep` and in the shard of the deep tier that `.ci/run` adds.
* `clients`: runs only in `make test-clients`, which installs clients that no other test needs.
* `engines`: runs only in `make test-engines`, which installs engines that no other test needs.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Generator

import pytest

from tests.plugins.costs import PROCESS_EVENTS, SOCKET_EVENTS

TIERS = ("fast", "standard", "deep", "clients", "engines")
FOLDERS = {
    "chart": "standard", "clients": "clients", "fuzz": "standard", "gpu": "standard", "integration": "deep",
    "simulation": "standard", "unit/artifacts/registry": "standard", "unit/pilotlight/agent/weights": "standard",
    "wire": "standard",
}  # fmt: skip
"""Tier of the tests in a folder of tests/ and below; those of other folders are fast."""
SHARDS = 8


class IsolationError(RuntimeError):
    """A fast test started a process or opened a socket."""


class Isolation:
    """Fails a fast test that starts a process or opens a socket."""

    def __init__(self) -> None:
        self.test: str | None = None
        """Node id of the fast test that runs now."""
        self.violation: str | None = None
        """What it did: the error that is raised there may be caught by the code under test."""

    def audit(self, event: str, _: tuple[object, ...]) -> None:
        """An audit hook. It cannot be removed, so it must stay cheap."""
        if self.test is not None and (event in SOCKET_EVENTS or event in PROCESS_EVENTS):
            self.violation = f"{self.test} is marked fast and raised {event}: mark it standard or deep"
            raise IsolationError(self.violation)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Covers the set-up of fixtures of every scope."""
        self.test, self.violation = item.nodeid if tier(item) == "fast" else None, None
        try:
            return (yield)
        finally:
            self.test = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fails a test that caught the error."""
        report = yield
        if self.violation is not None and report.passed:
            report.outcome, report.longrepr, self.violation = "failed", self.violation, None
        return report


def tier(item: pytest.Item) -> str:
    """The tier of a test. Raises UsageError if it has two."""
    marks = {mark.name for mark in item.iter_markers() if mark.name in TIERS}
    own = {mark.name for mark in item.own_markers if mark.name in TIERS}
    if len(own or marks) > 1:
        raise pytest.UsageError(f"{item.nodeid} has the markers {', '.join(sorted(own or marks))}; keep one")
    if own or marks:
        return (own or marks).pop()
    folders = (one.as_posix() for one in item.path.relative_to(item.config.rootpath / "tests").parents)
    return next((FOLDERS[one] for one in folders if one in FOLDERS), "fast")


def shard(item: pytest.Item) -> int:
    """The shard of a test: a hash of its function's name, so that moving a file changes no shard."""
    return shard_of(getattr(item, "originalname", None) or item.name)


def shard_of(name: str) -> int:
    """The shard of a test function."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % SHARDS


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--shard NUMBER`."""
    help_ = f"run one of {SHARDS} shards of the deep tier: its deep tests and its property tests"
    parser.addoption("--shard", type=int, choices=range(SHARDS), help=help_)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the isolation of fast tests.

    urllib3 binds a socket when it is imported, to see whether there is IPv6. It is imported here, because otherwise the
    fast test that happens to import it first would fail.
    """
    importlib.import_module("urllib3.util.connection")
    isolation = Isolation()
    sys.addaudithook(isolation.audit)
    config.pluginmanager.register(isolation, "isolation")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its tier, and selects the shard."""
    for item in items:
        found = tier(item)
        if found not in {mark.name for mark in item.own_markers}:
            item.add_marker(found)
    number = config.getoption("--shard")
    if number is None:
        return
    chosen = [item for item in items if shard(item) == number and (tier(item) == "deep" or has_budget(item))]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def has_budget(item: pytest.Item) -> bool:
    """Whether the deep tier runs more examples of this test than `make test` does."""
    uses_budget = hasattr(getattr(item, "module", None), "examples")  # tests.support.example_budget
    return uses_budget or getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
