"""Settings of connections with engines, of tracking, and of limits."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from pathlib import Path
from typing import Literal

from sidestep.config import engine_targets, parsing, scrape_targets, subscriptions, triton_servers
from sidestep.config.engine_targets import EngineTarget
from sidestep.config.scrape_targets import Target
from sidestep.config.setting import option
from sidestep.config.subscriptions import Subscription
from sidestep.config.triton_servers import Server
from sidestep.errors import ConfigError

_servers = functools.partial(
    option, default=(), separator=None, shown=scrape_targets.without_secrets, unset="none"
)
"""An option of servers to read from; their values may contain secrets."""


def temporary_directory() -> str:
    """Return the directory for temporary files."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError(
            "no directory for temporary files can be written: set TMPDIR to one, such as a mounted volume"
        ) from None


def default_endpoint() -> str:
    """Return an ipc path in a directory that belongs to this user."""
    base = os.environ.get("XDG_RUNTIME_DIR") or temporary_directory()
    name = "sidestep" if "XDG_RUNTIME_DIR" in os.environ else f"sidestep-{os.getuid()}"
    return f"ipc://{Path(base) / name / 'ingest.ipc'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of connections with engines, of tracking, and of limits."""

    # Laid out by hand: name, text, then parser and default.
    # fmt: off
    ingest_endpoint: tuple[str, ...] = option("--ingest.endpoint ENDPOINT",
        "Endpoint that engines connect to, ipc:// or tcp://; repeatable.",
        parsing.ingest_endpoint, default=(),
        collect=lambda endpoints: endpoints or (default_endpoint(),),
        unset="ipc://$XDG_RUNTIME_DIR/sidestep/ingest.ipc; without that variable,"
        " ipc:///tmp/sidestep-UID/ingest.ipc")
    ingest_curve_key: str = option("--ingest.curve-key FILE",
        "File with the exporter's secret key (sidestep keygen); tcp:// endpoints then require CURVE.",
        unset="tcp:// endpoints do not use CURVE")
    ingest_authorized_keys: str = option("--ingest.authorized-keys DIR",
        "Directory of the engines' public keys, NAME.pub, reloaded every second.",
        unset="tcp:// endpoints do not use CURVE")
    ingest_allow_plain_tcp: bool = option("--ingest.allow-plain-tcp",
        "Allow tcp:// endpoints that other hosts can reach without authentication.",
        parsing.boolean, default=False)
    ingest_ipc_group: str = option("--ingest.ipc-group GROUP",
        "Group that may also connect to ipc:// paths; their directory is created with mode 2770.",
        unset="only the exporter's own user may connect")
    subscribe: tuple[Subscription, ...] = _servers(f"--subscribe {subscriptions.FORM}",
        "Stream of an engine's own publisher to read: kv-events, forward-pass or load, such"
        " as kv-events=tcp://host:5557,replay=tcp://host:5558; a port range has one port per"
        " rank. Repeatable; space-separated in the variable. See streams.md.",
        subscriptions.parse, shown=str, collect=subscriptions.collect)
    scrape: tuple[Target, ...] = _servers(f"--scrape {scrape_targets.FORM}",
        "Metrics page of another exporter to scrape, such as http://host:8002/metrics,label.pod=a;"
        " its families are exposed too. Repeatable; space-separated in the variable. See"
        " scrape.md.",
        scrape_targets.parse, collect=scrape_targets.collect)
    triton: tuple[Server, ...] = _servers(f"--triton {triton_servers.FORM}",
        "Triton server to poll statistics from, http://HOST:8000; its models are exposed as engines."
        " Repeatable; space-separated in the variable. See triton.md.",
        triton_servers.parse, collect=scrape_targets.collect_servers)
    engine: tuple[EngineTarget, ...] = _servers(f"--engine {engine_targets.FORM}",
        "Engine's server to poll, such as llamacpp=http://127.0.0.1:8080; its models are exposed as"
        " engines. Repeatable; space-separated in the variable. See llamacpp.md.",
        engine_targets.parse, collect=scrape_targets.collect_servers)
    limits_memory_soft: int = option("--limits.memory-soft MIB",
        "Resident memory from which new streams are rejected; 0 disables the limit.",
        parsing.whole, 384)
    limits_memory_hard: int = option("--limits.memory-hard MIB",
        "Resident memory at which all connections are closed and the socket is bound again; 0"
        " disables the limit.",
        parsing.whole, 512)
    state_dir: str = option("--state.dir DIR",
        "Directory for the snapshot that keeps counters across restarts; one directory per exporter,"
        " preferably on a memory-backed volume.",
        unset="a restart is a counter reset")
    shutdown_linger: float = option("--shutdown.linger SECONDS",
        "Maximum seconds after SIGTERM for which the exporter still answers, so that a scrape can get the"
        " last counts of all engines; 0 stops it at once. See reliability.md.",
        parsing.seconds, 16.0)
    kv_sample_rate: float = option("--kv.sample-rate SHARE",
        "Share of KV blocks whose lifetimes and lookups are tracked; 0 disables tracking.",
        parsing.share, 0.01, adjustable=True)
    kv_scale_samples: bool = option("--kv.scale-samples",
        "Scale KV block histograms up by the sample rate: a sampled block counts as 1/rate blocks.",
        parsing.boolean, default=False)
    kv_max_tracked: int = option("--kv.max-tracked NUMBER",
        "Maximum sampled KV blocks tracked at once, per engine; further blocks only count as refused. All"
        " engines together track at most ten times as many, in equal shares.",
        parsing.positive, 100_000)
    kv_curve_half_life: float = option("--kv.curve-half-life SECONDS",
        "Seconds after which a lookup in the prefix cache counts half in the hit-ratio curve; 0 disables"
        " the curve. See kv-residency.md.",
        parsing.seconds, 3600.0)
    intervals_scheduled: Literal["first", "last"] = option("--intervals.scheduled WHICH",
        "Scheduling that ends the queue time of a request preempted before its first token: the first, as"
        " in vLLM's own front end, or the last. It applies where engines send request events.",
        parsing.one_of("first", "last"), "first")
    intervals_inter_token: Literal["output", "token"] = option("--intervals.inter-token PER",
        "Unit of the inter-token latency where engines send request events: the interval before an output of"
        " several tokens is one observation, as in the engine, or it is divided among its tokens.",
        parsing.one_of("output", "token"), "output")
    requests_max_tracked: int = option("--requests.max-tracked NUMBER",
        "Maximum requests in flight tracked at once, per engine; all engines together track at most"
        " twice as many, in equal shares.",
        parsing.positive, 100_000)
    requests_max_age: float = option("--requests.max-age SECONDS",
        "Age from which on an unfinished request is no longer tracked.",
        parsing.positive_seconds, parsing.DAY)
    health_min_threshold: float = option("--health.min-threshold SECONDS",
        "Least seconds that a step may take before the engine counts as stalled, even if its steps are"
        " usually short. Requests, outputs and heartbeats may take 1.5 times as long. See health.md.",
        parsing.min_threshold, 5.0)
    health_max_threshold: float = option("--health.max-threshold SECONDS",
        "Most seconds that a step may take before the engine counts as stalled, even if its steps are"
        " usually long.",
        parsing.positive_seconds, 120.0)
    # fmt: on
