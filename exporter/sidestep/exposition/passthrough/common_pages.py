"""The table of scraped families that mean the same as one with a common name, and their copies.

Each row names what it was read from; no page of these was recorded. A family with another meaning
is not here: Dynamo's queued requests wait for their first token, and TGI's time per token counts the
first one too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sidestep.engines.common_names import FAMILIES, TOKEN_TYPE
from sidestep.exposition.passthrough import parser
from sidestep.exposition.passthrough.families import PageFamily, Sample, Series
from sidestep.exposition.passthrough.parser import Labels

NAMES = frozenset(family.name for family in FAMILIES)
_KINDS = {family.name: family.kind for family in FAMILIES}
_HELPS = {family.name: family.help for family in FAMILIES}
MODEL, MODEL_NAME = "model", "model_name"


class Row(NamedTuple):
    """One scraped family.

    Attributes:
        source: Its name on the page.
        name: The common name.
        release: Release or document that it was read from.
        token_type: Value of the label ``gen_ai_token_type``, of families that have it.
    """

    source: str
    name: str
    release: str
    token_type: str = ""


_DYNAMO, _LMCACHE, _TGI = (
    "Dynamo's dashboards of 2026-04-21",
    "LMCache's source of 2026, release not known",
    "TGI's documents of 2026, release not known",
)
_TOKENS = "gen_ai_client_token_usage"
_SECONDS = "gen_ai_server_{}_seconds"

TABLE: tuple[Row, ...] = (
    Row(
        "dynamo_frontend_time_to_first_token_seconds",
        _SECONDS.format("time_to_first_token"),
        _DYNAMO,
    ),
    Row(
        "dynamo_frontend_inter_token_latency_seconds",
        "sidestep_inter_token_latency_seconds",
        _DYNAMO,
    ),
    Row("dynamo_frontend_request_duration_seconds", _SECONDS.format("request_duration"), _DYNAMO),
    Row("dynamo_frontend_input_sequence_tokens", _TOKENS, _DYNAMO, "input"),
    Row("dynamo_frontend_output_sequence_tokens", _TOKENS, _DYNAMO, "output"),
    Row(
        "lmcache:num_lookup_tokens_total", "sidestep_prefix_cache_looked_up_tokens_total", _LMCACHE
    ),
    Row("lmcache:num_lookup_hits_total", "sidestep_prefix_cache_found_tokens_total", _LMCACHE),
    Row("tgi_batch_current_size", "sidestep_requests_running", _TGI),
    Row("tgi_queue_size", "sidestep_requests_waiting", _TGI),
    Row("tgi_request_duration", _SECONDS.format("request_duration"), _TGI),
    Row("tgi_request_queue_duration", "sidestep_request_queue_seconds", _TGI),
    Row("tgi_request_input_length", _TOKENS, _TGI, "input"),
    Row("tgi_request_generated_tokens", _TOKENS, _TGI, "output"),
)
_BY_SOURCE = {row.source: row for row in TABLE}


class CommonCopies:
    """Makes copies of one page's families under common names; series are made once."""

    def __init__(self) -> None:
        self._known: dict[bytes, Series] = {}

    def of(self, families: Iterable[PageFamily]) -> list[PageFamily]:
        """Return the copies, one for each common name; a family of another kind has none."""
        made: dict[str, PageFamily] = {}
        known: dict[bytes, Series] = {}
        for family in families:
            row = _BY_SOURCE.get(family.name)
            if row is None or family.kind != _KINDS[row.name]:
                continue
            copy = made.setdefault(
                row.name, PageFamily(row.name, family.kind, _HELPS[row.name], [], is_common=True)
            )
            copy.samples += self._samples(family.samples, row, known)
        self._known = known
        return list(made.values())

    def _samples(
        self, samples: Sequence[Sample], row: Row, known: dict[bytes, Series]
    ) -> list[Sample]:
        found: list[Sample] = []
        for series, value in samples:
            copy = self._known.get(series.key) or _copy(series, row)
            known[series.key] = copy
            found.append((copy, value))
        return found


def _copy(series: Series, row: Row) -> Series:
    """Return ``series`` under the common name, with the common labels."""
    name = row.name + series.name.removeprefix(row.source)
    labels = _labels(series.labels, row.token_type)
    text = parser.series_text(name, labels)
    return Series(series.raw, name, labels, text, parser.series_text(name, tuple(sorted(labels))))


def _labels(labels: Labels, token_type: str) -> Labels:
    names = {name for name, _ in labels}
    renamed = tuple(
        (MODEL_NAME if name == MODEL and MODEL_NAME not in names else name, text)
        for name, text in labels
        if text and name != TOKEN_TYPE
    )
    return (*renamed, (TOKEN_TYPE, token_type)) if token_type else renamed
