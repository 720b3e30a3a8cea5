"""`sidestep inject`: what it adds to which pods of real manifests, and that it changes nothing else."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from command_line import one_line, sidestep
from injection import assert_injected
from manifests import KUSTOMIZE, ROOT, Resource, environ, named, pods, resources, template
from schemas import validate
from sidestep_tools.doctor.manifests.checks import check

DATA = ROOT / "tests" / "data" / "deployments"
OVERLAYS = [
    path
    for path in KUSTOMIZE.glob("overlays/**/*.yaml")
    if path.name in {"vllm.yaml", "sglang.yaml", "llm.yaml", "modelserver.yaml", "stack.yaml"}
]
TWO_ENGINES = DATA / "two_engines.json"
FILES = sorted({*DATA.iterdir(), *OVERLAYS} - {TWO_ENGINES})
ENGINE = """\
kind: Pod
metadata: {name: pod}
spec:
  containers:
  - name: engine
    image: vllm/vllm-openai:v0.33.0
"""


def output(text: str, *flags: str) -> str:
    """Return what the command prints for the manifests in ``text``, with the image of a checkout."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        done = sidestep("inject", "-f", file.name, "--image=sidestep:dev", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def injected(text: str, *flags: str) -> list[Resource]:
    """Return the resources with what was added."""
    return flat(output(text, *flags))


def flat(text: str) -> list[Resource]:
    """Return the resources of a text, and those of its lists."""
    return [each for one in resources(text) for each in one.get("items", [one])]


def specification(resource: Resource) -> Resource:
    """Return the only pod's specification of a resource."""
    ((_, found),) = pods(resource)
    return found


def job(spec: Resource) -> Resource:
    """Return a job with this specification of a pod."""
    return {"kind": "Job", "spec": {"template": {"spec": spec}}}


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_engines_get_all_and_keep_their_own(file: Path, tmp_path: Path) -> None:
    """A changed pod has all of the template and is otherwise as it was; doctor finds nothing to mend."""
    text = output(file.read_text())
    (tmp_path / "after.yaml").write_text(text)
    codes = {each.code for each in check([str(tmp_path / "after.yaml")])}

    changed = 0
    for was, now in zip(flat(file.read_text()), flat(text), strict=True):
        assert list(was) == list(now)
        for (_, before), (_, pod) in zip(pods(was), pods(now), strict=True):
            if before != pod:
                changed += 1
                assert_injected(job(before), job(pod), template())
    # A worker of Ray is no engine.
    assert (
        (changed, codes) == (0, {"SD502"}) if file.stem == "workers_only" else changed and not codes
    )
    assert output(text) == text


def test_the_outputs_are_valid(tmp_path: Path) -> None:
    """By the schemas of Kubernetes, and of the kinds that hold pods."""
    found = [one for file in FILES for one in injected(file.read_text())]
    validate([one for one in found if any(pods(one))], tmp_path)


