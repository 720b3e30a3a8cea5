"""What outlives the process: all of a recorded run, wherever it is cut."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters import DATA
from intakes import CORE_RUNS, Fed, lines, steps
from sidestep.engines.items import encode_item
from sidestep.errors import ConfigError, WireError
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import (
    Finished,
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.snapshot.capture import restore
from sidestep.snapshot.state_file import DAMAGED, HEADER, SNAPSHOT, StateDirectory, verified
from sidestep.tracking.requests.inflight_state import CHUNK

FED = 1132
"""Steps of "core" in the snapshot of an earlier release."""
SAMPLED = ("vllm:kv_block", "sidestep_kv", "sidestep_recent")
"""Blocks are tracked anew; a hit rate is of the last requests, as one."""


@pytest.mark.parametrize("run", CORE_RUNS)
def test_a_run_goes_on_in_another_process(run: str) -> None:
    """Cut in nine places, requests in flight and all, it ends with the very same page."""
    recorded = list(steps(run))
    whole = Fed()
    whole.feed(recorded)

    cut = Fed()
    random = Random(run)
    places = sorted(random.sample(range(1, len(recorded)), 9))
    for start, end in pairwise([0, *places, len(recorded)]):
        cut.feed(recorded[start:end])
        cut = cut.reborn(cut.snapshot())

    assert lines(whole.page, *SAMPLED) == lines(cut.page, *SAMPLED)
    assert whole.rejected == cut.rejected == {}
    assert whole.intake.items == cut.intake.items


def two_engines_with_a_question() -> Fed:
    """Two samples of it: "a"'s ended last, heard of it has the exporter only in words of "b"."""
    fed = Fed()
    for name in "ab":
        labels = {"engine": name, "model_name": "m"}
        fed.greet(name, [EngineInfo(name, "vllm", labels, features=["engine_core"])])
    for number, name in enumerate("ab"):
        stamp = 2.0 - number
        ended = Finished(number, stamp, stamp, 0)
        asked = Queued(number, 1.0, 1.0, group=7, sample=number)
        fed.items(name, [encode_item(RequestEvents(0, stamp, 1, [asked, ended]))])
    fed.items("b", [encode_item(RequestEvents(0, 20.0, 1))])
    return fed


def counted(fed: Fed) -> list[str]:
    """The numbers of questions, by engine."""
    name = "vllm:request_params_n_count"
    return [line.rpartition(" ")[2] for line in fed.page.splitlines() if line.startswith(name)]


def test_a_question_that_ended_elsewhere_is_counted_by_the_next_process() -> None:
    """Its engine has not spoken since, and does so to another process."""
    fed = two_engines_with_a_question()
    assert counted(fed) == ["0", "0"]
    for exporter in (fed.reborn(fed.snapshot()), fed):
        exporter.items("a", [encode_item(RequestEvents(0, 20.0, 1))])
        assert counted(exporter) == ["1", "0"]


def test_a_question_that_ended_elsewhere_is_counted_where_its_engine_goes() -> None:
    """Another process of the engine, without the tap, will not speak of requests any more."""
    fed = two_engines_with_a_question()
    fed.greet("a", [EngineInfo("a", "vllm", {"engine": "a", "model_name": "m"})])

    assert counted(fed) == ["1", "0"]


def test_a_question_whose_engine_has_gone_counts_for_the_one_that_ends_it() -> None:
    """The samples of "b" end after "a" has no requests any more."""
    fed = Fed()
    for name in "ab":
        labels = {"engine": name, "model_name": "m"}
        fed.greet(name, [EngineInfo(name, "vllm", labels, features=["engine_core"])])
    asked = [Queued(number, 1.0, 1.0, group=7, sample=number) for number in range(2)]
    fed.items("b", [encode_item(RequestEvents(0, 1.0, 1, [asked[1]]))])
    ended = Finished(0, 2.0, 2.0, 0)
    fed.items("a", [encode_item(RequestEvents(0, 2.0, 1, [asked[0], ended]))])
    fed.greet("a", [EngineInfo("a", "vllm", {"engine": "a", "model_name": "m"})])
    fed.items("b", [encode_item(RequestEvents(0, 1.5, 1, [Finished(1, 1.5, 1.5, 0)]))])
    fed.items("b", [encode_item(RequestEvents(0, 20.0, 1))])

    assert counted(fed) == ["0", "1"]


def test_a_snapshot_is_the_same_after_it_was_read() -> None:
    """What is restored says of itself what it was restored from."""
    fed = Fed()
    fed.feed(steps("core_lora"))
    other = Fed(boot=2)
    restore(other.intake, fed.snapshot(), 0.0)

    # But for the process, which is another one.
    assert fed.snapshot()[:-1] == other.snapshot()[:-1]
    assert fed.intake.epoch == other.intake.epoch
    assert fed.intake.run < other.intake.run


