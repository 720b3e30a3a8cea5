"""Two front ends of vLLM that see the same engines: one has vLLM's own metrics, one the plugin.

Both are vLLM's ``AsyncLLM``, and the engines have vLLM's scheduler. There is no model: tokens are
random. Within a step the wall time stands still, so that both front ends see the same.

Runs with vLLM's interpreter: ``vllm_parity_program.py MODEL FOLDER CASE...``. For each case it
writes the page of vLLM's own metrics to ``FOLDER/CASE.txt`` and waits for ``FOLDER/CASE.done``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Clock:
    """The wall time, which stands still on the loop's thread while a step is processed."""

    def __init__(self) -> None:
        self.stopped_at: float | None = None
        self._real = time.time
        self._loop = threading.get_ident()

    def __call__(self) -> float:
        """Return Unix time."""
        if self.stopped_at is not None and threading.get_ident() == self._loop:
            return self.stopped_at
        return self._real()


clock = Clock()
# Before anything takes a reference.
time.time = clock

import numpy as np  # noqa: E402
import torch  # noqa: E402
from prometheus_client import REGISTRY, generate_latest  # noqa: E402
from vllm import PoolingParams, SamplingParams, TokensPrompt  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.engine import (  # noqa: E402
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    async_llm,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from sidestep_adapters.vllm.plugin import SidestepStatLogger  # noqa: E402

BLOCK = 16
LETTERS = "abcd"
"""Few, so that stop strings are found often."""
TAP = "sidestep_adapters.vllm.scheduler.SidestepScheduler"
REPETITION = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=2)
KINDS = tuple(RequestOutputKind)


@dataclasses.dataclass(frozen=True)
class Case:
    """A load, and options of the engines and front ends that it runs on.

    Attributes:
        options: Engine arguments.
        environ: Environment variables that vLLM looks up when it uses them.
        stops: Whether requests have stop strings.
        aborts: Whether clients leave.
        errors: Whether the core ends some requests with an error.
        repeats: Whether the core ends requests whose last two tokens are equal.
        external: Whether an external cache has some prompts.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    engines: int = 1
    front_ends: int = 1
    blocks: int = 1000
    requests: int = 80
    samples: Sequence[int] = (1, 1, 1, 2, 3)
    stops: bool = True
    aborts: bool = False
    external: bool = False
    drafts: int = 0
    logprobs: int | None = None
    pooling: bool = False
    sessions: bool = False
    errors: bool = False
    repeats: bool = False


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
CASES = {
    "plain": Case(),
    # A sample waits until another ends.
    "late-samples": Case({"max_num_seqs": 3}, samples=(2, 3, 4)),
    # The core goes on until the front end, which found the string, ends the request.
    "last-token": Case(requests=150, samples=(1, 2)),
    # The same string ends a request there and here.
    "repetitions": Case(samples=(1, 2), repeats=True),
    # A request has 27 blocks at most.
    "preemptions": Case({"max_num_seqs": 16}, blocks=28, requests=120, external=True),
    "adapters": Case({"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}),
    "priorities": Case({"scheduling_policy": "priority", "max_num_seqs": 4}, blocks=30),
    "drafts": Case({"speculative_config": NGRAM}, drafts=3, logprobs=1),
    "chunks": Case(environ={"VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "2"}, aborts=True),
    "nans": Case(environ={"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}, logprobs=2),
    "errors": Case({"max_num_seqs": 3}, errors=True),
    "pooling": Case({"runner": "pooling"}, pooling=True, stops=False, samples=(1,)),
    "sessions": Case(sessions=True, stops=False, samples=(1,)),
    "two-engines": Case({"max_num_seqs": 6}, engines=2, requests=120, aborts=True),
    "two-front-ends": Case({"max_num_seqs": 8}, engines=2, front_ends=2, requests=120),
    "aborts": Case({"max_num_seqs": 4}, aborts=True, blocks=40),
    "tapped": Case({"scheduler_cls": TAP, "max_num_seqs": 8}, blocks=60, samples=(1, 2)),
    "tapped-engines": Case({"scheduler_cls": TAP}, engines=2),
}


class Core:
    """The client of the engines that a front end has."""

    def __init__(self, engines: int, number: int, *, pooling: bool) -> None:
        self.engine_ranks_managed = [*range(engines)]
        self.resources = SimpleNamespace(engine_dead=False)
        self.reqs_in_flight: dict[str, bytes] = {}
        self.added: list[Any] = []
        self.aborted: list[str] = []
        self.is_idle = asyncio.Event()
        self._number = number
        self._pooling = pooling
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._decode = MsgpackDecoder(EngineCoreOutputs).decode

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return what the model can do."""
        return ("embed",) if self._pooling else ("generate",)

    async def add_request_async(self, request: Any) -> None:
        """Take a request."""
        request.client_index = self._number
        engine = engine_of(request.request_id, len(self.engine_ranks_managed))
        self.reqs_in_flight[request.request_id] = engine.to_bytes(2, "little")
        self.added.append(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Take an abort."""
        self.aborted += request_ids

    async def get_output_async(self) -> Any:
        """Return the outputs of the next step."""
        if self._messages.empty():
            self.is_idle.set()
        return self._decode(await self._messages.get())

    async def deliver(self, message: Any) -> None:
        """Send a message, and wait until it has been processed."""
        self.is_idle.clear()
        self._messages.put_nowait(message)
        await asyncio.wait_for(self.is_idle.wait(), 30.0)

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing."""


def engine_of(name: str, engines: int) -> int:
    """Return the engine of a request."""
    return zlib.crc32(name.encode()) % engines


class FrontEnd:
    """An ``AsyncLLM``, and the queues of its clients."""

    def __init__(self, case: Case, name: str, model: str, number: int, *, is_own: bool) -> None:
        config = config_of(case, name, model)
        parallel = config.parallel_config
        if not is_own:
            parallel._api_process_rank, parallel._api_process_count = number, case.front_ends
        core = self.core = Core(case.engines, number, pooling=case.pooling)
        async_llm.EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: core)
        self.engine = async_llm.AsyncLLM(
            config,
            SimpleNamespace,
            log_stats=True,
            log_requests=False,
            stat_loggers=None if is_own else [SidestepStatLogger],
        )
        self._queues: dict[str, Any] = {}
        self._clients: set[asyncio.Task[None]] = set()

    async def add(self, name: str, arrival: float, prompt: Any, params: Any, **more: Any) -> None:
        """Take a request."""
        queue = await self.engine.add_request(
            name, prompt, params.clone(), arrival_time=arrival, **more
        )
        self._queues[name] = queue
        client = asyncio.create_task(self._read(queue))
        self._clients.add(client)
        client.add_done_callback(self._clients.discard)

    async def abort(self, name: str) -> None:
        """Let a client leave, as ``AsyncLLM.generate`` does."""
        await self.engine.abort(self._queues[name].request_id, internal=True)

    async def _read(self, queue: Any) -> None:
        while not (await queue.get()).finished:
            pass


