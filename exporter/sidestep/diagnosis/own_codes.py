"""Codes of what an exporter finds about itself, its engines and its sources."""

from __future__ import annotations

from sidestep.diagnosis.finding import Code

# fmt: off
NO_ENGINE = Code("SD101", "warning", "No engine has connected",
    "No engine's process has reached an ingest endpoint since the start, and there is no"
    " `--subscribe`, `--triton`, `--engine` or `--scrape`.",
    "Start the engine with SIDESTEP_ENDPOINT set to one of the exporter's endpoints, and run"
    " `sidestep doctor --environment` where the engine runs.")
UNREACHABLE = Code("SD102", "error", "An engine is unreachable",
    "Its processes are silent or its server does not answer: they have crashed, are stopped, or the"
    " network is broken.",
    "Look at the engine's log and whether its process runs; see health.md.")
STALLED = Code("SD103", "error", "An engine is stalled",
    "It owes requests and makes no progress.",
    "Read /api/v1/engines/ID/stack, then restart the engine; see the runbook InferenceEngineStalled.")
SLOW = Code("SD104", "warning", "An engine is slow",
    "A step takes longer than the engine's own step times of its size.",
    "If it becomes stalled, read /api/v1/engines/ID/stack.")
NOT_SERVING = Code("SD140", "warning", "No engine serves requests",
    "All engines that the exporter knows are starting, stopped or asleep.",
    "Start an engine, or wait until one has loaded its model; /-/engines has their states.")
OVERLOADED = Code("SD141", "warning", "An engine is full or saturated",
    "More load is offered than the engine can serve, requests wait for KV blocks, or more wait than run.",
    "Add a replica, or send it less load; see autoscaling.md. For batch jobs a queue is no fault.")
OUTLIER = Code("SD142", "warning", "A replica is slower than the others of its model",
    "The engine's p95 of TTFT or ITL in the last minute is three times the median of its replicas or more.",
    "Compare its device, its neighbours and its share of the load.")
BUILDS_STATISTICS = Code("SD143", "info", "vLLM builds its statistics on the event loop",
    "The plugin replaces vLLM's metrics, but vLLM still builds statistics for each output. All"
    " metrics are right; the event loop spends more time.",
    "Remove the option that the finding names, or install a release of sidestep that knows this"
    " release of vLLM; see vllm.md.")
SAME_LABELS = Code("SD105", "info", "Two engines have the same labels",
    "Two engines send the same `engine` and `model_name`, as replicas do. The later one has its"
    " identity in the label `origin`.",
    "Keep `origin` in `by (...)` to distinguish replicas; sums over the model need no change.")
REJECTED = Code("SD106", "warning", "Messages or items were rejected",
    "The exporter does not accept what a sender sends. Reasons: `bug`, an error of the exporter;"
    " `throttled`, too many bad messages; `unauthorised`, a key without permission; `version`,"
    " another version of the protocol.",
    "The exporter's log names the sender. Install the same release of sidestep in engine and"
    " exporter.")
WRONG_KEY = Code("SD107", "error", "An engine's key was denied",
    "A process connected by tcp with a CURVE key that is not authorized.",
    "Add its public key to the directory of --ingest.authorized-keys, or give the engine the right"
    " SIDESTEP_CLIENT_KEY; see security.md.")
DENIED = Code("SD108", "warning", "HTTP clients were denied",
    "Requests had no or a wrong password, or no trusted client certificate.",
    "Put the password or the certificate into the Prometheus job (`basic_auth`, `tls_config`).")
HTTP_REFUSED = Code("SD109", "warning", "HTTP requests were refused",
    "A client opened too many connections, sent too slowly or badly, or used a host name that the"
    " exporter does not know (`host`).",
    "host: name it by --web.allowed-hosts; see security.md. Otherwise find the client; one scrape job"
    " and a few viewers never reach these limits.")
LOST = Code("SD110", "error", "Items were lost",
    "The engine or the exporter was away for longer than a sender's ring lasts, and the engine was"
    " then killed.",
    "Keep the exporter running, and let engines end by SIGTERM; see reliability.md.")
DROPPED = Code("SD111", "error", "A sender dropped items",
    "The queue of an engine's process was full, or the exporter rejected its items.",
    "Check that the process has CPU time left, and the exporter's log for rejections.")
FOLDED = Code("SD112", "warning", "A sender folded items",
    "The exporter was away until a sender's ring was full; totals are complete, single steps are"
    " not.",
    "Keep the exporter running: a sender holds the last 8 MiB of items.")
UNTRANSLATED = Code("SD113", "warning", "An engine's records could not be translated",
    "The plugin does not know some objects of the engine's release.",
    "Install a release of sidestep that supports the engine's release.")
SERIES_LIMIT = Code("SD114", "warning", "A limit on series was reached",
    "Label values beyond the limit count under `__other__`, or updates were rejected.",
    "Look at /api/v1/cardinality for the label with the most values.")
MEMORY = Code("SD115", "warning", "Memory is near its limit",
    "It is above nine tenths of --limits.memory-soft, from which on new streams are rejected.",
    "Raise --limits.memory-soft and --limits.memory-hard, or connect fewer engines.")
REBOUND = Code("SD116", "warning", "The ingest socket was closed and bound again",
    "Peers filled its memory (`memory`) or opened too many files (`descriptors`), or another process"
    " took the ipc path (`stolen`).",
    "memory: raise --limits.memory-hard; descriptors: raise the limit of open files; stolen: give"
    " each exporter a directory of its own.")
NOT_SAVED = Code("SD117", "error", "Snapshots fail",
    "The state directory cannot be written: counters would not survive a restart.",
    "Free space in --state.dir, and let the exporter's user write to it; its log names the error.")
