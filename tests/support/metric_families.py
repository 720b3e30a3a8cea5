"""A reader of Prometheus' protobuf exposition format, by google.protobuf's own classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.decoder import _DecodeVarint32  # type: ignore[attr-defined]

from pages import Family, Labels

Table = Mapping[str, Mapping[int, tuple[str, str]]]
"""By message and field number: the field's name, and its type, behind ``repeated`` if it is.
A type that is not a scalar names a message of the table.
"""

_REPEATED = "repeated "
_Field = descriptor_pb2.FieldDescriptorProto


def messages(package: str, table: Table, *, syntax: str) -> dict[str, Any]:
    """Return the message classes of ``table`` by name.

    They have a pool of their own: other libraries in the process may have messages with these
    names.

    Args:
        package: The messages' package.
        table: The messages and their fields.
        syntax: ``proto2`` or ``proto3``.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"sidestep/{package}.proto", package=package, syntax=syntax
    )
    for message, fields in table.items():
        described = file.message_type.add(name=message)
        for number, (name, form) in fields.items():
            kind = form.removeprefix(_REPEATED)
            field = described.field.add(name=name, number=number)
            field.label = _Field.LABEL_OPTIONAL if kind == form else _Field.LABEL_REPEATED
            if kind in table:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{package}.{name}") for name in table)
    return {each.name: message_factory.GetMessageClass(each) for each in found}


TABLE: Table = {
    "Timestamp": {1: ("seconds", "int64"), 2: ("nanos", "int32")},
    "LabelPair": {1: ("name", "string"), 2: ("value", "string")},
    "Gauge": {1: ("value", "double")},
    "Counter": {1: ("value", "double"), 3: ("created_timestamp", "Timestamp")},
    "Untyped": {1: ("value", "double")},
    "Quantile": {1: ("quantile", "double"), 2: ("value", "double")},
    "Summary": {
        1: ("sample_count", "uint64"),
        2: ("sample_sum", "double"),
        3: ("quantile", "repeated Quantile"),
        4: ("created_timestamp", "Timestamp"),
    },
    "Exemplar": {
        1: ("label", "repeated LabelPair"),
        2: ("value", "double"),
        3: ("timestamp", "Timestamp"),
    },
    "Bucket": {
        1: ("cumulative_count", "uint64"),
        2: ("upper_bound", "double"),
        3: ("exemplar", "Exemplar"),
    },
    "BucketSpan": {1: ("offset", "sint32"), 2: ("length", "uint32")},
    "Histogram": {
        1: ("sample_count", "uint64"),
        2: ("sample_sum", "double"),
        3: ("bucket", "repeated Bucket"),
        5: ("schema", "sint32"),
        6: ("zero_threshold", "double"),
        7: ("zero_count", "uint64"),
        12: ("positive_span", "repeated BucketSpan"),
        13: ("positive_delta", "repeated sint64"),
        15: ("created_timestamp", "Timestamp"),
        16: ("exemplars", "repeated Exemplar"),
    },
    "Metric": {
        1: ("label", "repeated LabelPair"),
        2: ("gauge", "Gauge"),
        3: ("counter", "Counter"),
        4: ("summary", "Summary"),
        5: ("untyped", "Untyped"),
        6: ("timestamp_ms", "int64"),
        7: ("histogram", "Histogram"),
    },
    "MetricFamily": {
        1: ("name", "string"),
        2: ("help", "string"),
        3: ("type", "int32"),
        4: ("metric", "repeated Metric"),
        5: ("unit", "string"),
    },
}
"""Field numbers of client_model's metrics.proto (proto2)."""
KINDS = ("counter", "gauge", "summary", "untyped", "histogram")
MetricFamily = messages("io.prometheus.client", TABLE, syntax="proto2")["MetricFamily"]


def families(page: bytes) -> Iterator[Any]:
    """Yield the families of a page, and check that each is well formed and canonical.

    Raises:
        AssertionError: A field is unknown, a length is wrong, or a metric is there twice.
    """
    at = 0
    while at < len(page):
        length, at = _DecodeVarint32(page, at)
        found = MetricFamily.FromString(page[at : at + length])
        # Unknown fields would be preserved, too, but in another order.
        assert len(found.SerializeToString()) == length
        assert len({tuple(labels_of(metric)) for metric in found.metric}) == len(found.metric)
        at += length
        yield found
    assert at == len(page)


def labels_of(metric: Any) -> Labels:
    """Return the labels of a metric."""
    return tuple((pair.name, pair.value) for pair in metric.label)


def parsed(page: bytes) -> dict[str, Family]:
    """Parse a page into the form of ``pages.parse``; histograms need classic buckets."""
    found: dict[str, Family] = {}
    for family in families(page):
        kind = KINDS[family.type]
        samples: dict[tuple[str, Labels], float] = {}
        for metric in family.metric:
            own = labels_of(metric)
            if kind == "histogram":
                samples.update(_classic(family.name, own, metric.histogram))
            elif kind == "summary":
                samples[f"{family.name}_count", own] = metric.summary.sample_count
                samples[f"{family.name}_sum", own] = metric.summary.sample_sum
                for one in metric.summary.quantile:
                    quantile = ("quantile", repr(one.quantile))
                    samples[family.name, tuple(sorted((*own, quantile)))] = one.value
            else:
                samples[family.name, own] = getattr(metric, kind).value
        name = family.name.removesuffix("_total") if kind == "counter" else family.name
        found[name] = Family("unknown" if kind == "untyped" else kind, samples)
    return found


def _classic(name: str, own: Labels, histogram: Any) -> dict[tuple[str, Labels], float]:
    found = {
        (f"{name}_count", own): histogram.sample_count,
        (f"{name}_sum", own): histogram.sample_sum,
    }
    for bucket in histogram.bucket:
        le = ("le", "+Inf" if bucket.upper_bound == math.inf else repr(bucket.upper_bound))
        found[f"{name}_bucket", tuple(sorted((*own, le)))] = bucket.cumulative_count
    return found


def buckets_of(histogram: Any) -> dict[int, int]:
    """Return the counts of native buckets by index."""
    found: dict[int, int] = {}
    index, count, deltas = 0, 0, iter(histogram.positive_delta)
    for span in histogram.positive_span:
        index += span.offset
        for _ in range(span.length):
            count += next(deltas)
            found[index] = count
            index += 1
    assert not list(deltas)
    return {index: count for index, count in found.items() if count}
