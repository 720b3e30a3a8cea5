"""Findings of an exporter about itself, by faults seeded over real connections, files and time."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import bcrypt
import msgspec
import pytest

from exporters import Start, until
from pages import get
from peers import count, publisher
from ports import free_port
from reporting_processes import WORKING, process
from sidestep.app.exporter import Exporter
from sidestep.diagnosis.own_checks import COUNTERS, EXPECTED, OwnChecks
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.exposition.live.view import LiveView
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import (
    CORE,
    FRONT_END_STATS,
    Bye,
    EngineInfo,
    Heartbeat,
    Hello,
)
from sidestep.protocol.receiver import MAX_STREAMS
from sidestep.telemetry.rows import BY_NAME
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_tools.web_client.access import Access
from socket_peers import batch, connect


async def findings(exporter: Exporter) -> dict[str, dict[str, Any]]:
    """Return the exporter's answer by code."""
    found = json.loads(await get(exporter.url.removesuffix("/metrics") + "/api/v1/doctor"))
    return {each["code"]: each for each in found["findings"]}


async def found(exporter: Exporter, code: str, seconds: float = 20.0) -> dict[str, Any]:
    """Wait for a finding."""
    latest: dict[str, dict[str, Any]] = {}

    async def has_code() -> bool:
        latest.update(await findings(exporter))
        return code in latest

    await until(has_code, seconds, code)
    return latest[code]


def test_every_name_is_a_metric() -> None:
    """A metric that was renamed would never be found."""
    kinds = {name: BY_NAME[name].kind for name in (*COUNTERS, *EXPECTED)}
    assert {kinds[name] for name in COUNTERS} == {"counter"}
    assert {kinds[name] for name in EXPECTED} == {"gauge"}


