"""The exporter and a llama-server over sockets: what is exposed in each situation, and what is asked."""

from __future__ import annotations

import json
import logging
import re

import pytest

from exporters import Start, until
from llama_servers import (
    LlamaServer,
    failure,
    left_out,
    llama_server,
    page,
    pages,
    props,
    recorded,
    response,
)
from pages import parse
from rendered import render
from sidestep.app.exporter import Exporter
from sidestep.errors import ConfigError


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sidestep")


def engine(server: LlamaServer, *options: str) -> tuple[str, ...]:
    """Return the flag."""
    return (",".join((f"llamacpp={server.url}", "interval=0.05", *options)),)


def samples(exporter: Exporter, **labels: str) -> dict[str, float]:
    """Return the series of engines with these labels, by name, and the value of ``position``."""
    return {
        " ".join((name, *(v for k, v in pairs if k == "position"))): value
        for family in parse(render(exporter.registry).decode()).values()
        for (name, pairs), value in family.samples.items()
        if labels.items() <= dict(pairs).items()
    }


def polls(exporter: Exporter, server: LlamaServer, outcome: str) -> float:
    """Return how many polls had ``outcome``."""
    name = f"llamacpp={server.url}"
    return exporter.metrics.value("sidestep_engine_polls_total", name, outcome)


async def polled_again(exporter: Exporter, server: LlamaServer, outcome: str = "ok") -> None:
    """Wait until two more polls have ended: one may have begun before."""
    before = polls(exporter, server, outcome)
    await until(lambda: polls(exporter, server, outcome) >= before + 2)


def state(exporter: Exporter) -> str:
    """Return the state of the only engine."""
    return next(health.state.value for _, health in exporter.intake.health)


def theirs(text: str) -> dict[str, float]:
    """Return the samples of a page of llama-server that have rows here."""
    found = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    named = {re.sub(r'\{position="(\d+)"\}', r" \1", head): float(v) for head, _, v in found}
    return {name: value for name, value in named.items() if name not in left_out()}


@pytest.mark.parametrize("name", ["load", "cache", "aborts", "speculative", "large", "embeddings"])
async def test_the_page_is_the_servers(name: str, start: Start) -> None:
    """After all recorded pages of a load every family is the server's, to the last digit."""
    found = pages(name)
    async with (
        llama_server(metrics=recorded(found[0])) as server,
        start(engine=engine(server)) as exporter,
    ):
        for each in found:
            server.answers["/metrics"] = recorded(each)
            await polled_again(exporter, server)
        ours = samples(exporter, model_name="tiny")

    assert theirs(found[-1]["body"]) == pytest.approx(
        {name: value for name, value in ours.items() if name.startswith("llamacpp:")}, rel=1e-12
    )


async def test_counters_continue_over_restarts(start: Start) -> None:
    """A header identifies another process, so that even one with higher counts is noticed."""
    first, second = pages("restart")
    higher = page(9, prompt_tokens_total=1000, n_decode_total=5000)
    async with (
        llama_server(metrics=recorded(first)) as server,
        start(engine=engine(server)) as exporter,
    ):
        await polled_again(exporter, server)
        before = samples(exporter)["llamacpp:prompt_tokens_total"]
        for answer in (recorded(second), higher):
            server.answers |= {"/metrics": answer, "/props": props(total_slots=3)}
            await polled_again(exporter, server)
        found = samples(exporter)

    of_second = theirs(second["body"])["llamacpp:prompt_tokens_total"]
    assert before == 102
    assert found["llamacpp:prompt_tokens_total"] == before + of_second + 1000
    assert found["sidestep_llamacpp_resets_total"] == 2
    assert found["sidestep_max_running_requests"] == 3


async def test_a_restart_with_another_model_counts_for_that_one_only(start: Start) -> None:
    """Its page comes before the properties are due again."""
    async with (
        llama_server(metrics=page(1, prompt_tokens_total=1000)) as server,
        start(engine=engine(server)) as exporter,
    ):
        await polled_again(exporter, server)
        server.answers |= {
            "/props": props(model_alias="other"),
            "/metrics": page(2, prompt_tokens_total=5000),
        }
        await polled_again(exporter, server)
        found = samples(exporter, model_name="other")
        before = samples(exporter, model_name="tiny")

    assert found["llamacpp:prompt_tokens_total"] == 5000
    assert "llamacpp:prompt_tokens_total" not in before


