"""Parses `WWW-Authenticate` (RFC 9110, section 11.6) and decides whether a realm may receive the login. Pure.

The sender of the 401 names the realm, which then receives the password. Therefore the realm must be the registry's own
host or a related one, over TLS, or one that an administrator allowed (CVE-2026-48978). Related hosts are below a domain
of one owner; domains of hosting providers, which many owners share, are in a table (`SHARED`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from yarl import URL

from artifacts.http.url_policy import (
    PORTS,
    format_host_port,
    get_origin,
    normalize_host,
    parse_address,
    parse_untrusted_url,
)
from artifacts.registry_errors import PolicyError

HEADER_CHARS_MAX = 8192
CHALLENGES_MAX = 16
SHARED: Final[Mapping[str, str]] = {
    "Amazon": (
        "cloudfront.net elasticbeanstalk.com *.elasticbeanstalk.com *.awsapprunner.com amplifyapp.com "
        "awsglobalaccelerator.com"
    ),
    "Azure": (
        "azurecr.io *.data.azurecr.io azure-api.net azureedge.net azurefd.net trafficmanager.net cloudapp.net "
        "*.cloudapp.azure.com azurewebsites.net *.azurewebsites.net azurestaticapps.net *.azurestaticapps.net "
        "*.azurecontainer.io azurecontainerapps.io *.azurecontainerapps.io *.azmk8s.io blob.core.windows.net "
        "dfs.core.windows.net file.core.windows.net queue.core.windows.net table.core.windows.net "
        "web.core.windows.net *.web.core.windows.net *.blob.storage.azure.net *.web.storage.azure.net "
        "vault.azure.net servicebus.windows.net database.windows.net"
    ),
    "Google": (
        "appspot.com *.r.appspot.com run.app *.run.app cloudfunctions.net firebaseapp.com firebaseio.com "
        "web.app *.gateway.dev storage.googleapis.com translate.goog cloud.goog *.cloudshell.dev"
    ),
    "other clouds": (
        "digitaloceanspaces.com *.digitaloceanspaces.com ondigitalocean.app linodeobjects.com "
        "*.linodeobjects.com *.nodebalancer.linode.com ip.linodeusercontent.com vultrobjects.com "
        "*.vultrobjects.com vultrusercontent.com your-objectstorage.com *.your-objectstorage.com "
        "backblazeb2.com *.backblazeb2.com wasabisys.com *.wasabisys.com r2.cloudflarestorage.com "
        "*.oraclecloudapps.com icr.io tencentcloudcr.com cr.yandex"
    ),
    "code and pages": (
        "github.io app.github.dev githubpreview.dev gitlab.io bitbucket.io readthedocs.io surge.sh "
        "netlify.app vercel.app now.sh workers.dev pages.dev r2.dev deno.dev glitch.me webflow.io "
        "streamlit.app hf.space gradio.live supabase.co supabase.in"
    ),
    "programs": (
        "herokuapp.com onrender.com fly.dev railway.app up.railway.app proxy.rlwy.net koyeb.app zeabur.app "
        "*.code.run *.platformsh.site *.platform.sh repl.co *.repl.co replit.app replit.dev *.replit.dev "
        "csb.app gitpod.io *.gitpod.io modal.run proxy.runpod.net pythonanywhere.com *.pythonanywhere.com "
        "jfrog.io"
    ),
    "tunnels": (
        "trycloudflare.com cfargotunnel.com lhr.life lhr.rocks lhrtunnel.link localhost.run loca.lt "
        "localtunnel.me serveo.net ngrok.io *.ngrok.io ngrok.app *.ngrok.app ngrok.dev *.ngrok.dev "
        "ngrok-free.app *.ngrok-free.app ngrok-free.dev "
        "devtunnels.ms *.devtunnels.ms ts.net share.zrok.io tunnelmole.net bore.pub"
    ),
    "names for addresses": (
        "duckdns.org ddns.net dyndns.org dynu.net no-ip.org no-ip.com no-ip.biz hopto.org zapto.org sytes.net "
        "myftp.org mooo.com freeddns.org ydns.eu dedyn.io myfritz.net synology.me myqnapcloud.com"
    ),
    "Kubernetes": ("svc.cluster.local"),
}
"""Domains of providers below which anyone can get a name, so that two such names may have different owners. `*` is any
single label.

