"""The content of a snapshot: one list of all state, and where each field that outlives the process is.

``test_fields`` compares it with the classes and with the wire structs, so a new field of either needs
its place here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sidestep.engines.tenant_counters import Accounted
from sidestep.ingest.intake import Intake
from sidestep.metrics.computed_gauges import SetGauges
from sidestep.metrics.description import Description
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import OpenFamily
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram
from sidestep.metrics.recent_steps import HitWindow, RecentSteps
from sidestep.metrics.registry import Registry
from sidestep.metrics.saturation import Saturation
from sidestep.metrics.timeline import Timeline
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.receiver import Receiver
from sidestep.protocol.stream import Stream
from sidestep.requests.request_log import RequestLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.requests.front_end import FrontEndReports
from sidestep.tracking.requests.inflight import InFlight
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.outputs import OutputTracker
from sidestep.tracking.requests.parallel_samples import EngineSamples, SampleGroup, SampleGroups
from sidestep.tracking.requests.parts import PartsTracker


class Held(NamedTuple):
    """A class of state.

    Attributes:
        saved: By field, the fields of wire structs that hold it in a snapshot.
        anew: Fields that begin anew, or that settings, other fields or the next Hello determine.
    """

    state: type
    saved: Mapping[str, str]
    anew: str = ""


def _same(struct: str, fields: str) -> dict[str, str]:
    """Return the places of fields that have the same names in ``struct``."""
    return {field: f"{struct}.{field}" for field in fields.split()}


CONTENTS = (
    Held(Stream, _same(
        "SavedStream", "id incarnation seq engines dropped errors folded beat mark replica server process"
    ) | {"state": "SavedStream.open", "retired": "SavedStream.retired SavedStream.retired_seqs"},
        "peer durable seen_at silent unanswered caught_up duplicates acked acked_at received"),
    Held(Receiver, {"streams": "SavedStream"},
        "boot settings kv_sample_rate durable changes _by_incarnation _claims"),
    Held(Intake, {
        "items": "SavedProcess.items", "metrics": "SavedProcess.counters", "registry": "SavedEngine",
        "receiver": "SavedStream",
    }, "applier guard accepted loads curves bindings refusals health _clock _wall _work _sender _arrived"
        " _lines _connections"),
    Held(SelfMetrics, {"_values": "SavedProcess.counters", "created": "SavedProcess.created"}, "_readings"),
    Held(RequestLog, {"outputs": "SavedRecords.lines SavedRecords.output"},
        "_metrics _condition _threshold _wall _encoder"),
    Held(Registry, {
        "engines": "SavedEngine.is_exposed SavedEngine.totals",
        "retired": "SavedEngine.is_exposed SavedEngine.totals",
        "limited": "SavedProcess.limited", "sample_groups": "GroupState",
    }, "layouts series tracking accounting reserved is_exposed wall clock has_exemplars version _label_keys parts"
        " quota refused_blocks refused_requests hand_overs"),
    Held(Engine, _same("Totals", "created restarts gauge_stamp last_seen") | {
        "id": "Head.engine", "layout": "Head.engine", "labels": "Head.engine SavedEngine.has_origin",
        "description": "Head.engine Head.core_info", "values": "Head.scalars Totals.scalars",
        "histograms": "Head.histograms Head.bounds Totals.histograms",
        "keyed": "Head.keyed Totals.keyed SavedEngine.more",
        "open_families": "Totals.open", "exposed_paths": "Totals.seen", "statistics": "Totals.polled",
        "parts": "Totals",
    }, "label_version info missing_slots settings feeds live absent version"),
    Held(Description, {
        "core_info": "Head.core_info", "front_info": "Head.engine", "features": "Head.engine",
        "closed": "Head.engine", "sent_bounds": "Head.engine",
    }, "bounds encoded_head excess_bytes"),
    Held(OpenFamily, _same("OpenTotals", "name kind help labels bounds children"), "born"),
    Held(Histogram, {
        "bounds": "Head.bounds OpenTotals.bounds", "counts": "Buckets.counts", "sum": "Buckets.total",
    }, "exemplars slo_counter"),
    Held(NativeHistogram, _same("NativeBuckets", "schema zeros created") | {
        "buckets": "NativeBuckets.indices NativeBuckets.counts Buckets.native",
    }),
    Held(RecentSteps, {"hit_windows": "Totals.hits", "held_tokens": "Totals.held_tokens"}),
    Held(HitWindow, _same("Hits", "requests queries hits"), "entries"),
    # Lifetimes of blocks and curves of lookups begin again.
    Held(Trackers, {"requests": "TrackerState RequestsState"}, "sink blocks lookups"),
    Held(Saturation, {}, "_arrived _before _begun _busy _known _occupied _seconds _since _steps _when ratio"
        " shortest"),
    Held(SetGauges, {}, "values"),
    Held(Timeline, {}, "steps requests limits"),
    Held(Accounted, {}, "counters owed"),
    Held(RequestTracker, {
        "requests": "RequestsState.requests", "samples": "TrackerState.known_until",
        "outputs": "TrackerState.step", "reports": "TrackerState.front_ends", "parts": "TrackerState.times",
        "processes": "TrackerState.processes", "sources": "TrackerState.source TrackerState.sources",
        "limits": "TrackerState.limits",
    }, "settings traces block_size _sink _now _max_expired _out"),
    Held(PartsTracker, {"times": "TrackerState.times"}, "_undivided"),
    Held(InFlight, _same("TrackerState", "prefilling given_up cut_off") | {
        "live": "RequestsState.numbers RequestsState.requests",
    }, "capacity max_age preempted waiting_tokens waiting_prompt_tokens prefill_tokens adapters limited untracked"
        " _shared_capacity _check_at"),
    Held(OutputTracker, {"last_step": "TrackerState.step"}, "notes_gaps role external_is_cached has_hand_overs"
        " block_size _requests _front_ends _parts _latency"),
    Held(FrontEndReports, _same("FrontEndState", "sent received ends held"), "expected _since _sink _count"),
    Held(EngineSamples, _same("TrackerState", "known_until interrupted_until") | {"observed": "GroupState"},
        "unknown _sample_groups _deployment _peers _open _closed"),
    Held(SampleGroups, {"groups": "GroupState", "given_up": "GroupState"}, "engines capacity"),
    Held(SampleGroup, _same(
        "GroupState", "number deadline ended live samples longest highest aborted closed owner waits arrival"
        " ended_at expected"
    )),
)  # fmt: skip
"""All classes of state with a field that outlives the process, and all parts of an engine.

Requests in flight, requests that wait for a front end, and engines in a Hello are wire structs
themselves: a snapshot holds all of their fields.
"""
FURTHER = (
    # By which engine a piece is, or by which release.
    "SavedProcess.release TrackerState.engine RequestsState.engine Child.labels Child.value"
    " Child.buckets OpenTotals.children"
    # What only senders fold, and places of what earlier formats had.
    " Totals.limited Totals.cut_off Totals.blocks Totals.process Totals.processes SavedProcess.epoch SavedProcess.run"
)
"""Other fields of the wire structs."""
