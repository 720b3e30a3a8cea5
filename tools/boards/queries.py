"""PromQL, made in one place so that every query follows the same rules.

Counters are rated over ``$__rate_interval`` and then added up, so that a series more or less never
changes what a panel means. Where histograms may be native ones (docs/native-histograms.md), which
have no ``_bucket`` series, a query goes on after ``or`` with what asks those.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = "[$__rate_interval]"
RANKS = ("tp_rank", "pp_rank", "moe_ep_rank", "attn_cp_rank")
"""Labels in which only ranks differ that tell the same."""

REPLICA = ("job", "instance", "origin", "model_name", "engine", "dp_rank")
"""Labels that tell schedulers apart."""

By = str | Sequence[str]


class Scope:
    """Whose series are asked for: what a dashboard's variables choose.

    Args:
        labels: Each is matched with the variable of the same name.
    """

    def __init__(self, *labels: str) -> None:
        self._matchers = [f'{label}=~"${label}"' for label in labels]

    def __call__(self, *names: str, **matched: str) -> str:
        """A selector of one family, or of those of several that are there.

        Args:
            names: Sample names.
            matched: More labels with their values; one that begins with ``~`` is a pattern.
        """
        own = [
            f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"'
            for label, value in matched.items()
        ]
        if len(names) > 1:
            own = [f'__name__=~"{"|".join(names)}"', *own]
        name = names[0] if len(names) == 1 else ""
        return f"{name}{{{','.join(own + self._matchers)}}}"


def grouped(operator: str, by: By, expr: str) -> str:
    """``operator`` over ``expr``, one series for each combination of the labels ``by``."""
    labels = [by] if isinstance(by, str) else list(by)
    kept = f" by ({', '.join(labels)})" if any(labels) else ""
    return f"{operator}{kept} ({expr})"


def total(selector: str, by: By = "") -> str:
    """Gauges, added up."""
    return grouped("sum", by, selector)


def mean(selector: str, by: By = "") -> str:
    """The mean of gauges that do not add up."""
    return grouped("avg", by, selector)


def most(selector: str, by: By = "") -> str:
    """The highest of gauges that do not add up."""
    return grouped("max", by, selector)


def rate(selector: str, by: By = "") -> str:
    """What counters count in a second."""
    return grouped("sum", by, f"rate({selector}{WINDOW})")


def once(expr: str, by: By = "") -> str:
    """A sum in which the ranks of an SGLang replica, which all tell the same, count once."""
    return grouped("sum", by, _one_rank(expr))


def once_rate(selector: str, by: By = "") -> str:
    """``rate`` of what every rank of a replica counts."""
    return once(f"rate({selector}{WINDOW})", by)


def once_mean_rate(selector: str, by: str) -> str:
    """The mean over the replicas of what every rank of one counts in a second."""
    replica = f"sum by ({', '.join(REPLICA)}, {by}) ({_one_rank(f'rate({selector}{WINDOW})')})"
    return grouped("avg", by, replica)


def _one_rank(expr: str) -> str:
    # All other labels stay: what differs in them, such as a mode, adds up.
    return f"max without ({', '.join(RANKS)}) ({expr})"


def ratio(part: str, whole: str) -> str:
    """No sample where ``whole`` is 0: nothing divided by nothing is no 0 %."""
    return f"{part} / ({whole} > 0)"


class Histogram:
    """Queries of a family, classic or native.

    Args:
        scope: Whose.
        name: The family's.
        matched: As for ``Scope``.
    """

    def __init__(self, scope: Scope, name: str, **matched: str) -> None:
        self._native = f"rate({scope(name, **matched)}{WINDOW})"
        self._bucket = f"rate({scope(f'{name}_bucket', **matched)}{WINDOW})"
        self._sum = scope(f"{name}_sum", **matched)
        self._count = scope(f"{name}_count", **matched)
        self._at = (scope, name, matched)

    def quantile(self, share: float, by: By = "") -> str:
        """Such a quantile of what was observed in the window."""
        labels = [by] if isinstance(by, str) else list(by)
        classic = grouped("sum", [*(each for each in labels if each), "le"], self._bucket)
        native = grouped("sum", by, self._native)
        return f"histogram_quantile({share}, {classic}) or histogram_quantile({share}, {native})"

    def mean(self, by: By = "") -> str:
        """Mean of what was observed in the window."""
        native = grouped("sum", by, self._native)
        return (
            f"{ratio(rate(self._sum, by), rate(self._count, by))}"
            f" or histogram_sum({native}) / (histogram_count({native}) > 0)"
        )

    def observed(self, by: By = "") -> str:
        """Observations in a second."""
        return f"{rate(self._count, by)} or histogram_count({grouped('sum', by, self._native)})"

    def added(self, by: By = "") -> str:
        """Sum of what was observed in a second."""
        return f"{rate(self._sum, by)} or histogram_sum({grouped('sum', by, self._native)})"

    def within(self, bound: str, by: By = "") -> str:
        """Share of observations up to ``bound``, which is one of the classic bounds."""
        scope, name, matched = self._at
        below = rate(scope(f"{name}_bucket", le=bound, **matched), by)
        native = grouped("sum", by, self._native)
        return f"{ratio(below, rate(self._count, by))} or histogram_fraction(0, {bound}, {native})"

    def heat(self) -> str:
        """Observations by bucket, for a heatmap."""
        return (
            f"{grouped('sum', 'le', self._bucket.replace('rate(', 'increase(', 1))}"
            f" or {grouped('sum', '', self._native.replace('rate(', 'increase(', 1))}"
        )
