"""The exporter and a Triton server, over sockets: what is shown of each, whatever the server does."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from conftest import Start, until
from pages import parse
from sidestep.app import Exporter
from sidestep.exposition.text_page import render
from sidestep_adapters.triton import queries as triton_questions
from tritons import STATS, Triton, answer, error, recording, tritons


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sidestep")


class Page:
    """What an exporter shows of Triton."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter = exporter

    def samples(self, name: str, **labels: str) -> dict[str, float]:
        """Of one family, by model and version or the label that is left."""
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
        """Successful requests by model and version."""
        return self.samples("nv_inference_request_success")

    @property
    def state(self) -> str:
        """Of the only server."""
        states = self.samples("sidestep_triton_state")
        return next((name for name, value in states.items() if value), "")

    @property
    def polls(self) -> dict[str, float]:
        """By outcome, such as there were."""
        found = self.samples("sidestep_triton_polls_total")
        return {name: value for name, value in found.items() if value}

    def own(self, name: str) -> dict[tuple[str, ...], float]:
        """A self-metric."""
        metrics = self.exporter.metrics.collect()
        return {
            tuple(sample.labels.values()): sample.value
            for family in metrics
            for sample in family.samples
            if sample.name == name
        }


def triton(server: Triton, *options: str, interval: float = 0.05) -> tuple[str, ...]:
    """The flag."""
    return (",".join((server.url, f"interval={interval}", *options)),)


async def asked(server: Triton, more: int = 2, path: str = STATS) -> None:
    """Wait for so many questions more."""
    before = server.asked[path]
    await until(lambda: server.asked[path] >= before + more)


async def test_what_the_server_counts_is_shown(start: Start) -> None:
    """From the first poll on all since the model was loaded, then what is new."""
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
    """One that stays open holds up Triton's exit for half a minute."""
    async with tritons("a") as server, start(triton=triton(server)):
        await asked(server, 3)

        assert all("connection: close" in head.lower() for head in server.heads)
        assert server.asked["/v2"] == server.asked["/v2/models/a/config"] == 1
        assert server.most == 1


async def test_a_configuration_gives_labels_and_instances(start: Start) -> None:
    """Metric tags as on Triton's own page; a response cache that nobody asked begins at 0."""
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
    "said",
    [
        error("403 Forbidden", "This API is restricted, expecting header 'x-triton-key'"),
        error("400 Bad Request", "Request for unknown model: 'a' is not found"),
        answer(b"<html>", kind="text/html"),
    ],
)
async def test_a_model_without_a_configuration_is_shown(
    start: Start, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Without tags and instances."""
    async with tritons("a") as server:
        server.configs["a"] = {"metric_tags": {"team": "blue"}}
        server.say("/v2/models/a/config", said)
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 0})
            await asked(server)

            assert page.samples("sidestep_triton_instances") == {}
            assert server.asked["/v2/models/a/config"] == 1
            assert caplog.text.count("no configuration of model 'a'") == 1


async def test_a_configuration_that_does_not_come_is_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For some polls, in which all other models go on; then the model is shown without."""
    monkeypatch.setattr(triton_questions, "CONFIG_SECONDS", 0.1)
    async with tritons("a", "b") as server:
        server.say("/v2/models/a/config", stall=True)
        server.configs["a"] = {"metric_tags": {"team": "blue"}}
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"b/1": 0})
            assert server.asked["/v2/models/a/config"] <= 3
            await until(lambda: page.served == {"a/1": 0, "b/1": 0})
            await asked(server)

            assert server.asked["/v2/models/a/config"] == 3


async def test_new_configurations_are_asked_for_some_at_a_time(start: Start) -> None:
    """At most eight, and each once."""
    names = [f"m{n}" for n in range(40)]
    async with tritons(*names) as server, start(triton=triton(server)) as exporter:
        await until(lambda: len(Page(exporter).served) == 40)
        await asked(server)

        configs = {p: n for p, n in server.asked.items() if p.endswith("/config")}
        assert set(configs.values()) == {1}
        assert len(configs) == 40
        assert 1 < server.most <= 8


