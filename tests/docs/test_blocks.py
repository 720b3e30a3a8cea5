"""Every block of code of README.md and of the quickstart runs, or is checked as far as it can be here.

Containers and clusters are not at hand: the real clients of Docker and Kubernetes read those commands, kustomize renders the
manifests, and the test looks at what would run. The unit of systemd is started without systemd.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from exporters import page_of_engine
from growing_page import growing_page
from manifests import TOOLS, defaults, named, resources, settings
from markdown_blocks import Block, blocks, inline_code
from promtool import PROMTOOL
from promtool import run as promtool
from readers_machine import ROOT, Machine, machines
from schemas import validate

pytestmark = pytest.mark.timeout(300)

README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
COMMANDS = re.compile(r"(?:make|pip|sidestep|docker|kubectl|uvx|git|curl) ")
ENDLESS = {"make demo": "page for people"}
"""Commands that serve until they are ended, and what they print once they serve."""


@pytest.fixture(scope="module")
def install() -> Iterator[Callable[[], Machine]]:
    """Return a function that returns a machine with a clone and engines' stand-ins."""
    with machines() as make:
        yield make


@pytest.fixture
def reader(install: Callable[[], Machine]) -> Iterator[Machine]:
    """Return a machine, and end all that was started on it."""
    made = install()
    yield made
    made.close()


def section(heading: str) -> list[Block]:
    """Return the blocks of a section of the quickstart."""
    lines = QUICKSTART.read_text().splitlines()
    begin = lines.index(f"## {heading}") + 1
    (end, *_) = [n for n, line in enumerate(lines, 1) if line.startswith("## ") and n > begin]
    return [block for block in blocks(QUICKSTART) if begin < block.line < end]


def run(reader: Machine, block: Block) -> None:
    """Run a block as a reader does who goes through the document from its beginning.

    Of a console each command is repeated until it prints what the block has. A file is saved where its first line says.
    """
    if block.text.strip() in ENDLESS:
        command = block.text.strip()
        reader.run(f"{command} & ENDLESS=$!")
        reader.wait_for(ENDLESS[command])
        reader.run("kill $ENDLESS; wait $ENDLESS || true")
    elif block.language == "sh":
        reader.run(block.text)
    elif block.language == "console":
        for command, output in re.findall(
            r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE
        ):
            reader.until(command, output.splitlines())
    elif block.language in ("yaml", "ini"):
        reader.save(block.text)
    elif block.language != "mermaid":
        pytest.fail(f"{block}: nothing checks a block of {block.language or 'no language'}")


def test_the_readmes_blocks_run(reader: Machine) -> None:
    """A reader looks at an engine that runs, and then connects one of vLLM and one of SGLang."""
    with growing_page(page_of_engine("page_main")) as url:
        reader.page_port = int(url.rpartition(":")[2].removesuffix("/metrics"))
        for block in blocks(README):
            run(reader, block)
    shown = (
        "curl -s http://127.0.0.1:9857/metrics | grep -E '^(sidestep_engine_up|sglang:realtime)'"
    )
    reader.until(shown, [
        'sidestep_engine_up{engine="0",model_name="MODEL",origin=""} 1.0',
        'sidestep_engine_up{engine="0",model_name="tiny",...} ...',
        'sidestep_engine_up{engine="...sglang/scheduler...",model_name="MODEL",origin=""} 1.0',
        'sglang:realtime_tokens_total{...model_name="MODEL"...} ...',
    ])  # fmt: skip


def test_the_readmes_exporter_has_its_directories(reader: Machine) -> None:
    """The socket is in the user's runtime directory, where other commands look for it, and the state below home."""
    (serve,) = [b for b in blocks(README) if b.language == "sh" and "sidestep serve" in b.text]
    reader.run(serve.text.partition("\n")[0])
    reader.wait_for(f"engines connect to ipc://{reader.home}/user/sidestep/ingest.ipc")
    reader.run("sidestep replay exporter/sidestep/data/vllm-aborts.rec.gz --speed max")
    assert (reader.home / ".local/state/sidestep/snapshot").is_file()


