"""Request policies: which members of a request body are removed, forced, capped or set by default. Pure.

The policies of a Model and of a Tenant are combined: the removed members of both; forced values, where the Tenant's
override the Model's; the lower cap; and defaults, where the Tenant's override the Model's. A forced value overrides a
cap, a cap overrides the client's value, and that overrides a default. A rule for a member applies to all members with
the same meaning (`same_members`), so that none of them bypasses it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from msgspec import Raw

from autoscaler.contract import (
    TOKEN_LIMITS,
    ModelEntry,
    ModelName,
    PolicyEntry,
    TenantEntry,
    TenantName,
    same_members,
)
from gateway.errors import CallError, invalid_request

FOUND_MAX = 10_000
"""Cache size for combined policies; above it the cache is cleared."""
_NULL = b"null"
_TOOLS = frozenset({"tools", "functions"})
_TOOL_MEMBERS = _TOOLS | frozenset({"tool_choice", "function_call", "parallel_tool_calls"})
"""Removed with tools: engines reject a choice of tools without tools."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_RESPONSES = b"/v1/responses"
_NO_ENTRY = PolicyEntry()


class Policy:
    """The combined policy of one Tenant for one name of a Model."""

    __slots__ = (
        "_caps",
        "_defaults",
        "_dropped",
        "_folded",
        "_forced",
        "answer_checks",
        "letters",
        "members",
        "request_checks",
    )

    def __init__(self, model: PolicyEntry, tenant: PolicyEntry, name: str) -> None:
        """`name`: the requested name of the Model."""
        self._caps: dict[str, float] = {}
        """Member -> its maximum."""
        for entry in (model, tenant):
            for member, cap in entry.caps.items():
                for same in same_members(member):
                    self._caps[same] = min(cap, self._caps.get(same, cap))
        self._forced = _combined(model.forced, model.forced_by_name.get(name, {}), tenant.forced)
        dropped = set[str]()
        for member in (*model.removed, *tenant.removed):
            dropped |= _TOOL_MEMBERS if member in _TOOLS else same_members(member)
        forced = {same for member in self._forced for same in same_members(member)}
        self._dropped = frozenset(dropped | forced)
        """Members of requests that are dropped."""
        defaults = _combined(model.defaults, tenant.defaults)
        self._defaults = {
            member: self._capped_default(member, text) for member, text in defaults.items() if member not in forced
        }
        members = {*self._dropped, *self._caps}
        for member in self._defaults:
            members |= same_members(member)
        self.members = frozenset(members)
        """All members that the policy reads or changes."""
        self.letters = frozenset("".join(filter(str.isalnum, member.casefold())) for member in self.members)
        """The letters and digits of these members, for names of form parts that parsers read differently."""
        self._folded = {member.casefold(): member for member in self.members}
        self.request_checks = tuple(one for one in (model.request_check, tenant.request_check) if one is not None)
        self.answer_checks = tuple(one for one in (model.answer_check, tenant.answer_check) if one is not None)

    def _capped_default(self, member: str, text: str) -> str:
        cap = self._caps.get(member)
        if cap is None or _NUMBER.fullmatch(text) is None or float(text) <= cap:
            return text
        return _render(cap)

    def edits(self, engine_path: bytes, names: Collection[str], values: Mapping[str, Raw]) -> dict[str, bytes | None]:
        """Return the new values of members as JSON; None removes one. Raises CallError 400.

        `names`: all members of the request. `values` has at least those in `members`.
        """
        self._check_case(names)
        out: dict[str, bytes | None] = {}
        for name in self.members.intersection(names):
            if name in self._dropped:
                out[name] = None
            elif name in self._caps:
                capped = self._capped(name, bytes(values[name]))
                if capped is not None:
                    out[name] = capped
        for member, text in self._forced.items():
            out[_target(member, engine_path)] = text.encode()
        for member, text in self._defaults.items():
            kept = same_members(member) - self._dropped
            if not any(name in names and bytes(values[name]) != _NULL for name in kept):
                out[_target(member, engine_path)] = text.encode()
        return out

    def _capped(self, name: str, value: bytes) -> bytes | None:
        """Return the cap if the value exceeds it. A negative limit of tokens means none."""
        if value == _NULL:
            return None
        text = value.decode("utf-8", "replace")
        if _NUMBER.fullmatch(text) is None:
            raise invalid_request(f"{name} must be a number", param=name)
        cap, number = self._caps[name], float(text)
        return _render(cap).encode() if number > cap or (number < 0 and name in TOKEN_LIMITS) else None

    def _check_case(self, names: Collection[str]) -> None:
        """Reject members that some engines take for one of the policy because they ignore case."""
        for name in names:
            if name not in self.members:
                known = self._folded.get(name.casefold())
                if known is not None:
                    raise _differs_in_case(known)


def _combined(*maps: Mapping[str, str]) -> dict[str, str]:
    """Return one map; a member overrides earlier ones with the same meaning."""
    out: dict[str, str] = {}
    for one in maps:
        for member, text in one.items():
            for same in same_members(member).intersection(out):
                del out[same]
            out[member] = text
    return out


def _target(member: str, engine_path: bytes) -> str:
    """Return the name of a member in the API of a path: for limits of tokens the one that its engines read."""
    if member not in TOKEN_LIMITS:
        return member
    return "max_output_tokens" if engine_path == _RESPONSES else "max_tokens"


def _render(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)


def _differs_in_case(known: str) -> CallError:
    message = f"a member differs from {known} only in the case of its letters: write {known}, or remove it"
    return invalid_request(message, param=known)


class Policies:
    """The policies of all Models and Tenants."""

    def __init__(self, models: Mapping[ModelName, PolicyEntry], tenants: Mapping[TenantName, PolicyEntry]) -> None:
        self._models = models
        self._tenants = tenants
        self._found: dict[tuple[TenantName, ModelName, str], Policy | None] = {}
        every = [Policy(entry, _NO_ENTRY, name) for entry in models.values() for name in ("", *entry.forced_by_name)]
        every += [Policy(_NO_ENTRY, entry, "") for entry in tenants.values()]
        self.members = frozenset[str]().union(*(policy.members for policy in every))
        """All members that some policy reads or changes."""

    def find(self, tenant: TenantEntry, model: ModelEntry, name: str) -> Policy | None:
        """Return the policy for a request that names the Model by `name`, to which Ollama's clients append `:latest`.
        None: there is none.
        """
        own = self._models.get(model.name)
        by_name: Mapping[str, object] = {} if own is None else own.forced_by_name
        named = next((one for one in (name, name.removesuffix(":latest")) if one in by_name), "") if by_name else ""
        key = (tenant.name, model.name, named)
        if key in self._found:
            return self._found[key]
        others = self._tenants.get(tenant.name)
        found = None if own is None and others is None else Policy(own or _NO_ENTRY, others or _NO_ENTRY, named)
        if len(self._found) >= FOUND_MAX:
            self._found.clear()
        self._found[key] = found
        return found


def build_policies(models: Iterable[ModelEntry], tenants: Iterable[TenantEntry]) -> Policies | None:
    """Return the policies of a catalogue; None if no Model and no Tenant has one."""
    of_models = {entry.name: entry.policy for entry in models if entry.policy is not None}
    of_tenants = {entry.name: entry.policy for entry in tenants if entry.policy is not None}
    return Policies(of_models, of_tenants) if of_models or of_tenants else None
