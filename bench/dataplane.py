"""`make bench-dataplane`: the cost of a request, a chunk and a waiting stream at one gateway, and at other proxies.

Runs all parts, or those named on the command line. Each part prints its table while it runs. The last line is one JSON
object (interfaces, section 10). `QUICK=1` uses fewer rounds of the same sizes, at most 10 minutes, without LiteLLM.
Proxies run on core 0; load, engine and this program run on core 1.
"""

from __future__ import annotations

import resource

from bench import attacks, calls, chunks, kit, latency, leaving, overload, parts, stalls, waiting

KEYS = (
    "rps", "ratio_nginx", "ratio_haproxy", "ratio_vllm_router", "ratio_sglang_router", "ratio_aiohttp", "ratio_litellm",
    "us_per_call", "cpu_ratio_nginx", "us_per_chunk", "chunk_cpu_ratio_nginx", "blast_chunks_per_s",
    "blast_ratio_nginx", "kib_per_waiting", "added_ms_p50", "added_ms_p99", "stall_cpu_ms_max", "small_added_ms_p99",
    "close_ms_p99", "refusal_ms_p99", "rss_growth_mib", "overload_goodput",
    "attacked_p99_ratio", "attacked_added_ms_p99",
    "attack_connects_p99_ratio", "attack_slow_readers_p99_ratio", "attack_slow_heads_p99_ratio",
    "attack_idle_p99_ratio",
)  # fmt: skip
"""The keys of the last line. The keys of a part that was not selected are null."""

PARTS: dict[str, parts.Part] = {
    "calls": calls.measure,
    "chunks": chunks.paced,
    "blast": chunks.blast,
    "waiting": waiting.measure,
    "latency": latency.measure,
    "stalls": stalls.measure,
    "leaving": leaving.measure,
    "overload": overload.measure,
    "attacks": attacks.measure,
}
"""The parts, in the order in which they run."""


def main() -> None:
    """Run on the core of the load, with the maximum number of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kit.pin(kit.LOAD_CORE)
    parts.main("dataplane", __doc__, KEYS, PARTS)


if __name__ == "__main__":
    main()