async def test_a_refused_stream_has_the_remedy_of_its_reason(start: Start) -> None:
    """The same as in the log."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send(Hello(VERSION + 1, "s", 1, 1, 1, []))
        finding = await found(exporter, "SD106")
    assert finding["subject"] == "version"
    assert finding["remedy"].startswith("Install the same release of sidestep here and in")


async def test_an_engine_beyond_the_limit_of_streams(start: Start) -> None:
    """It is missing from every page, so a counter and a finding say that it was refused."""
    async with start() as exporter, connect(exporter) as peer:
        for number in range(MAX_STREAMS + 1):
            info = EngineInfo(f"e{number}", "vllm", {"engine": str(number), "model_name": "m"})
            await peer.send(Hello(VERSION, f"s{number}", number + 1, 1, 1, [info]))
        finding = await found(exporter, "SD106")
    assert finding["subject"] == "over_limit"
    assert f"the last: stream s{MAX_STREAMS}: over_limit: too many streams" in finding["text"]
    assert exporter.metrics.value("sidestep_rejected_total", "over_limit") == 1


async def test_a_server_of_engine_that_never_answers(start: Start) -> None:
    """It has no engine that could be unreachable, so the server itself is named."""
    target = f"llamacpp=http://127.0.0.1:{free_port()}"
    async with start(engine=(target,)) as exporter:
        finding = await found(exporter, "SD124")
    assert (finding["subject"], finding["text"]) == (target, "its state is down")


@pytest.mark.usefixtures("kept_log")
async def test_a_model_that_cannot_be_a_label_is_named(start: Start) -> None:
    """In the finding and among the latest warnings of the live page, escaped."""
    async with start() as exporter, connect(exporter) as peer:
        labels = {"engine": "0", "model_name": "a\u3000b"}
        await peer.send(Hello(VERSION, "s", 1, 1, 1, [EngineInfo("e", "vllm", labels)]))
        finding = await found(exporter, "SD106")
        url = exporter.url.removesuffix("/metrics") + "/api/v1/live"
        (warning,) = json.loads(await get(url))["warnings"]
    assert finding["subject"] == "not_printable"
    assert "the last: stream s: not_printable: label model_name is 'a\\u3000b'" in finding["text"]
    assert finding["remedy"].startswith("Give it another name (of a model: --served-model-name)")
    assert "label model_name is 'a\\u3000b'" in warning["text"]


async def test_two_engines_with_equal_labels(start: Start) -> None:
    """The later one is named."""
    async with start() as exporter, connect(exporter) as peer:
        labels = {"engine": "0", "model_name": "m"}
        infos = [EngineInfo(f"{name}/m/0", "vllm", labels) for name in ("a", "b")]
        await peer.send(Hello(VERSION, "s", 1, 1, 1, infos))
        finding = await found(exporter, "SD105")
    assert finding["subject"] == "engine b/m/0"
    assert finding["text"] == "another engine has its labels engine=0, model_name=m"


@pytest.mark.parametrize(
    ("roles", "code", "text"),
    [
        (["prefill", "prefill"], "SD144", "all of its engines are for prefill"),
        (["decode"], "SD144", "all of its engines are for decode"),
        (["decode", "both", "prefill"], "SD145", "roles: both, decode, prefill"),
        (["decode", "prefill"], "", ""),
        (["both", "both"], "", ""),
    ],
)
async def test_roles_that_do_not_match(
    roles: list[str], code: str, text: str, start: Start
) -> None:
    """The model is named, and what its engines are for."""
    infos = [
        EngineInfo(role + str(rank), "vllm", {"engine": str(rank), "model_name": "m"})
        for rank, role in enumerate(roles)
    ]
    for info, role in zip(infos, roles, strict=True):
        info.info = {"kv_transfer": {"role": role}} if role != "both" else {}
    async with start() as exporter, connect(exporter) as peer:
        await peer.send(Hello(VERSION, "s", 1, 1, 1, infos))
        await until(lambda: len(exporter.registry.engines) == len(roles))
        latest = await findings(exporter)
    found_codes = {"SD144", "SD145"} & latest.keys()
    assert found_codes == ({code} if code else set())
    if code:
        assert (latest[code]["subject"], latest[code]["text"]) == ("model m", text)


async def test_two_living_processes_with_one_identity(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are counted; the log, a counter, the verdict and a finding say so."""
    async with start() as exporter:
        endpoint = exporter.endpoints[0]
        with closing(publisher(endpoint)) as one, closing(publisher(endpoint)) as other:
            for each in (one, other):
                each.push(count(5))
            await until(lambda: one.drained and other.drained)
            finding = await found(exporter, "SD136")
            shown = json.loads(await get(exporter.url.removesuffix("/metrics") + "/api/v1/live"))
            tokens = await get(exporter.url)

    assert finding["subject"] == "engine e~2"
    assert exporter.metrics.value("sidestep_identity_conflicts_total") == 1
    assert shown["verdict"]["text"].startswith(
        "engine e~2 has the identity of another living server"
    )
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 5' in tokens
    assert 'vllm:generation_tokens_total{engine="0",model_name="m",origin="e~2"} 5' in tokens
    process_name = f"process {os.getpid()} on {socket.gethostname()}"
    (line,) = [text for text in caplog.messages if "two living processes" in text]
    assert line.startswith(
        f"two living processes claim the ids of stream s: {process_name} and {process_name}; the"
        " second one counts as stream s~2; set SIDESTEP_NAMESPACE"
    )


@pytest.mark.parametrize("is_core_first", [True, False])
async def test_a_core_and_a_front_end_that_count_the_same(
    is_core_first: bool, start: Start
) -> None:
    """The second one stops for good; nothing is doubled, and a finding says so."""
    labels = {"engine": "0", "model_name": "m"}
    roles = {"core": CORE, "api0": ""} if is_core_first else {"api0": "", "core": CORE}
    async with start() as exporter, AsyncExitStack() as stack:
        made: list[Publisher] = []
        for name, role in roles.items():
            features = [FRONT_END_STATS] if role else []
            info = EngineInfo("ns/m/0", "vllm", labels, features=features, role=role)
            made.append(Publisher(exporter.endpoints[0], f"ns/m/{name}", [info]))
            stack.enter_context(closing(made[-1]))
            made[-1].push(count(5))
            await until(lambda: made[-1].drained or made[-1].refused)
        first, second = made
        finding = await found(exporter, "SD137")
        assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 5' in await get(
            exporter.url
        )
        assert (first.refused, second.refused) == (False, True)
        assert second.dropped == 1
    assert finding["subject"] == "id_conflict"
    assert exporter.metrics.value("sidestep_rejected_total", "id_conflict") == 1


