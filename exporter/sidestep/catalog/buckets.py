"""Bucket families: the default bounds of classic histograms and the schemas of native ones.

Bounds that an engine overrides (vLLM's ``--custom-histogram-buckets``, SGLang's
``--bucket-time-to-first-token`` and others) arrive in its Hello and take precedence over these
defaults; the exporter's configuration takes precedence over both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise

from sidestep.errors import ConfigError
from sidestep.protocol.limits import COARSEST, FINEST

Bounds = tuple[float, ...]
LARGEST = sys.float_info.max

VLLM: Mapping[str, Bounds] = {
    "request_latency": (
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
        120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
    ),
    "time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
        10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
    ),
    "inter_token_latency": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
        10.0, 20.0, 40.0, 80.0,
    ),
    "iteration_tokens": (
        1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
    ),
    "request_params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
    "request_num_preemptions": (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
    "request_tokens": (),  # depends on the model's length: see one_two_five
    "kv_cache_residency": (
        0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0,
        60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0,
    ),
}  # fmt: skip
"""The families of vLLM 0.33, under the engine's own keys."""

SGLANG_TOKENS: Bounds = (
    100.0, 300.0, 500.0, 700.0, 1000.0, 1500.0, 2000.0, 3000.0, 4000.0, 5000.0, 6000.0, 7000.0,
    8000.0, 9000.0, 10000.0, 12500.0, 15000.0, 17500.0, 20000.0, 22500.0, 25000.0, 27500.0,
    30000.0, 35000.0, 40000.0, 60000.0, 80000.0, 100000.0, 200000.0, 300000.0, 400000.0,
    600000.0, 800000.0, 1000000.0, 1100000.0,
)  # fmt: skip
SGLANG_LATENCY: Bounds = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0,
    200.0, 400.0,
)  # fmt: skip
SGLANG_COPY: Bounds = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01, 0.02, 0.03, 0.04, 0.05,
    0.1, 0.2, 0.5, 1.0,
)  # fmt: skip

SGLANG: Mapping[str, Bounds] = {
    "sglang_time_to_first_token": SGLANG_LATENCY,
    "sglang_inter_token_latency": (
        0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1,
        0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
    ),
    "sglang_e2e_request_latency": (*SGLANG_LATENCY, 600.0, 1200.0, 1800.0, 2400.0),
    "sglang_prompt_tokens": SGLANG_TOKENS,
    "sglang_generation_tokens": SGLANG_TOKENS,
    "sglang_eviction_duration": SGLANG_COPY,
    "sglang_load_back_duration": SGLANG_COPY,
    "sglang_prefill_delayer_passes": (0.0, 5.0, 20.0, 29.0),
    "sglang_prefill_delayer_seconds": (
        0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0,
    ),
    "sglang_eplb_physical_count": tuple(map(float, range(8))),  # one per rank; eight by default
}  # fmt: skip
"""The families of SGLang 0.5.23 whose bounds depend on its flags, its environment or its size."""

OWN: Mapping[str, Bounds] = {
    "iteration_duration": (
        0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0,
        2.5, 5.0, 10.0,
    ),
    "iteration_requests": (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0),
    "held_tokens": (
        0.0, 128.0, 512.0, 2048.0, 8192.0, 32768.0, 131072.0, 524288.0, 2097152.0, 8388608.0,
    ),
    "cache_blocks": (
        100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0, 200000.0,
        500000.0, 1000000.0, 2000000.0, 5000000.0, 10000000.0,
    ),
    "reuses": (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0),
    "milliseconds": (
        1.0, 2.5, 5.0, 7.5, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0,
    ),
    "triton_batch_size": (
        1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0, 512.0,
    ),
    "triton_poll_duration": (
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    ),
}  # fmt: skip
"""The families of metrics that no engine has; their bounds are this project's choice."""

GEN_AI: Mapping[str, Bounds] = {
    "gen_ai_time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ),
    "gen_ai_time_per_output_token": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    ),
    "gen_ai_request_duration": tuple(0.01 * 2**power for power in range(14)),
    "gen_ai_token_usage": tuple(4.0**power for power in range(14)),
}  # fmt: skip
"""The bounds that OpenTelemetry's conventions for generative AI recommend, the same for all engines."""

SCHEMA = 3
"""The default schema of native histograms: eight buckets to a power of two."""
SCHEMAS: Mapping[str, int] = dict.fromkeys(
    (
        "request_latency",
        "time_to_first_token",
        "inter_token_latency",
        "iteration_duration",
        "sglang_time_to_first_token",
        "sglang_inter_token_latency",
        "sglang_e2e_request_latency",
        "gen_ai_time_to_first_token",
        "gen_ai_time_per_output_token",
        "gen_ai_request_duration",
    ),
    4,
)
"""The schemas of families with a finer resolution than the default.

Prometheus interpolates within a bucket: the error of a quantile is at most the bucket's width,
which is 4.4 % here, and with few requests it often reaches that."""

DEFAULT_MAX_MODEL_LEN = 131072
"""The highest bound of the token-count families where an engine does not report its model's length."""


def one_two_five(limit: int) -> Bounds:
    """Return 1, 2, 5, 10, 20, 50, ... up to ``limit``, as vLLM does for token counts.

    >>> one_two_five(100)
    (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
    """
    decades = range(len(str(max(limit, 1))))
    return tuple(float(m * 10**d) for d in decades for m in (1, 2, 5) if m * 10**d <= limit)


DEFAULTS: Mapping[str, Bounds] = {
    **VLLM,
    **SGLANG,
    **OWN,
    **GEN_AI,
    "request_tokens": one_two_five(DEFAULT_MAX_MODEL_LEN),
}


def checked_schema(key: str, schema: object) -> int:
    """Return ``schema``, the value of a file's ``key``, after checking it."""
    if isinstance(schema, int) and not isinstance(schema, bool) and COARSEST <= schema <= FINEST:
        return schema
    raise ConfigError(f"{key}: give a whole number from {COARSEST} to {FINEST}")


def checked(key: str, bounds: Iterable[object]) -> Bounds:
    """Return ``bounds``, the value of a file's ``key``, as floats after checking them."""
    values = list(bounds)
    if not values or not all(
        # Comparisons, since an integer may be larger than any float.
        isinstance(v, int | float) and not isinstance(v, bool) and -LARGEST <= v <= LARGEST
        for v in values
    ):
        raise ConfigError(f"{key}: give one or more finite numbers")
    result = tuple(float(v) for v in values if isinstance(v, int | float))
    if any(a >= b for a, b in pairwise(result)):
        raise ConfigError(f"{key} must increase strictly")
    return result
