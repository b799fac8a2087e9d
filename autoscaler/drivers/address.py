"""A host and a port as one text, as URLs, Host headers and Routes want it (RFC 3986, 3.2.2). Pure."""

from __future__ import annotations


def written(host: str, port: int) -> str:
    """`host:port`; an address of IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def of_engine(host: str, port: int, tls_name: str | None) -> str:
    """As Routes say it (`autoscaler.contract`). `tls_name`: whom its certificate is for, empty where that is the host;
    None: it speaks plain HTTP.
    """
    if tls_name is None:
        return written(host, port)
    return f"https://{tls_name}@{written(host, port)}" if tls_name else f"https://{written(host, port)}"