@pytest.mark.parametrize(
    ("heartbeat", "code"),
    [
        (Heartbeat(1, 0, 0, dropped=3), "SD111"),
        (Heartbeat(1, 0, 0, folded=3), "SD112"),
        (Heartbeat(1, 0, 0, errors=3), "SD113"),
    ],
)
async def test_what_a_sender_reports(heartbeat: Heartbeat, code: str, start: Start) -> None:
    """Items that it dropped or folded, and records that it could not translate."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello()
        await peer.send(heartbeat)
        finding = await found(exporter, code)
    assert finding["subject"] == "s"
    assert finding["text"].startswith("3 since the start")


async def test_a_stalled_engine(start: Start) -> None:
    """The engine is named, and the remedy has the path of its stack."""
    limits = {"health_min_threshold": "3", "health_max_threshold": "3"}
    async with start(**limits) as exporter, process(exporter) as stuck:
        stuck.progress = [msgspec.structs.replace(WORKING, steps=6, step_age=70.0, unfinished=1)]
        finding = await found(exporter, "SD103")
        assert finding["subject"] == "engine ns/m/0"
        path = finding["remedy"].split()[1].rstrip(",")
        url = exporter.url.removesuffix("/metrics") + path
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert await answer.text() == "no stack: engine ns/m/0 is stalled\n"


async def test_no_engine_that_serves(start: Start) -> None:
    """All have said goodbye; one that is not asked for numbers counts as well."""
    async with start(web_disable_ui=True) as exporter, connect(exporter) as peer:
        await peer.send_hello(engines=2)
        await peer.send(batch(1, *(VllmStep(n, 1.0, 1.0, SchedulerStats()) for n in range(2))))
        await until(lambda: exporter.intake.items == 2)
        await peer.send(Bye(1, 2))

        async def has_found() -> bool:
            # Until the Bye is processed, the engines start.
            finding = await found(exporter, "SD140")
            return bool(finding["text"] == "2 engines have stopped")

        await until(has_found)


async def test_a_subscription_is_not_connected(start: Start) -> None:
    """So is that of a stream."""
    async with start(subscribe=("kv-events=tcp://127.0.0.1:9,model=m",)) as exporter:
        assert "127.0.0.1:9" in (await found(exporter, "SD126"))["subject"]


async def test_an_invalid_web_configuration(start: Start, tmp_path: Path) -> None:
    """The file was changed after the start."""
    path = tmp_path / "web.yml"
    path.write_text("basic_auth_users: {}\n")
    async with start(web_config_file=str(path)) as exporter:
        assert "SD121" not in await findings(exporter)
        path.write_text("basic_auth_users: [\n")
        await found(exporter, "SD121")


async def test_a_state_directory_that_is_gone(start: Start, tmp_path: Path) -> None:
    """Snapshots fail."""
    state = tmp_path / "state"
    async with start(state_dir=str(state)) as exporter:
        assert "SD117" not in await findings(exporter)
        # At once, since the exporter writes files there meanwhile.
        state.rename(tmp_path / "moved")
        finding = await found(exporter, "SD117")
    assert finding["subject"] == str(state)


async def test_a_host_that_is_refused_has_its_remedy(start: Start) -> None:
    """Behind a proxy the exporter refuses a name that it does not know: a flag allows it."""
    async with start() as exporter, aiohttp.ClientSession() as session:
        headers = {"Host": "metrics.example"}
        async with session.get(exporter.url, headers=headers) as answer:
            assert answer.status == 421

        finding = await found(exporter, "SD109")

        assert finding["subject"] == "host"
        assert "--web.allowed-hosts" in finding["remedy"]


async def test_denied_passwords(start: Start, tmp_path: Path) -> None:
    """A scrape without the password."""
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    (tmp_path / "web.yml").write_text(f"basic_auth_users:\n  sre: {hashed}\n")
    async with start(web_config_file=str(tmp_path / "web.yml")) as exporter:
        url = exporter.url
        doctor = url.removesuffix("/metrics") + "/api/v1/doctor"
        async with Access().session() as session, session.get(url) as answer:
            assert answer.status == 401
        async with Access("sre:secret").session() as allowed, allowed.get(doctor) as answer:
            codes = [each["code"] for each in (await answer.json())["findings"]]
    assert "SD108" in codes


class Clock:
    """Time as data."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the present time."""
        return self.now


