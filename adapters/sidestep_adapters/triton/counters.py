"""What Triton's own page and its statistics both count: the numbers of one, and of the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sidestep.engines.triton.rows import FAILURES, ROWS
from sidestep.engines.triton.wire import InferenceStats, ModelStats, Timed
from sidestep.exposition.passthrough import parser as exposition
from sidestep.exposition.passthrough.page import Plan, Series
from sidestep_adapters.triton.statistics import Head

NATIVE = tuple(row for row in ROWS if row.name.startswith("nv_"))
Numbers = tuple[int | None, ...]
"""By ``NATIVE``, counts and nanoseconds; None: not known."""
UNKNOWN: Numbers = (None,) * len(NATIVE)

_AT = {row.name: at for at, row in enumerate(NATIVE)}
_UNITS = tuple(row.per for row in NATIVE)
_FAILURE = next(row.name for row in NATIVE if row.feature == FAILURES)
_EXACT = 2.0**53
"""Beyond it a double is no count."""
_STEP = 100
"""Lines that are read between two turns of the loop; of those that are known ten times as many."""

_Places = tuple[Sequence[int], ...]
"""By ``NATIVE``: lines of the page, whose sum is the number."""
_Labels = tuple[tuple[str, str], ...]


def numbers(stats: ModelStats) -> Numbers:
    """Of statistics."""
    of = stats.inference_stats
    return (
        of.success.count,
        of.fail.count,
        stats.inference_count,
        stats.execution_count,
        of.success.ns,
        of.queue.ns,
        of.compute_input.ns,
        of.compute_infer.ns,
        of.compute_output.ns,
        *((None, None) if of.cache_hit is None else (of.cache_hit.count, of.cache_hit.ns)),
        *((None, None) if of.cache_miss is None else (of.cache_miss.count, of.cache_miss.ns)),
    )


def raised(stats: ModelStats, least: Numbers) -> ModelStats:
    """``stats`` with numbers that are nowhere below ``least``; all else is as it was."""
    success, fail, inferred, executed, *times, hit, hit_ns, miss, miss_ns = [
        max(had or 0, wanted or 0) for had, wanted in zip(numbers(stats), least, strict=True)
    ]
    success_ns, queue_ns, input_ns, infer_ns, output_ns = times
    of = stats.inference_stats
    return ModelStats(
        stats.last_inference,
        inferred,
        executed,
        InferenceStats(
            Timed(success, success_ns),
            Timed(fail, of.fail.ns),
            Timed(of.queue.count, queue_ns),
            Timed(of.compute_input.count, input_ns),
            Timed(of.compute_infer.count, infer_ns),
            Timed(of.compute_output.count, output_ns),
            None if of.cache_hit is None else Timed(hit, hit_ns),
            None if of.cache_miss is None else Timed(miss, miss_ns),
        ),
        stats.batch_stats,
        stats.response_stats,
        stats.memory_usage,
    )


class _Key:
    """Whose number a series is a part of, and the labels that all parts must have in common."""

    __slots__ = ("at", "head", "labels")

    def __init__(self, head: Head, at: int, labels: _Labels) -> None:
        self.head = head
        self.at = at
        self.labels = labels


class Places:
    """Where versions of models have their numbers on a page.

    A version whose series others' labels tell apart has none: which of them are its own cannot
    be known.
    """

    def __init__(self) -> None:
        self._order: Sequence[Series | None] = ()
        self._keys: dict[Series, _Key | None] = {}
        self._places: dict[Head, _Places | None] = {}

    def find(self, plan: Plan) -> Iterator[None]:
        """Be those of ``plan``, after the last step."""
        if plan.order is self._order:
            return
        order, known = plan.order, self._keys
        keys: dict[Series, _Key | None] = {}
        labels: dict[Head, _Labels | None] = {}
        found: dict[Head, tuple[list[int], ...]] = {}
        left = 10 * _STEP
        for place, series in enumerate(order):
            left -= 1
            if left <= 0:
                left = 10 * _STEP
                yield
            if series is None or series.name not in _AT:
                continue
            if series in known:
                key = keys[series] = known[series]
            else:
                key = keys[series] = _key(series)
                left -= 9
            if key is None:
                continue
            if labels.setdefault(key.head, key.labels) != key.labels or _is_named(key):
                labels[key.head] = None
            found.setdefault(key.head, tuple([] for _ in NATIVE))[key.at].append(place)
        self._order, self._keys = order, keys
        self._places = {
            head: places if labels[head] is not None else None for head, places in found.items()
        }

    def numbers(self, head: Head, values: Sequence[bytes]) -> Numbers:
        """Those of ``head`` in the page's values, where they are surely its own."""
        places = self._places.get(head)
        if places is None:
            return UNKNOWN
        return tuple(
            [_sum(values, lines, unit) for lines, unit in zip(places, _UNITS, strict=True)]
        )


def _key(series: Series) -> _Key | None:
    own = exposition.plain(exposition.head(series.raw).labels)
    # Statistics are summed over GPUs and over reasons.
    own.pop("gpu_uuid", None)
    if series.name == _FAILURE:
        own.pop("reason", None)
    try:
        head = Head(own.pop("model"), own.pop("version"))
    except KeyError:
        return None
    return _Key(head, _AT[series.name], tuple(sorted(own.items())))


def _is_named(key: _Key) -> bool:
    """Whether another model may have the same name."""
    return any(name == "namespace" for name, _ in key.labels)


def _sum(values: Sequence[bytes], lines: Sequence[int], unit: int) -> int | None:
    """None where one is no count, or there is none."""
    if not lines:
        return None
    try:
        total = sum([float(values[line]) for line in lines], 0.0)
    except ValueError:
        # With a timestamp: not Triton's.
        return None
    return int(total) * unit if 0 <= total < _EXACT and total.is_integer() else None