def test_a_snapshot_of_before_0012_restores_what_is_counted_here() -> None:
    """What that release kept of other exporters is passed over: they send it again."""
    packed = (DATA / "snapshot_before_0012.gz").read_bytes()
    recorded = [*list(steps("core"))[:FED], *steps("sglang")]
    fed = Fed()
    fed.feed(recorded)
    back = fed.reborn(verified(gzip.decompress(packed)))

    assert lines(back.page, *SAMPLED) == lines(fed.page, *SAMPLED)
    assert back.intake.items == fed.intake.items
    assert {e.layout.dialect for e in back.intake.registry.engines.values()} == {"vllm", "sglang"}
    assert "leaf" not in back.page
    assert not back.intake.registry.retired


def test_gauges_wait_for_their_engine() -> None:
    """A restored engine shows what it has counted; its gauges come back when it greets."""
    fed = Fed()
    recorded = list(steps("core"))
    fed.feed(recorded[: len(recorded) // 2])
    other = Fed(boot=2)
    restore(other.intake, fed.snapshot(), 0.0)

    assert "vllm:generation_tokens_total" in other.page
    assert "vllm:num_requests_running" not in other.page
    back = fed.reborn(fed.snapshot())
    assert lines(fed.page, *SAMPLED) == lines(back.page, *SAMPLED)


def test_large_numbers_are_kept_exactly() -> None:
    """Operations of a GPU pass 64 bits within hours."""
    fed = Fed()
    fed.feed(steps("core"))
    (engine,) = fed.intake.registry.engines.values()
    slot = engine.layout.find("vllm:estimated_flops_per_gpu_total").slots[0]
    engine.values[slot] = 3**80
    fed.intake.registry.touch(engine)

    other = fed.reborn(fed.snapshot())

    assert other.intake.registry.engines[engine.id].values[slot] == 3**80


def test_other_bounds_start_that_family_anew() -> None:
    """Its counts cannot be moved."""
    fed = Fed()
    fed.feed(steps("core"))
    other = Fed(boot=2)
    other.intake.registry.overrides = {"inter_token_latency": (0.5, 1.0)}
    restore(other.intake, fed.snapshot(), 0.0)
    (engine,) = other.intake.registry.engines.values()
    names = [row.name for row in engine.layout.histograms]
    changed = engine.histograms[names.index("vllm:inter_token_latency_seconds")]
    same = engine.histograms[names.index("vllm:time_to_first_token_seconds")]

    assert changed is not None
    assert same is not None
    assert (changed.bounds, sum(changed.counts), changed.sum) == ((0.5, 1.0), 0, 0.0)
    assert sum(same.counts) > 0


def test_many_requests_in_flight_come_in_pieces() -> None:
    """So that none takes long; what follows from them is the same."""
    fed = Fed()
    fed.greet(
        "s", [EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"}, features=["engine_core"])]
    )
    count = 3 * CHUNK + 5
    for start in range(0, count, 256):
        numbers = range(start, min(start + 256, count))
        queued = [Queued(n, 1.0, 1.0, 7, "a" if n % 2 else "", n // 2, n % 2) for n in numbers]
        fed.items("s", [encode_item(RequestEvents(0, 1.0, 9, list(queued)))])
    fed.items("s", [encode_item(RequestEvents(0, 2.0, 9, [Scheduled(n, 2.0) for n in range(300)]))])
    pieces = fed.snapshot()
    other = fed.reborn(pieces)
    last = Iteration(2.0, 3.0, 3.0, [Output(3.0, list(range(300)))])
    for each in (fed, other):
        each.items("s", [encode_item(RequestEvents(0, 3.0, 9, [last]))])

    assert max(map(len, pieces)) < 1 << 20
    assert len(pieces) > count // CHUNK + 1
    assert fed.page == other.page
    # But for what the processes themselves have counted: one was greeted twice.
    assert fed.snapshot()[:-1] == other.snapshot()[:-1]


def snapshot() -> bytes:
    """A small one, as it is on the disk."""
    fed = Fed()
    fed.feed(list(steps("core"))[:40])
    return b"".join(fed.snapshot())


def test_every_damage_is_noticed(tmp_path: Path) -> None:
    """Torn at any byte, or any one bit of it another: never wrong numbers."""
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


@settings(max_examples=200)
@given(st.data())
def test_pieces_that_are_none_restore_nothing(data: st.DataObject) -> None:
    """A file with a good checksum and nonsense in it: another release's, or somebody's own."""
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


def test_a_damaged_snapshot_is_set_aside(tmp_path: Path) -> None:
    """It is there for whoever wants to look, and is not read again."""
    directory = StateDirectory(tmp_path)
    (tmp_path / SNAPSHOT).write_bytes(b"damage")
    with pytest.raises(WireError):
        directory.read()
    directory.set_aside()

    assert directory.read() is None
    assert (tmp_path / DAMAGED).read_bytes() == b"damage"
    directory.release()


def test_a_directory_has_one_exporter(tmp_path: Path) -> None:
    """Two would overwrite each other's; the second is told at once."""
    first = StateDirectory(tmp_path / "state")
    with pytest.raises(ConfigError, match="another exporter uses it"):
        StateDirectory(tmp_path / "state")
    first.release()

    StateDirectory(tmp_path / "state").release()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_another_format_is_named() -> None:
    """Whoever goes back to an older release learns why its counters start anew."""
    data = HEADER.pack(b"sidestep", 99, 0, 0)
    with pytest.raises(WireError, match="format 99"):
        verified(data)
