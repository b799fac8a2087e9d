"""`pilotlight weights`: weights as OCI artifacts. Owns the group; its commands are modules of their own."""

from __future__ import annotations

import click

from pilotlight import logins, packing, peering, pulling, sending, stored


@click.group(epilog="Example: pilotlight weights ls")
def weights() -> None:
    """Weights as OCI artifacts: made here, brought here, and kept on this node."""


for command in (
    packing.pack,
    sending.push,
    sending.inspect,
    pulling.pull,
    pulling.verify_,
    stored.list_,
    stored.pin,
    stored.unpin,
    stored.evict,
    logins.login,
    logins.logout,
    peering.serve_,
):
    weights.add_command(command)
