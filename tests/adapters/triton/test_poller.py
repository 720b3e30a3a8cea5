"""The exporter and a Triton server over sockets: what is exposed in each situation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from exporters import Start, until
from pages import parse
from rendered import render
from sidestep.app.exporter import Exporter
from tritons import STATS, Triton, answer, error, recording, tritons


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sidestep")


class Page:
    """The exporter's series of Triton."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter = exporter

    def samples(self, name: str, **labels: str) -> dict[str, float]:
        """Return one family, by model and version or its remaining label."""
        text = render(self.exporter.registry).decode()
        base = name.removesuffix("_total")
        found: dict[str, float] = {}
        families = parse(text)
        for (sample, pairs), value in families[base].samples.items() if base in families else ():
            had = dict(pairs)
            if sample in (name, f"{name}_total") and labels.items() <= had.items():
                rest = {key: text for key, text in had.items() if key not in labels}
                found["/".join(text for _, text in sorted(rest.items()))] = value
        return found

    @property
    def served(self) -> dict[str, float]:
        """Return successful requests by model and version."""
        return self.samples("nv_inference_request_success")

    @property
    def state(self) -> str:
        """Return the state of the only server."""
        states = self.samples("sidestep_triton_state")
        return next((name for name, value in states.items() if value), "")

    @property
    def polls(self) -> dict[str, float]:
        """Return polls by outcome."""
        found = self.samples("sidestep_triton_polls_total")
        return {name: value for name, value in found.items() if value}

    def own(self, name: str) -> dict[tuple[str, ...], float]:
        """Return a metric of the exporter itself."""
        return {
            labels: v for _, found in self.exporter.metrics.samples([name]) for labels, v in found
        }


def triton(server: Triton, *options: str, interval: float = 0.05) -> tuple[str, ...]:
    """Return the flag."""
    return (",".join((server.url, f"interval={interval}", *options)),)


@asynccontextmanager
async def polled_model(
    start: Start, *options: str, models: Sequence[str] = ("a",), interval: float = 0.05
) -> AsyncIterator[tuple[Triton, Page]]:
    """Run a server whose model "a" has served five requests, and an exporter that has polled it."""
    async with tritons(*models) as server:
        server.models["a", "1"].infer(5)
        async with start(triton=triton(server, *options, interval=interval)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 5} | {f"{name}/1": 0 for name in models[1:]})
            yield server, page


async def queried(server: Triton, more: int = 2, path: str = STATS) -> None:
    """Wait for ``more`` queries."""
    before = server.asked[path]
    await until(lambda: server.asked[path] >= before + more)


async def test_the_servers_counts_are_exposed(start: Start) -> None:
    """The first poll adds everything since the model was loaded, later ones the increases."""
    async with tritons("a", "b") as server:
        server.models["a", "1"].infer(3, size=2)
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 3, "b/1": 0})
            server.models["a", "1"].infer(1, size=4)
            server.models["b", "1"].fail(2)
            await until(lambda: page.served["a/1"] == 4)

            assert page.samples("nv_inference_count") == {"a/1": 10, "b/1": 0}
            assert page.samples("nv_inference_request_failure") == {"a/1": 0, "b/1": 2}
            assert page.samples("sidestep_triton_model_versions") == {"": 2}
            assert page.state == "up"
            assert page.polls.keys() == {"ok"}
            assert page.own("sidestep_engine_up") == {(f"triton/{server.url}", "", ""): 1}


async def test_every_poll_closes_its_connection(start: Start) -> None:
    """An open connection delays Triton's exit by half a minute."""
    async with tritons("a") as server, start(triton=triton(server)):
        await queried(server, 3)

        assert all("connection: close" in head.lower() for head in server.heads)
        assert server.asked["/v2/models/a/config"] == 1
        assert server.most == 1