The rules work as those of the Public Suffix List, whose MPL-2.0 rules out shipping it. A name matched by a rule is
shared by all customers, as are its parents; a name with one more label has one owner, including all names below it.
"""
SHARED_DEEPLY: Final = (
    "amazonaws.com", "amazonaws.com.cn", "on.aws", "aliyuncs.com", "fcapp.run", "myhuaweicloud.com", "myqcloud.com",
    "baidubce.com", "volces.com", "yandexcloud.net", "appdomain.cloud", "openshiftapps.com", "ovh.net", "scw.cloud",
    "nip.io", "sslip.io", "xip.io", "pinggy.io", "pinggy.link",
)  # fmt: skip
"""Domains with regions, services or addresses at varying depths: no names below them are related."""
SHARED_TOPS = frozenset({"app", "dev"})
"""Most domains directly below these belong to hosting providers that give names to anyone."""
_RULES: Final = frozenset(rule for rules in SHARED.values() for rule in rules.split())
_ABOVE: Final = (
    frozenset(
        name for rule in _RULES for name in accumulate(reversed(rule.split(".")), lambda tail, label: f"{label}.{tail}")
    )
    - _RULES
)
"""Parents of the names in the rules."""
_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rf'({_WORD})[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|({_WORD}))')
_SCHEME = re.compile(rf"({_WORD})(?=[ \t]|,|$)(?![ \t]*=)")
_TOKEN68 = re.compile(r"[A-Za-z0-9._~+/-]+=*(?=[ \t]*(?:,|$))")
_GAP = re.compile(r"[ \t,]*")


class Challenge(NamedTuple):
    """One authentication scheme offered by the server."""

    scheme: str
    """Lowercase."""
    parameters: Mapping[str, str]
    """Keys are lowercase."""


def parse_challenges(headers: Sequence[str]) -> list[Challenge]:
    """Parse all challenges in order; the rest of a header after a syntax error is ignored."""
    found: list[Challenge] = []
    for header in headers[:CHALLENGES_MAX]:
        found += _challenges(header[:HEADER_CHARS_MAX])
    return found[:CHALLENGES_MAX]


def _challenges(text: str) -> list[Challenge]:
    found: list[Challenge] = []
    parameters: dict[str, str] = {}
    at = _gap(text, 0)
    while at < len(text):
        if found and (one := _PARAMETER.match(text, at)) is not None:
            value = one[3] if one[2] is None else re.sub(r"\\(.)", r"\1", one[2])
            parameters.setdefault(one[1].lower(), value)
            at = _gap(text, one.end())
        elif (scheme := _SCHEME.match(text, at)) is not None:
            parameters = {}
            found.append(Challenge(scheme[1].lower(), parameters))
            at = _gap(text, scheme.end())
            if _PARAMETER.match(text, at) is None and (token := _TOKEN68.match(text, at)) and "=" in token[0]:
                at = _gap(text, token.end())
        else:
            break
    return found


def _gap(text: str, at: int) -> int:
    found = _GAP.match(text, at)
    return at if found is None else found.end()


def parse_realm(text: str, registry: URL, allowed: Collection[str] = ()) -> URL:
    """Return the realm's URL if it may receive the registry's login. Raises PolicyError.

    `allowed`: HOST or HOST:PORT entries that an administrator trusts with it.
    """
    said, url = get_origin(registry), parse_untrusted_url(text)
    asked = get_origin(url)
    if asked == said:
        return url
    named = {one.lower() for one in allowed}
    trusted = format_host_port(asked.host, asked.port) in named or str(asked) in named
    if url.scheme != "https" and not (said.scheme == "http" and trusted):
        raise PolicyError(f"{said}: its realm is not https; no login is sent there")
    if trusted:
        return url
    related = asked.host == said.host or (parse_address(asked.host) is None and is_related_host(said.host, asked.host))
    if not related or asked.port not in {said.port, PORTS["https"]}:
        raise PolicyError(
            f"{said}: its realm is at {asked}, which seems to belong to another party; "
            f"a login is sent only to the registry's host and to hosts of the same domain"
        )
    return url


def is_related_host(registry: str, other: str) -> bool:
    """Whether `other` is the registry, its parent domain, or a host below either: `registry-1.docker.io`,
    `auth.docker.io`. A domain that several parties share does not count.
    """
    registry, other = normalize_host(registry), normalize_host(other)
    if parse_address(registry) is not None or parse_address(other) is not None:
        return registry == other
    parents = {registry, registry.partition(".")[2]}
    return any(_owned(one) and (other == one or other.endswith("." + one)) for one in parents)


def _owned(domain: str) -> bool:
    """Whether one party owns all names below the domain; false for top levels, `co.uk`, and shared provider domains."""
    top, labels = domain.partition(".")[2], domain.split(".")
    if len(labels) < 2 or (len(labels) == 2 and labels[1] in SHARED_TOPS):
        return False
    if domain in _RULES or f"*.{top}" in _RULES or domain in _ABOVE:
        return False
    if any(domain == one or domain.endswith("." + one) for one in SHARED_DEEPLY):
        return False
    return len(labels) > 2 or len(labels[-1]) > 2 or len(labels[-2]) > 3
