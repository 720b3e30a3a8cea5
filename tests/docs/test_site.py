"""The documents as a site: mkdocs builds it, and a browser searches it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.async_api import async_playwright, expect

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (.[dev])"
)


def build(config: Path, into: Path) -> subprocess.CompletedProcess[str]:
    """Build a site; only with its log on does mkdocs count warnings."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", config, "-d", into],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


class Quiet(SimpleHTTPRequestHandler):
    """A file server without a log."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the site and return its URL."""
    directory = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", directory)
    assert done.returncode == 0, done.stderr
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=directory)) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "links", [["gone.md", "vllm.md#gone"], ["/vllm.md"]], ids=["no target", "absolute"]
)
def test_a_broken_link_fails_the_build(links: list[str], tmp_path: Path) -> None:
    """A page or a heading that does not exist, and an absolute path, end the build."""
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    config = tmp_path / "mkdocs.yml"
    shutil.copy(ROOT / "mkdocs.yml", config)
    with (tmp_path / "docs" / "faq.md").open("a") as page:
        page.writelines(f"\n[here]({link})\n" for link in links)
    done = build(config, tmp_path / "site")

    assert done.returncode != 0
    assert "faq.md" in done.stderr
    assert all(link in done.stderr for link in links)


WORDS = {
    "sidestep_kv_block_reuses": "metrics/vllm.html",
    "num_retracted_requests_total": "metrics/sglang.html",
    "SD101": "doctor.html",
}
"""Words of a search, and the page to which it leads."""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt: chromium)")
async def test_a_search_leads_to_the_page(site: str) -> None:
    """Names of metrics and codes are found, and nothing is loaded from another host."""
    asked: list[str] = []
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for words, page in WORDS.items():
            tab = await browser.new_page()
            tab.on("request", lambda request: asked.append(request.url))
            await tab.goto(f"{site}/index.html")
            await tab.get_by_role("textbox", name="Search").click()
            # The page reads the words at each key, which ``fill`` does not press.
            await tab.get_by_role("textbox", name="Search").press_sequentially(words)
            found = tab.locator(f".md-search-result__link[href*='{page}']")
            await expect(found.first).to_be_attached(timeout=20_000)
        await browser.close()

    assert {url for url in asked if not url.startswith((site, "data:", "blob:"))} == set()
