"""Injection into manifests: the exporter as a sidecar, and the plugin in the engine's container."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import BinaryIO

import click
import msgspec
import yaml

from sidestep.config.yaml_reader import read_documents, read_nodes
from sidestep.errors import ConfigError
from sidestep.protocol.limits import escape
from sidestep_tools.doctor import environment
from sidestep_tools.doctor.manifests.containers import PodSpec
from sidestep_tools.doctor.manifests.pods import ENDPOINT, Engine, Pod
from sidestep_tools.doctor.manifests.reading import mapping, without_nulls
from sidestep_tools.inject import tree

PLUGIN = "/opt/sidestep/plugin"
NAMESPACE = "SIDESTEP_NAMESPACE"
GROUP = 65532
AFTER_ENGINE = 18
"""Seconds that the exporter may need after the engine: --shutdown.linger and a snapshot."""
KSERVE = {"template", "prefill.template", "worker", "prefill.worker"}
"""Places of engines' pods in the specification of an LLMInferenceService, whose images KServe fills in."""
PREFIX = re.compile(r"(?:---.*\n)?(?:[ \t]*(?:#.*)?\n)*")
"""Matches the separator of a document and the comments at its beginning."""


def documents(text: str) -> list[str]:
    """Split a stream into the texts of its documents."""
    return [each for each in re.split(r"(?m)^(?=---(?:\s|$))", text) if each]


class Injection:
    """One run of the command.

    Args:
        image: Image of the exporter.
        is_instead: Whether sidestep counts in the engines' place; otherwise the variable is not set.
    """

    def __init__(self, image: str, *, is_instead: bool) -> None:
        self.notes: list[str] = []
        """Lines that say what was done."""
        self._is_instead = is_instead
        text = resources.files("sidestep_tools.inject").joinpath("pod.yaml").read_text("utf-8")
        (template,) = read_documents(text)
        self._pod = template["template"]["spec"]
        for container in self._pod["initContainers"]:
            container["image"] = image

    def document(self, text: str, line: int = 0) -> tuple[str, str]:
        """Return a document before and after; as it is written if it has no engine.

        ``line`` is the number of the file's lines before it, so that errors name the line of the file.

        Raises:
            ConfigError: It is not YAML, or an engine in it cannot be patched.
        """
        if "containers" not in text or (root := read_nodes("\n" * line + text)) is None:
            return text, text
        before, after = tree.unshared(root), tree.unshared(root)
        changed = [self._resource(each) for each in _resources(after)]
        if not any(changed):
            return text, text
        prefix = PREFIX.match(text)
        start = prefix[0] if prefix else ""
        return start + tree.dump(before), start + tree.dump(after)

    def _resource(self, resource: yaml.Node) -> bool:
        """Patch the pods of a resource, and return whether there was one to patch."""
        value = mapping(tree.construct(resource))
        metadata, kind = mapping(value.get("metadata")), value.get("kind", "")
        if mapping(metadata.get("labels")).get("sidestep/inject") == "false":
            return False
        is_kserve = kind == "LLMInferenceService"
        found = False
        for path, node in _pods(resource, ()):
            if not is_kserve or ".".join(path[1:]) in KSERVE:
                place = [each for each in path if each not in ("spec", "template")]
                subject = " ".join((f"{kind}/{metadata.get('name', '')}", *place))
                found |= self._specification(node, subject, is_kserve=is_kserve)
        return found

    def _specification(self, node: yaml.Node, subject: str, *, is_kserve: bool) -> bool:
        """Patch a pod's specification, and return whether it has an engine that needs it."""
        try:
            spec = msgspec.convert(without_nulls(tree.construct(node)), PodSpec)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{subject}: {error}") from None
        pod = Pod(subject, spec, is_exempt=False)
        engines = [each for each in pod.engines if each.kind != "triton"]
        if is_kserve and not pod.engines and spec.containers:
            main = [each for each in spec.containers if each.name == "main"] or spec.containers
            engines = [Engine(pod, main[0], "vllm", is_server=False)]
        elif pod.engines and not engines:
            self.notes.append(
                f"{subject}: unchanged: Triton is polled, see deploy/kustomize/triton"
            )
        sends = [e for e in engines if any(v.name == ENDPOINT for v in e.container.env)]
        if engines and (pod.exporters or sends):
            self.notes.append(f"{subject}: unchanged: it has an exporter, or {ENDPOINT}")
            return False
        if not engines:
            return False
        self._refuse_taken(pod, engines)
        containers = [*spec.init_containers, *spec.containers]
        nodes = [*tree.items(node, "initContainers"), *tree.items(node, "containers")]
        for engine in engines:
            index = [each is engine.container for each in containers].index(True)
            name = engine.container.name
            self._add_to_engine(nodes[index], engine, name if engine is not engines[0] else "")
            self.notes.append(f"{subject}: added the exporter, and the plugin to container {name}")
        self._add_to_pod(node, engines)
        return True

    def _refuse_taken(self, pod: Pod, engines: Sequence[Engine]) -> None:
        """Refuse a pod that already has a name or a path of what is added."""
        ours, spec = self._pod, pod.spec
        (template,) = ours["containers"]
        for given, added in (
            ({each.name for each in spec.volumes}, {each["name"] for each in ours["volumes"]}),
            (
                {each.name for each in (*spec.init_containers, *spec.containers)},
                {each["name"] for each in ours["initContainers"]},
            ),
            (
                {mount.mount_path for each in engines for mount in each.container.volume_mounts},
                {each["mountPath"] for each in template["volumeMounts"]},
            ),
        ):
            for name in sorted(given & added):
                raise ConfigError(f"{pod.subject}: it has {name} already: remove or rename it")

    def _add_to_pod(self, node: yaml.Node, engines: Sequence[Engine]) -> None:
        # Before the pod's own: one of these may be the engine, or take long.
        tree.items(node, "initContainers")[:0] = map(tree.represent, self._pod["initContainers"])
        tree.items(node, "volumes").extend(map(tree.represent, self._pod["volumes"]))
        groups = tree.items(tree.inner(node, "securityContext"), "supplementalGroups")
        if str(GROUP) not in [each.value for each in groups]:
            groups.append(tree.represent(GROUP))
        given = [_options(each).get("--shutdown-timeout", "") for each in engines]
        needed = AFTER_ENGINE + max((int(each) for each in given if each.isdecimal()), default=0)
        if engines[0].pod.spec.termination_grace_period_seconds < needed:
            tree.put(node, "terminationGracePeriodSeconds", tree.represent(needed))

    def _add_to_engine(self, node: yaml.Node, engine: Engine, suffix: str) -> None:
        """Patch an engine's container; the suffix distinguishes it from a pod's first, which may serve the same model."""
        (template,) = self._pod["containers"]
        facts = environment.VLLM if engine.kind == "vllm" else environment.SGLANG
        known = {each.name: each.value_from for each in engine.container.env}
        given = {each.name: each.value for each in engine.container.env if not each.value_from}
        for name in (each for each in ("PYTHONPATH", facts.allowed) if known.get(each)):
            raise ConfigError(
                f"{engine.pod.subject}: {name} has a valueFrom: write its value instead"
            )
        mode = [{"name": facts.mode, "value": "instead"}] * self._is_instead
        added = [*template["env"], *mode]
        if suffix:
            names = {each["name"]: each for each in added}
            pod = {**names[NAMESPACE], "name": "POD_NAME"}
            names[NAMESPACE] = {"name": NAMESPACE, "value": f"$(POD_NAME):{suffix}"}
            added = [pod, *names.values()]
        variables = [each for each in added if each["name"] not in known]
        changed = {}
        if "PYTHONPATH" in given:
            changed["PYTHONPATH"] = ":".join(filter(None, (PLUGIN, given["PYTHONPATH"])))
        if not environment.Start(facts, given).allows_plugin:
            changed[facts.allowed] = ",".join(filter(None, (given[facts.allowed], "sidestep")))
        env = tree.items(node, "env")
        for each in env:
            named = tree.child(each, "name")
            if named is not None and named.value in changed:
                tree.put(each, "value", tree.represent(changed[named.value]))
        env.extend(map(tree.represent, variables))
        tree.items(node, "volumeMounts").extend(map(tree.represent, template["volumeMounts"]))
        if facts is environment.SGLANG and "--enable-metrics" not in _options(engine):
            self._enable_metrics(node, engine)

    def _enable_metrics(self, node: yaml.Node, engine: Engine) -> None:
        """Add the option to SGLang's arguments; a script is left as it is."""
        container = engine.container
        is_script = len(container.words) != len(container.command) + len(container.args)
        if engine.is_server and not is_script:
            tree.items(node, "args" if container.args else "command").append(
                tree.represent("--enable-metrics")
            )
        else:
            self.notes.append(f"{engine.pod.subject}: start SGLang with --enable-metrics")