async def test_a_configuration_gives_labels_and_instances(start: Start) -> None:
    """Metric tags equal those of Triton's page; an unused response cache starts at 0."""
    async with tritons("tagged", "cached", "ens") as server:
        groups = [{"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]}]
        server.configs["tagged"] = {"metric_tags": {"team": "blue"}, "instance_group": groups}
        server.configs["cached"] = {"response_cache": {"enable": True}}
        server.configs["ens"] = {"platform": "ensemble", "instance_group": groups}
        async with start(triton=triton(server, "label.az=x")) as exporter:
            page = Page(exporter)
            await until(lambda: len(page.served) == 3)

            assert page.served == {"blue/x/tagged/1": 0, "x/cached/1": 0, "x/ens/1": 0}
            assert page.samples("sidestep_triton_instances") == {"blue/x/tagged/1": 4}
            assert page.samples("nv_cache_num_hits_per_model") == {"x/cached/1": 0}
            busy = page.samples("sidestep_triton_busy_seconds_total")
            assert busy.keys() == {"blue/x/tagged/1", "x/cached/1"}


@pytest.mark.parametrize(
    "response",
    [
        error("403 Forbidden", "This API is restricted, expecting header 'x-triton-key'"),
        answer(b"<html>", kind="text/html"),
    ],
)
async def test_a_model_without_a_configuration_is_exposed(
    start: Start, response: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A model whose configuration cannot be read has no tags and no instances."""
    async with tritons("a") as server:
        server.configs["a"] = {"metric_tags": {"team": "blue"}}
        server.respond("/v2/models/a/config", response)
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 0})
            await queried(server)

            assert page.samples("sidestep_triton_instances") == {}
            assert server.asked["/v2/models/a/config"] == 1
            assert caplog.text.count("no configuration of model 'a'") == 1


async def test_a_reloaded_model_keeps_its_totals(start: Start) -> None:
    """Its statistics restart at 0; its configuration may change, and its labels with it."""
    async with polled_model(start) as (server, page):
        server.configs["a"] = {"instance_group": [{"count": 3}]}
        server.load("a").infer(2)
        await until(lambda: page.served == {"a/1": 7})
        assert page.samples("sidestep_triton_resets_total") == {"a/1": 1}
        await until(lambda: page.samples("sidestep_triton_instances") == {"a/1": 3})
        server.configs["a"] = {"metric_tags": {"team": "blue"}}
        server.load("a")
        await until(lambda: page.served == {"blue/a/1": 0})


async def test_a_reload_before_the_configuration_is_known_is_remembered(
    start: Start,
) -> None:
    """No request is lost."""
    path = "/v2/models/a/config"
    async with polled_model(start, interval=0.1) as (server, page):
        server.respond(path, error("503 Service Unavailable", "Server not ready"))
        server.load("a").infer(2)
        await queried(server, 1, path)
        server.models["a", "1"].infer(4)
        await queried(server, 1)
        server.instead.clear()
        await until(lambda: page.served == {"a/1": 11})


async def test_a_server_that_is_away_is_not_seen(start: Start) -> None:
    """The state that the exporter itself exports of a server is no item of the server."""
    name = "sidestep_engine_last_seen_timestamp_seconds"
    async with polled_model(start) as (server, page):
        await server.stop()
        await until(lambda: page.state == "down")
        (before,) = page.own(name).values()
        polls = page.polls["unreachable"]
        await until(lambda: page.polls["unreachable"] >= polls + 3)

        assert page.own(name) == {(f"triton/{server.url}", "", ""): before}


async def test_a_restarted_server_keeps_its_totals(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engines are down meanwhile, and no count that was polled is lost."""
    async with polled_model(start) as (server, page):
        await server.stop()
        await until(lambda: page.state == "down")
        assert page.own("sidestep_engine_up") == {(f"triton/{server.url}", "", ""): 0}
        assert page.served == {"a/1": 5}
        assert page.polls["unreachable"] >= 1
        server.load("a").infer(1)
        await server.start()
        await until(lambda: page.served == {"a/1": 6})
        await until(lambda: page.state == "up")

        assert page.own("sidestep_engine_up") == {(f"triton/{server.url}", "", ""): 1}
        assert caplog.text.count("unreachable: ") == 1
        assert "check that Triton runs" in caplog.text
        assert caplog.text.count("polls succeed; model versions: 1") == 1
        assert caplog.text.count("polls succeed again") == 1


async def test_a_version_can_be_named(start: Start) -> None:
    """Only that version is queried; one that is not ready is absent, which is no error."""
    path = "/v2/models/a/versions/2/stats"
    async with tritons("a", "b") as server:
        server.load("a", "2").infer(3)
        flag = triton(server, "model=a/2", "model=b", "model=b/1", "model=c/1")
        async with start(triton=flag) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/2": 3, "b/1": 0})
            server.respond(path, RESTRICTED)
            await until(lambda: page.polls.get("restricted", 0) > 0)
            assert page.served == {"a/2": 3, "b/1": 0}
            server.instead.clear()
            del server.models["a", "2"]
            await until(lambda: page.served == {"b/1": 0})

            stats = {asked for asked in server.asked if asked.endswith("/stats")}
            assert stats == {path, "/v2/models/b/stats", "/v2/models/c/versions/1/stats"}
            assert page.polls.keys() == {"ok", "restricted"}


RESTRICTED = recording("err_restricted.http")
WRONG: dict[str, tuple[bytes, str]] = {
    "restricted": (RESTRICTED, "set the header that the server expects"),
    "not_ready": (
        error("503 Service Unavailable", "Server not ready"),
        "the server is starting or stopping",
    ),
    "unsupported": (
        error("503 Service Unavailable", "the server does not support model statistics"),
        "TRITON_ENABLE_STATS",
    ),
    "unknown_model": (error("400 Bad Request", "requested model 'a' is not available"), ""),
    "http_404": (recording("err_bad_path.http"), "Triton's own HTTP port"),
    "http_500": (error("500 Internal Server Error", "?"), "Triton's own HTTP port"),
}
BAD: dict[str, bytes] = {
    "html": answer(b"<html>login</html>", kind="text/html"),
    "truncated": answer(recording("stats_501_models.json"))[:9999],
    "no http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "twice": answer(b'{"model_stats": [{"name": "a"}, {"name": "a", "version": ""}]}'),
    "huge": answer(b'{"model_stats": [' + b" " * (9 << 20) + b"]}"),
}
FAILURES = [(outcome, response, advice) for outcome, (response, advice) in WRONG.items()]
FAILURES += [("bad_answer", response, "Triton's own HTTP port") for response in BAD.values()]


@pytest.mark.parametrize(
    ("outcome", "response", "advice"), FAILURES, ids=[*WRONG, *(f"bad: {name}" for name in BAD)]
)
async def test_an_error_is_never_absence(
    start: Start, outcome: str, response: bytes, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All values stay and the engines stay up; the log has one line for the error and one for its end."""
    async with polled_model(start) as (server, page):
        server.respond(STATS, response)
        await until(lambda: page.polls.get(outcome, 0) >= 2 and page.state == "stale")
        assert page.served == {"a/1": 5}
        assert page.own("sidestep_engine_up") == {(f"triton/{server.url}", "", ""): 1}
        lines = [text for text in caplog.messages if f": {outcome}: " in text]
        assert len(lines) == 1
        assert lines[0].startswith(f"triton {server.url}: ")
        assert advice in lines[0]
        assert "\n" not in lines[0]
        server.instead.clear()
        server.models["a", "1"].infer(1)
        await until(lambda: page.served == {"a/1": 6})
        await until(lambda: page.state == "up")

        assert caplog.text.count("polls succeed again") == 1
        assert page.samples("sidestep_triton_resets_total") == {"a/1": 0}


async def test_a_model_with_invalid_statistics_keeps_its_values(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The other models are read."""
    async with polled_model(start, models=("a", "b")) as (server, page):
        entries = [model.reported(*key) for key, model in server.models.items()]
        entries[0]["execution_count"] = -1
        entries[1]["inference_stats"]["success"]["count"] = 9
        server.respond(STATS, answer(json.dumps({"model_stats": entries}).encode()))
        await until(lambda: page.served == {"a/1": 5, "b/1": 9})

        assert page.state == "up"
        assert page.own("sidestep_rejected_total")["bad_item",] >= 1
        assert "model 'a', version '1'" in caplog.text


async def test_a_header_opens_a_restricted_server(start: Start, tmp_path: Path) -> None:
    """Its secret is in a file, and in no line of the log."""
    async with tritons("a") as server:
        secret = tmp_path / "secret"
        secret.write_text("s3cret\n")
        async with start(triton=triton(server, f"header.x-triton-key=@{secret}")) as exporter:
            await until(lambda: Page(exporter).served == {"a/1": 0})

            assert all("x-triton-key: s3cret" in head for head in server.heads)


async def test_totals_outlive_the_exporter(start: Start, tmp_path: Path) -> None:
    """Models unloaded meanwhile are gone; the current configuration is exposed."""
    async with tritons("a", "b", "c") as server:
        for name in "abc":
            server.models[name, "1"].infer(5)
        flags = {"state_dir": str(tmp_path / "state"), "triton": triton(server)}
        async with start(**flags) as exporter:
            await until(lambda: len(Page(exporter).served) == 3)
        server.load("a").infer(1)
        server.models["b", "1"].infer(1)
        del server.models["c", "1"]
        server.configs["b"] = {"response_cache": {"enable": True}}
        async with start(**flags) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 6, "b/1": 6})
            assert page.samples("nv_cache_num_hits_per_model") == {"b/1": 0}
            server.load("c").infer(2)
            await until(lambda: page.served == {"a/1": 6, "b/1": 6, "c/1": 7})
