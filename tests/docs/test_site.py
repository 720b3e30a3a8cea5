"""The documents as a site, which mkdocs builds."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {
    "sidestep_kv_block_reuses": "metrics/vllm.html",
    "num_retracted_requests_total": "metrics/sglang.html",
    "SD101": "doctor.html",
}
"""Words of a search, and the page that has them."""

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


def test_the_site_can_be_searched_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Names of metrics and codes are in the index; scripts and styles are the site's own."""
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    for words, page in WORDS.items():
        assert [one for one in index if page in one["location"] and words in one["text"]], words
    loaded = re.findall(
        r'<(?:script|link|img)[^>]* (?:src|href)="(.*?)"', (tmp_path / "index.html").read_text()
    )
    assert loaded
    assert [url for url in loaded if url.startswith(("http", "//"))] == []


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """Its target is a page or a heading that does not exist."""
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    config = tmp_path / "mkdocs.yml"
    shutil.copy(ROOT / "mkdocs.yml", config)
    links = ("gone.md", "vllm.md#gone")
    with (tmp_path / "docs" / "faq.md").open("a") as page:
        page.writelines(f"\n[here]({link})\n" for link in links)
    done = build(config, tmp_path / "site")

    assert done.returncode != 0
    assert all(link in done.stderr for link in links)
