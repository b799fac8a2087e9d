"""Probes as a kubelet runs them: httpGet, tcpSocket and exec, with thresholds, delays and periods."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

Spec = dict[str, Any]


class Prober:
    """Probes containers at one address. `period_s` overrides the pods' periods (whole seconds, at least one)."""

    def __init__(self, ip: str, ports: dict[str, int], session: aiohttp.ClientSession, period_s: float | None) -> None:
        self.ip = ip
        self._ports = ports
        self._session = session
        self._period_s = period_s

    async def until(self, probe: Spec, *, good: bool, failures_max: int | None = None) -> bool:
        """Probes until the threshold of consecutive results is reached; returns False after `failures_max` failures."""
        needed = probe.get("successThreshold", 1) if good else probe.get("failureThreshold", 3)
        in_a_row = failures = 0
        while True:
            found = await self.once(probe)
            in_a_row = in_a_row + 1 if found is good else 0
            if in_a_row >= needed:
                return True
            failures += not found
            if failures_max is not None and failures >= failures_max:
                return False
            await asyncio.sleep(self._period_s or probe.get("periodSeconds", 10))

    async def once(self, probe: Spec) -> bool:
        """Runs one probe."""
        try:
            async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
                if "httpGet" in probe:
                    return await self._get(probe["httpGet"])
                if "tcpSocket" in probe:
                    _, writer = await asyncio.open_connection(self.ip, self._port(probe["tcpSocket"]["port"]))
                    writer.close()
                    return True
                process = await asyncio.create_subprocess_exec(*probe["exec"]["command"])
                try:
                    return await process.wait() == 0
                finally:
                    if process.returncode is None:
                        process.kill()
                        await process.wait()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _get(self, get: Spec) -> bool:
        url = f"http://{get.get('host', self.ip)}:{self._port(get['port'])}{get.get('path', '/')}"
        headers = {header["name"]: header["value"] for header in get.get("httpHeaders", [])}
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            return 200 <= answer.status < 400

    def _port(self, port: int | str) -> int:
        return port if isinstance(port, int) else self._ports[port]