def test_standard_input_is_read_without_a_file() -> None:
    """As Helm's post-renderer gives it; the lines on what was done are on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "sidestep", "inject", "--image=sidestep:dev"],
        input=ENGINE,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == output(ENGINE)
    assert (
        done.stderr == "sidestep: Pod/pod: added the exporter, and the plugin to container engine\n"
    )


def test_several_files_are_one_stream(tmp_path: Path) -> None:
    """Separators are between the files, even if one ends without a newline."""
    files = [tmp_path / name for name in ("map.yaml", "pod.yaml", "last.yaml")]
    for file, text in zip(files, ("kind: ConfigMap", ENGINE, "---\nkind: Secret\n"), strict=True):
        file.write_text(text)
    done = sidestep("inject", *(word for each in files for word in ("-f", each)))

    assert [each["kind"] for each in resources(done.stdout)] == ["ConfigMap", "Pod", "Secret"]
    assert "sidestep-plugin" in done.stdout
    assert "---\n---" not in done.stdout


def test_what_is_added_is_what_the_component_adds() -> None:
    """The package has the same text as the component, which the package does not contain."""
    file = importlib.resources.files("sidestep_tools.inject").joinpath("pod.yaml")
    assert file.read_text() == (KUSTOMIZE / "parts" / "pod" / "pod.yaml").read_text()


def test_every_engine_of_a_pod_gets_the_plugin() -> None:
    """There is one exporter in the pod, and no two engines have one namespace, as they may serve the same model."""
    found = injected(TWO_ENGINES.read_text())
    pod = specification(found[0])
    chat, embed = (environ(each, {"metadata.name": "pod-0"}) for each in pod["containers"])

    for engine in pod["containers"]:
        assert named(engine["env"], "PYTHONPATH")["value"].startswith("/opt/sidestep/plugin")
        assert named(engine["volumeMounts"], "sidestep-socket")
    assert len([each for each in pod["initContainers"] if each["name"] == "sidestep"]) == 1
    assert chat["SIDESTEP_NAMESPACE"] == "pod-0"
    assert embed["SIDESTEP_NAMESPACE"] == "pod-0:embed"


def test_documents_without_an_engine_pass_as_they_are() -> None:
    """Comments, order and style included; of a patched one the comments at its beginning."""
    other = (
        "# Source: chart/templates/map.yaml\nkind: ConfigMap # theirs\ndata: {b: 'on', a: |\n    ---x\n}\n"
        "---\n# empty\n--- # again\nkind: Pod\nspec: {containers: [{name: proxy, image: envoy}]}\n"
    )
    head = "---\n# Source: chart/templates/pod.yaml\n"
    text = output(f"{other}{head}{ENGINE}---\nkind: Secret\n...\n")

    assert text.startswith(f"{other}{head}kind: Pod\n")
    assert text.endswith("---\nkind: Secret\n...\n")
    assert output("") == ""


def test_values_keep_their_meaning() -> None:
    """Texts that other readers of YAML take for numbers keep their quotes, and aliases their values."""
    text = output(
        f"""{ENGINE}    env: &env
    - {{name: A, value: "1e3"}}
    - {{name: B, value: '0o17'}}
    - {{name: C, value: "on"}}
    - name: D
      value: |
        two
        lines
  - name: other
    image: proxy
    env: *env
metadata: {{name: pod, annotations: {{date: 2024-01-01}}}}
""".replace("metadata: {name: pod}\n", "", 1)
    )
    (found,) = resources(text)
    other = found["spec"]["containers"][1]

    assert 'value: "1e3"' in text
    assert "value: '0o17'" in text
    assert "'2024-01-01'" in text
    assert [each["value"] for each in other["env"]] == ["1e3", "0o17", "on", "two\nlines\n"]


def test_variables_and_options_of_the_engine() -> None:
    """Lists of plugins are extended, and SGLang gets its option; what a person has set stays."""
    text = ENGINE.replace("vllm/vllm-openai:v0.33.0", "lmsysorg/sglang:v0.5.23")
    (found,) = injected(
        f"""{text}    command: [python3, -m, sglang.launch_server]
    args: [--model-path=tiny]
    env:
    - {{name: SGLANG_PLUGINS, value: theirs}}
    - {{name: SIDESTEP_NAMESPACE, valueFrom: {{fieldRef: {{fieldPath: metadata.uid}}}}}}
  securityContext: {{supplementalGroups: [65532]}}
