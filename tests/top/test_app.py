"""The terminal view under textual's pilot: a screen of a given size, and keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from textual.pilot import Pilot

from exporters import until
from sidestep_tools.top.app import TopApp
from sidestep_tools.top.report import TargetReport
from sidestep_tools.top.screens import DetailsScreen, HelpScreen
from sidestep_tools.top.table import EngineTable
from top_reports import DOWN, URL, Reports, engine

NEVER = 3600.0
"""An interval after which no test waits: polls are asked for by a key."""


class Screen:
    """The view of a source, with what it shows."""

    def __init__(self, app: TopApp, pilot: Pilot[None], source: Reports) -> None:
        self.app = app
        self.pilot = pilot
        self.source = source

    @property
    def lines(self) -> list[str]:
        """Text of the lines on the screen."""
        return [strip.text.rstrip() for strip in self.app.screen._compositor.render_strips()]

    @property
    def text(self) -> str:
        """Text of the screen."""
        return "\n".join(self.lines)

    @property
    def engines(self) -> list[str]:
        """Names of the engines on the screen, in their order."""
        words = [line.strip("> !✗●○▲■□").split(" ")[0] for line in self.lines]
        return [word for word in words if word.startswith("pod-")]

    @property
    def table(self) -> EngineTable:
        """The table."""
        return self.app.query_one(EngineTable)

    @property
    def chosen(self) -> str:
        """The line under the cursor."""
        (line,) = (line for line in self.lines if line.startswith(">"))
        return line

    async def press(self, *keys: str) -> None:
        """Press keys, and wait until they have been handled."""
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def shows(self, text: str) -> None:
        """Wait until the text is on the screen."""
        await until(lambda: text in self.text, 10, f"{text!r} in\n{self.text}")

    async def poll(self) -> None:
        """Poll once, and wait until the report is on the screen."""
        before, polls = self.app.report, self.source.polls
        await self.pilot.press("r")
        await until(lambda: self.source.polls > polls and self.app.report is not before, 10)
        await self.pilot.pause()


@contextlib.asynccontextmanager
async def view(
    source: Reports, size: tuple[int, int] = (80, 24), interval: float = NEVER
) -> AsyncIterator[Screen]:
    """Show a source on a screen of that size."""
    app = TopApp(source, interval)
    async with app.run_test(size=size) as pilot:
        if source.answering.is_set():
            await until(lambda: app.report is not None, 10)
        await pilot.pause()
        yield Screen(app, pilot, source)


async def test_first_screen() -> None:
    """The screen has the verdict, the sums, and a line for each engine; 0 is not unknown.

    A rank that repeats the requests of another one is not in the sums.
    """
    quiet = engine(2, waiting=None, running=0.0, ttft=None, state=None)
    rank = engine(3, summed=False)
    async with view(Reports(engine(1), quiet, rank)) as screen:
        assert "● all 3 engines are well: requests running 11, waiting 1" in screen.text
        assert "running 11  waiting 1  tokens/s 2.00k in 1.00k out" in screen.text
        one, two, _ = (line for line in screen.lines if "pod-" in line)
        assert one.split()[:8] == [">●", "pod-1", "ok", "11", "1", "1.00k", "501", "200ms"]
        assert two.split()[:7] == ["pod-2", "--", "0", "--", "1.00k", "502", "--"]


@pytest.mark.parametrize(
    ("width", "last"),
    [(40, "KV"), (60, "KV"), (80, "KV"), (100, "HITS"), (120, "PREEMPT"), (200, "LOAD")],
)
async def test_widths(width: int, last: str) -> None:
    """Columns leave by their importance, and the ones that stay are whole."""
    rows = [engine(number, engine=f"vllm-llama-{number:0>20}") for number in range(40)]
    async with view(Reports(*rows), (width, 24)) as screen:
        (head,) = (line for line in screen.lines if "ENGINE" in line)
        assert head.split()[-1] == last
        assert {"ENGINE", "STATE▲", "WAIT"} <= set(head.split())
        lines = [line[: width - 1].rstrip() for line in screen.lines if "vllm-" in line]
        assert len(lines) > 10
        assert {len(line) for line in lines} == {len(head)}
        assert all(len(line) <= width for line in screen.lines)


async def test_sort() -> None:
    """Keys choose the column and the direction; unknown values are last in both."""
    rows = [engine(2), engine(10), engine(1), engine(3, running=None)]
    async with view(Reports(*rows)) as screen:
        assert screen.engines == ["pod-1", "pod-2", "pod-3", "pod-10"]
        while screen.app.order.key != "engine":
            await screen.press("s")
        await screen.press("S")
        assert screen.engines == ["pod-10", "pod-3", "pod-2", "pod-1"]
        while screen.app.order.key != "running":
            await screen.press("s")
        assert "▼RUN" in screen.text
        assert screen.engines == ["pod-10", "pod-2", "pod-1", "pod-3"]
        await screen.press("S")
        assert "▲RUN" in screen.text
        assert screen.engines == ["pod-1", "pod-2", "pod-10", "pod-3"]
        await screen.press("left")
        assert screen.app.order.key == "state"


async def test_sort_without_columns() -> None:
    """A terminal of one column has room for none of the table's."""
    async with view(Reports(engine(1)), size=(1, 24)) as screen:
        await screen.press("s", "left")
        assert screen.table.columns == []