def test_commands_between_backticks_run(reader: Machine) -> None:
    """The commands in README.md's text make what they promise, and the targets of make exist."""
    found = {code for code in inline_code(README) if COMMANDS.match(code)}
    targets = {code.split()[1] for code in found if code.startswith("make ")}
    assert "demo" in targets
    for target in targets:
        reader.run(f"make --dry-run {target}")
    found -= {f"make {target}" for target in targets}

    assert found == {"sidestep run", "sidestep run --", "sidestep inject -f deploy.yaml"}
    deploy = "deploy/kustomize/overlays/vllm/vllm.yaml"
    reader.run(f"sidestep run --help && sidestep inject -f {deploy}")


def test_the_readme_is_short() -> None:
    """README has one screen and a half of text."""
    assert len(README.read_text().splitlines()) <= 150
    assert (
        len(re.sub(r"```.*?```|\]\(.*?\)", "", README.read_text(), flags=re.DOTALL).split()) <= 750
    )


def test_every_block_of_the_quickstart_is_in_a_section_that_runs() -> None:
    """No block is outside of the sections that the tests below go through."""
    run_here = [*section("On a machine"), *section("With Docker"), *section("In Kubernetes")]

    assert blocks(QUICKSTART) == run_here


def test_the_quickstart_on_a_machine(reader: Machine) -> None:
    """The unit's exporter serves a vLLM that has the plugin, and a recording; Prometheus accepts its configuration."""
    for block in section("On a machine"):
        run(reader, block)
    reader.until("curl -s http://127.0.0.1:9857/metrics", ['vllm:...{...model_name="tiny"...} ...'])
    unit = reader.home / "etc/systemd/system/sidestep.service"
    if analyze := shutil.which("systemd-analyze"):
        done = subprocess.run(
            [analyze, "verify", unit], capture_output=True, text=True, check=False
        )
        assert f"{unit.name}:" not in done.stderr
    if PROMTOOL:
        done = promtool("check", "config", reader.clone / "prometheus.yml")
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    shutil.which("docker") is None, reason="there is no docker to read the commands"
)
def test_the_quickstart_with_docker(reader: Machine) -> None:
    """Docker reads the commands, the image has what they name, and the engine gets what the plugin needs."""
    # In the container's place.
    reader.run("sidestep serve --ingest.endpoint ipc:///run/sidestep/ingest.ipc &")
    reader.wait_for("engines connect to")
    text = ""
    for block in section("With Docker"):
        run(reader, block)
        text += block.text
    exporter, engine = [shlex.split(line) for line in joined(text) if line.startswith("docker run")]
    image = exporter.index("sidestep:dev")
    config = settings({"args": exporter[image + 1 :]}, defaults())
    given = dict(one.split("=", 1) for one in option(engine, "-e"))
    mounts = [one.split(":")[:2] for one in option(exporter, "-v")]
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()

    assert [given["SIDESTEP_ENDPOINT"]] == list(config.ingest_endpoint)
    assert given["PYTHONPATH"] in dockerfile
    assert all(target in dockerfile for _, target in mounts)
    assert all(one.split(":")[:2] in mounts for one in option(engine, "-v"))


def option(command: list[str], flag: str) -> list[str]:
    """Return the values of an option of a command."""
    return [value for name, value in itertools.pairwise(command) if name == flag]


def joined(text: str) -> list[str]:
    """Return the lines of commands, with continued lines as one."""
    return text.replace("\\\n", " ").splitlines()


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="there is no kubectl to render manifests"
)
def test_the_quickstart_in_kubernetes(reader: Machine) -> None:
    """What is applied is the manifest with the sidecar, of the registry's image, and the mode is instead."""
    # In the pod's place, as it is reached by the forwarded port.
    reader.run("sidestep serve --ingest.endpoint ipc:///run/sidestep/ingest.ipc &")
    reader.wait_for("engines connect to")
    for block in section("In Kubernetes"):
        run(reader, block)
    applied = resources((reader.home / "applied.yaml").read_text())
    deployment, monitor = applied
    pod = deployment["spec"]["template"]["spec"]
    sidecar = named(pod["initContainers"], "sidestep")
    (engine,) = pod["containers"]

    assert sidecar["image"] == "registry.example/sidestep:dev"
    assert named(engine["env"], "SIDESTEP_VLLM_MODE")["value"] == "instead"
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == sidecar["ports"][0]["name"]
    if TOOLS.exists():
        validate(applied, reader.home)
