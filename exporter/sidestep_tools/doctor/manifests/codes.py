"""Codes of findings about manifests."""

from sidestep.diagnosis.finding import Code

# fmt: off
UNREADABLE = Code("SD501", "error", "A manifest cannot be read",
    "The file is not YAML, a field has a value that Kubernetes refuses, or it is the source of a chart or of a kustomization.",
    "Correct the file; render charts by `helm template` and kustomizations by `kubectl kustomize`.")
NOTHING = Code("SD502", "info", "The manifests have neither an engine nor an exporter",
    "No container runs vLLM, SGLang, Triton or `sidestep serve`, as far as command, image and variables show.",
    "Give the manifests of the engines' pods, or those of the cluster: `kubectl get deploy,sts,podmonitor -o yaml | sidestep doctor --manifest -`.")
NOT_OBSERVED = Code("SD510", "warning", "The pod of an engine has no exporter",
    "The pod has neither an exporter nor SIDESTEP_ENDPOINT, so the engine's metrics come from its own page alone.",
    "Add the component of deploy/kustomize or the chart's templates to the workload, or label one that is no engine `sidestep/inject: \"false\"`.")
NO_EXPORTER = Code("SD511", "error", "An engine sends to an exporter that its pod does not have",
    "SIDESTEP_ENDPOINT is an ipc:// path, which only reaches a process in the same pod, and the pod has no exporter.",
    "Add the exporter's container to the pod, or give a tcp:// endpoint.")
NEVER_ENDS = Code("SD512", "error", "The exporter is an init container that never ends",
    "An init container without `restartPolicy: Always` has to end before the engine starts, and an exporter does not end: the engine never starts.",
    "Set `restartPolicy: Always` in the exporter's container (Kubernetes 1.29 or later).")
ENDS_EARLY = Code("SD513", "warning", "The exporter may end before the engine",
    "Kubernetes stops ordinary containers together, and native sidecars in the reverse order of their start: an exporter that does not start before the engine misses its last counts.",
    "Make the exporter an init container with `restartPolicy: Always`, before the engine's.")
REFUSED = Code("SD514", "error", "The exporter refuses its settings",
    "A flag or a variable of the container is unknown or has an invalid value: the exporter ends at its start.",
    "Correct the setting; `sidestep serve --help` lists all.")
NO_ENDPOINT = Code("SD520", "error", "An engine has no SIDESTEP_ENDPOINT",
    "The pod has an exporter, and the plugin in the engine does nothing without the variable.",
    "Set SIDESTEP_ENDPOINT in the engine's container to the exporter's --ingest.endpoint.")
OTHER_ENDPOINT = Code("SD521", "error", "Engine and exporter have different endpoints",
    "SIDESTEP_ENDPOINT is none of the endpoints of the pod's exporter.",
    "Set both to the same endpoint.")
NOT_SHARED = Code("SD522", "error", "Engine and exporter do not share the socket's directory",
    "Both have to mount one volume at the same path; a container without it has a directory of its own there.",
    "Mount the same `emptyDir` at the same path in both containers, with the same `subPath` or none.")
NOT_WRITABLE = Code("SD524", "error", "The exporter cannot write a directory",
    "The socket and the state need a directory on a volume that is mounted read-write, all the more with `readOnlyRootFilesystem`.",
    "Mount an `emptyDir` there, without `readOnly`.")
OTHER_PODS = Code("SD525", "warning", "Other pods have the socket's directory, too",
    "The socket is on the node's disk or on a claim: the exporters of two pods take the path from each other.",
    "Use an `emptyDir` with `medium: Memory`.")
WORLD_WRITABLE = Code("SD527", "error", "The socket is in a world-writable directory",
    "The directory of an `emptyDir` itself is world-writable, which the exporter refuses.",
    "Put the socket into a directory below the mount, such as /run/sidestep/ingest/ingest.ipc; the exporter creates it.")
NOT_PERMITTED = Code("SD528", "error", "The engine may not open the socket",
    "Engine and exporter run as different users without a common group: the directory is open to the exporter's user and to --ingest.ipc-group only.",
    "Set --ingest.ipc-group to a group that both have, by `runAsGroup`, or by the pod's `supplementalGroups` or `fsGroup`.")
NO_PYTHONPATH = Code("SD530", "error", "PYTHONPATH does not lead to the plugin",
    "An init container copies the plugin to a volume, and the engine does not mount it, or not at a directory of its PYTHONPATH.",
    "Mount the plugin's volume in the engine's container, and set PYTHONPATH to that path.")
