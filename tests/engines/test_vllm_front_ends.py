"""A tapped core and its front ends: who counts what users wait for, and the hop between them."""

from __future__ import annotations

import pytest

from intakes import Fed
from sidestep.catalog.slo import Objective
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import FrontEndLatencies, VllmStep
from sidestep.ingest.bindings import FRONT_END_WAIT
from sidestep.metrics.exposed_engines import ENGINE_EXPIRES_SECONDS
from sidestep.protocol import messages
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import (
    CORE,
    ENGINE_CORE,
    FRONT_END,
    FRONT_END_STATS,
    Bye,
    EngineInfo,
    Heartbeat,
    Hello,
    Settings,
)
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.snapshot.capture import restore

TTFT, E2E = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"
HOP = "sidestep_frontend_hop_seconds"
ARRIVAL = 1_795_173_151.25
NOTHING = (0, 0.0)


def hello(role: str, *features: str) -> list[EngineInfo]:
    """Return the engine as a process with this role describes it."""
    labels = {"engine": "0", "model_name": "m"}
    return [EngineInfo("e", "vllm", labels, features=[ENGINE_CORE, *features], role=role)]


def core_items(request: int = 1, arrival: float = ARRIVAL, group: int = 0) -> list[bytes]:
    """Return a core's items about a request: its first output after 2 s, its end after 4 s."""
    events: list[Event] = [
        Queued(request, 1.0, arrival, 8, group=group),
        Scheduled(request, 1.5),
        Iteration(1.9, 2.0, arrival + 2.0, [Output(2.0, [request])]),
        Iteration(3.9, 4.0, arrival + 4.0, [Output(4.0, [request])]),
        Finished(request, 4.0, arrival + 4.0, 0, 8, 2),
    ]
    return [encode_item(RequestEvents(0, 4.0, 1, [event])) for event in events]


def front_end_items(arrival: float = ARRIVAL) -> list[bytes]:
    """Return the items of the same request's front end, which receives each output 0.25 s later."""
    found = [
        FrontEndLatencies(arrival + 2.25, [2.25], []),
        FrontEndLatencies(arrival + 4.25, [], [4.25]),
    ]
    return [encode_item(VllmStep(0, 5.0, 1.0, front_end=latencies)) for latencies in found]


def observed(fed: Fed, family: str) -> tuple[int, float]:
    """Return count and sum of a histogram of the only engine."""
    values = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in fed.page.splitlines()
        if line.startswith((f"{family}_count", f"{family}_sum"))
    }
    return int(values[f"{family}_count"]), values[f"{family}_sum"]


@pytest.fixture
def fed() -> Fed:
    """Return an intake with an engine that its core and an API server with the plugin feed."""
    made = Fed()
    made.send_hello("core", hello(CORE))
    made.send_hello("api", hello(FRONT_END))
    return made


@pytest.mark.parametrize("core_first", [False, True])
def test_the_front_ends_latencies_count_and_the_difference_is_shown(
    fed: Fed, core_first: bool
) -> None:
    """A request is observed once, with the hop that the core does not see, in either order."""
    sent = [("core", core_items()), ("api", front_end_items())]
    for stream, items in sent if core_first else reversed(sent):
        fed.items(stream, items)

    assert fed.rejected == {}
    assert observed(fed, TTFT) == (1, 2.25)
    assert observed(fed, E2E) == (1, 4.25)
    assert observed(fed, HOP) == (1, 0.25)
    assert observed(fed, "vllm:request_queue_time_seconds") == (1, 0.5)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("folded", ["core", "api"])
def test_folded_items_count_once(folded: str, known: bool) -> None:
    """Objectives leave out a core's folded latencies, whether or not the sender knew the objectives."""
    slo = [("ttft", TTFT, 1.0), ("queue", "vllm:request_queue_time_seconds", 1.0)]
    made = Fed(slo=[Objective(name, (family,), limit) for name, family, limit in slo])
    sent = [messages.Objective(name, [family], limit) for name, family, limit in slo]
    made.send_hello("api", hello(FRONT_END))
    made.send_hello("core", hello(CORE))
    for stream, items in (("core", core_items()), ("api", front_end_items())):
        if stream == folded:
            made.fold(stream, items, settings=Settings(objectives=sent if known else []))
        else:
            made.items(stream, items)

    assert made.rejected == {}
    assert observed(made, TTFT) == (1, 2.25)
    assert observed(made, E2E) == (1, 4.25)
    (engine,) = made.intake.registry.engines.values()
    counted = engine.keyed[engine.layout.handler_slot("slo_requests")]
    assert counted == {
        ("bad", "ttft"): 1,
        ("good", "ttft"): 0,
        ("good", "queue"): 1,
        ("bad", "queue"): 0,
    }