STATE_DAMAGED = Code("SD118", "info", "A snapshot was damaged",
    "The exporter could not read its snapshot at a start and moved it aside; counters began at 0.",
    "Use a volume that keeps what is written; one state directory belongs to one exporter.")
STATE_FULL = Code("SD119", "warning", "The state directory is nearly full",
    "It has less space than three snapshots.",
    "Enlarge the volume of --state.dir.")
NOT_DURABLE = Code("SD120", "info", "Counters do not survive a restart of the exporter",
    "There is no --state.dir, so each restart is a counter reset.",
    "Set --state.dir to a directory on a volume that outlives the container.")
WEB_CONFIG = Code("SD121", "error", "The web configuration on disk is invalid",
    "The last valid one is in use, and a restart would fail.",
    "Correct the file; the exporter's log names the line.")
ZAP_DOWN = Code("SD122", "error", "Keys of engines can no longer be checked",
    "Engines cannot connect by tcp.",
    "Restart the exporter, and report its log.")
NOT_SCRAPED = Code("SD123", "warning", "Prometheus does not scrape the exporter",
    "No request with Prometheus's header has arrived within five minutes.",
    "Add the exporter to a scrape job (deploy/prometheus.yml, or the PodMonitor), and look at"
    " Prometheus' page of targets.")
TARGET_DOWN = Code("SD124", "error", "A polled server does not answer",
    "A target of --scrape or a server of --engine is away, slow or denies access.",
    "Open its address from the exporter's host; sidestep_scrape_polls_total or"
    " sidestep_engine_polls_total has the outcome.")
TARGET_LINES = Code("SD125", "warning", "Samples of a scraped target are not exposed",
    "Its page has unreadable lines, or names that another engine or the exporter has.",
    "sidestep_scrape_left_out_samples has the reason; see scrape.md.")
SUBSCRIPTION = Code("SD126", "error", "A subscription is not connected",
    "The publisher of the engine's stream is not there, or its address is wrong.",
    "Compare the address with the engine's --kv-events-config or its equivalent.")
STREAM_LOST = Code("SD127", "warning", "Messages of an engine's stream were lost",
    "There were gaps, and no replay endpoint that still had the messages.",
    "Configure `replay=` for the subscription, and a replay endpoint in the engine.")
LOOP_LAG = Code("SD131", "warning", "The exporter is starved of CPU time",
    "Its event loop was late by more than a second.",
    "Raise the container's CPU limit; a quarter of a core carries some hundred engines' steps.")
COLLECTOR = Code("SD132", "warning", "A registered collector fails",
    "A collector of the entry-point group `sidestep.collectors` raised an error or returned samples"
    " that cannot be written.",
    "Mend or remove the collector; only its samples are missing.")
OTLP_DOWN = Code("SD133", "error", "The OTLP receiver accepts nothing",
    "Three pushes in a row were not accepted: the receiver of --otlp.endpoint is away or slow, its URL is"
    " wrong, or it refuses the requests.",
    "The exporter's log has the receiver's answer; opentelemetry.md has the URLs of common receivers.")
OTLP_REJECTED = Code("SD134", "warning", "An OTLP receiver rejected data",
    "The receiver refused requests, data points, spans or log records: a header or the URL is wrong,"
    " a limit was reached, or two exporters push the same series.",
    "The exporter's log has the receiver's reason; give each exporter a service.instance.id of its own.")
RECORDS_LOST = Code("SD135", "warning", "Records of requests are lost",
    "An output of records takes them too slowly and its queue is full, or requests ended while their"
    " engine could not reach the exporter.",
    "The exporter's log has the reason. Keep fewer records with --requests.log.if and --requests.log.share.")
CONTESTED = Code("SD136", "warning", "Two living processes have one identity",
    "The host name (or SIDESTEP_NAMESPACE), model and port of two servers are equal, or their"
    " command lines name no port. Both are counted, one with `~2` in its namespace; after a restart"
    " it may be the other one.",
    "Give each server a SIDESTEP_NAMESPACE of its own, or none, and name its port with --port.")
COUNTED_TWICE = Code("SD137", "error", "Two processes of an engine count the same requests",
    "The engine's core has a scheduler with a tap, and its front end does not know that. The"
    " exporter accepts only the one that connected first.",
    "Name sidestep's scheduler, or a class that derives from it, in --scheduler-cls; not a function that makes one.")
MISSING_FIELDS = Code("SD138", "error", "An engine's release lacks fields that metrics need",
    "The release has renamed or removed fields of its statistics; metrics that need them have no"
    " samples. The engine's log names them.",
    "Install a release of sidestep that names the engine's release as supported.")
NO_CORE = Code("SD146", "warning", "An engine's core has not connected",
    "The front end leaves most metrics to a tap in the core: they stay at 0. The core's tap could"
    " not start, or it sends to another exporter.",
    "Look for sidestep in the core's log; give the core the front end's SIDESTEP_ENDPOINT and"
    " SIDESTEP_NAMESPACE, or sum over both exporters.")
NO_PEER = Code("SD144", "warning", "A prefill or decode engine has no peer",
    "A model has engines for prefill and none that decodes at this exporter, or the reverse. The"
    " others are down, or send to another exporter: sums over this one are those of half a service.",
    "Start the other engines, send both kinds to one exporter, or sum over both exporters; see pd.md.")
MIXED_ROLES = Code("SD145", "info", "A model has engines for decode, and engines that do both",
    "Routers send the latter whole requests, or prompts to hand over: mode `beside` does not tell"
    " them apart.",
    "Name each engine's kv_role, or use mode `instead` or the tap; see pd.md.")
# fmt: on

CODES = sorted(each for each in tuple(vars().values()) if isinstance(each, Code))