async def test_click() -> None:
    """A click on a heading sorts by it, and a second one reverses; a click on a line opens it."""
    async with view(Reports(*map(engine, range(4)))) as screen:
        y = next(y for y, line in enumerate(screen.lines) if "WAIT" in line)
        x = screen.lines[y].index("WAIT")
        await screen.pilot.click(offset=(x, y))
        await screen.pilot.pause()
        assert screen.engines == ["pod-3", "pod-2", "pod-1", "pod-0"]
        await screen.pilot.click(offset=(x, y))
        await screen.pilot.pause()
        assert screen.engines == ["pod-0", "pod-1", "pod-2", "pod-3"]
        await screen.pilot.click(offset=(4, y + 3))
        await screen.pilot.pause()
        assert isinstance(screen.app.screen, DetailsScreen)
        await screen.press("escape")
        assert "pod-2" in screen.chosen


async def test_filter() -> None:
    """The table keeps what contains the text, while it is typed and until Escape."""
    rows = [engine(1), engine(2, model="Qwen"), engine(3, state="idle")]
    async with view(Reports(*rows)) as screen:
        await screen.press("slash", *"qWeN")
        assert screen.engines == ["pod-2"]
        assert "filter 'qWeN': 1 of 3" in screen.lines[0]
        await screen.press("enter")
        await screen.poll()
        assert screen.engines == ["pod-2"]
        await screen.press("escape")
        assert screen.engines == ["pod-1", "pod-2", "pod-3"]
        await screen.press("slash", *"idle", "escape")
        assert screen.engines == ["pod-1", "pod-2", "pod-3"]
        await screen.press("q")
        assert not screen.app.is_running


async def test_details() -> None:
    """Enter shows all percentiles and curves of an engine, and they follow the polls."""
    source = Reports(engine(1), engine(2, model="Qwen"))
    async with view(source, (80, 24)) as screen:
        await screen.press("down", "enter")
        await screen.shows("Qwen, vllm, http://10.0.0.1:9400")
        assert "TTFT                  100ms    200ms    300ms       40" in screen.text
        assert "30 ended, 0 of them aborted; 2 preemptions" in screen.text
        assert "TTFT p95              200ms" in screen.text
        source.targets = [TargetReport(url=URL, engines=[engine(1), engine(2, running=77.0)])]
        await screen.poll()
        assert "77 running, 2 waiting" in screen.text
        source.targets = [TargetReport(url=URL, engines=[engine(1)])]
        await screen.poll()
        assert "not in the last answer" in screen.text
        await screen.press("escape")
        assert not isinstance(screen.app.screen, DetailsScreen)
        assert "pod-1" in screen.chosen


async def test_failed_targets() -> None:
    """A target that fails is a line with its reason; its engines stay, and do not count."""
    source = Reports(engine(1))
    source.targets += [
        TargetReport(url=DOWN, error="timed out after 2 s", engines=[engine(2)], age=31.0),
        TargetReport(url="http://10.0.0.3", error="401 Unauthorized: give --user"),
    ]
    async with view(source) as screen:
        assert "2 of 3 targets failed" in screen.lines[0]
        assert f"✗ {DOWN}: timed out after 2 s (last answer 31s ago)" in screen.text
        assert "✗ http://10.0.0.3: 401 Unauthorized: give --user" in screen.text
        assert " ! pod-2" in screen.text
        assert "running 11 " in screen.text
        await screen.press("enter")
        await screen.shows("✗ timed out after 2 s; its last answer is 31s old")