def _options(engine: Engine) -> dict[str, str]:
    return environment.parse_options(engine.container.words)


def _resources(node: yaml.Node) -> Iterator[yaml.Node]:
    """Yield the resources of a document: itself, or the items of a list such as kustomize's."""
    kind = tree.child(node, "kind")
    if kind is not None and str(kind.value).endswith("List"):
        for item in tree.items(node, "items"):
            yield from _resources(item)
    elif isinstance(node, yaml.MappingNode):
        yield node


def _pods(node: yaml.Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], yaml.Node]]:
    """Yield the pods' specifications below a node, each with the keys that lead to it."""
    containers = tree.child(node, "containers")
    if isinstance(containers, yaml.SequenceNode):
        if all(isinstance(each, yaml.MappingNode) for each in containers.value):
            yield path, node
        return
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            yield from _pods(each, (*path, key.value))


def _inject_file(injection: Injection, place: str, content: bytes) -> tuple[str, str]:
    """Return the text of a file before and after."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{place}: line {number}: is not UTF-8") from None
    before, after, line = "", "", 0
    for each in documents(text):
        try:
            old, new = injection.document(each, line)
        except ConfigError as error:
            remedy = ": render its chart by `helm template`" if "{{" in each else ""
            raise ConfigError(f"{place}: {error}{remedy}") from None
        before, after, line = before + old, after + new, line + each.count("\n")
    return before, after


def run(files: Sequence[BinaryIO], *, image: str, mode: str, diff: bool) -> None:
    """Print the manifests with what was added, or the differences; standard error says what was done.

    Raises:
        ConfigError: A file is not YAML, or an engine in it cannot be patched.
    """
    injection = Injection(image, is_instead=mode == "instead")
    texts: list[str] = []
    for file in files:
        before, after = _inject_file(injection, file.name, file.read())
        if diff:
            old, new = (each.splitlines(keepends=True) for each in (before, after))
            names = file.name, f"{file.name} with sidestep"
            texts.append("".join(difflib.unified_diff(old, new, *names)))
        else:
            if texts and texts[-1][-1:] != "\n":
                texts.append("\n")
            texts.append(f"---\n{after}" if texts and not after.startswith("---") else after)
    click.echo("".join(texts), nl=False)
    for note in injection.notes or ["unchanged: no container runs vLLM or SGLang"]:
        sys.stderr.write(f"sidestep: {escape(note)}\n")