NO_PLUGIN = Code("SD531", "error", "No init container copies the plugin",
    "The engine's PYTHONPATH names a volume that is empty when the engine starts.",
    "Add the init container `sidestep-plugin`, which copies /opt/sidestep/plugin to the volume.")
NOT_LISTENING = Code("SD540", "error", "The exporter does not listen where its port is declared",
    "The container declares another port than --web.listen-address, or the exporter listens on 127.0.0.1, which neither Prometheus nor the kubelet reaches.",
    "Set --web.listen-address to `:PORT`, and declare the same containerPort.")
NOT_SELECTED = Code("SD542", "warning", "No monitor selects the pod",
    "The manifests have a PodMonitor or ServiceMonitor for exporters, and its selector or its namespaces do not include this pod.",
    "Correct the monitor's `selector` or `namespaceSelector`, or the pod's labels.")
NO_SUCH_PORT = Code("SD544", "error", "A monitor names a port that the exporter does not have",
    "The monitor selects the pod, and its port is none of the exporter's page: Prometheus has no such target.",
    "Set the monitor's `port` to the name of the exporter's port (`sidestep`).")
NO_SUCH_PATH = Code("SD545", "error", "A monitor scrapes a path that the exporter does not have",
    "The exporter's pages are --web.telemetry-path, `/metrics` by default, and the same with `/pod`: others are answered by 404.",
    "Remove `path`, or set it to one of these.")
TWICE = Code("SD546", "warning", "The same counts are scraped twice",
    "Prometheus scrapes the exporter and the engine's own page, or one exporter more than once: sums over their series are doubled.",
    "Scrape one of them, or set SIDESTEP_VLLM_MODE or SIDESTEP_SGLANG_MODE to `instead`.")
LABELS = Code("SD548", "warning", "honorLabels does not fit the exporter",
    "The series of a sidecar have no labels `namespace` and `pod` of their own that Prometheus should keep.",
    "Omit `honorLabels` for sidecars.")
ANNOTATION = Code("SD549", "warning", "The scrape annotation names another port",
    "The annotation `prometheus.io/port` is not the port of the pod's exporter, so the exporter is not scraped by it.",
    "Set it to the exporter's port, or remove `prometheus.io/scrape` if a PodMonitor scrapes the exporter.")
BLOCKED = Code("SD550", "error", "A NetworkPolicy closes a port",
    "Policies select the pod and none of their rules allows the port: nothing reaches the exporter's page or ingest port, or the engine itself.",
    "Add a rule for the port; the policy of deploy/helm/sidestep restricts the exporter's port and no other.")
WRONG_PROBE = Code("SD555", "error", "A probe asks the exporter for what it does not have",
    "The probe's path does not exist, its port is not the page's, or it is the name of another container's port: the probe always fails.",
    "Ask `/-/ready` for startup and readiness and `/-/healthy` for liveness; the engine's container gives the exporter's port by number.")
KILLS = Code("SD556", "warning", "A liveness probe restarts a container because of a slow engine",
    "`/-/engines` fails while an engine is stalled or starts: the exporter is restarted for it, or an engine in a long prefill.",
    "Use `/-/healthy` for the exporter; for the engine see health.md: at least five minutes, with a startupProbe.")
NO_TIME = Code("SD560", "warning", "The pod has too little time to terminate",
    "terminationGracePeriodSeconds has to last for the engine's own shutdown, --shutdown.linger and 2 s; after it Kubernetes kills all containers, and the last counts are lost.",
    "Raise terminationGracePeriodSeconds, or lower --shutdown.linger.")
OUT_OF_MEMORY = Code("SD561", "warning", "The container's memory limit is below --limits.memory-hard",
    "Kubernetes kills the exporter before it limits its own memory.",
    "Set --limits.memory-hard to 192 MiB less than the container's limit, and --limits.memory-soft below it.")
STATE = Code("SD562", "warning", "The state directory is not on a volume in memory or on a claim",
    "In the container's own file system it ends with the container, and its restart is a counter reset; on the node's disk each snapshot waits for the disk.",
    "Mount an `emptyDir` with `medium: Memory` there, or a claim.")
SHARED_STATE = Code("SD564", "error", "Several exporters have one state directory",
    "A state directory belongs to one exporter; replicas, pods or containers overwrite each other's counters.",
    "Give each its own: `volumeClaimTemplates`, an `emptyDir`, or one replica.")
ONE_PER_NODE = Code("SD566", "info", "With hostNetwork only one such pod fits on a node",
    "The exporter's port is the node's, so a second pod with the same port does not start there.",
    "Give each such workload its own --web.listen-address, or run one pod per node.")
# fmt: on
CODES = tuple(each for each in tuple(globals().values()) if isinstance(each, Code))