def config_of(case: Case, name: str, model: str) -> Any:
    """Return the configuration of an engine whose model is named after the case."""
    config = EngineArgs(
        model=model,
        served_model_name=[name],
        load_format="dummy",
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK,
        max_num_batched_tokens=256,
        async_scheduling=False,
        enable_prefix_caching=not case.pooling,
        **case.options,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = case.blocks
    return config


class Engine:
    """An engine: vLLM's scheduler, and random tokens in place of a model."""

    def __init__(self, case: Case, name: str, model: str, number: int) -> None:
        config = config_of(case, name, model)
        config.parallel_config.data_parallel_index = number
        layers = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(case.blocks, [], [KVCacheGroupSpec(["layer"], layers)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        hashed = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashed)
        self._hasher = get_request_block_hasher(BLOCK, hashed)
        self._encode = MsgpackEncoder().encode
        self._decode = MsgpackDecoder(EngineCoreRequest).decode
        self._case = case
        self._random = random.Random(number)

    def add(self, request: Any) -> None:
        """Queue a request."""
        sent = self._decode(self._encode(request))
        self.scheduler.add_request(Request.from_engine_core_request(sent, self._hasher))

    def step(self) -> dict[int, Any]:
        """Make a step, and return its outputs by front end."""
        scheduler, chance = self.scheduler, self._random
        batch = scheduler.schedule()
        ids = [*batch.num_scheduled_tokens]
        tokens = [self._tokens(batch, scheduler.requests[one]) for one in ids]
        made = ModelRunnerOutput(ids, {one: number for number, one in enumerate(ids)}, tokens)
        if self._case.logprobs:
            made.logprobs = logprobs(tokens)
        if self._case.pooling:
            made.sampled_token_ids = []
            made.pooler_output = [
                torch.zeros(4) if scheduler.requests[one].num_computed_tokens >= total else None
                for one, total in ((one, scheduler.requests[one].num_tokens) for one in ids)
            ]
        if self._case.environ.get("VLLM_COMPUTE_NANS_IN_LOGITS"):
            made.num_nans_in_logits = {one: chance.choice((0,) * 19 + (3,)) for one in ids}
        outputs: dict[int, Any] = scheduler.update_from_output(batch, made)
        if self._case.drafts:
            letters = [[5] * self._case.drafts for _ in ids]
            scheduler.update_draft_token_ids(DraftTokenIds(ids, letters))
        if self._case.errors and scheduler.requests and chance.random() < 0.05:
            self._fail(chance.choice(sorted(scheduler.requests)), outputs)
        for output in itertools.chain.from_iterable(one.outputs for one in outputs.values()):
            stats = output.prefill_stats
            if self._case.external and stats is not None and stats.num_computed_tokens > 8:
                stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, 7)
        return outputs

    def _fail(self, name: str, outputs: dict[int, Any]) -> None:
        """End a request that has no output in this step with an error, perhaps before its first one."""
        request = self.scheduler.requests[name]
        made = outputs.setdefault(0, EngineCoreOutputs()).outputs
        if name not in {one.request_id for one in made}:
            self.scheduler.finish_requests([name], RequestStatus.FINISHED_ERROR)
            reason, events = request.get_finished_reason(), request.take_events()
            made.append(EngineCoreOutput(name, [], finish_reason=reason, events=events))

    def _tokens(self, batch: Any, request: Any) -> list[int]:
        if self._case.pooling or request.num_computed_tokens < request.num_tokens:
            return []
        drafts = batch.scheduled_spec_decode_tokens.get(request.request_id, ())
        count = self._random.randint(1, 1 + len(drafts))
        return [self._random.choice(TOKENS * 10 + [STOP]) for _ in range(count)]


TOKENS: list[int] = []
STOP = 2
"""The token at which requests stop."""


def logprobs(tokens: Sequence[Sequence[int]]) -> LogprobsLists:
    """Return probabilities for each token."""
    flat = [token for some in tokens for token in some]
    starts = [0, *itertools.accumulate(map(len, tokens))]
    ids = np.array([[token] * 3 for token in flat] or np.zeros((0, 3)), dtype=np.int32)
    return LogprobsLists(ids, -np.ones(ids.shape), np.ones(len(flat), dtype=np.int32), starts)


class Run:
    """A case that runs."""

    def __init__(self, name: str, model: str) -> None:
        case = self.case = CASES[name]
        self.own = FrontEnd(case, name, model, 0, is_own=True)
        self.ours = [
            FrontEnd(case, name, model, number, is_own=False) for number in range(case.front_ends)
        ]
        self.engines = [Engine(case, name, model, number) for number in range(case.engines)]
        self._random = random.Random(name)
        self._encode = MsgpackEncoder().encode
        self._running: dict[str, FrontEnd] = {}
        self._shared = [self._random.choice(TOKENS) for _ in range(64)]

    async def run(self) -> None:
        """Run the load."""
        waiting = [*range(self.case.requests)]
        while waiting or any(one.scheduler.has_requests() for one in self.engines):
            for _ in range(self._random.choice((0, 0, 1, 1, 2, 4))):
                if waiting:
                    await self._add(waiting.pop(0))
            if self.case.aborts and self._random.random() < 0.15 and self._running:
                await self._abort(self._random.choice([*self._running]))
            self._forward()
            for number, engine in enumerate(self.engines):
                await self._step(number, engine)
        for front_end in (self.own, *self.ours):
            assert not front_end.engine.output_processor.request_states
        await asyncio.sleep(0)

    async def _add(self, number: int) -> None:
        chance = self._random
        prompt = [chance.choice(TOKENS) for _ in range(chance.choice((1, 5, 30, 100, 300)))]
        if chance.random() < 0.3:
            prompt = self._shared + prompt
        more: dict[str, Any] = {}
        if "enable_lora" in self.case.options and (adapter := chance.randrange(3)):
            more["lora_request"] = LoRARequest(f"lora-{adapter}", adapter, "/none")
        if "scheduling_policy" in self.case.options:
            more["priority"] = chance.randrange(3)
        name, ours = f"r{number}", self.ours[number % len(self.ours)]
        arrival, params = time.time() - chance.random() * 3, self._params()
        inputs = [prompt, [TOKENS[0]] * 9] if self.case.sessions else []
        for front_end in (self.own, ours):
            # vLLM adds later inputs of a session to the list of the first one.
            given: Any = (
                stream([[*one] for one in inputs])
                if inputs
                else TokensPrompt(prompt_token_ids=[*prompt])
            )
            await front_end.add(name, arrival, given, params, **more)
            # The inputs of a session come from a task of their own.
            for _ in range(20 if inputs else 0):
                await asyncio.sleep(0)
        self._running[name] = ours

    def _params(self) -> Any:
        chance, case = self._random, self.case
        if case.pooling:
            return PoolingParams(task="embed")
        kind = RequestOutputKind.DELTA if case.sessions else chance.choice(KINDS)
        stop = chance.choice((None, "ab", ["cc", "ad"])) if case.stops else None
        limit = chance.choice((1, 2, 3, 8, 40)) if stop else chance.choice((1, 2, 10, 60))
        return SamplingParams(
            n=chance.choice(case.samples),
            max_tokens=limit,
            stop=stop,
            stop_token_ids=[STOP],
            output_kind=kind,
            logprobs=case.logprobs,
            repetition_detection=REPETITION if case.repeats else None,
        )

    async def _abort(self, name: str) -> None:
        for front_end in (self.own, self._running.pop(name)):
            await front_end.abort(name)

    def _forward(self) -> None:
        """Give the engines what their clients have sent: both front ends the same."""
        own = self.own.core
        added = [request for one in self.ours for request in one.core.added]
        aborted = [request for one in self.ours for request in one.core.aborted]
        assert sorted(r.request_id for r in added) == sorted(r.request_id for r in own.added)
        assert sorted(aborted) == sorted(own.aborted), (aborted, own.aborted)
        for core in (own, *(one.core for one in self.ours)):
            core.added, core.aborted = [], []
        for request in added:
            self._engine(request.request_id).add(request)
        for name in aborted:
            self._engine(name).scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def _engine(self, name: str) -> Engine:
        return self.engines[engine_of(name, len(self.engines))]

    async def _step(self, number: int, engine: Engine) -> None:
        if not engine.scheduler.has_requests():
            return
        outputs = engine.step()
        if not outputs:
            return
        for one in outputs.values():
            one.engine_index = number
        clock.stopped_at = time.time()
        await self.own.core.deliver(self._encode(merged(outputs, number)))
        for index, one in outputs.items():
            await self.ours[index].core.deliver(self._encode(one))
        clock.stopped_at = None
        # Clients take their outputs.
        await asyncio.sleep(0)
        self._forward()


def merged(outputs: Mapping[int, Any], number: int) -> Any:
    """Return a step's outputs as a single front end would get them, all at the same time."""
    stamp = next(iter(outputs.values())).timestamp
    for one in outputs.values():
        one.timestamp = stamp
    made = EngineCoreOutputs(engine_index=number, timestamp=stamp)
    made.outputs = [one for some in outputs.values() for one in some.outputs]
    made.scheduler_stats = next((one.scheduler_stats for one in outputs.values()), None)
    return made


async def stream(prompts: Sequence[list[int]]) -> AsyncIterator[Any]:
    """Yield the inputs of a session."""
    from vllm.engine.protocol import StreamingInput  # noqa: PLC0415 - only newer releases

    for prompt in prompts:
        yield StreamingInput(prompt=TokensPrompt(prompt_token_ids=prompt))


async def main(model: str, folder: Path, names: Sequence[str]) -> None:
    """Run the cases one after the other."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - vLLM brings it along

    TOKENS.extend(Tokenizer.from_file(f"{model}/tokenizer.json").encode(LETTERS).ids)
    for name in names:
        os.environ["SIDESTEP_NAMESPACE"] = name
        os.environ.update(CASES[name].environ)
        run = Run(name, model)
        await run.run()
        (folder / f"{name}.tmp").write_bytes(generate_latest(REGISTRY))
        (folder / f"{name}.tmp").rename(folder / f"{name}.txt")
        while not (folder / f"{name}.done").exists():
            await asyncio.sleep(0.02)
        for front_end in (run.own, *run.ours):
            front_end.engine.shutdown()
        for variable in CASES[name].environ:
            del os.environ[variable]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
