"""What metrics cost SGLang's tokenizer and its scheduler, by the token, with SGLang's real classes.

The tokenizer is a real ``TokenizerManager``. In place of the scheduler and the detokenizer is an
object that sends real messages. The scheduler is a real ``Scheduler`` on the CPU. Its model's forward
pass is replaced by a pause, since the tensors of a model would hide what metrics cost.

Each request gets ``TOKENS`` tokens, one a step, and requests begin one after the other. Every mode
has processes of its own; they are measured in turns. The cost of the loop is the CPU time of its
thread; the cost of the process adds all other threads until everything has been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import pickle
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from benchmarks.process import Worker, cases, costs_in_turns, own_output, wait
from benchmarks.summary.loop import GAP, SPREAD, TOKENS, Case
from benchmarks.summary.rows import LEFT_OUT, Figure, Row, Topic
from benchmarks.summary.sglang import ENVIRON, STAND_INS

OFF, OWN, INSTEAD = "no metrics", "SGLang's own metrics", "plugin instead"
MODES = (OFF, OWN, INSTEAD)
PARTS = ("tokenizer", "scheduler")
CASES = (Case(64, streaming=True), Case(256, streaming=True), Case(256, streaming=False))
SHARE = 20
"""Limit: per cent of SGLang's cost that is left."""
FLUSH = 50
"""Tokens after which a scheduler sends those of a request whose client does not stream."""
PROMPT = 7
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Microseconds of CPU a token, of the loop's thread and of the process."""

    loop: float
    process: float


Found = Mapping[tuple[str, Case, str], Cost]
"""Costs by part, case and mode."""


def share(part: str, case: Case, what: str) -> str:
    """Return the name of the row with what is left of SGLang's cost."""
    return f"{part}, {case}: left of SGLang's cost, {what}"


def rows() -> list[Row]:
    """Return the rows: the shares first, then what each mode costs."""
    keys = [(part, case) for part in PARTS for case in CASES]
    made = [
        Row(share(*key, what), "%", limit=SHARE) for key in keys for what in ("loop", "process")
    ]
    titles = [f"{part}, {case}: {mode}" for part, case in keys for mode in (OFF, INSTEAD)]
    return [*made, *(Row(title, "us a token", OWN) for title in titles)]


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return the figures."""
    found: dict[tuple[str, Case, str], Cost] = {}
    for part in PARTS:
        costs = costs_in_turns(
            Cost, MODES, CASES[:1] if quick else CASES, partial(start, part), quick=quick
        )
        found |= {(part, *key): cost for key, cost in costs.items()}
    made = figures(found)
    return {row.name: made.get(row.name, Figure(why=LEFT_OUT)) for row in rows()}


def start(part: str, mode: str, endpoint: str, stack: contextlib.ExitStack) -> Worker:
    """Start the process of a part in a mode."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-multiprocess-"))
    paths = [str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **ENVIRON,
        "PROMETHEUS_MULTIPROC_DIR": folder,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
    }
    if mode == INSTEAD:
        environ |= {
            "SIDESTEP_ENDPOINT": endpoint,
            "SIDESTEP_SGLANG_MODE": "instead",
            "SIDESTEP_NAMESPACE": f"bench-{part}",
        }
    return stack.enter_context(Worker(["benchmarks.summary.sglang_loop", part, mode], environ))


def figures(found: Found) -> Mapping[str, Figure]:
    """Return the figures of all rows that were measured."""
    made: dict[str, Figure] = {}
    for part, case in {(part, case) for part, case, _ in found}:
        off, own, ours = (found[part, case, mode] for mode in MODES)
        made[share(part, case, "loop")] = Figure(
            100 * (ours.loop - off.loop) / (own.loop - off.loop)
        )
        made[share(part, case, "process")] = Figure(
            100 * (ours.process - off.process) / (own.process - off.process)
        )
        made[f"{part}, {case}: {OFF}"] = Figure(off.process, own.process)
        made[f"{part}, {case}: {INSTEAD}"] = Figure(ours.process, own.process)
    return made


class Part(Protocol):
    """A part of SGLang that serves the requests of a case."""

    def serve(self, case: Case) -> tuple[float, float]:
        """Serve the requests; return CPU seconds of thread and process when the first was answered."""


