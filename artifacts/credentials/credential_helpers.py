"""Docker credential helpers (`docker-credential-NAME`): programs that return, store and erase logins. I/O.

Implements Docker's helper protocol (https://docs.docker.com/reference/cli/docker/login): a command as the argument, the
data on pipes. A helper must finish within a few seconds. It receives only the host and, to store a login, that login.
Its output is not shown, and it is killed together with its child processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import msgspec

from artifacts.credentials.docker_config import IDENTITY_USER, Login, format_server_url
from artifacts.registry_errors import DeniedError

PROGRAM_S_MAX = 10.0
END_S_MAX = 1.0
PROGRAM_BYTES_MAX = 64 << 10
UNKNOWN = b"credentials not found"
"""Output of a helper that has no login for the host."""


class _Spoken(msgspec.Struct, frozen=True, rename="pascal"):
    username: str = ""
    secret: str = ""


class _Kept(msgspec.Struct, frozen=True, rename={"server": "ServerURL", "username": "Username", "secret": "Secret"}):
    server: str
    username: str
    secret: str


async def get_login(name: str, host: str, within_s: float = PROGRAM_S_MAX) -> Login | None:
    """Return the helper's login for a host, or None. Raises DeniedError."""
    code, text = await _said(name, "get", host, format_server_url(host).encode(), within_s)
    if code != 0:
        if UNKNOWN in text:
            return None
        raise DeniedError(f"{host}: docker-credential-{name} failed with status {code} and returned no login")
    try:
        found = msgspec.json.decode(text, type=_Spoken)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise DeniedError(f"{host}: docker-credential-{name} returned an invalid login") from None
    if found.username == IDENTITY_USER:
        return Login(identity_token=found.secret)
    return Login(found.username, found.secret) if found.username and found.secret else None


async def store_login(name: str, host: str, login: Login, within_s: float = PROGRAM_S_MAX) -> None:
    """Store the login of a host in the helper. Raises DeniedError."""
    user, secret = (IDENTITY_USER, login.identity_token) if login.identity_token else (login.user, login.password)
    text = msgspec.json.encode(_Kept(format_server_url(host), user, secret))
    code, _ = await _said(name, "store", host, text, within_s)
    if code != 0:
        raise DeniedError(
            f"{host}: docker-credential-{name} failed with status {code} and stored no login; if it is read-only, "
            f"remove it from credsStore or credHelpers, or log in with its own tool"
        )


async def erase_login(name: str, host: str, within_s: float = PROGRAM_S_MAX) -> bool:
    """Erase the login of a host from the helper; False if it had none. Raises DeniedError."""
    if await get_login(name, host, within_s) is None:
        return False
    code, text = await _said(name, "erase", host, format_server_url(host).encode(), within_s)
    if code != 0 and UNKNOWN not in text:
        raise DeniedError(f"{host}: docker-credential-{name} failed with status {code} and may still have the login")
    return code == 0


async def _said(name: str, word: str, host: str, question: bytes, within_s: float) -> tuple[int, bytes]:
    """Run the helper; return its exit status and output. Raises DeniedError."""
    program = f"docker-credential-{name}"
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            word,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=PROGRAM_BYTES_MAX,
        )
    except OSError as error:
        raise DeniedError(f"{host}: {program}, which stores its login, cannot be started: {error.strerror}") from None
    try:
        async with asyncio.timeout(within_s):
            text = await _answer(process, question)
            if len(text) > PROGRAM_BYTES_MAX:
                raise DeniedError(f"{host}: {program} returned too much output for a login")
            return await process.wait(), text
    except TimeoutError:
        raise DeniedError(f"{host}: {program} returned no login within {within_s:.0f} s") from None
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the helper and its process group, unless it has exited."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # a child that left the process group may keep the output open
            async with asyncio.timeout(END_S_MAX):
                await process.communicate()


async def _answer(process: asyncio.subprocess.Process, question: bytes) -> bytes:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("internal error: the credential helper was started without pipes for stdin and stdout")
    process.stdin.write(question)
    try:
        await process.stdin.drain()
    except ConnectionError:
        pass  # the helper needs no input or is exiting; its exit status shows whether it succeeded
    process.stdin.close()
    text = b""
    while len(text) <= PROGRAM_BYTES_MAX and (more := await process.stdout.read(PROGRAM_BYTES_MAX)):
        text += more
    return text