async def test_a_model_that_is_loaded_anew_counts_on(start: Start) -> None:
    """Its statistics begin at 0; its configuration may be another, and its labels with it."""
    async with tritons("a") as server:
        server.models["a", "1"].infer(5)
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 5})
            server.configs["a"] = {"instance_group": [{"count": 3}]}
            server.load("a").infer(2)
            await until(lambda: page.served == {"a/1": 7})
            assert page.samples("sidestep_triton_resets_total") == {"a/1": 1}
            await until(lambda: page.samples("sidestep_triton_instances") == {"a/1": 3})
            server.configs["a"] = {"metric_tags": {"team": "blue"}}
            server.load("a")
            await until(lambda: page.served == {"blue/a/1": 0})


async def test_a_model_that_overtakes_itself_before_its_configuration_is_there(
    start: Start,
) -> None:
    """That it began anew is remembered: nothing that it did is lost."""
    async with tritons("a") as server:
        server.models["a", "1"].infer(5)
        path = "/v2/models/a/config"
        async with start(triton=triton(server, interval=0.1)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 5})
            server.say(path, error("503 Service Unavailable", "Server not ready"))
            server.load("a").infer(2)
            await asked(server, 1, path)
            server.models["a", "1"].infer(4)
            await asked(server, 1)
            server.instead.clear()
            await until(lambda: page.served == {"a/1": 11})


async def test_a_version_that_is_not_ready_is_not_shown(start: Start) -> None:
    """When it is back its totals go on."""
    async with tritons("a", "b") as server:
        server.models["a", "1"].infer(5)
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 5, "b/1": 0})
            del server.models["a", "1"]
            await until(lambda: page.served == {"b/1": 0})
            server.load("a", "1").infer(1)
            server.load("a", "2").infer(1)
            await until(lambda: page.served == {"a/1": 6, "a/2": 1, "b/1": 0})
            server.models.clear()
            await until(lambda: page.served == {})

            assert page.state == "up"
            assert page.samples("sidestep_triton_model_versions") == {"": 0}


async def test_a_server_that_is_started_anew_counts_on(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engines are down while it is, and nothing is lost of what was seen."""
    async with tritons("a") as server:
        server.models["a", "1"].infer(5)
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 5})
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
            assert server.asked["/v2"] == 2
            assert caplog.text.count("unreachable: ") == 1
            assert "see whether Triton runs" in caplog.text
            assert caplog.text.count("polled again") == 1


async def test_a_server_may_come_later(start: Start) -> None:
    """Its port is closed until all its models are loaded."""
    async with tritons("a") as server:
        await server.stop()
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.state == "down")
            assert page.own("sidestep_engine_up") == {(f"triton/{server.url}", "", ""): 0}
            await server.start()
            await until(lambda: page.served == {"a/1": 0})


async def test_a_server_is_shown_before_it_answers(start: Start) -> None:
    """One that says nothing for a minute is down meanwhile, and not just nowhere."""
    async with tritons("a") as server:
        server.say("/v2", stall=True)
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.state == "down")
            assert page.polls == {}
            assert page.own("sidestep_engine_up") == {(f"triton/{server.url}", "", ""): 0}
            server.instead.clear()
            await until(lambda: page.state == "up")

            assert page.own("sidestep_engine_up") == {(f"triton/{server.url}", "", ""): 1}


async def test_namespaces_are_asked_for_model_by_model(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a server cannot tell of all models; what it does not know under one name is absent."""
    async with tritons(*(f"m{n}" for n in range(20))) as server:
        server.namespaced = True
        twice = "/v2/models/m0/stats"
        server.say(
            twice, error("400 Bad Request", "Request for unknown model: '/r::m0' is not found")
        )
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: len(page.served) == 19)
            del server.models["m1", "1"]
            await until(lambda: len(page.served) == 18)

            assert page.polls.keys() == {"ok"}
            assert server.asked[STATS] == 1
            assert "/v2/models/unloaded/stats" not in server.asked
            assert 1 < server.most <= 8
            assert caplog.text.count("--model-namespacing") == 1


async def test_named_models_are_asked_for_alone(start: Start) -> None:
    """One that is not there is absent, not an error."""
    async with tritons("a", "b") as server:
        options = ("model=a", "model=c")
        async with start(triton=triton(server, *options)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 0})
            server.load("c").infer(2)
            await until(lambda: page.served == {"a/1": 0, "c/1": 2})
            del server.models["a", "1"]
            await until(lambda: page.served == {"c/1": 2})

            assert STATS not in server.asked
            assert page.polls.keys() == {"ok"}


