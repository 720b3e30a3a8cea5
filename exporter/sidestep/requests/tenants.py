"""Tenants of requests: those with series of their own, and all others as ``__other__``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from sidestep.protocol.limits import OTHER, printable
from sidestep.protocol.request_events import Identity, id_prefix

NO_TENANT = "__none__"
"""Name of requests that have no tenant."""
SKETCH_FACTOR = 10
"""Counters of the sketch for each tenant that is shown."""
LEAD = 2
"""A tenant replaces a shown one once it has this many times its requests."""


Rule = Callable[[Identity, str], str]
"""Function that returns the tenant of a request, of its identity and its adapter; empty: none."""
HEADER = "header:"
"""Prefix of a rule by a label that the client gave its request."""
RULES: dict[str, Rule] = {
    "cache-salt": lambda identity, _: identity.salt,
    "adapter": lambda _, adapter: adapter,
    "priority": lambda identity, _: str(identity.priority),
    "id-prefix": lambda identity, _: identity.prefix or id_prefix(identity.id),
}
"""Tenant of a request by value of ``--tenants.by``."""
_UNKNOWN = Identity()


def rule(by: str) -> Rule:
    """Return the rule that ``--tenants.by`` names."""
    if not by.startswith(HEADER):
        return RULES[by]
    name = by.removeprefix(HEADER)
    return lambda identity, _: identity.labels.get(name, "")


class HeavyHitters:
    """Requests by tenant in bounded memory (Misra and Gries, 1982).

    A count is at most the true one, and less by at most the number of all requests divided by the
    number of counters.
    """

    def __init__(self, counters: int) -> None:
        self._counters = counters
        self._counts: dict[str, int] = {}

    def add(self, name: str) -> int:
        """Count a request; return the tenant's count."""
        known = self._counts.get(name, 0)
        if known or len(self._counts) < self._counters:
            self._counts[name] = known + 1
            return known + 1
        self._counts = {key: count - 1 for key, count in self._counts.items() if count > 1}
        return 0

    def seed(self, counts: Mapping[str, int]) -> None:
        """Continue with known counts, which are not above the true ones."""
        self._counts.update(counts)

    def lightest(self, names: Iterable[str]) -> tuple[int, str]:
        """Return the smallest count of ``names``, and the name that has it."""
        return min((self._counts.get(name, 0), name) for name in names)


class Tenants:
    """The tenants of one exporter.

    The first ones are shown until there are ``limit``; then one that has clearly more requests replaces
    the one with the fewest. Which tenants are shown is an estimate; what is counted for them is not.

    Args:
        by: One of ``RULES``, or ``header:NAME``.
        always: Tenants that are shown as long as the exporter runs; they count for the limit.

    Attributes:
        replaced: Called with the name of a tenant that is no longer shown.
    """

    def __init__(self, by: str, limit: int, always: Collection[str] = ()) -> None:
        self.replaced: Callable[[str], None] = lambda _: None
        self._rule = rule(by)
        self._limit = max(limit, len(always))
        self._always = frozenset(always)
        self._shown = dict.fromkeys(always)
        self._requests = HeavyHitters(SKETCH_FACTOR * self._limit)

    def __contains__(self, name: object) -> bool:
        """Return whether the tenant is shown."""
        return name in self._shown

    def tenant(self, identity: Identity | None, adapter: str) -> str:
        """Return the tenant of a request that begins, and count the request."""
        # What is printable depends on the release of Python, and clients choose the name.
        name = printable(self._rule(identity or _UNKNOWN, adapter)) or NO_TENANT
        count = self._requests.add(name)
        if name in self._shown or name == OTHER:
            return name
        if len(self._shown) < self._limit:
            self._shown[name] = None
        elif replaceable := self._shown.keys() - self._always:
            fewest, lightest = self._requests.lightest(replaceable)
            if count > LEAD * max(fewest, 1):
                del self._shown[lightest]
                self._shown[name] = None
                self.replaced(lightest)
        return name

    def restore(self, requests: Mapping[str, int]) -> list[str]:
        """Show the tenants of a snapshot's series, and count on; return those that do not fit."""
        heaviest = sorted(requests, key=lambda name: (-requests[name], name))
        for name in heaviest:
            if name != OTHER and len(self._shown) < self._limit:
                self._shown[name] = None
        self._requests.seed({name: requests[name] for name in self._shown if requests.get(name)})
        return [name for name in heaviest if name not in self._shown and name != OTHER]
