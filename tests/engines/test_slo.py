"""``--slo``: its forms, its mistakes, and what engines receive of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from exporters import Start, until
from peers import publisher
from refused import refused
from sidestep.catalog.slo import Objective
from sidestep.config.settings import Config, read
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.slo import resolve
from sidestep.errors import ConfigError

TTFT = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")


def test_thresholds_are_seconds_in_any_notation() -> None:
    """Flags, the variable and the three forms in the file have the same result."""
    expected = Objective("ttft", ("ttft",), 0.35)
    for text in ("ttft=350ms", "ttft=0.35", "ttft=.35s", "ttft=0.35s", " ttft=350.0ms"):
        assert read({"slo": (text,)}, {}).slo == (expected,)
    assert read({}, {"SIDESTEP_SLO": "ttft=350ms availability"}).slo == (
        expected,
        Objective("availability"),
    )
    assert read({"slo": ("e2e=2m",)}, {"SIDESTEP_SLO": "ttft=1"}).slo[0].threshold == 120.0
    assert read({}, {}).slo == ()


@pytest.mark.parametrize(
    "text",
    [
        "[slo]\nttft = 0.35\navailability = true\n[slo.mine]\nfamily = 'queue'\nthreshold = '2s'\n",
        "[slo]\nttft = '350ms'\navailability = true\nmine = {family = 'queue', threshold = 2}\n",
        "slo = ['ttft=350ms', 'availability', 'mine=2,family=queue']\n",
        "[slo.ttft]\nthreshold = 0.35\n[slo]\navailability = true\nmine = {family = 'queue', threshold = 2}",
    ],
)
def test_the_file_has_objectives_by_name(tmp_path: Path, text: str) -> None:
    """They are a table or written like flags; other tables are unaffected."""
    file = tmp_path / "sidestep.toml"
    file.write_text(text + "\n[log]\nlevel = 'debug'\n")
    config = read({"config_file": str(file)}, {})

    assert set(config.slo) == {
        Objective("ttft", ("ttft",), 0.35),
        Objective("availability"),
        Objective("mine", ("queue",), 2.0),
    }
    assert config.log_level == "debug"


def configured(given: Mapping[str, Any]) -> Config:
    """Return the configuration after the checks at the exporter's start."""
    config = read(given, {})
    resolve(config.slo, DIALECTS, common=config.metrics_common)
    return config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ttft", "--slo 'ttft': must be a time above 0 and of a day at most, such as 350ms"),
        ("ttft=nan", "must be a time above 0"),
        ("ttft=2h", "must be a time above 0"),
        ("ttft=86401", "of a day at most"),
        ("TTFT=1", "must have a name of small letters"),
        ("", "must have a name of small letters"),
        ("ttf=1", "'ttf' is none of ttft, inter_token, time_per_output_token, e2e, queue,"),
        ("availability=1", "availability is how requests end"),
        ("ttft=1,family=queue", "ttft has families of its own; give yours another name"),
        ("mine=1,famly=queue", "'famly' is no option; known is family="),
        ("mine=1,family=queue,family=ttft", "family= is given twice"),
        ("mine=1,family=vllm:prompt_tokens_total", "is no histogram of seconds of vLLM or SGLang"),
        (
            "mine=1,family=gen_ai_server_request_duration_seconds",
            "needs --metrics.common",
        ),
        (
            "mine=1,family=sglang:time_per_output_token_seconds",
            "is an old name of sglang:inter_token_latency_seconds; use that instead",
        ),
    ],
)
def test_mistakes_are_one_line(given: str, said: str) -> None:
    """The error names the mistake and the remedy."""
    with pytest.raises(ConfigError) as raised:
        configured({"slo": (given,)})

    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slo = [5]", "slo '5': must be NAME=THRESHOLD"),
        ("[slo]\nttft = true", "slo 'ttft=True': must be a time above 0"),
        (f"[slo]\nttft = 1{'0' * 400}", "must be a time above 0"),
        ("[slo]\navailability = false", "must be true; without it leave the line away"),
        ("[slo.mine]\nfamily = 3\nthreshold = 1", "family must be a string"),
        ("[slo.mine]\ntreshold = 1", "'treshold' is no key; known are family and threshold"),
        ("[slo.mine]\nthreshold = 1", "add family= to name one of your own"),
        ("[slo.ttft.x]\ny = 1", "'x' is no key"),
    ],
)
def test_mistakes_in_the_file_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    """An error in the file also has the file's name."""
    file = tmp_path / "sidestep.toml"
    file.write_text(text)
    line = refused({"config_file": str(file)})

    assert line.startswith(f"{file}: ")
    assert said in line


def test_objectives_are_unique_and_limited() -> None:
    """Each objective costs two series per engine."""
    many = tuple(f"mine_{number}=1,family=ttft" for number in range(17))
    for given, said in (
        (("ttft=1", "ttft=2"), "slo: ttft is given twice; give each objective once"),
        (many, "slo: there are 17; give 16 at most"),
    ):
        with pytest.raises(ConfigError, match=said):
            read({"slo": given}, {})
    with pytest.raises(ConfigError, match=r"^slo: mine: 'a\\nb' is no histogram of seconds"):
        resolve([Objective("mine", ("a\nb",), 1.0)], DIALECTS, common=False)
    common = {"metrics_common": True, "slo": ("mine=1,family=sidestep_request_queue_seconds",)}
    assert len(configured(common).slo) == 1
    assert len(read({"slo": many[:16]}, {}).slo) == 16


async def test_engines_receive_the_objectives(start: Start) -> None:
    """They fold as the exporter counts; availability needs no objective there."""
    async with start(slo=("ttft=350ms", "availability")) as exporter:
        with closing(publisher(exporter.endpoints[0])) as engine:
            await until(lambda: engine.connected)
            said = engine._sender._folder.settings.objectives

    assert [(one.name, tuple(one.families), one.threshold) for one in said] == [
        ("ttft", TTFT, 0.35)
    ]
