"""Snapshots of recorded runs, taken at any point."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import DATA
from intakes import CORE_RUNS, Fed, lines, steps
from sidestep.config.objectives import parse
from sidestep.engines.items import Item, encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.errors import ConfigError, WireError
from sidestep.protocol.iteration_stats import IterationStats, PromptTokenStats
from sidestep.protocol.messages import EngineInfo, Heartbeat
from sidestep.protocol.request_events import (
    HANDED_OVER,
    Finished,
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.snapshot.capture import restore
from sidestep.snapshot.state_file import SNAPSHOT, StateDirectory, verified
from sidestep.tracking.requests.inflight_state import CHUNK

OBJECTIVES = [parse(text) for text in ("ttft=350ms", "inter_token=7ms", "e2e=3s", "availability")]
SNAPSHOT_STEPS = 1132
"""Steps of the run "core" in the recorded snapshot."""
NOT_RESTORED = ("vllm:kv_block", "sidestep_kv", "sidestep_recent")
"""Families of sampled blocks, whose tracking restarts, and rates of the last requests."""
NEWER = (
    "sidestep_request_part",
    "sidestep_handed_over",
    "sidestep_received_prompt",
    "sidestep_local_prefills",
    "sidestep_service_time_to_first_token",
    "sidestep_service_e2e_request_latency",
)
"""Families that a snapshot of before 1.0 does not have."""
PROMPT = Family("sglang:prompt_tokens_total", "counter", [], [Sample([], 1.0)])
CACHED = Family("sglang:cached_tokens_total", "counter", ["cache_source"], [Sample(["host"], 2.0)])
LOCAL = PromptTokenStats(local_cache_hit=2)


@pytest.mark.parametrize("run", CORE_RUNS)
def test_run_continues_in_another_process(run: str) -> None:
    """After nine restarts with requests in flight, the page equals that of a single process."""
    recorded = list(steps(run))
    whole = Fed(slo=OBJECTIVES)
    whole.feed(recorded)

    restarted = Fed(slo=OBJECTIVES)
    random = Random(run)
    places = sorted(random.sample(range(1, len(recorded)), 9))
    for start, end in pairwise([0, *places, len(recorded)]):
        restarted.feed(recorded[start:end])
        restarted = restarted.restarted(restarted.snapshot(), slo=OBJECTIVES)

    assert lines(whole.page, *NOT_RESTORED) == lines(restarted.page, *NOT_RESTORED)
    assert "sidestep_slo_requests_total" in whole.page
    assert whole.rejected == restarted.rejected == {}
    assert whole.intake.items == restarted.intake.items


def two_engines_with_one_group() -> Fed:
    """Return an exporter with a group of two parallel samples on engines "a" and "b"; that of "a" ends last."""
    fed = Fed()
    for name in "ab":
        labels = {"engine": name, "model_name": "m"}
        fed.send_hello(name, [EngineInfo(name, "vllm", labels, features=["engine_core"])])
    for number, name in enumerate("ab"):
        stamp = 2.0 - number
        ended = Finished(number, stamp, stamp, 0)
        asked = Queued(number, 1.0, 1.0, group=7, sample=number)
        fed.items(name, [encode_item(RequestEvents(0, stamp, 1, [asked, ended]))])
    fed.items("b", [encode_item(RequestEvents(0, 20.0, 1))])
    return fed


def group_counts(fed: Fed) -> list[str]:
    """Return the number of groups of parallel samples, by engine."""
    name = "vllm:request_params_n_count"
    return [line.rpartition(" ")[2] for line in fed.page.splitlines() if line.startswith(name)]


def test_group_that_ended_on_another_engine_is_counted_after_a_restart() -> None:
    """Its own engine sends nothing in between."""
    fed = two_engines_with_one_group()
    assert group_counts(fed) == ["0", "0"]
    for exporter in (fed.restarted(fed.snapshot()), fed):
        exporter.items("a", [encode_item(RequestEvents(0, 20.0, 1))])
        assert group_counts(exporter) == ["1", "0"]


def test_tokens_of_a_hand_over_are_left_out_after_a_restart() -> None:
    """The engine that continues the request counts them."""
    fed = Fed()
    fed.send_hello("a", [EngineInfo("a", "vllm", {"engine": "a", "model_name": "m"})])
    asked = Queued(0, 1.0, 1.0, max_tokens=9, transfer=HANDED_OVER)
    first = Iteration(1.0, 2.0, 2.0, [Output(2.0, [0])])
    fed.items("a", [encode_item(RequestEvents(0, 2.0, 1, [asked, Scheduled(0, 1.0), first]))])
    fed = fed.restarted(fed.snapshot())
    second = Iteration(2.0, 3.0, 3.0, [Output(3.0, [0])])
    fed.items("a", [encode_item(RequestEvents(0, 3.0, 1, [second]))])

    labels = '{engine="a",model_name="m"}'
    assert f"vllm:generation_tokens_total{labels} 2\n" in fed.page
    assert f"sidestep_handed_over_generation_tokens_total{labels} 2\n" in fed.page
    assert f"sidestep_service_generation_tokens_total{labels} 0\n" in fed.page


def test_restored_snapshot_is_written_identically() -> None:
    """Only the process itself differs."""
    fed = Fed()
    fed.feed(steps("core_lora"))
    other = Fed(boot=2)
    restore(other.intake, fed.snapshot(), 0.0)

    # The last piece describes the process.
    assert fed.snapshot()[:-1] == other.snapshot()[:-1]


@pytest.mark.parametrize(("release", "newer"), [("before_1.0", NEWER), ("1.0", ())])
def test_a_snapshot_of_an_earlier_release_is_read(release: str, newer: tuple[str, ...]) -> None:
    """Engines that other exporters counted in it are ignored; requests in flight go on."""
    packed = (DATA / f"snapshot_{release}.gz").read_bytes()
    core = list(steps("core"))
    fed = Fed()
    fed.feed([*core[:SNAPSHOT_STEPS], *steps("sglang")])
    back = fed.restarted(verified(gzip.decompress(packed)))

    for rest in ([], core[SNAPSHOT_STEPS:]):
        for each in (fed, back):
            each.feed(rest)
        assert lines(back.page, *NOT_RESTORED, *newer) == lines(fed.page, *NOT_RESTORED, *newer)
        assert back.intake.items == fed.intake.items
    assert {e.layout.dialect for e in back.intake.registry.engines.values()} == {"vllm", "sglang"}
    assert "downstream" not in back.page
    assert not back.intake.registry.retired


def test_engines_of_an_unknown_dialect_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A package has their dialect, or a later release; other engines keep their counters."""
    fed, known, other = Fed(), Fed(boot=2), Fed(boot=2)
    fed.feed([*list(steps("core"))[:SNAPSHOT_STEPS], *steps("sglang")])
    other.intake.registry.layouts = {"sglang": other.intake.registry.layouts["sglang"]}
    for each in (known, other):
        restore(each.intake, fed.snapshot(), 0.0)

    found = lines(other.page, "sidestep_")
    assert found == [line for line in lines(known.page) if line.startswith("sglang:")]
    assert caplog.messages == ["no dialect vllm: the counters of engine vm/tiny/0 start at 0"]