class Tokenizer:
    """A real tokenizer manager, and an object in place of its sockets."""

    def __init__(self, arguments: Any, ports: Any) -> None:
        import uvloop  # noqa: PLC0415
        from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: PLC0415

        self._runner = uvloop.new_event_loop()
        asyncio.set_event_loop(self._runner)
        self._manager = TokenizerManager(arguments, ports)
        self._enable_metrics = arguments.enable_metrics
        self._peer = Peer()
        self._manager.send_to_scheduler = self._manager.recv_from_detokenizer = self._peer

    def serve(self, case: Case) -> tuple[float, float]:
        """Serve the requests of a case."""
        return self._runner.run_until_complete(self._serve(case))

    async def _serve(self, case: Case) -> tuple[float, float]:
        peer = self._peer
        peer.sent.clear()
        peer.expected = case.requests
        ids = [f"{number}" for number in range(case.requests)]
        clients = [asyncio.create_task(self._ask(one, case)) for one in ids]
        await peer.sent.wait()
        messages = outputs(ids, case, enable_metrics=self._enable_metrics)
        begun = time.thread_time(), time.process_time()
        for message in messages:
            peer.messages.put_nowait(message)
        await asyncio.gather(*clients)
        return begun

    async def _ask(self, rid: str, case: Case) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

        asked = GenerateReqInput(
            rid=rid,
            input_ids=[2] * PROMPT,
            sampling_params={"max_new_tokens": TOKENS},
            stream=case.streaming,
        )
        async for _ in self._manager.generate_request(asked):
            pass


class Peer:
    """The tokenizer's sockets: it counts the requests that are sent, and returns encoded messages.

    SGLang's messages are pickled.
    """

    def __init__(self) -> None:
        self.sent = asyncio.Event()
        self.expected = 0
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()

    def send_pyobj(self, message: Any, **_: Any) -> None:
        """Encode a request, and tell when all have come."""
        pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self.expected -= 1
        if not self.expected:
            self.sent.set()

    async def recv_pyobj(self, **_: Any) -> Any:
        """Return the next message after a pause."""
        await asyncio.sleep(GAP)
        return pickle.loads(await self.messages.get())