@asynccontextmanager
async def checks(
    start: Start, clock: Clock, **settings: Any
) -> AsyncIterator[tuple[Exporter, OwnChecks]]:
    """Run an exporter with checks whose time the test sets."""
    async with start() as exporter:
        made = OwnChecks(
            exporter.registry,
            LiveView(exporter.intake).evaluation,
            exporter.metrics,
            lambda: dataclasses.replace(exporter.config, **settings),
            lambda: exporter.endpoints,
            clock=clock,
        )
        yield exporter, made


async def codes_of(checks: OwnChecks) -> set[str]:
    """Return the codes that are found now."""
    return {each.code for each in await checks.findings()}


async def test_no_engine(start: Start) -> None:
    """After 15 s, unless the exporter polls a server."""
    clock = Clock()
    async with checks(start, clock) as (exporter, own):
        assert "SD101" not in await codes_of(own)
        clock.now += 15
        (finding,) = [each for each in await own.findings() if each.code == "SD101"]
        assert exporter.endpoints[0] in finding.text
        async with process(exporter):
            await until(lambda: bool(exporter.registry.engines))
            assert "SD101" not in await codes_of(own)
    async with checks(start, clock, scrape=("http://h/metrics",)) as (_, own):
        clock.now += 60
        assert "SD101" not in await codes_of(own)


async def test_nothing_scrapes(start: Start) -> None:
    """After five minutes with an engine."""
    clock = Clock()
    async with checks(start, clock) as (exporter, own), process(exporter):
        await until(lambda: bool(exporter.registry.engines))
        assert "SD123" not in await codes_of(own)
        clock.now += 300
        assert "SD123" in await codes_of(own)


async def test_findings_of_counters_end_after_an_hour(start: Start) -> None:
    """What was counted before is no finding any more; what the start has restored never is."""
    clock = Clock()
    async with start() as exporter:
        exporter.metrics.add("sidestep_lost_items_total", 5)
        own = OwnChecks(
            exporter.registry,
            LiveView(exporter.intake).evaluation,
            exporter.metrics,
            lambda: exporter.config,
            lambda: exporter.endpoints,
            clock=clock,
        )
        assert "SD110" not in await codes_of(own)
        exporter.metrics.add("sidestep_lost_items_total", 2)
        (finding,) = [each for each in await own.findings() if each.code == "SD110"]
        assert finding.text.startswith("2 since the start")
        for _ in range(60):
            own.note()
        assert "SD110" not in await codes_of(own)


async def test_an_otlp_receiver_that_accepts_nothing(start: Start) -> None:
    """After three intervals and the time of a push; then a missing scrape is no finding."""
    clock = Clock()
    receiver = {"otlp_endpoint": "http://collector:4318/v1/metrics", "otlp_interval": 15.0}
    async with checks(start, clock, **receiver) as (exporter, own), process(exporter):
        await until(lambda: bool(exporter.registry.engines))
        exporter.metrics.set("sidestep_otlp_last_success_timestamp_seconds", 0.0)
        clock.now += 54
        assert "SD133" not in await codes_of(own)
        clock.now += 300
        (finding,) = [each for each in await own.findings() if each.code == "SD133"]
        assert finding.subject == receiver["otlp_endpoint"]
        assert "SD123" not in await codes_of(own)
        exporter.metrics.set("sidestep_otlp_last_success_timestamp_seconds", time.time())
        assert "SD133" not in await codes_of(own)


@pytest.mark.parametrize(
    ("counter", "labels", "code"),
    [
        ("sidestep_otlp_rejected_spans_total", (), "SD134"),
        ("sidestep_otlp_rejected_log_records_total", (), "SD134"),
        ("sidestep_request_records_lost_total", ("full", "traces"), "SD135"),
    ],
)
async def test_records_that_do_not_arrive(
    start: Start, counter: str, labels: tuple[str, ...], code: str
) -> None:
    """The receiver rejects spans or log records, or the queue of an output is full."""
    async with checks(start, Clock()) as (exporter, own):
        assert code not in await codes_of(own)
        exporter.metrics.add(counter, 3, *labels)
        (finding,) = [each for each in await own.findings() if each.code == code]
    assert finding.text.startswith(f"3 since the start ({counter})")
