"""What it costs to pass on a page of another exporter: read it, and show it on ours; one core.

The page is like that of a Triton with 500 models. The peer is prometheus_client's reader of the
text format, which knows nothing of the page before. Slices are what the event loop is held for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.table import percentile, show
from sidestep.exposition.passthrough.page import Page
from sidestep.exposition.passthrough.registry import Passed
from sidestep.exposition.passthrough_text import pieces

MODELS, FAMILIES = 500, 8
ROUNDS = 15
CHUNK = 1 << 16


def main() -> None:
    """Measure and print the table."""
    rows = [
        measured("nothing changed", lambda _: page(0)),
        measured("one value in ten changed", lambda number: page(number, every=10)),
        measured("every value changed", page),
        measured("a model more", lambda number: page(0, models=MODELS + number)),
        measured("all is new", lambda _: page(0), anew=True),
    ]
    rows.append(["prometheus_client reads it", f"{peer():.1f}", "", ""])
    samples = MODELS * FAMILIES
    show(
        f"A page of {samples} samples, {len(page(0)) >> 10} KiB, passed on",
        ("what changed", "read ms", "longest slice ms", "show ms"),
        rows,
    )


def page(number: int, every: int = 1, models: int = MODELS) -> bytes:
    """A page; of one value in ``every`` ``number`` is a part."""
    return "".join(
        f"# HELP nv_inference_{family} Something of each model.\n"
        f"# TYPE nv_inference_{family} counter\n"
        + "".join(
            f'nv_inference_{family}{{model="some_model_{model}",version="1"}}'
            f" {model + number * (not model % every)}\n"
            for model in range(models)
        )
        for family in "abcdefgh"
    ).encode()


def measured(title: str, made: Callable[[int], bytes], *, anew: bool = False) -> list[str]:
    """A row: medians, and the longest slice of all."""
    passed = Passed(lambda: [frozenset({"x"})])
    target = passed.page((("pod", "a"),))
    read(target, made(0))
    reads, shows, longest = [], [], 0.0
    for number in range(1, ROUNDS + 1):
        text = made(number)
        if anew:
            target.hide()
        took, slice_ = read(target, text)
        started = time.thread_time()
        whole = b"".join(line for some in pieces(passed) for line in some)
        shows.append(time.thread_time() - started)
        reads.append(took)
        longest = max(longest, slice_)
        if len(whole) <= len(text):
            raise AssertionError("a label is missing")
    return [
        title,
        f"{percentile(reads, 0.5) * 1e3:.1f}",
        f"{longest * 1e3:.1f}",
        f"{percentile(shows, 0.5) * 1e3:.1f}",
    ]


def read(target: Page, text: bytes) -> tuple[float, float]:
    """Seconds of this thread that all of it took, and the longest slice."""
    reading = target.take([text[at : at + CHUNK] for at in range(0, len(text), CHUNK)])
    began = started = time.thread_time()
    longest = 0.0
    for _ in reading:
        now = time.thread_time()
        longest, started = max(longest, now - started), now
    now = time.thread_time()
    return now - began, max(longest, now - started)


def peer() -> float:
    """Milliseconds that prometheus_client takes to read the page."""
    text = page(0).decode()
    found = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        list(text_string_to_metric_families(text))
        found.append(time.thread_time() - started)
    return percentile(found, 0.5) * 1e3


if __name__ == "__main__":
    main()