async def test_a_sleeping_model_is_asked_for_nothing_that_wakes_it(start: Start) -> None:
    """Its counters stay, it is asleep as an engine, and only the path that reports sleep is asked."""
    busy = page(n_decode_total=7, requests_processing=1)
    async with llama_server(metrics=busy) as server, start(engine=engine(server)) as exporter:
        await polled_again(exporter, server)
        server.answers["/props"] = props(is_sleeping=True)
        server.answers["/metrics"] = page(n_decode_total=7, requests_processing=0)
        await until(lambda: state(exporter) == "asleep", timeout=20)
        server.forget()
        await polled_again(exporter, server)

        assert set(server.asked) == {"/props"}
        assert samples(exporter)["llamacpp:n_decode_total"] == 7

        server.answers["/props"] = props()
        await until(lambda: "/metrics" in server.asked)
        await until(lambda: state(exporter) in ("ok", "idle"))


async def test_slots_are_asked_only_while_requests_run(start: Start) -> None:
    """The tokens of requests in slots are the context in use; without requests it is 0."""
    slots = [
        {"id": 0, "is_processing": True, "n_prompt_tokens": 512, "params": {}},
        {"id": 1, "is_processing": False, "n_prompt_tokens": 999},
    ]
    async with llama_server(
        metrics=page(requests_processing=0), slots=response(json.dumps(slots))
    ) as server:
        async with start(engine=engine(server), metrics_common=True) as exporter:
            await polled_again(exporter, server)
            idle = samples(exporter)
            assert "/slots" not in server.asked

            server.answers["/metrics"] = page(requests_processing=1)
            await polled_again(exporter, server)
            busy = samples(exporter)
        async with start(engine=engine(server, "slots=false")) as exporter:
            server.forget()
            await polled_again(exporter, server)
            assert "/slots" not in server.asked
            assert "sidestep_llamacpp_context_tokens" not in samples(exporter)

    assert idle["sidestep_llamacpp_context_usage_ratio"] == 0
    assert busy["sidestep_llamacpp_context_tokens"] == 512
    assert busy["sidestep_llamacpp_context_size_tokens"] == 4 * 2048
    assert busy["sidestep_kv_cache_usage_ratio"] == 512 / 8192


def model(name: str, status: str) -> dict[str, object]:
    """Return a model of a router."""
    return {"id": name, "status": {"value": status, "args": ["--port", "1"]}}


def models(**states: str) -> bytes:
    """Return a router's list."""
    return response(json.dumps({"data": [model(*each) for each in states.items()]}))


async def test_a_routers_models_are_engines(start: Start) -> None:
    """Each model in memory is an engine; none is loaded or woken up, and one that returns continues."""
    one, asleep = "?model=one&autoload=false", "?model=asleep&autoload=false"
    async with llama_server(
        props=response(json.dumps({"role": "router"})),
        models=models(one="loaded", two="unloaded", asleep="sleeping"),
    ) as server:
        server.answers |= {
            f"/metrics{one}": page(1, prompt_tokens_total=5),
            f"/props{one}": props(model_alias="other", total_slots=2),
            f"/props{asleep}": props(),
        }
        async with start(engine=engine(server)) as exporter:
            await polled_again(exporter, server)
            assert set(server.asked) == {
                "/props", "/models", f"/metrics{one}", f"/props{one}", f"/props{asleep}"
            }  # fmt: skip
            found = samples(exporter, model_name="one")
            assert found["llamacpp:prompt_tokens_total"] == 5
            assert found["sidestep_max_running_requests"] == 2
            states = {e.labels["model_name"]: h.state.value for e, h in exporter.intake.health}
            await until(lambda: len(exporter.registry.engines) == 2)
            assert states.keys() == {"one", "asleep"}

            server.answers["/models"] = models(one="unloaded", two="unloaded", asleep="sleeping")
            await polled_again(exporter, server)
            assert samples(exporter, model_name="one") == {}
            await until(lambda: len(exporter.registry.engines) == 1)

            server.answers["/models"] = models(one="loaded")
            server.answers[f"/metrics{one}"] = page(2, prompt_tokens_total=3)
            await polled_again(exporter, server)
            assert samples(exporter, model_name="one")["llamacpp:prompt_tokens_total"] == 8


async def test_a_server_that_loads_its_model_is_starting(start: Start) -> None:
    """The poll has that outcome, and an engine that is known has that state."""
    loading = failure(503, "Loading model")
    async with (
        llama_server(props=loading, metrics=loading) as server,
        start(engine=engine(server)) as exporter,
    ):
        await until(lambda: polls(exporter, server, "starting") > 0)
        server.answers |= {"/props": props(), "/metrics": page(n_decode_total=1)}
        await polled_again(exporter, server)
        server.answers |= {"/props": loading, "/metrics": loading}
        await until(lambda: state(exporter) == "starting")
        assert samples(exporter)["llamacpp:n_decode_total"] == 1


