"""Rows of the SLO counters, which have the same names for vLLM and SGLang."""

from __future__ import annotations

from sidestep.catalog.model import ENGINE_LABELS, Handler, Row
from sidestep.catalog.slo import SLO_HANDLERS, SLO_REQUESTS, SLO_UNDECIDED
from sidestep.engines.sglang.collectors import TOKENIZER


def _rows(
    shared: tuple[str, ...], *, extra_labels: bool = False, mirrored: bool = False
) -> tuple[Row, ...]:
    return (
        Row(
            name=SLO_REQUESTS,
            kind="counter",
            source=Handler(SLO_HANDLERS[0]),
            help="Requests by whether they meet an objective of --slo: good is at most its threshold."
            " An objective of inter-token latency counts gaps between tokens instead.",
            labels=tuple(sorted((*shared, "result", "slo"))),
            shared=shared,
            extra_labels=extra_labels,
            mirrored=mirrored,
        ),
        Row(
            name=SLO_UNDECIDED,
            kind="counter",
            source=Handler(SLO_HANDLERS[1]),
            help="Requests in neither result of sidestep_slo_requests_total: they arrived as bucket"
            " counts, and the objective's threshold lies inside their bucket.",
            labels=tuple(sorted((*shared, "slo"))),
            shared=shared,
            extra_labels=extra_labels,
            mirrored=mirrored,
        ),
    )


VLLM = _rows(ENGINE_LABELS)
# Every rank reports queue times.
SGLANG = _rows(TOKENIZER.shared, extra_labels=TOKENIZER.extra_labels, mirrored=True)