def test_integers_over_64_bits_are_restored_exactly() -> None:
    """Operations of a GPU exceed 64 bits within hours."""
    fed = Fed()
    fed.feed(steps("core"))
    (engine,) = fed.intake.registry.engines.values()
    slot = engine.layout.find("vllm:estimated_flops_per_gpu_total").slots[0]
    engine.values[slot] = 3**80
    fed.intake.registry.touch(engine)

    other = fed.restarted(fed.snapshot())

    assert other.intake.registry.engines[engine.id].values[slot] == 3**80


@pytest.mark.parametrize(
    ("dialect", "item"),
    [
        ("sglang", Samples(0, 1.0, [PROMPT, CACHED])),
        ("vllm", VllmStep(0, 1.0, 1.0, None, IterationStats(0, prompt_token_stats=LOCAL))),
        ("vllm", RequestEvents(0, 1e15, 9, [Queued(1, 1e15, 1.0, 7)])),
    ],
    ids=["more cached", "local only", "clock"],
)
def test_counts_that_cannot_be_are_restored(dialect: str, item: Item) -> None:
    """One sender is wrong: the counters of all engines would begin at 0 without the snapshot."""
    fed = Fed()
    labels = {"engine": "0", "model_name": "m"}
    fed.send_hello("s", [EngineInfo("e", dialect, labels, features=["engine_core"])])
    fed.items("s", [encode_item(item)])

    assert "e" in fed.restarted(fed.snapshot()).intake.registry.engines