def test_a_core_waits_for_its_front_end() -> None:
    """After an outage both resend; whichever reconnects first, the front end's values count."""
    made = Fed()
    made.send_hello("core", hello(CORE, FRONT_END_STATS))
    assert "core" not in made.intake.receiver.streams

    made.now += 1.0
    made.send_hello("api", hello(FRONT_END))
    made.send_hello("core", hello(CORE, FRONT_END_STATS))
    made.items("core", core_items())
    made.items("api", front_end_items())

    assert observed(made, TTFT) == (1, 2.25)


def test_a_new_core_waits_until_one_front_end_is_there(fed: Fed) -> None:
    """Not for one that has left, if there is another; after a restart of all, for a new one."""

    def restart_core() -> bool:
        """Replace the core by a process that sends a hello; return whether it is accepted."""
        fed.send("core", Bye(fed.incarnation("core"), 0))
        fed.restart("core")
        info = hello(CORE, FRONT_END_STATS)
        fed.send("core", Hello(VERSION, "core", fed.incarnation("core"), 1, 1, info))
        return fed.intake.receiver.streams["core"].incarnation == fed.incarnation("core")

    fed.send_hello("api2", hello(FRONT_END))
    fed.send("api", Bye(fed.incarnation("api"), 0))
    assert restart_core()
    fed.send("api2", Bye(fed.incarnation("api2"), 0))
    assert not restart_core()


def test_a_core_waits_no_longer_than_a_front_end_needs() -> None:
    """Front ends with statistics need not have the plugin."""
    made = Fed()
    made.send_hello("core", hello(CORE, FRONT_END_STATS))
    made.now += FRONT_END_WAIT
    made.send_hello("core", hello(CORE, FRONT_END_STATS))
    made.items("core", core_items())

    assert observed(made, TTFT) == (1, 2.0)


def test_a_cores_last_items_may_follow_its_front_ends_goodbye(fed: Fed) -> None:
    """Late items count no request twice; the core's next process counts if no front end comes."""
    fed.items("api", front_end_items())
    fed.send("api", Bye(fed.incarnation("api"), 2))
    fed.items("core", core_items())
    assert observed(fed, TTFT) == (1, 2.25)

    fed.restart("core")
    fed.send_hello("core", hello(CORE))
    fed.items("core", core_items())
    assert observed(fed, TTFT) == (2, 4.25)


def test_a_silent_front_end_has_its_latencies_still_to_send(fed: Fed) -> None:
    """The core counts again once the front end's stream has expired."""
    beat = Heartbeat(fed.incarnation("core"), 0, 0)
    for _ in range(int(ENGINE_EXPIRES_SECONDS) - 1):
        fed.advance(1.0)
        fed.send("core", beat)
    fed.items("core", core_items(1))
    assert observed(fed, TTFT) == NOTHING

    fed.advance(2.0)
    fed.items("core", core_items(2))
    assert observed(fed, TTFT) == (1, 2.0)


def test_a_restarted_exporter_knows_the_front_ends(fed: Fed) -> None:
    """A core that reconnects first does not count what its front end is about to send."""
    restarted = Fed(boot=2)
    restore(restarted.intake, fed.snapshot(), 0.0)
    restarted.seqs, restarted.processes = fed.seqs, fed.processes
    restarted.send_hello("core", hello(CORE, FRONT_END_STATS))
    restarted.items("core", core_items())
    restarted.send_hello("api", hello(FRONT_END))
    restarted.items("api", front_end_items())

    assert observed(restarted, TTFT) == (1, 2.25)
    assert observed(restarted, E2E) == (1, 4.25)


@pytest.mark.parametrize("group", [0, 7])
@pytest.mark.parametrize("core_first", [False, True])
def test_requests_of_one_arrival_have_their_own_hops(
    fed: Fed, group: int, core_first: bool
) -> None:
    """Parallel samples, and prompts of a list: their first tokens come in the same order on both sides."""
    queued = [Queued(n, 1.0, ARRIVAL, 8, group=group, sample=n) for n in range(3)]
    outputs = [Output(2.0 + n, [n]) for n in range(3)]
    steps = [Iteration(one.stamp - 0.1, one.stamp, ARRIVAL + one.stamp, [one]) for one in outputs]
    received = [FrontEndLatencies(ARRIVAL + n + 2.25, [n + 2.25]) for n in range(3)]
    sent = [
        ("core", [encode_item(RequestEvents(0, 5.0, 1, [*queued, *steps]))]),
        ("api", [encode_item(VllmStep(0, 5.0, 1.0, front_end=one)) for one in received]),
    ]
    for stream, items in sent if core_first else reversed(sent):
        fed.items(stream, items)

    assert observed(fed, TTFT) == (3, 9.75)
    assert observed(fed, HOP) == (3, 0.75)