def outputs(ids: Sequence[str], case: Case, *, enable_metrics: bool) -> list[bytes]:
    """Return the detokenizer's messages of all steps, encoded."""
    from sglang.srt.managers.io_struct import BatchStrOutput  # noqa: PLC0415
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats  # noqa: PLC0415

    first = {one: number * SPREAD // len(ids) for number, one in enumerate(ids)}
    now = time.perf_counter()
    times = {
        one: SchedulerReqTimeStats(
            enable_metrics=enable_metrics,
            wait_queue_entry_time=now,
            forward_entry_time=now,
            prefill_finished_time=now,
            queue_duration_s=0.001,
            storage_prefetch_wait_s=0.0,
            storage_staging_wait_s=0.0,
        )
        for one in ids
    }
    # Fields that a request without log probabilities has in common with all others of its batch.
    unused = {
        field: None
        for field in BatchStrOutput.__struct_fields__
        if any(part in field for part in ("logprobs", "entropy", "mask", "hidden", "placeholder"))
    }
    made = []
    for step in range(SPREAD + TOKENS):
        tokens = {one: step - first[one] + 1 for one in ids if 0 <= step - first[one] < TOKENS}
        sent = [
            one
            for one, count in tokens.items()
            if case.streaming or count == TOKENS or not count % FLUSH
        ]
        if not sent:
            continue
        new = [1 if case.streaming else (tokens[one] - 1) % FLUSH + 1 for one in sent]
        end = {"type": "length", "length": TOKENS}
        output = BatchStrOutput(
            **unused,
            rids=sent,
            http_worker_ipcs=[None] * len(sent),
            finished_reasons=[end if tokens[one] == TOKENS else None for one in sent],
            output_strs=["word "] * len(sent),
            output_ids=[array("q", [17] * count) for count in new],
            prompt_tokens=[PROMPT] * len(sent),
            completion_tokens=[tokens[one] for one in sent],
            reasoning_tokens=[0] * len(sent),
            cached_tokens=[0] * len(sent),
            routed_experts=None,
            indexer_topk=None,
            retraction_counts=[0] * len(sent),
            cached_tokens_details=[None] * len(sent),
            time_stats=sent_times([times[one] for one in sent]),
        )
        made.append(pickle.dumps(output, pickle.HIGHEST_PROTOCOL))
    return made


def sent_times(times: Sequence[Any]) -> Any:
    """Return the times of requests as SGLang's scheduler sends them."""
    from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: PLC0415
    from sglang.srt.managers.scheduler_components import output_streamer  # noqa: PLC0415

    made = output_streamer._GenerationStreamAccumulator(
        return_logprob=False,
        return_hidden_states=False,
        return_routed_experts=False,
        return_indexer_topk=False,
        spec_algorithm=None,
        disaggregation_mode=DisaggregationMode.NULL,
        default_stream_interval=1,
        default_force_stream_interval=FLUSH,
        get_cached_tokens_details=lambda _: None,
        is_request_level_customized_info_key=lambda _: False,
        current_weight_version=None,
        time_stats=times,
    )
    return made.to_payload(dp_rank=0, is_idle_batch=True).time_stats


class Scheduler:
    """A real scheduler whose forward pass is a pause, and objects in place of its sockets."""

    def __init__(self, arguments: Any, ports: Any) -> None:
        from sglang.srt.managers import scheduler  # noqa: PLC0415
        from sglang.srt.managers.scheduler_components import ipc_channels  # noqa: PLC0415

        self._requests: deque[bytes | None] = deque()
        self._begun_at = -1
        sockets = SimpleNamespace(recv_pyobj=self._receive, send_pyobj=_encode)
        ipc_channels.get_zmq_socket = lambda *_: sockets
        self._scheduler = scheduler.Scheduler(arguments, ports)
        self._scheduler.model_worker.forward_batch_generation = _forward
        self._scheduler.metrics_reporter.start_scheduler_time_accounting()

    def serve(self, case: Case) -> tuple[float, float]:
        """Serve the requests of a case."""
        made = self._scheduler
        made.flush_cache()
        self._requests.extend(requests(case))
        made.gracefully_exit = False
        begun = time.thread_time(), time.process_time()
        made.event_loop_normal()
        return begun

    def _receive(self, *_: Any, **__: Any) -> Any:
        """Return a request, at most as many in a step as begin in one."""
        import zmq  # noqa: PLC0415

        made = self._scheduler
        if self._requests and made.forward_ct != self._begun_at:
            request = self._requests.popleft()
            if request is None:
                self._begun_at = made.forward_ct
                raise zmq.Again
            return pickle.loads(request)
        made.gracefully_exit = not (self._requests or made.waiting_queue or made.running_batch.reqs)
        raise zmq.Again


def _encode(message: Any, **_: Any) -> None:
    """Encode a message as SGLang's socket does, and send it to nobody."""
    pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def _forward(batch: Any, *_: Any, **__: Any) -> Any:
    """Return a token for each request of a batch after a pause."""
    import torch  # noqa: PLC0415
    from sglang.srt.managers.utils import GenerationBatchResult  # noqa: PLC0415

    time.sleep(GAP)
    return GenerationBatchResult(next_token_ids=torch.full((len(batch.reqs),), 17))


def requests(case: Case) -> list[bytes | None]:
    """Return the tokenizer's messages with the requests of a case, encoded; None ends a step's."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput  # noqa: PLC0415
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats  # noqa: PLC0415
    from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    params.normalize(None)
    made: list[bytes | None] = []
    step = 0
    for number in range(case.requests):
        if number * SPREAD // case.requests != step:
            step += 1
            made.append(None)
        request = TokenizedGenerateReqInput(
            rid=str(number),
            input_text=None,
            input_ids=array("q", [2 + number, *[3] * (PROMPT - 1)]),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=case.streaming,
            time_stats=APIServerReqTimeStats(),
        )
        made.append(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
    return made


def main() -> None:
    """Run a worker: a case a line on standard input, its costs a line on standard output."""
    part, mode = sys.argv[1:]
    answers = own_output()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        made = constructed(part, mode, folder)
    drained = publisher_is_drained()
    gc.collect()
    gc.freeze()
    for asked, answer in cases(answers):
        case = Case(**asked)
        thread, process = made.serve(case)
        thread = time.thread_time() - thread
        wait(drained)
        process = time.process_time() - process
        tokens = case.requests * TOKENS
        answer(Cost(thread / tokens * 1e6, process / tokens * 1e6))
    # At a regular exit SGLang's libraries print pages about leaks.
    os._exit(0)


def constructed(part: str, mode: str, folder: str) -> Part:
    """Return a part of SGLang, constructed as in its own process."""
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415
    from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: PLC0415
    from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: PLC0415

    from sidestep_adapters.sglang import plugin  # noqa: PLC0415

    kind: Callable[[Any, Any], Part] = Tokenizer if part == "tokenizer" else Scheduler
    arguments = ServerArgs(
        model_path=folder,
        load_format="dummy",
        dtype="float32",
        context_length=2048,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        mem_fraction_static=0.1,
        max_total_tokens=1 << 17,
        max_running_requests=256,
        skip_tokenizer_init=True,
        enable_metrics=mode != OFF,
    )
    arguments.resolve_once()
    arguments.check_server_args()
    plugin.plugin()
    HookRegistry.apply_hooks()
    ranks = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0) if part == "scheduler" else None
    publish(arguments, role=part, ranks=ranks)
    return kind(arguments, PortArgs.init_new(arguments))


def publisher_is_drained() -> Callable[[], bool]:
    """Return a function that tells whether everything recorded has been sent."""
    from sidestep_adapters.sglang import taps  # noqa: PLC0415

    own = taps.process()
    if own is None or own.publisher is None:
        return lambda: True
    publisher, deferred = own.publisher, own.deferred
    wait(lambda: publisher.connected)
    return lambda: not deferred and publisher.drained


SGLANG_LOOP = Topic(
    "SGLang's tokenizer and scheduler: what metrics cost them",
    tuple(rows()),
    measure,
    venv="sglang-venv",
    needs=("sglang", "tools/setup_sglang.sh"),
)

if __name__ == "__main__":
    main()
