"""The logins that a command of this machine has for registries, in the order in which they are asked. I/O.

Owns that order: people's files and the programs that they name, then the cloud whose registry it is. A pod's pull
secrets come before all of these (`artifacts.credentials.keychain.each`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from artifacts.credentials.clouds.amazon import Amazon
from artifacts.credentials.clouds.azure import Azure
from artifacts.credentials.clouds.cloud import Clouds
from artifacts.credentials.clouds.google import METADATA, Google
from artifacts.credentials.keychain import Chain, ConfigFiles, Keychain, usual


def files() -> list[Path]:
    """Where people's logins are."""
    return usual(os.environ, Path.home())


def keychain(*, plain_http: bool = False) -> Keychain:
    """Of this process. What a cloud gives to a machine is not for `plain_http`: whoever listens would have it."""
    people = ConfigFiles(files())
    return people if plain_http else Chain([people, clouds(os.environ, Path.home())])


def clouds(env: Mapping[str, str], home: Path) -> Clouds:
    """All that are known."""
    return Clouds([Amazon(env, home), Google(env.get("GCE_METADATA_HOST") or METADATA), Azure(env)])