async def test_pause() -> None:
    """While paused nothing is asked but by a key."""
    source = Reports(engine(1))
    async with view(source, interval=0.05) as screen:
        await until(lambda: source.polls > 3)
        await screen.press("p")
        assert "PAUSED" in screen.lines[0]
        source.targets = [TargetReport(url=URL, engines=[engine(1, running=99.0)])]
        polls = source.polls
        await asyncio.sleep(0.2)
        assert source.polls == polls
        assert "running 11 " in screen.text
        await screen.poll()
        assert "running 99 " in screen.text
        assert source.polls == polls + 1
        await screen.press("p")
        await until(lambda: source.polls > polls + 3)
        assert "PAUSED" not in screen.lines[0]


async def test_slow_poll() -> None:
    """Keys work while targets do not answer, and the title says so."""
    source = Reports(engine(1), engine(2))
    source.answering.clear()
    async with view(source, interval=0.01) as screen:
        assert "waiting for the first answer" in screen.text
        await screen.press("question_mark")
        assert isinstance(screen.app.screen, HelpScreen)
        await screen.press("escape")
        source.answering.set()
        await screen.shows("pod-2")
        source.answering.clear()
        await screen.press("left", "S", "down")
        assert screen.engines == ["pod-2", "pod-1"]
        await screen.shows("no answer for 3s")
        assert source.polls > 1


async def test_cursor_survives() -> None:
    """The cursor stays on its engine when the order changes, and the scroll position stays."""
    source = Reports(*map(engine, range(256)))
    async with view(source) as screen:
        await screen.press("pagedown", "pagedown", "up")
        chosen, top = screen.chosen.split()[1], screen.table.lines.scroll_offset.y
        assert top > 0
        source.targets = [
            TargetReport(url=URL, engines=[engine(n, running=float(n % 7)) for n in range(256)])
        ]
        await screen.poll()
        assert screen.chosen.split()[1] == chosen
        assert screen.table.lines.scroll_offset.y == top
        while screen.app.order.key != "running":
            await screen.press("s")
        assert screen.chosen.split()[1] == chosen
        await screen.press("G")
        assert screen.table.lines.highlighted == 255
        assert screen.engines[-1] in screen.chosen
        source.targets = [TargetReport(url=URL, engines=[engine(n) for n in range(3)])]
        await screen.poll()
        assert screen.engines == ["pod-2", "pod-1", "pod-0"]
        assert "pod-0" in screen.chosen


async def test_help() -> None:
    """The help explains keys and columns; keys that scroll do not close it, others do."""
    async with view(Reports(engine(1)), (80, 60)) as screen:
        await screen.press("question_mark")
        await screen.shows("filter by engine, model, state or target")
        for title in ("ENGINE", "TTFT", "PREEMPT", "LOAD", "--"):
            assert title in screen.text
        await screen.press("down", "j")
        assert isinstance(screen.app.screen, HelpScreen)
        await screen.press("q")
        assert not isinstance(screen.app.screen, HelpScreen)
        assert screen.app.is_running


async def test_hostile_names() -> None:
    """Names with control sequences and markup are text."""
    row = engine(
        1, engine="pod-1\x1b[31m\n[red]x[/]", model="[bold", reason="[/]\x07", state="slow"
    )
    async with view(Reports(row), (200, 24)) as screen:
        assert r"pod-1\u001b[31m\n[red]x[/]" in screen.text
        assert not any(char in screen.text for char in "\x1b\x07")
        await screen.press("enter")
        await screen.shows("[bold, vllm")
        await screen.press("escape", "slash", *"[red]")
        assert "filter '[red]'" in screen.lines[0]


async def test_no_engines() -> None:
    """Without engines the view says so, and keys do no harm."""
    async with view(Reports()) as screen:
        assert "▲ no engine is connected" in screen.text
        await screen.press("down", "G", "enter", "s", "S", "pageup")
        assert "running --  waiting --" in screen.text


async def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR the same is said without colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    full = engine(2, kv_cache_usage=1.0, waiting=9.0)
    async with view(Reports(engine(1), full)) as screen:
        assert "▲ engine pod-2 is full" in screen.text
        assert ">▲ pod-2" in screen.text
        assert "━━━ 100%" in screen.text
