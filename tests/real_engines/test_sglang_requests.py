"""Records and tenants of a real SGLang's requests, against its clients' own books and its own counters."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporters import until
from real_engines.comparison import Page, assert_nothing_refused, idle, parse, settled_alone, value
from real_engines.load import Answer, Ask, Client, generated, reasons
from real_engines.processes import ExporterProcess
from real_engines.sglang_runs import CUSTOM_LABELS
from real_engines.sglang_server import RETRACTING
from real_engines.sites import SglangSite
from request_runs import lines

pytestmark = pytest.mark.engine

IDENTITY = {"SIDESTEP_REQUEST_IDENTITY": "full"}
TENANTS = ("acme", "globex", "initech", "hooli")
TOTALS = {
    "sidestep_tenant_requests": ("sglang:num_requests",),
    "sidestep_tenant_failed_requests": ("sglang:num_aborted_requests",),
    "sidestep_tenant_cached_prompt_tokens": ("sglang:cached_tokens",),
    "sidestep_tenant_generation_tokens": ("sglang:generation_tokens",),
}
PROMPTS = ("sidestep_tenant_prompt_tokens", "sidestep_tenant_cached_prompt_tokens")


class Scrapes:
    """Scrapes of an exporter's page until the load ends; each is checked."""

    def __init__(self, exporter: ExporterProcess, *, may_replace: bool = False) -> None:
        self.count = 0
        self._exporter = exporter
        self._may_replace = may_replace
        self._before: dict[object, float] = {}
        self._is_over = False

    @contextlib.asynccontextmanager
    async def during(self) -> Any:
        """Scrape while the body runs."""
        task = asyncio.create_task(self._run())
        yield
        self._is_over = True
        await task

    async def _run(self) -> None:
        while not self._is_over:
            self.check(parse(await self._exporter.page()))

    def check(self, page: Page) -> None:
        """Assert that the sums over tenants are SGLang's own totals, and that no series decreases."""
        if "sidestep_tenant_requests" not in page:
            return
        self.count += 1
        for family, own in TOTALS.items():
            assert value(page, family) == sum(value(page, name) for name in own), family
        prompts = sum(value(page, family) for family in PROMPTS)
        assert prompts == value(page, "sglang:prompt_tokens")
        now: dict[object, float] = {
            (name, labels): number
            for name, family in page.items()
            if name.startswith("sidestep_tenant_")
            for labels, number in family.samples.items()
        }
        if not self._may_replace:
            assert {key: n for key, n in self._before.items() if now[key] < n} == {}
        self._before = now


def named(groups: Iterable[Iterable[Ask]]) -> Iterator[list[Ask]]:
    """Yield the requests with an id and a cache salt each, and a priority."""
    number = 0
    for group in groups:
        found: list[Ask] = []
        for ask in group:
            tenant = TENANTS[number % len(TENANTS)]
            own = {
                "rid": f"{tenant}-{number}",
                "cache_salt": tenant,
                "priority": number % 3,
            }
            found.append(dataclasses.replace(ask, options={**own, **ask.options}))
            number += 1
        yield found


async def leave_early(client: Client, asks: Iterable[Ask], seconds: float) -> None:
    """Ask, and leave after ``seconds``."""

    async def ask_one(ask: Ask) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.ask(ask), seconds)

    await asyncio.gather(*map(ask_one, asks))


@pytest.mark.parametrize("mode", ["beside", "instead"])
async def test_records_equal_the_clients_own_books(
    mode: str, sglang: SglangSite, tmp_path: Path
) -> None:
    """Each request has one record, with the tokens of its usage; tenants add up at every scrape."""
    log = tmp_path / "requests.jsonl"
    environ = {**RETRACTING, **IDENTITY, "SIDESTEP_SGLANG_MODE": mode}
    # Of the requests that are left early, some find the queue full.
    limits = ["--max-queued-requests", "20"]
    server = sglang.server(["--enable-priority-scheduling", *limits], environ)
    flags = ("--requests.log", str(log), "--tenants.by", "cache-salt", "--tenants.show", "acme")
    async with sglang.with_exporter(server, *flags) as exporter:
        await settled_alone(exporter, lambda page: value(page, "sglang:num_requests") > 0)
        async with Client(server.base) as client:
            scrapes = Scrapes(exporter)
            asked: list[Ask] = []
            answers: list[Answer] = []
            async with scrapes.during():
                invalid = [Ask(client.text(9), 4, options={"temperature": -1.0}) for _ in range(3)]
                for group in named([invalid, *client.mixed_asks(streams=2)]):
                    asked += group
                    answers += await client.ask_all(group)
                early = [
                    Ask(client.text(60), 1200, stream=n % 2 == 0, options=_early(n))
                    for n in range(40)
                ]
                await leave_early(client, early, 1.0)
                await settled_alone(exporter, idle)
        expected = sum(map(_samples, asked)) + len(early)

        async def is_complete() -> bool:
            return len([r for r in lines(log) if _is_clients(r)]) >= expected

        with contextlib.suppress(AssertionError):
            await until(is_complete, 30.0, "a record for each request")
        page = await settled_alone(exporter, idle)
        scrapes.check(page)
    records = [record for record in lines(log) if _is_clients(record)]
    ends = Counter(record["reason"] for record in records)
    print(  # noqa: T201 - for the one who runs it
        f"\nsglang requests, {mode}: {len(records)} records of {expected} requests {dict(ends)},"
        f" {scrapes.count} scrapes, {sum(bool(r['preemptions']) for r in records)} retracted,"
        f" {sum(r['reason'] == 'abort' and not r['output_tokens'] for r in records)} aborted unserved"
    )
    assert len(records) == expected
    assert scrapes.count > 20
    assert len({record["key"] for record in records}) == len(records)
    _assert_books(asked, answers, records)
    assert_nothing_refused(page)


