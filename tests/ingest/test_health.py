"""The health of engines by what their streams send, over minutes that pass as data."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from intakes import Fed
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.limits import COUNT_LIMIT, VALUE_LIMIT, VERSION
from sidestep.protocol.messages import CORE, FRONT_END, Bye, EngineInfo, Heartbeat, Hello
from sidestep.protocol.progress import ASLEEP, STARTING, Progress
from sidestep.snapshot.capture import restore
from sidestep.tracking.health.states import EngineState, Health, Reason
from sidestep_adapters.triton.wire import ModelStats, TritonStats

STACK = ["vllm/core.py:10 run", "vllm/core.py:20 step", "vllm/worker.py:30 execute", "lock.py:5 a"]
WORKING = Progress(0, steps=5, unfinished=2, step_age=0.05, longest=0.05, longest_tokens=8)


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sidestep.ingest.health")


def info(name: str = "ns/m/0", role: str = CORE) -> EngineInfo:
    """Return an engine."""
    return EngineInfo(name, "vllm", {"engine": name, "model_name": "m"}, role=role)


def report(fed: Fed, *progress: Progress, stream: str = "core") -> None:
    """Send a heartbeat with progress."""
    beat = Heartbeat(fed.incarnation(stream), fed.seqs[stream], 0, progress=list(progress))
    fed.send(stream, beat)


def run(fed: Fed, seconds: int, *progress: Progress, stream: str = "core") -> None:
    """Let ``seconds`` pass with a heartbeat in each."""
    for _ in range(seconds):
        report(fed, *progress, stream=stream)
        fed.advance(1.0)


def health(fed: Fed, name: str = "ns/m/0") -> Health:
    """Return the health of an engine."""
    found = fed.intake.health.of(fed.intake.registry.engines[name])
    assert found is not None
    return found


def state(fed: Fed, name: str = "ns/m/0") -> EngineState:
    """Return the state of an engine."""
    return health(fed, name).state


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines since the last call."""
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def working(fed: Fed | None = None) -> Fed:
    """Return an intake with an engine that has worked for some seconds."""
    made = fed or Fed(now=1000.0)
    made.send_hello("core", [info()])
    run(made, 5, WORKING)
    assert state(made) is EngineState.OK
    return made


