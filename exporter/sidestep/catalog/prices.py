"""Prices of tokens (``--prices.model``), which the counters of cost add up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

PARTS = 10**12
"""Units of a stored cost in one unit of the currency. Costs are whole numbers, so that sums are exact."""
TOKENS = 10**6
"""Tokens that a price is for."""
PRICED = "prices"
"""Feature of rows that only an exporter with prices has."""
ANY = "*"
"""Name that stands for all models without prices of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Price:
    """Prices of a model's tokens, in ``PARTS`` of the currency for one token.

    Attributes:
        computed: Price of a prompt token whose KV is computed.
        generated: Price of a generated token.
        transferred: Price of a prompt token whose KV comes from the engine that has computed it.
    """

    model: str
    computed: int
    cached: int
    generated: int
    transferred: int = 0

    def __str__(self) -> str:
        found = [("input", self.computed), ("cached", self.cached), ("output", self.generated)]
        found += [("transferred", self.transferred)] if self.transferred else []
        return ",".join((self.model, *(f"{name}={n * TOKENS / PARTS:.15g}" for name, n in found)))

    def cost(self, computed: int, cached: int, generated: int, transferred: int = 0) -> int:
        """Return the cost of tokens."""
        prompt = computed * self.computed + cached * self.cached + transferred * self.transferred
        return prompt + generated * self.generated


class Prices:
    """The prices of all models."""

    def __init__(self, found: Iterable[Price] = ()) -> None:
        self._by_model = {price.model: price for price in found}

    def __bool__(self) -> bool:
        return bool(self._by_model)

    def of(self, model: str) -> Price | None:
        """Return the prices of a model; None if it has none."""
        return self._by_model.get(model) or self._by_model.get(ANY)