async def test_patterns_choose_models(start: Start) -> None:
    """Of the answer for all."""
    async with (
        tritons("llama-7b", "llama-70b", "bert") as server,
        start(triton=triton(server, "model=llama-*")) as exporter,
    ):
        page = Page(exporter)
        await until(lambda: page.served == {"llama-7b/1": 0, "llama-70b/1": 0})
        await until(lambda: page.samples("sidestep_triton_model_versions") == {"": 2})

        assert "/v2/models/bert/config" not in server.asked


RESTRICTED = recording("err_restricted.http")
WRONG: dict[str, tuple[bytes, str]] = {
    "restricted": (RESTRICTED, "give the header that it expects"),
    "not_ready": (error("503 Service Unavailable", "Server not ready"), "it starts or ends"),
    "unsupported": (
        error("503 Service Unavailable", "the server does not support model statistics"),
        "TRITON_ENABLE_STATS",
    ),
    "unknown_model": (error("400 Bad Request", "requested model 'a' is not available"), ""),
    "http_404": (recording("err_bad_path.http"), "Triton's own HTTP port"),
    "http_405": (recording("err_method_post.http"), "Triton's own HTTP port"),
    "http_500": (error("500 Internal Server Error", "?"), "Triton's own HTTP port"),
}
BAD: dict[str, bytes] = {
    "html": answer(b"<html>login</html>", kind="text/html"),
    "html that lies": answer(b"<html>login</html>"),
    "empty": answer(b""),
    "another": answer(b'{"models": []}'),
    "garbage": answer(bytes(range(256))),
    "truncated": answer(recording("stats_501_models.json"))[:9999],
    "longer than it says": b'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"model_stats": []}',
    "no http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "deep": answer(b'{"model_stats":' + b"[" * 200_000),
    "twice": answer(b'{"model_stats": [{"name": "a"}, {"name": "a", "version": ""}]}'),
    "nameless": answer(b'{"model_stats": [{"version": "1"}]}'),
    "a number": answer(b'{"model_stats": [1]}'),
    "huge": answer(b'{"model_stats": [' + b" " * (9 << 20) + b"]}"),
}
FAILURES = [(outcome, said, advice) for outcome, (said, advice) in WRONG.items()]
FAILURES += [("bad_answer", said, "Triton's own HTTP port") for said in BAD.values()]


@pytest.mark.parametrize(
    ("outcome", "said", "advice"), FAILURES, ids=[*WRONG, *(f"bad: {name}" for name in BAD)]
)
async def test_an_error_is_never_absence(
    start: Start, outcome: str, said: bytes, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All stays as it was, the engines up; one line says what it is, one that it is over."""
    async with tritons("a") as server:
        server.models["a", "1"].infer(5)
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 5})
            server.say(STATS, said)
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

            assert caplog.text.count("polled again") == 1
            assert page.samples("sidestep_triton_resets_total") == {"a/1": 0}


async def test_one_model_that_contradicts_itself_costs_itself(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are read, and it stays as it was."""
    async with tritons("a", "b") as server:
        server.models["a", "1"].infer(5)
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 5, "b/1": 0})
            told = [model.told(*key) for key, model in server.models.items()]
            told[0]["execution_count"] = -1
            told[1]["inference_stats"]["success"]["count"] = 9
            server.say(STATS, answer(json.dumps({"model_stats": told}).encode()))
            await until(lambda: page.served == {"a/1": 5, "b/1": 9})

            assert page.state == "up"
            assert page.own("sidestep_rejected_total")["bad_item",] >= 1
            assert "model 'a', version '1'" in caplog.text