def _early(number: int) -> dict[str, Any]:
    tenant = TENANTS[number % len(TENANTS)]
    return {"ignore_eos": True, "rid": f"{tenant}-early{number}", "cache_salt": tenant}


def _is_clients(record: dict[str, Any]) -> bool:
    """Return whether a record is of this test's client, and not of the server's own warm-up."""
    return record["tenant"] in TENANTS


def _samples(ask: Ask) -> int:
    return int(ask.options.get("n", 1))


def _assert_books(asked: list[Ask], answers: list[Answer], records: list[dict[str, Any]]) -> None:
    by_id = {record["id"]: record for record in records}
    for ask, answer in zip(asked, answers, strict=True):
        if _samples(ask) > 1:
            continue
        record = by_id[ask.options["rid"]]
        if answer.refused:
            assert (record["reason"], record["refused"]) == ("refused", "bad_request")
        elif answer.left:
            assert record["output_tokens"] > 0
        else:
            assert [record["reason"]] == answer.reasons
            assert record["output_tokens"] == answer.tokens
            assert record["prompt_tokens"] == answer.prompt_tokens
            assert 0 < record["ttft_seconds"] <= record["e2e_seconds"] + 0.001
            assert record["e2e_seconds"] <= answer.seconds + 0.05
            parts = [record[f"{part}_seconds"] for part in ("queue", "prefill", "decode")]
            assert sum(parts) <= record["e2e_seconds"] + 0.01
        assert record["tenant"] == ask.options["cache_salt"]
        assert record["priority"] == ask.options["priority"]
        assert record["max_tokens"] == ask.tokens
    parallel = [(ask, a) for ask, a in zip(asked, answers, strict=True) if _samples(ask) > 1]
    named_ids = {ask.options.get("rid") for ask in asked}
    samples = [r for r in records if r["id"] not in named_ids and "early" not in r["id"]]
    assert len(samples) == sum(_samples(ask) for ask, _ in parallel)
    assert sum(r["output_tokens"] for r in samples) == generated(a for _, a in parallel)
    assert Counter(r["sample"] for r in samples) == {0: len(parallel), 1: len(parallel)}
    assert reasons(a for _, a in parallel) == Counter(r["reason"] for r in samples)
    assert any(record["preemptions"] for record in records)
    assert any(record["cached_tokens"] for record in records)


async def test_tenants_by_custom_label(sglang: SglangSite, tmp_path: Path) -> None:
    """Without an identity; one of three teams has series of its own, and the sums are equal all the same."""
    log = tmp_path / "requests.jsonl"
    server = sglang.server(["--tokenizer-metrics-allowed-custom-labels", "team"])
    flags = ("--requests.log", str(log), "--tenants.by", "header:team", "--tenants.max", "1")
    teams = ["red", "blue", "green"]
    async with sglang.with_exporter(server, *flags) as exporter:
        scrapes = Scrapes(exporter, may_replace=True)
        async with Client(server.base) as client, scrapes.during():
            asks = [
                Ask(
                    client.text(30), 20, headers={CUSTOM_LABELS: json.dumps({"team": teams[n % 3]})}
                )
                for n in range(60)
            ]
            answers = await client.ask_all(asks)
        await until(lambda: len(lines(log)) >= len(asks), 30.0, "a record for each request")
        scrapes.check(parse(await exporter.page()))
    records = [record for record in lines(log) if record["tenant"] in teams]

    assert Counter(record["tenant"] for record in records) == dict.fromkeys(teams, 20)
    assert sum(record["output_tokens"] for record in records) == generated(answers) == 1200
    assert all(record["id"] == "" for record in records)
