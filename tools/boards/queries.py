"""PromQL expressions, built here so that every query follows the same rules.

Rates of counters over ``$__rate_interval`` are summed, so that a panel's meaning does not depend on
the number of series. Where histograms may be native (docs/native-histograms.md), without ``_bucket``
series, a query has an alternative for them after ``or``.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = "[$__rate_interval]"
RANKS = ("tp_rank", "pp_rank", "moe_ep_rank", "attn_cp_rank", "pid")
"""Labels that differ only between ranks, and processes of TensorRT-LLM, with equal values."""

PLACE_COLUMNS = {
    "cluster": "Cluster",
    "namespace": "Namespace",
    "pod": "Pod",
    "instance": "Exporter",
}
"""Columns of a table for the labels of a place."""
PLACE = tuple(PLACE_COLUMNS)
"""Labels of a place: one exporter may have engines of several pods."""
PLACE_NAME = " ".join(f"{{{{{label}}}}}" for label in PLACE)
"""Legend of a place; labels that do not exist are left out."""
TARGET_LABELS = ("cluster", "namespace", "pod", "job", "instance")
"""Labels that every selector matches; one that does not exist matches *All*."""
ENGINE = (*PLACE, "model_name", "engine", "origin")
"""Labels of an engine; the last only where an exporter has two with equal others, as replicas have."""
ENGINE_NAME = f"{{{{model_name}}}} engine {{{{engine}}}} {{{{origin}}}} {PLACE_NAME}"
RANK = (*PLACE, "model_name", "dp_rank", "origin")
"""Labels of a data-parallel rank of SGLang."""
RANK_NAME = f"{{{{model_name}}}} {{{{dp_rank}}}} {{{{origin}}}} {PLACE_NAME}"
REPLICA = (*ENGINE, "job", "dp_rank")
"""Labels that distinguish schedulers."""
RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "trtllm_num_requests_running",
)
"""Gauges of all engines that run models of language."""
WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
    "trtllm_num_requests_waiting",
)

By = str | Sequence[str]


class Scope:
    """The series that a dashboard's variables select.

    Args:
        labels: Labels that are matched with the variable of the same name, besides the target's.
    """

    def __init__(self, *labels: str) -> None:
        self._matchers = [f'{label}=~"${label}"' for label in (*labels, *TARGET_LABELS)]

    def __call__(self, *names: str, **matched: str) -> str:
        """Return a selector of one family, or of several alternatives.

        Args:
            names: Sample names.
            matched: Values of further labels; one that begins with ``~`` is a pattern, and one that
                begins with ``!`` a value that is left out.
        """
        operators = {"~": "=~", "!": "!="}
        own = [
            f'{label}{operators[value[:1]]}"{value[1:]}"'
            if value[:1] in operators
            else f'{label}="{value}"'
            for label, value in matched.items()
        ]
        if len(names) > 1:
            own = [f'__name__=~"{"|".join(names)}"', *own]
        name = names[0] if len(names) == 1 else ""
        return f"{name}{{{','.join(own + self._matchers)}}}"


def grouped(operator: str, by: By, expr: str) -> str:
    """Return ``operator`` over ``expr``, with one series per combination of the labels ``by``."""
    labels = [by] if isinstance(by, str) else list(by)
    kept = f" by ({', '.join(labels)})" if any(labels) else ""
    return f"{operator}{kept} ({expr})"


def total(selector: str, by: By = "") -> str:
    """Return the sum of gauges."""
    return grouped("sum", by, selector)


def mean(selector: str, by: By = "") -> str:
    """Return the mean of gauges that cannot be summed."""
    return grouped("avg", by, selector)


def most(selector: str, by: By = "") -> str:
    """Return the maximum of gauges that cannot be summed."""
    return grouped("max", by, selector)


def rate(selector: str, by: By = "") -> str:
    """Return the rate of counters per second."""
    return grouped("sum", by, f"rate({selector}{WINDOW})")


def changed(selector: str, by: By = "") -> str:
    """Return how often values changed, without a sample where they did not."""
    return f"{grouped('max', by, f'changes({selector}{WINDOW})')} > 0"


def grown(selector: str, by: By = "") -> str:
    """Return by how much counters grew, without a sample where they did not or only began again."""
    return f"{grouped('max', by, f'increase({selector}{WINDOW})')} > 0"


def once(expr: str, by: By = "") -> str:
    """Return a sum in which the ranks of an SGLang replica, which report the same, count once."""
    return grouped("sum", by, _one_rank(expr))


def once_rate(selector: str, by: By = "") -> str:
    """Return ``rate`` of counters that every rank of a replica reports."""
    return once(f"rate({selector}{WINDOW})", by)


def once_mean_rate(selector: str, by: str) -> str:
    """Return the mean over replicas of the rate that every rank of one reports."""
    replica = f"sum by ({', '.join(REPLICA)}, {by}) ({_one_rank(f'rate({selector}{WINDOW})')})"
    return grouped("avg", by, replica)


def _one_rank(expr: str) -> str:
    # All other labels, such as a mode, stay and are summed.
    return f"max without ({', '.join(RANKS)}) ({expr})"


def ratio(part: str, whole: str) -> str:
    """Return a ratio without a sample where ``whole`` is 0."""
    return f"{part} / ({whole} > 0)"


class Histogram:
    """Queries of a histogram family, classic or native.

    Args:
        scope: Selected series.
        name: Name of the family.
        matched: As for ``Scope``.
    """

    def __init__(self, scope: Scope, name: str, **matched: str) -> None:
        self._native = f"rate({scope(name, **matched)}{WINDOW})"
        self._bucket = f"rate({scope(f'{name}_bucket', **matched)}{WINDOW})"
        self._sum = scope(f"{name}_sum", **matched)
        self._count = scope(f"{name}_count", **matched)
        self._at = (scope, name, matched)

    def quantile(self, share: float, by: By = "") -> str:
        """Return a quantile of the observations in the window."""
        labels = [by] if isinstance(by, str) else list(by)
        classic = grouped("sum", [*(each for each in labels if each), "le"], self._bucket)
        native = grouped("sum", by, self._native)
        return f"histogram_quantile({share}, {classic}) or histogram_quantile({share}, {native})"

    def mean(self, by: By = "") -> str:
        """Return the mean of the observations in the window."""
        native = grouped("sum", by, self._native)
        return (
            f"{ratio(rate(self._sum, by), rate(self._count, by))}"
            f" or histogram_sum({native}) / (histogram_count({native}) > 0)"
        )

    def observed(self, by: By = "") -> str:
        """Return observations per second."""
        return f"{rate(self._count, by)} or histogram_count({grouped('sum', by, self._native)})"

    def added(self) -> str:
        """Return the sum of the observations per second."""
        return f"{rate(self._sum)} or histogram_sum({grouped('sum', '', self._native)})"

    def within(self, bound: str, by: By = "") -> str:
        """Return the share of observations up to ``bound``, one of the classic bounds.

        Series without that bound, such as those of another release, are left out.
        """
        scope, name, matched = self._at
        below = f"rate({scope(f'{name}_bucket', le=bound, **matched)}{WINDOW})"
        with_bound = f"rate({self._count}{WINDOW}) and ignoring (le) {below}"
        native = grouped("sum", by, self._native)
        return (
            f"{ratio(grouped('sum', by, below), grouped('sum', by, with_bound))}"
            f" or histogram_fraction(0, {bound}, {native})"
        )

    def observed_within(self, bound: str) -> str:
        """Return observations per second up to ``bound``, one of the classic bounds."""
        scope, name, matched = self._at
        native = grouped("sum", "", self._native)
        return (
            f"{rate(scope(f'{name}_bucket', le=bound, **matched))}"
            f" or histogram_fraction(0, {bound}, {native}) * histogram_count({native})"
        )

    def heat(self) -> str:
        """Return observations by bucket, for a heatmap."""
        return (
            f"{grouped('sum', 'le', self._bucket.replace('rate(', 'increase(', 1))}"
            f" or {grouped('sum', '', self._native.replace('rate(', 'increase(', 1))}"
        )