@pytest.mark.parametrize(
    ("answer", "outcome", "line"),
    [
        (recorded(pages("plain", status=501)[0]), "no_metrics", "with --metrics"),
        (failure(404, "File Not Found"), "wrong_path", "with --api-prefix it ends with the prefix"),
        (recorded(pages("key", status=401)[0]), "http_401", "header.Authorization=Bearer @/FILE"),
        (response("<html>", kind="text/html"), "bad_answer", "is that of a llama-server"),
    ],
)
async def test_a_failed_poll_says_what_to_do(
    answer: bytes, outcome: str, line: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the server, the cause and the cure."""
    async with llama_server(metrics=answer) as server, start(engine=engine(server)) as exporter:
        await until(lambda: polls(exporter, server, outcome) > 1)

    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([one for one in found if line in one and server.url in one]) == 1


async def test_labels_can_be_set(start: Start) -> None:
    """By default they are the address, and the model's alias or file."""
    async with llama_server(
        props=props(model_alias="", model_path="C:\\models\\m.gguf"), metrics=page(n_decode_total=1)
    ) as server:
        place = server.url.removeprefix("http://")
        async with start(engine=engine(server)) as exporter:
            await polled_again(exporter, server)
            assert samples(exporter, engine=place, model_name="m.gguf")
        async with start(engine=engine(server, "engine=7", "model=x", "label.pod=p")) as exporter:
            await polled_again(exporter, server)
            assert samples(exporter, engine="7", model_name="x", pod="p")


async def test_a_server_that_has_gone_is_unreachable(start: Start) -> None:
    """Its engine's state says so, and its counters continue when it is back."""
    async with (
        llama_server(metrics=page(1, n_decode_total=4)) as server,
        start(engine=engine(server)) as exporter,
    ):
        await polled_again(exporter, server)
        await server.http.stop()
        await until(lambda: state(exporter) == "unreachable")
        server.answers["/metrics"] = page(2, n_decode_total=3)
        await server.http.start()
        await until(lambda: samples(exporter).get("llamacpp:n_decode_total") == 7)
        await until(lambda: state(exporter) != "unreachable")


async def test_requests_without_steps_are_a_stall(start: Start) -> None:
    """A batch may take long on a CPU: the limit is --health.max-threshold."""
    async with llama_server(metrics=page(n_decode_total=4, requests_processing=1)) as server:
        flags = {"health_min_threshold": "3", "health_max_threshold": "3"}
        async with start(engine=engine(server), **flags) as exporter:
            await until(lambda: bool(exporter.registry.engines) and state(exporter) == "stalled")
            (health,) = (health for _, health in exporter.intake.health)
            assert health.reason is not None
            assert health.reason.value == "no_steps"
            server.answers["/metrics"] = page(n_decode_total=5, requests_processing=1)
            await until(lambda: state(exporter) == "ok")


async def test_counters_survive_the_exporter(start: Start, tmp_path: object) -> None:
    """With a state directory, what the server counts meanwhile arrives once."""
    flags = {"state_dir": f"{tmp_path}/state"}
    async with llama_server(metrics=page(1, n_decode_total=4)) as server:
        async with start(engine=engine(server), **flags) as exporter:
            await polled_again(exporter, server)
        server.answers["/metrics"] = page(1, n_decode_total=10)
        async with start(engine=engine(server), **flags) as exporter:
            await polled_again(exporter, server)
            assert samples(exporter)["llamacpp:n_decode_total"] == 10


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("llama=http://h:1", "'llama' is no kind of server; known are llamacpp"),
        ("llamacpp=http://h:1,modle=a", "'modle' is no option; known are model=, engine=, slots="),
        ("llamacpp=http://h:1,slots=maybe", "slots= must be true or false"),
        ("llamacpp=http://h:1,label.model_name=a,label.position=a", "position"),
        ("llamacpp=http://h:1,header.X-Api-Key=@/no/such/file", "No such file"),
    ],
)
async def test_a_wrong_flag_is_one_line(flag: str, complaint: str, start: Start) -> None:
    """The exporter does not start."""
    with pytest.raises(ConfigError, match=complaint) as error:
        async with start(engine=(flag,)):
            pass
    assert str(error.value).startswith("--engine")
