"""The plugin's page equals vLLM's own for the same outputs, sample by sample, without a model."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from exporters import until
from real_engines.comparison import Page, all_differences, parse, report, value
from real_engines.processes import ExporterProcess, Process, engine_environ
from real_engines.sites import BLOCKS, VllmSite

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("vllm_parity_program.py")
STEPS = "vllm:iteration_tokens_total"
SUCCESS = "vllm:request_success"
QUEUE = "vllm:request_queue_time_seconds"
UNSCHEDULED = (QUEUE, "vllm:request_prefill_time_seconds", "vllm:request_inference_time_seconds")
ABORTS = {"chunks", "two-engines", "aborts"}
CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "late-samples": (),
    "last-token": (),
    "repetitions": (),
    "preemptions": (),
    "adapters": (),
    "priorities": (),
    "drafts": (),
    # vLLM does not count requests whose clients leave.
    "chunks": (SUCCESS,),
    "nans": (),
    # Of a request that ends before it is scheduled, vLLM observes the engine's time since its start.
    "errors": UNSCHEDULED,
    "pooling": (),
    # Of a session, vLLM observes the time from its last input back to the first: below 0.
    "sessions": (QUEUE,),
    "two-engines": (SUCCESS,),
    # Each of vLLM's front ends observes its part of a step.
    "two-front-ends": (STEPS,),
    "aborts": (SUCCESS,),
    # A core cannot see that the last token allowed completes a stop string; its tap samples blocks.
    "tapped": (SUCCESS, *BLOCKS),
    "tapped-engines": (SUCCESS, *BLOCKS),
}
"""Families that differ, and why, by case."""
SETTLE = 20.0
"""Seconds until parallel samples of tapped engines are known to be complete, and more."""


async def test_pages_agree_sample_by_sample(vllm: VllmSite, tmp_path: Path) -> None:
    """Counts, sums and buckets of all families are the same in every case."""
    command = [str(vllm.python), str(PROGRAM), str(vllm.model), str(tmp_path), *CASES]
    environ = {
        **engine_environ(vllm.home),
        "SIDESTEP_ENDPOINT": vllm.endpoint,
        "SIDESTEP_VLLM_MODE": "instead",
        "VLLM_PLUGINS": "none-by-entry-point",
        # Both front ends give a request the same id.
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    found = {}
    async with (
        vllm.exporter() as exporter,
        Process(command, environ, vllm.home / "program.log") as program,
    ):
        await exporter.started()
        for name, apart in CASES.items():
            file = tmp_path / f"{name}.txt"

            async def written(file: Path = file) -> bool:
                return file.exists()  # noqa: ASYNC240 - nothing else runs

            await program.ready(written, 120.0)
            theirs = of_case(file.read_text(), name)
            found[name] = await compared(theirs, exporter, name, apart)
            report(name, theirs, [], differences=len(found[name]))
            file.with_suffix(".done").touch()
        await until(lambda: program.code is not None, 30.0, "end of the program")
        assert program.code == 0, program.output[-4000:]
        builds = value(parse(await exporter.page()), "sidestep_engine_process_builds_statistics")

    assert {name: [] for name in CASES} == found
    assert builds == 0


def of_case(text: str, name: str) -> Page:
    """Return the families that the model of a case has."""
    label = f'model_name="{name}"'
    lines = [line for line in text.splitlines() if line.startswith("#") or label in line]
    return Page((k, family) for k, family in parse("\n".join(lines)).items() if family.samples)


async def compared(
    theirs: Page, exporter: ExporterProcess, name: str, apart: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Return what differs on the exporter's page of a case, as soon as nothing does or after a while."""
    found = [("every family", "was never compared")]

    async def agree() -> bool:
        nonlocal found
        ours = of_case(await exporter.page(), name)
        found = list(all_differences(theirs, ours, apart=apart))
        aborted = value(ours, SUCCESS, finished_reason="abort")
        if value(theirs, SUCCESS) != value(ours, SUCCESS) - aborted:
            found.append((SUCCESS, "differs in more than aborts"))
        if bool(aborted) != (name in ABORTS):
            found.append((SUCCESS, f"{aborted} requests were aborted"))
        return not found

    with contextlib.suppress(AssertionError):
        await until(agree, SETTLE)
    return found