def test_many_requests_in_flight_are_saved_in_pieces() -> None:
    """No piece takes long to encode, and later intervals are the same."""
    fed = Fed()
    fed.send_hello(
        "s", [EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"}, features=["engine_core"])]
    )
    count = 3 * CHUNK + 5
    for start in range(0, count, 256):
        numbers = range(start, min(start + 256, count))
        queued = [Queued(n, 1.0, 1.0, 7, "a" if n % 2 else "", n // 2, n % 2) for n in numbers]
        fed.items("s", [encode_item(RequestEvents(0, 1.0, 9, list(queued)))])
    fed.items("s", [encode_item(RequestEvents(0, 2.0, 9, [Scheduled(n, 2.0) for n in range(300)]))])
    pieces = fed.snapshot()
    other = fed.restarted(pieces)
    last = Iteration(2.0, 3.0, 3.0, [Output(3.0, list(range(300)))])
    for each in (fed, other):
        each.items("s", [encode_item(RequestEvents(0, 3.0, 9, [last]))])

    assert max(map(len, pieces)) < 1 << 20
    assert len(pieces) > count // CHUNK + 1
    assert fed.page == other.page
    for each in (fed, other):
        each.send("s", Heartbeat(each.incarnation("s"), each.seqs["s"], 0))
    # The last piece has the processes' own counters: one has received two Hellos.
    assert fed.snapshot()[:-1] == other.snapshot()[:-1]


def snapshot() -> bytes:
    """Return a small snapshot."""
    fed = Fed()
    fed.feed(list(steps("core"))[:40])
    return b"".join(fed.snapshot())


def test_damage_is_detected(tmp_path: Path) -> None:
    """The file may be restarted at any byte, or any bit may be flipped."""
    directory = StateDirectory(tmp_path)
    directory.write([b"x" * 300, b"y", snapshot()[:700]])
    data = (tmp_path / SNAPSHOT).read_bytes()
    assert [len(piece) for piece in verified(data)] == [300, 1, 700]

    for end in range(len(data)):
        with pytest.raises(WireError):
            list(verified(data[:end]))
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(WireError):
                list(verified(bytes(flipped)))
    directory.release()


@given(st.data())
def test_invalid_pieces_restore_nothing(data: st.DataObject) -> None:
    """The checksum may be correct, as in a file of another release."""
    fed = Fed()
    fed.feed(list(steps("core"))[:40])
    pieces = fed.snapshot()
    victim = data.draw(st.integers(0, len(pieces) - 1))
    nonsense = data.draw(st.binary(max_size=200) | st.just(pieces[victim][:-1]))
    pieces[victim] = nonsense
    other = Fed(boot=2)

    with pytest.raises(WireError):
        restore(other.intake, pieces, 0.0)

    assert other.page == ""
    assert other.intake.receiver.streams == {}


def test_directory_is_locked(tmp_path: Path) -> None:
    """A second exporter fails at start."""
    first = StateDirectory(tmp_path / "state")
    with pytest.raises(ConfigError, match="another exporter uses it"):
        StateDirectory(tmp_path / "state")
    first.release()

    StateDirectory(tmp_path / "state").release()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
