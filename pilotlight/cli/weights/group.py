"""The `pilotlight weights` command group: weights as OCI artifacts. Its commands are in modules of their own."""

from __future__ import annotations

import click

from pilotlight.agent.weights import peer_sharing
from pilotlight.cli.weights import inspect_push, login, pack, pull, store, verify


@click.group(epilog="Example: pilotlight weights ls")
def weights() -> None:
    """Manage weights as OCI artifacts: pack and push them, pull them, and manage this node's store."""


for command in (
    pack.pack,
    inspect_push.push,
    inspect_push.inspect,
    pull.pull,
    verify.verify_,
    store.list_,
    store.pin,
    store.unpin,
    store.evict,
    login.login,
    login.logout,
    peer_sharing.serve_,
):
    weights.add_command(command)