async def test_a_server_that_has_no_statistics_is_said_so(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Other servers speak the same protocol without them; they may come with another version."""
    async with tritons("a") as server:
        server.extensions = ["model_repository"]
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.polls.get("unsupported", 0) >= 2)
            assert STATS not in server.asked
            assert caplog.text.count("unsupported: ") == 1
            server.extensions.append("statistics")
            await until(lambda: page.served == {"a/1": 0})


async def test_a_server_may_not_say_what_it_can(start: Start) -> None:
    """Statistics may be allowed where metadata is not."""
    async with tritons("a") as server:
        server.say("/v2", RESTRICTED)
        async with start(triton=triton(server)) as exporter:
            await until(lambda: Page(exporter).served == {"a/1": 0})


async def test_a_slow_server_is_not_a_dead_one(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that is loaded over HTTP blocks the port; one question waits, and no other is asked."""
    async with tritons("a") as server:
        server.models["a", "1"].infer(5)
        async with start(triton=triton(server)) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 5})
            server.say(STATS, stall=True)
            await asked(server, 1)
            before = server.asked.total()
            await until(lambda: page.state == "stale")
            assert page.own("sidestep_engine_up") == {(f"triton/{server.url}", "", ""): 1}
            assert page.served == {"a/1": 5}
            assert server.asked.total() == before
            assert server.busy == 1
            assert ": slow: " in caplog.text
            server.instead.clear()
            await until(lambda: page.state == "up")

            assert caplog.text.count("polled again") == 1


async def test_an_answer_that_does_not_come_is_waited_for_no_longer_than_said(start: Start) -> None:
    """Then it is asked for anew; a part of it is none."""
    async with tritons("a") as server:
        server.models["a", "1"].infer(5)
        async with start(triton=triton(server, "timeout=0.2")) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/1": 5})
            server.say(STATS, answer(recording("stats_501_models.json"))[:5000], stall=True)
            await until(lambda: page.polls.get("slow", 0) >= 2 and page.state == "stale")

            assert page.served == {"a/1": 5}


async def test_a_header_opens_a_restricted_server(start: Start, tmp_path: Path) -> None:
    """Its secret stands in a file, and in no line of the log."""
    async with tritons("a") as server:
        secret = tmp_path / "secret"
        secret.write_text("s3cret\n")
        async with start(triton=triton(server, f"header.x-triton-key=@{secret}")) as exporter:
            await until(lambda: Page(exporter).served == {"a/1": 0})

            assert all("x-triton-key: s3cret" in head for head in server.heads)


async def test_totals_outlive_the_exporter(start: Start, tmp_path: Path) -> None:
    """And what went away meanwhile is away; what its configuration says now is shown."""
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


async def test_models_that_are_not_polled_any_more_are_not_fed(
    start: Start, tmp_path: Path
) -> None:
    """Other patterns are given to the next exporter."""
    async with tritons("a", "b") as server:
        state = str(tmp_path / "state")
        async with start(state_dir=state, triton=triton(server)) as exporter:
            await until(lambda: len(Page(exporter).served) == 2)
        async with start(state_dir=state, triton=triton(server, "model=b*")) as exporter:
            registry = exporter.registry
            await until(lambda: any(e.streams for e in registry.engines.values() if e.statistics))
            await asked(server)

            fed = {
                e.labels["model"] for e in registry.engines.values() if e.statistics and e.streams
            }
            assert fed == {"b"}


async def test_two_servers_are_told_apart_by_their_labels(start: Start) -> None:
    """Each has its state."""
    async with tritons("a") as one, tritons("a") as other:
        flag = (*triton(one, "label.pod=x"), *triton(other, "label.pod=y"))
        other.models["a", "1"].infer(3)
        async with start(triton=flag) as exporter:
            page = Page(exporter)
            await until(lambda: page.served == {"a/x/1": 0, "a/y/1": 3})
            await one.stop()
            down = {"pod": "x", "state": "down"}
            await until(lambda: page.samples("sidestep_triton_state", **down) == {"": 1.0})

            assert page.samples("sidestep_triton_state", pod="y", state="up") == {"": 1.0}


async def test_the_loop_is_never_held_for_long(start: Start) -> None:
    """501 models are read and shown in slices."""
    async with tritons("a") as server:
        server.say(STATS, answer(recording("stats_501_models.json")))
        async with start(triton=triton(server)) as exporter:
            await until(lambda: len(Page(exporter).served) == 501, timeout=60)
            await until(lambda: Page(exporter).state == "up")


async def test_an_exporter_ends_while_a_server_is_silent(start: Start) -> None:
    """At once, whatever is awaited."""
    async with tritons("a") as server:
        server.say(STATS, stall=True)
        async with start(triton=triton(server)):
            await asked(server, 1)
            began = time.monotonic()

        assert time.monotonic() - began < 5