def samples(fed: Fed, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a self-metric by its label values."""
    return {
        labels: value for _, found in fed.intake.metrics.samples({name}) for labels, value in found
    }


def test_a_step_that_does_not_end_is_logged_with_the_innermost_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line says that the engine is stalled and where, and one that it no longer is."""
    fed = working()
    for age in range(1, 200):
        stuck = Progress(0, steps=5, unfinished=2, step_age=float(age), stack=STACK)
        run(fed, 1, stuck)

    assert (state(fed), health(fed).reason) == (EngineState.STALLED, Reason.STEP)
    assert list(health(fed).stack) == STACK
    (line,) = messages(caplog)
    assert line.startswith("engine ns/m/0 is stalled: step for ")
    assert line.endswith(
        "stream core, in lock.py:5 a, in vllm/worker.py:30 execute, in vllm/core.py:20 step"
    )

    run(fed, 2, WORKING)
    assert messages(caplog) == ["engine ns/m/0 is no longer stalled, its state is ok"]
    assert health(fed).stack == ()


def test_a_silent_process_is_stalled_then_unreachable(caplog: pytest.LogCaptureFixture) -> None:
    """Also in the middle of a step, the reason is the silence: nobody knows whether the step has ended."""
    fed = working()
    fed.advance(5.0)
    assert state(fed) is EngineState.SLOW
    fed.advance(2.0)
    assert (state(fed), health(fed).reason) == (EngineState.STALLED, Reason.PUBLISHER)
    assert health(fed).stream == "core"
    fed.advance(25.0)
    assert state(fed) is EngineState.UNREACHABLE
    assert samples(fed, "sidestep_engine_unfinished_requests") == {}
    stalled, unreachable = messages(caplog)
    assert "is stalled: publisher for 8 s, stream core" in stalled
    assert unreachable.startswith("engine ns/m/0 is unreachable")

    report(fed, WORKING)
    fed.advance(1.0)
    assert state(fed) is EngineState.OK
    assert messages(caplog) == ["engine ns/m/0 is no longer unreachable, its state is ok"]


def test_each_of_two_engines_has_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """A server with several engines: the log's limit is one line a minute for each engine and state."""
    fed = Fed(now=1000.0)
    names = ["ns/m/0", "ns/m/1"]
    fed.send_hello("core", [info(name) for name in names])
    run(fed, 5, WORKING, msgspec.structs.replace(WORKING, engine=1))
    fed.advance(32.0)
    run(fed, 1, WORKING, msgspec.structs.replace(WORKING, engine=1))
    found = [line.split()[1:5] for line in messages(caplog)]

    for words in (["is", "stalled:"], ["is", "unreachable:"], ["is", "no", "longer"]):
        assert [line[0] for line in found if line[1:][: len(words)] == words] == names


def test_a_process_that_says_goodbye_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """A stopped engine is no failure, so nothing is logged; its next process is another one."""
    fed = working()
    fed.send("core", Bye(fed.incarnation("core"), 0))
    fed.advance(40.0)
    assert state(fed) is EngineState.STOPPED
    assert messages(caplog) == []

    fed.restart("core")
    fed.send_hello("core", [info()])
    report(fed, Progress(0, condition=STARTING))
    fed.advance(1.0)
    assert state(fed) is EngineState.STARTING


def test_the_core_decides_whether_an_engine_is_reachable() -> None:
    """A front end that ends leaves the engine to others; a core that ends leaves no engine."""
    fed = working()
    fed.send_hello("api", [info(role=FRONT_END)])
    fed.send("api", Bye(fed.incarnation("api"), 0))
    run(fed, 3, WORKING)
    assert state(fed) is EngineState.OK

    fed.restart("api")
    fed.send_hello("api", [info(role=FRONT_END)])
    run(fed, 40, Progress(0), stream="api")
    assert state(fed) is EngineState.UNREACHABLE

    report(fed, WORKING)
    fed.send("core", Bye(fed.incarnation("core"), 0))
    run(fed, 40, Progress(0), stream="api")
    assert state(fed) is EngineState.STOPPED


def test_a_core_that_is_killed_with_its_server_is_unreachable_soon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All of its API servers have said goodbye, and it has not: it is silent for two heartbeats."""
    fed = working()
    for stream in ("api0", "api1"):
        fed.send_hello(stream, [info(role=FRONT_END)])
    run(fed, 1, WORKING)
    fed.send("api0", Bye(fed.incarnation("api0"), 0))
    fed.advance(3.0)
    assert state(fed) is EngineState.SLOW
    fed.send("api1", Bye(fed.incarnation("api1"), 0))
    fed.advance(1.0)
    assert state(fed) is EngineState.UNREACHABLE
    assert messages(caplog)[-1].startswith("engine ns/m/0 is unreachable")

    report(fed, WORKING)
    fed.advance(1.0)
    assert state(fed) is EngineState.OK


def test_one_of_two_api_servers_that_stands(caplog: pytest.LogCaptureFixture) -> None:
    """The engine works for the other; the log names the one whose event loop stands, and its stack."""
    fed = working()
    for stream in ("api0", "api1"):
        fed.send_hello(stream, [info(role=FRONT_END)])
    for age in range(1, 12):
        steps = Progress(0, steps=5 + age, unfinished=2, step_age=0.1)
        standing = Progress(0, unfinished=1, step_age=age, loop_age=age, stack=STACK)
        report(fed, Progress(0, steps=age, unfinished=2, step_age=0.1), stream="api0")
        report(fed, standing, stream="api1")
        run(fed, 1, steps)
    found = health(fed)
    assert (found.state, found.reason) == (EngineState.STALLED, Reason.FRONT_END)
    assert (found.stream, found.unfinished) == ("api1", 3)
    (line,) = messages(caplog)
    assert line.startswith("engine ns/m/0 is stalled: front_end for ")
    assert "stream api1, in lock.py:5 a" in line
    assert (("m", "front_end")) in {k[1:2] + k[-1:] for k in samples(fed, STALLED)}


STALLED = "sidestep_engine_stalled_seconds"


def test_a_frozen_front_end_keeps_the_engine_stalled_beside_an_idle_core() -> None:
    """Its requests wait for as long as the engine may return under its name."""
    fed = working()
    fed.send_hello("api", [info(role=FRONT_END)])
    report(fed, Progress(0), stream="api")
    run(fed, 60, Progress(0, steps=9))
    found = health(fed)
    assert (found.state, found.reason) == (EngineState.STALLED, Reason.PUBLISHER)
    assert found.stream == "api"

    run(fed, 300, Progress(0, steps=9))
    assert state(fed) is EngineState.IDLE


@pytest.mark.parametrize(
    ("ends_last", "expected"),
    [(True, EngineState.STOPPED), (False, EngineState.UNREACHABLE)],
    ids=["goodbye", "silence"],
)
def test_the_last_front_end_decides_where_there_is_no_core(
    ends_last: bool, expected: EngineState
) -> None:
    """A goodbye of the last one stops the engine; its silence makes the engine unreachable."""
    fed = Fed(now=1000.0)
    for stream in ("closed", "silent"):
        fed.send_hello(stream, [info(role=FRONT_END)])
    if ends_last:
        run(fed, 20, Progress(0), stream="closed")
    fed.send("closed", Bye(fed.incarnation("closed"), 0))
    if not ends_last:
        run(fed, 20, Progress(0), stream="silent")
    fed.advance(40.0)

    assert state(fed) is expected


def test_engines_of_a_snapshot_have_half_a_minute_to_connect() -> None:
    """After the exporter's restart a missing engine is starting at first; one that had ended has stopped."""
    fed = working()
    fed.send_hello("done", [info("ns/m/1")])
    fed.send("done", Bye(fed.incarnation("done"), 0))
    for back in (True, False):
        other = Fed(boot=2, now=5000.0)
        restore(other.intake, fed.snapshot(), 5000.0)
        other.seqs, other.processes = dict(fed.seqs), dict(fed.processes)
        other.advance(1.0)
        assert (state(other), state(other, "ns/m/1")) == (EngineState.STARTING, EngineState.STOPPED)
        other.advance(27.0)
        assert state(other) is EngineState.STARTING
        if back:
            other.send_hello("core", [info()])
            run(other, 1, WORKING)
            assert state(other) is EngineState.OK
        else:
            other.advance(3.0)
            assert state(other) is EngineState.UNREACHABLE
            assert state(other, "ns/m/1") is EngineState.STOPPED


@pytest.mark.parametrize("pause", [20.0, 40.0, 400.0])
def test_an_exporter_that_was_stopped_blames_nobody(
    pause: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The exporter reads what waits in its sockets after its clock has advanced."""
    fed = working()
    messages(caplog)
    fed.now += pause
    fed.intake.health.update(fed.now)
    fed.intake.expire(fed.now)
    found = [state(fed)]
    for _ in range(10):
        run(fed, 1, WORKING)
        found.append(state(fed))

    assert set(found) == {EngineState.OK}
    assert messages(caplog) == []
    assert samples(fed, "sidestep_engine_up") == {("ns/m/0", "m", ""): 1.0}

    # Whoever does not return is found as soon as without a pause.
    fed.advance(9.0)
    assert state(fed) is EngineState.STALLED


def test_an_exporter_that_was_stopped_takes_no_dead_process_for_alive() -> None:
    """A process that is killed just before the pause is succeeded under its own ids."""
    fed = working()
    fed.restart("core")
    hello = Hello(VERSION, "core", fed.incarnation("core"), 1, 1, [info()])
    fed.send("core", hello)
    fed.now += 5.0
    fed.intake.health.update(fed.now)
    for _ in range(5):
        fed.send("core", hello)
        fed.advance(1.0)

    streams = fed.intake.receiver.streams.values()
    assert [(each.id, each.incarnation) for each in streams] == [("core", hello.incarnation)]
    assert samples(fed, "sidestep_engine_restarts_total") == {("ns/m/0", "m", ""): 1.0}


ABSURD = {
    "a negative index": [Progress(-1, unfinished=1, step_age=99.0)],
    "an index out of range": [Progress(1, unfinished=1, step_age=99.0)],
    "a huge index": [Progress(2**63, unfinished=1, step_age=99.0)],
    "an unknown condition": [Progress(0, condition="\x00on fire")],
    "every engine twice": [Progress(0, unfinished=3), Progress(0)],
}


@pytest.mark.parametrize("progress", ABSURD.values(), ids=ABSURD.keys())
def test_progress_of_no_engine_is_ignored(progress: Sequence[Progress]) -> None:
    """The rest of the heartbeat counts."""
    fed = working()
    run(fed, 3, WORKING, *progress)
    report(fed, *progress)
    fed.advance(1.0)

    assert state(fed) in (EngineState.OK, EngineState.IDLE)
    assert fed.rejected == {}


def test_huge_numbers_are_numbers() -> None:
    """A sender may claim any age; the engine is its own, and the page stays valid."""
    fed = working()
    huge = Progress(
        0, COUNT_LIMIT, COUNT_LIMIT, COUNT_LIMIT, VALUE_LIMIT, COUNT_LIMIT, VALUE_LIMIT, VALUE_LIMIT,
        VALUE_LIMIT, COUNT_LIMIT,
    )  # fmt: skip
    run(fed, 3, huge)

    assert state(fed) is EngineState.STALLED
    (age,) = samples(fed, "sidestep_engine_step_age_seconds").values()
    assert age == pytest.approx(VALUE_LIMIT)
    assert samples(fed, "sidestep_engine_unfinished_requests") == {("ns/m/0", "m", ""): COUNT_LIMIT}


def test_frames_that_are_not_printable_become_so(caplog: pytest.LogCaptureFixture) -> None:
    """No sender can write a second log line, or colors into a terminal."""
    fed = working()
    frames = ["a\nERROR fake", "\x1b[31mred", "x" * 256, "\u202eevil", ""]
    run(fed, 3, Progress(0, unfinished=1, step_age=999.0, stack=frames))

    assert list(health(fed).stack) == ["a?ERROR fake", "?[31mred", "x" * 200, "?evil", ""]
    (line,) = messages(caplog)
    assert line.isprintable()


MODEL = EngineInfo("triton/t/m/1", "triton", {"model": "m", "version": "1"})


def polled() -> tuple[Fed, ServerFeed]:
    """Return an intake, and the feed of a polled server that has answered."""
    fed = Fed(now=1000.0)
    feed = ServerFeed(fed.intake, "triton t")
    feed.mark_answered(fed.now)
    feed.apply(MODEL, TritonStats(0, fed.now, 1e9, ModelStats(), 1))
    return fed, feed


def test_a_polled_server_is_unreachable_once_it_refuses_connections() -> None:
    """At the next evaluation; its models too, until it answers again."""
    fed, feed = polled()
    fed.advance(2.0)
    assert state(fed, MODEL.id) is EngineState.OK

    feed.detach(fed.now)
    fed.advance(1.0)
    assert state(fed, MODEL.id) is EngineState.UNREACHABLE
    states = samples(fed, "sidestep_engine_state")
    assert {key[-1] for key, value in states.items() if value} == {"unreachable"}
    assert {key[0] for key in states} == {MODEL.id}

    feed.mark_answered(fed.now)
    fed.advance(2.0)
    assert state(fed, MODEL.id) is EngineState.OK


def test_a_polled_server_of_a_snapshot_is_expected_until_its_first_answer() -> None:
    """Once it has answered and refuses connections, it is as unreachable as any other."""
    fed, _ = polled()
    other = Fed(boot=2, now=5000.0)
    restore(other.intake, fed.snapshot(), 5000.0)
    feed = ServerFeed(other.intake, "triton t")
    feed.detach(other.now)
    other.advance(2.0)
    assert state(other, MODEL.id) is EngineState.STARTING

    feed.mark_answered(other.now)
    other.advance(2.0)
    assert state(other, MODEL.id) is not EngineState.UNREACHABLE
    feed.detach(other.now)
    other.advance(2.0)
    assert state(other, MODEL.id) is EngineState.UNREACHABLE


def test_the_metrics_of_a_stalled_engine() -> None:
    """One state is 1; reason and ages have samples where they are known."""
    fed = working()
    fed.send_hello("old", [info("ns/m/1")])
    fed.advance(1.0)
    labels = ("ns/m/0", "m", "")
    states = samples(fed, "sidestep_engine_state")
    assert {key: n for key, n in states.items() if n} == {
        (*labels, "ok"): 1.0,
        ("ns/m/1", "m", "", "starting"): 1.0,
    }
    assert len(states) == 2 * len(EngineState)
    assert samples(fed, "sidestep_engine_stalled_seconds") == {}
    report(fed, Progress(0, steps=9, condition=ASLEEP))
    fed.advance(1.0)
    assert samples(fed, "sidestep_engine_step_age_seconds") == {labels: 0.0}
    assert samples(fed, "sidestep_engine_unfinished_requests") == {labels: 0.0}
    assert samples(fed, "sidestep_engine_state")[(*labels, "asleep")] == 1.0

    run(fed, 1, Progress(0, unfinished=3, waiting_age=40.0))
    stalls = samples(fed, "sidestep_engine_stalled_seconds")
    assert stalls.keys() == {(*labels, "no_steps")}
    assert 40.0 <= stalls[(*labels, "no_steps")] <= 42.0


def gauges(fed: Fed, running: int, stream: str = "core") -> None:
    """Send a step of the engine with so many requests."""
    step = VllmStep(0, fed.now, fed.now, SchedulerStats(num_running_reqs=running))
    fed.items(stream, [encode_item(step)])


def test_an_engine_with_running_requests_is_not_idle() -> None:
    """One that reports no progress, such as a replayed recording, whose steps are far apart."""
    fed = Fed(now=1000.0)
    fed.send_hello("core", [info(role="")])
    gauges(fed, 19)
    for _ in range(60):
        run(fed, 1)
        assert state(fed) is EngineState.OK
    run(fed, 70)
    # It looks like one that hangs.
    assert (state(fed), health(fed).reason) == (EngineState.SLOW, None)
    assert health(fed).age == pytest.approx(130.0, abs=2.0)
    gauges(fed, 0)
    run(fed, 20)
    assert state(fed) is EngineState.IDLE
