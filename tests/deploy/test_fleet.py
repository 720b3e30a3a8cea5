"""Prometheus agents that write into one store, as docs/fleet.md sets them up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from manifests import ROOT
from prometheus_server import VERSIONS
from promtool import PROMTOOLS, run

FLEET = ROOT / "deploy" / "fleet"


@pytest.mark.parametrize("version", VERSIONS)
def test_promtool_accepts_agent_and_store(version: str, tmp_path: Path) -> None:
    """The agent's configuration is one of agent mode."""
    if PROMTOOLS[version] is None:
        pytest.skip(f"there is no promtool {version}")
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "all.json").write_text('[{"targets": ["127.0.0.1:9857"]}]')
    agent = tmp_path / "agent.yml"
    agent.write_text((FLEET / "agent.yml").read_text())
    for flags, file in ((["--agent"], agent), ([], FLEET / "store.yml")):
        done = run("check", "config", *flags, file, binary=PROMTOOLS[version])
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_target_is_one_agents() -> None:
    """Of two agents, the second keeps the other shard, and both write to the store of the document."""
    agent = yaml.safe_load((FLEET / "agent.yml").read_text())
    hashed, kept = agent["scrape_configs"][0]["relabel_configs"]

    assert (hashed["action"], hashed["modulus"], hashed["target_label"]) == (
        "hashmod",
        2,
        kept["source_labels"][0],
    )
    assert (kept["action"], kept["regex"]) == ("keep", "0")
    (write,) = agent["remote_write"]
    assert re.fullmatch(r"http://\S+:9090/api/v1/write", write["url"])
