"""Settings to change where a limit binds, or where a part of requests takes their time.

docs/tuning.md and ``sidestep why`` show this table.
"""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """Settings of one engine."""

    dialect: str
    text: str


class Cause(NamedTuple):
    """One reason for which requests are slow.

    Attributes:
        name: As ``sidestep why`` names it; a limit has its own name.
        parts: Keys of a request's parts that it lengthens.
        changes: What to change, by engine; an engine without one has no such setting.
        otherwise: What helps with any engine.
        evidence: What to look at before and after.
    """

    name: str
    parts: tuple[str, ...]
    meaning: str
    changes: tuple[Change, ...]
    otherwise: str
    unless: str
    evidence: str


# fmt: off
CAUSES = (
    Cause("front_end_in", ("front_end_in",),
        "Requests wait for the front end: parsing, chat template, tokenizer, images.",
        (Change("vllm", "raise --api-server-count"), Change("sglang", "raise --tokenizer-worker-num")),
        "Give the front end more CPU cores; send smaller images.",
        "its processes use little CPU: then clients send slowly, or clocks of the hosts differ.",
        "CPU of the front end's processes, sidestep_engine_process_cpu_seconds_total.",
    ),
    Cause("slots", ("queue.slots",),
        "The batch has as many requests as it may have, so the next one waits until another ends.",
        (Change("vllm", "raise --max-num-seqs"), Change("sglang", "raise --max-running-requests")),
        "Add a replica.",
        "the KV cache is nearly full, because it would bind next; or if the time of a step grows in proportion to"
        " its requests, because more slots then only move the wait from the queue to the decode.",
        "Time of a step by its number of requests; vllm:kv_cache_usage_perc or sglang:token_usage below 0.8.",
    ),
    Cause("tokens", ("queue.tokens", "prefill_gap"),
        "A step has as many tokens as it may have, so prompts wait, or are computed in chunks with gaps.",
        (Change("vllm", "raise --max-num-batched-tokens"),
         Change("sglang", "raise --chunked-prefill-size and --max-prefill-tokens")),
        "Add a replica; raise the hit ratio of the prefix cache, so that fewer tokens are computed.",
        "inter-token latency is what users wait for: longer steps interrupt it more.",
        "sidestep_iteration_prefill_tokens near the setting; the part interference.",
    ),
    Cause("kv_blocks", ("queue.kv_blocks", "preempted", "recompute"),
        "The KV cache is full: requests wait for blocks, or lose theirs and are computed again.",
        (Change("vllm", "raise --gpu-memory-utilization, or set --kv-cache-dtype fp8 or --kv-offloading-size"),
         Change("sglang", "raise --mem-fraction-static, or set --kv-cache-dtype fp8_e4m3; if requests are"
                " retracted, raise --schedule-conservativeness")),
        "Add a replica, or shard the model over more GPUs.",
        "the GPU has no memory to spare, or fp8 changes the answers too much; a lower limit of running"
        " requests only moves the wait.",
        'sidestep_requests{state="preempted"}; /api/v1/kv/curve has the hit ratio of a larger cache.',
    ),
    Cause("lora", ("queue.lora",),
        "The batch has as many LoRA adapters as it may have, so a request with another one waits.",
        (Change("vllm", "raise --max-loras"), Change("sglang", "raise --max-loras-per-batch")),
        "Send requests of one adapter to one replica.",
        "memory is short: each adapter of the batch takes memory from the KV cache.",
        "sidestep_lora_requests: adapters that wait while few others run.",
    ),
    Cause("grammar", ("queue.grammar",),
        "Requests wait until the grammar of their structured output is compiled.",
        (Change("vllm", "set another backend in --structured-outputs-config"),
         Change("sglang", "set another --grammar-backend")),
        "Send the same schema for the same purpose: a compiled grammar is cached.",
        "each request has a new schema, because a cache then finds none.",
        "Requests with and without structured output apart.",
    ),
    Cause("kv_transfer", ("queue.kv_transfer",),
        "Requests wait for KV from another engine or an external cache.",
        (Change("vllm", "check the connector of --kv-transfer-config"),
         Change("sglang", "check --disaggregation-transfer-backend")),
        "Add prefill engines or bandwidth; place both on one rack.",
        "prefill here would take longer than the transfer.",
        "Time in transfer by connector, and the queue of the engine that sends.",
    ),
    Cause("encoder", ("queue.encoder",),
        "The budget of the multimodal encoder is used up, so a request with images waits.",
        (Change("vllm", "raise --max-num-batched-tokens, or lower --limit-mm-per-prompt"),),
        "Send smaller or fewer images.",
        "inter-token latency is what users wait for: a step with an encoder is long.",
        "Requests with and without images apart.",
    ),
    Cause("deferred", ("queue.deferred",),
        "The scheduler has passed over the request for a reason of its own.",
        (), "Look at the engine's log.", "it ends by itself, such as a priority that others have.",
        'sidestep_requests{state="deferred"}.',
    ),
    Cause("paused", ("queue.paused",),
        "An operator, or a trainer, has paused the engine.",
        (), "Resume it.", "its weights are being updated.", "Calls of the engine's pause and sleep routes.",
    ),
    Cause("queue", ("queue.unknown",),
        "Requests wait in the queue, and the engine does not say which limit binds.",
        (Change("vllm", "install this release's tap, which says it (docs/vllm-core.md)"),),
        "Compare running requests and the usage of the KV cache with their limits.",
        "requests wait for a moment only.", "sidestep_step_limit_seconds_total, where there is one.",
    ),
    Cause("interference", ("interference",),
        "Steps that also compute other requests' prompts are longer, and each output waits for them.",
        (Change("vllm", "lower --max-num-batched-tokens, or set --long-prefill-token-threshold"),
         Change("sglang", "lower --chunked-prefill-size")),
        "Compute prompts on engines of their own (disaggregated prefill); raise the prefix cache's hit ratio.",
        "TTFT is what users wait for: prompts then take more steps.",
        "Time of steps with and without prefill, sidestep_iteration_duration_seconds.",
    ),
    Cause("stalled", ("queue.stalled", "stalled"),
        "No step ended for much longer than usual.",
        (), "Look at /-/engines and the stack of the thread: docs/health.md.",
        "the engine has just started: the first steps compile.", "sidestep_engine_stalled_seconds.",
    ),
    Cause("front_end_out", ("front_end_out",),
        "Outputs wait for the front end: detokenizer, tool calls, streaming.",
        (Change("vllm", "raise --api-server-count, or --stream-interval"),
         Change("sglang", "raise --stream-interval")),
        "Give the front end more CPU cores.",
        "clients read slowly: the front end then waits for them.",
        "sidestep_frontend_hop_seconds; CPU of the front end's processes.",
    ),
)
# fmt: on