""",
        "--mode=instead",
        "--image=registry.example/sidestep:1",
    )
    pod = specification({**found, "kind": "Job", "spec": {"template": found}})
    (engine,) = pod["containers"]

    assert engine["args"] == ["--model-path=tiny", "--enable-metrics"]
    assert named(engine["env"], "SGLANG_PLUGINS")["value"] == "theirs,sidestep"
    assert named(engine["env"], "SIDESTEP_SGLANG_MODE")["value"] == "instead"
    assert "uid" in str(named(engine["env"], "SIDESTEP_NAMESPACE"))
    assert pod["securityContext"] == {"supplementalGroups": [65532]}
    assert {each["image"] for each in pod["initContainers"]} == {"registry.example/sidestep:1"}


def test_the_grace_period_lasts_for_engine_and_exporter() -> None:
    """The period is raised if it has to be."""
    (found,) = injected(f"{ENGINE}    args: [--shutdown-timeout=30]\n")
    assert found["spec"]["terminationGracePeriodSeconds"] == 48


@pytest.mark.parametrize(
    "change",
    [
        ("metadata: {name: pod}", 'metadata: {name: pod, labels: {sidestep/inject: "false"}}'),
        ("v0.33.0", "v0.33.0\n    env: [{name: SIDESTEP_ENDPOINT, value: 'tcp://node:9858'}]"),
        ("vllm/vllm-openai:v0.33.0", "nvcr.io/nvidia/tritonserver:25.01-py3"),
        ("vllm/vllm-openai:v0.33.0", "vllm/vllm-openai:v0.33.0\n    command: [python3, fetch.py]"),
    ],
)
def test_pods_that_stay(change: tuple[str, str]) -> None:
    """Those that a label exempts, that send elsewhere, that are polled, and that run something else."""
    text = ENGINE.replace(*change)
    assert output(text) == text


def test_the_difference() -> None:
    """The diff has what is added, without a change of style."""
    text = output(f"# A comment\n{ENGINE}", "--diff")
    lines = text.splitlines()

    assert lines[0].startswith("--- ")
    assert "+    - name: PYTHONPATH" in lines
    assert not [line for line in lines if line.startswith("-") and line != lines[0]]


@pytest.mark.parametrize(
    "change",
    [
        ("vllm/vllm-openai:v0.33.0", "vllm/vllm-openai-rocm:v0.20"),
        ("vllm/vllm-openai:v0.33.0", "registry.example:5000/a/vllm-cpu-release-repo@sha256:0"),
        ("vllm/vllm-openai:v0.33.0", "own\n    command: [sidestep, run, --, vllm, serve, tiny]"),
    ],
    ids=["rocm", "cpu", "run"],
)
def test_pods_that_are_found(change: tuple[str, str]) -> None:
    """By the names of vLLM's images, and by the command even if `sidestep run` starts it."""
    (found,) = injected(ENGINE.replace(*change))
    assert named(found["spec"]["containers"][0]["env"], "SIDESTEP_ENDPOINT")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("kind: Pod\nspec: {containers: [}\n", "line 2: is not YAML"),
        (f"{ENGINE}---\n{ENGINE}---\nspec: {{containers: [}}\n", "pod.yaml: line 15: is not YAML"),
        (f"{ENGINE}    args: {{{{ toYaml .args }}}}\n", "render its chart by `helm template`"),
        (f"{ENGINE}    name: \udcff\n", "pod.yaml: line 7: is not UTF-8"),
        (f"{ENGINE}  volumes: [{{name: sidestep-socket}}]\n", "Pod/pod: it has sidestep-socket"),
        (f"{ENGINE}  - name: sidestep\n    image: proxy\n", "Pod/pod: it has sidestep already"),
        (
            f"{ENGINE}    volumeMounts: [{{name: run, mountPath: /run/sidestep}}]\n",
            "Pod/pod: it has /run/sidestep",
        ),
        (f"{ENGINE}    env: [{{name: PYTHONPATH, valueFrom: {{}}}}, 7]\n", "Pod/pod: Expected"),
        (
            f"{ENGINE}    env: [{{name: PYTHONPATH, valueFrom: {{x: y}}}}]\n",
            "Pod/pod: PYTHONPATH has",
        ),
    ],
)
def test_what_cannot_be_patched_is_an_error(text: str, what: str, tmp_path: Path) -> None:
    """Of one line, and nothing is printed: Helm then applies nothing."""
    file = tmp_path / "pod.yaml"
    file.write_text(text, errors="surrogateescape")
    one_line(sidestep("inject", "-f", file), 2, what)


def test_a_list_of_kustomize_functions() -> None:
    """The command reads and writes what kustomize gives to an exec function."""
    text = f"kind: ResourceList\nfunctionConfig: {{}}\nitems:\n- {ENGINE.replace(chr(10), chr(10) + '  ')}"
    (engine,) = injected(text)
    assert "sidestep" in str(engine["spec"]["initContainers"])
