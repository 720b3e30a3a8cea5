"""The event loop gets its turn after little work, however many engines there are."""

from __future__ import annotations

import functools

import pytest

from intakes import Fed
from sidestep.engine_metrics import SeriesCount, series_of
from sidestep.formats import Format
from sidestep.render.own import AT_ONCE, OwnTexts
from sidestep.selfmetrics import OwnRegistry
from sidestep.wire.messages import EngineInfo
from slices import MOST, counted, slices

MANY = 512
FORMS: tuple[Format, ...] = ("text", "openmetrics", "protobuf")


def info(number: int) -> EngineInfo:
    """One of many engines."""
    return EngineInfo(f"e{number}", "vllm", {"engine": str(number), "model_name": "m"})


def fleet(engines: int) -> Fed:
    """So many of them, a stream each."""
    fed = Fed()
    for number in range(engines):
        fed.greet(f"s{number % 250}", [info(n) for n in range(number % 250, engines, 250)])
    return fed


@functools.cache
def many() -> Fed:
    """``MANY``, which tests leave as they are."""
    return fleet(MANY)


@pytest.mark.parametrize("form", FORMS)
def test_own_families_come_some_samples_at_a_time(form: Format) -> None:
    """Those of engines and streams, too; also those of the first page."""
    texts = OwnTexts(OwnRegistry(many().intake.metrics))

    assert max(slices(texts.pieces(form))) < MOST


@pytest.mark.parametrize("form", FORMS)
def test_own_families_that_have_not_changed_are_not_written_again(form: Format) -> None:
    """Of an engine and a stream more, a page costs what asking for their values does."""
    costs = []
    for engines in (50, 250):
        texts = OwnTexts(OwnRegistry(fleet(engines).intake.metrics))
        list(texts.pieces(form))
        with counted() as calls:
            list(texts.pieces(form))
        costs.append(calls.count)

    assert costs[1] - costs[0] < 40 * 200


@pytest.mark.parametrize("form", FORMS)
def test_own_families_that_have_changed_are_written(form: Format) -> None:
    """Some of their samples, more of them, and fewer: each page is as one from nothing."""
    fed = fleet(2)
    texts = OwnTexts(OwnRegistry(fed.intake.metrics))

    def same() -> bool:
        """Whether a page is as one from nothing; without what collectors tell, which is last."""
        fresh = OwnTexts(OwnRegistry(fed.intake.metrics))
        found, wanted = ([*one.pieces(form)][:-1] for one in (texts, fresh))
        return b"".join(found) == b"".join(wanted)

    assert same()
    fed.intake.registry.engines["e1"].last_seen = 7.0
    assert same()
    for number in range(2, AT_ONCE + 10):
        fed.greet(f"s{number}", [info(number)])
    assert same()
    for number in range(5, AT_ONCE + 10):
        fed.intake.registry.discard(fed.intake.registry.engines[f"e{number}"])
    assert same()
    fed.intake.registry.engines["e1"].labels["model_name"] = "other"
    fed.intake.registry.engines["e1"].look_anew()
    assert same()


def test_series_of_engines_that_have_not_changed_are_not_counted_again() -> None:
    """And of those that have, they are; whoever has gone counts no more."""
    fed = fleet(40)
    registry = fed.intake.registry
    count = SeriesCount(registry)

    def total() -> float:
        (*_, (_, value)) = [one for one in count.reading() if one is not None]
        return value

    with counted() as first:
        wanted = sum(map(series_of, registry.engines.values()))
    with counted():
        assert total() == wanted
    with counted() as again:
        assert total() == wanted
    registry.engines["e3"].values[:] = [1] * len(registry.engines["e3"].values)
    registry.touch(registry.engines["e3"])
    grown = sum(map(series_of, registry.engines.values()))

    assert again.count < first.count / 3
    assert total() == grown > wanted
    registry.discard(registry.engines["e3"])
    assert total() == grown - series_of(fleet(1).intake.registry.engines["e0"]) - (grown - wanted)
