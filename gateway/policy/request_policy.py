"""Request policies: which members of a request body are removed, forced, capped or set by default. Pure.

The policies of a Model and of a Tenant are combined: the removed members of both; forced values, where the Tenant's
override the Model's; the lower cap; and defaults, where the Tenant's override the Model's. A forced value overrides a
cap, a cap overrides the client's value, and that overrides a default. A rule for a member applies to all members with
the same meaning (`same_members`), so that none of them bypasses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf

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
from gateway.errors import CallError, invalid_request, model_faulty
from gateway.exception_handling import reraise_memory_error

FOUND_MAX = 1_000
"""Cache size for combined policies; above it the cache is cleared. A policy with the most members has about 200 KiB."""
_NULL = b"null"
_TOOLS = frozenset({"tools", "functions"})
_TOOL_MEMBERS = _TOOLS | frozenset({"tool_choice", "function_call", "parallel_tool_calls"})
"""Removed with tools: engines reject a choice of tools without tools."""
_UNLIMITED_BELOW = dict.fromkeys(TOKEN_LIMITS, 0) | {
    "logprobs": 0, "prompt_logprobs": 0, "top_logprobs": 0, "truncate_prompt_tokens": 0, "top_k": 1,
}  # fmt: skip
"""Member -> the lowest number that engines read as a limit. A lower one means no limit: -1 for llama.cpp (tokens,
`top_k`) and vLLM (the others), and 0 as `top_k` for both.
"""
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
                    limit = max(cap, 1.0) if same in TOKEN_LIMITS else cap  # 0 tokens mean no limit for some engines
                    self._caps[same] = min(limit, self._caps.get(same, limit))
        self._forced = _combined(model.forced, model.forced_by_name.get(name, {}), tenant.forced)
        dropped = _removed_members((*model.removed, *tenant.removed))
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
        if member not in self._caps or _NUMBER.fullmatch(text) is None:
            return text
        return self._within_cap(member, float(text)) or text

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
        """Return another value if this one exceeds the cap."""
        if value == _NULL:
            return None
        text = value.decode("utf-8", "replace")
        if _NUMBER.fullmatch(text) is None:
            raise invalid_request(f"{name} must be a number", param=name)
        capped = self._within_cap(name, float(text))
        return None if capped is None else capped.encode()

    def _within_cap(self, name: str, number: float) -> str | None:
        """Return what replaces a number that exceeds the cap, or means no limit. A limit of 0 tokens, which means none
        for Ollama, becomes 1.
        """
        cap = self._caps[name]
        if name in TOKEN_LIMITS and 0 <= number < 1:
            return "1"
        return _render(cap) if number > cap or number < _UNLIMITED_BELOW.get(name, -inf) else None

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


def _removed_members(removed: Iterable[str]) -> set[str]:
    dropped = set[str]()
    for member in removed:
        dropped |= _TOOL_MEMBERS if member in _TOOLS else same_members(member)
    return dropped


def _concerned_members(entry: PolicyEntry) -> set[str]:
    """Return all members that a policy with this entry reads or changes, whatever name a request uses."""
    members = _removed_members(entry.removed)
    for member in {*entry.caps, *entry.forced, *entry.defaults}.union(*entry.forced_by_name.values()):
        members |= same_members(member)
    return members


def _ignore_fault(model: ModelName, error: Exception) -> None:
    del model, error


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


class _Source:
    """The policy of one Model or Tenant in the catalogue, and the exception that it raised, if any."""

    __slots__ = ("entry", "error", "members")

    def __init__(self, entry: PolicyEntry) -> None:
        self.entry = entry
        self.members = frozenset[str]()
        self.error: Exception | None = None
        try:
            self.members = frozenset(_concerned_members(entry))
        except Exception as error:  # noqa: BLE001 - the first request that needs the policy reports it
            reraise_memory_error(error)
            self.error = error


class Policies:
    """The policies of all Models and Tenants. A combined policy is built when the first request needs it."""

    def __init__(self) -> None:
        self.on_fault: Callable[[ModelName, Exception], None] = _ignore_fault
        """Called for the first exception of a Model's policies, and again after a change of these."""
        self.members = frozenset[str]()
        """All members that some policy reads or changes."""
        self._models: dict[str, _Source] = {}
        self._tenants: dict[str, _Source] = {}
        self._uses: dict[str, int] = {}
        """Member -> number of Models and Tenants whose policy concerns it."""
        self._found: dict[tuple[str, str, str], Policy | None] = {}
        """Tenant, Model, and name with values of its own ("" each for none) -> the policy; None: it raised."""
        self._faulty: set[str] = set()
        """Models whose exception was reported."""

    @property
    def empty(self) -> bool:
        """Whether no Model and no Tenant has a policy."""
        return not self._models and not self._tenants

    def clear(self) -> None:
        """Remove all policies."""
        self.members = frozenset()
        self._models.clear()
        self._tenants.clear()
        self._uses.clear()
        self._found.clear()
        self._faulty.clear()

    def update(
        self, models: Mapping[ModelName, PolicyEntry | None], tenants: Mapping[TenantName, PolicyEntry | None]
    ) -> None:
        """Replace the policies of these Models and Tenants; None removes one."""
        new_models = {name for name, entry in models.items() if self._replace(self._models, name, entry)}
        new_tenants = {name for name, entry in tenants.items() if self._replace(self._tenants, name, entry)}
        if not new_models and not new_tenants:
            return
        self.members = frozenset(self._uses)
        self._faulty = set() if new_tenants else self._faulty - new_models
        self._found = {
            key: found for key, found in self._found.items() if key[0] not in new_tenants and key[1] not in new_models
        }

    def _replace(self, sources: dict[str, _Source], name: str, entry: PolicyEntry | None) -> bool:
        """Replace one policy; False if it is the same."""
        old = sources.get(name)
        if entry == (None if old is None else old.entry):
            return False
        new = None if entry is None else _Source(entry)
        for member in () if new is None else new.members:
            self._uses[member] = self._uses.get(member, 0) + 1
        for member in () if old is None else old.members:
            self._uses[member] -= 1
            if not self._uses[member]:
                del self._uses[member]
        if new is None:
            del sources[name]
        else:
            sources[name] = new
        return True

    def find(self, tenant: TenantEntry, model: ModelEntry, name: str) -> Policy | None:
        """Return the policy for a request that names the Model by `name`, to which Ollama's clients append `:latest`.
        None: there is none. Raises CallError 503 if the policy raised an exception.
        """
        own, others = self._models.get(model.name), self._tenants.get(tenant.name)
        if own is None and others is None:
            return None
        by_name: Mapping[str, object] = {} if own is None else own.entry.forced_by_name
        named = next((one for one in (name, name.removesuffix(":latest")) if one in by_name), "") if by_name else ""
        key = ("" if others is None else tenant.name, "" if own is None else model.name, named)
        if key not in self._found:
            if len(self._found) >= FOUND_MAX:
                self._found.clear()
            self._found[key] = self._build(own, others, model.name, named)
        found = self._found[key]
        if found is None:
            raise model_faulty()
        return found

    def _build(self, own: _Source | None, others: _Source | None, model: ModelName, named: str) -> Policy | None:
        """Return the combined policy; None if it raised an exception."""
        fault = next((one.error for one in (own, others) if one is not None and one.error is not None), None)
        if fault is None:
            try:
                return Policy(
                    _NO_ENTRY if own is None else own.entry, _NO_ENTRY if others is None else others.entry, named
                )
            except Exception as error:  # noqa: BLE001 - an exception concerns only requests with this policy
                reraise_memory_error(error)
                fault = error
        if model not in self._faulty:
            self._faulty.add(model)
            self.on_fault(model, fault)
        return None
