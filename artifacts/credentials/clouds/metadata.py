"""What a machine or pod asks its own cloud beside it: metadata services, on addresses of the machine's own link. I/O.

Owns the one way to these addresses, which `transport` never asks: where they lie is written here or in this process'
own environment, never said by a registry. Promises: no redirect is followed, no proxy asked, every wait has an end.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from yarl import URL

from artifacts.credentials.clouds.cloud import ANSWER_BYTES_MAX, Reply
from artifacts.errors import BrokenError
from artifacts.http.retry import STATUSES, Pace, Tries

CONNECT_S, WHOLE_S = 2.0, 10.0
"""It lies beside us: who does not take a connection at once is not there."""


class NobodyError(Exception):
    """Nobody answers there: this machine is none of that cloud's."""


async def fetch_metadata(url: str, headers: Mapping[str, str], pace: Pace) -> Reply:
    """What it says. Raises NobodyError, and UnreachableError where it is there and too busy in all tries."""
    tries = Tries(pace)
    while True:
        try:
            return await _once(URL(url, encoded=True), headers)
        except BrokenError as error:
            await tries.again(error)


async def _once(url: URL, headers: Mapping[str, str]) -> Reply:
    limits = aiohttp.ClientTimeout(total=WHOLE_S, connect=CONNECT_S)  # its name is looked up within that, too
    try:
        async with (
            aiohttp.ClientSession(timeout=limits, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.get(url, headers=headers, allow_redirects=False) as answer,
        ):
            if answer.status in STATUSES:
                raise BrokenError(f"answered {answer.status}", answer.headers.get("Retry-After"))
            text = b""
            while len(text) <= ANSWER_BYTES_MAX and (more := await answer.content.read(ANSWER_BYTES_MAX)):
                text += more
            return Reply(answer.status, answer.headers, text[:ANSWER_BYTES_MAX])
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL):
        raise NobodyError from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BrokenError(f"the connection broke while it answered ({type(error).__name__})") from None
