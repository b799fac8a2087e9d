"""HTTP client for the metadata service of the local machine or pod, on link-local addresses. I/O.

This is the only code that contacts these addresses; `artifacts.http.transport` never does. They are constants or come
from this process's environment, never from a registry. No redirects, no proxy, and every wait has a timeout.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from yarl import URL

from artifacts.credentials.clouds.cloud import ANSWER_BYTES_MAX, Reply
from artifacts.http.retry import STATUSES, Pace, Tries
from artifacts.registry_errors import BrokenError

CONNECT_S, WHOLE_S = 2.0, 10.0
"""The service is local: if it does not accept a connection quickly, it does not exist."""


class NobodyError(Exception):
    """No metadata service responds: the machine does not run in that cloud."""


async def fetch_metadata(url: str, headers: Mapping[str, str], pace: Pace) -> Reply:
    """Fetch a URL. Raises NobodyError, and UnreachableError if the service exists but is too busy in all attempts."""
    tries = Tries(pace)
    while True:
        try:
            return await _once(URL(url, encoded=True), headers)
        except BrokenError as error:
            await tries.again(error)


async def _once(url: URL, headers: Mapping[str, str]) -> Reply:
    limits = aiohttp.ClientTimeout(total=WHOLE_S, connect=CONNECT_S)  # includes the name lookup
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
        raise BrokenError(f"the connection broke during the response ({type(error).__name__})") from None
