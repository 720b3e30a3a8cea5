"""Texts of panels without data: why, and what enables their metrics."""

VLLM = "No vLLM engine reports here: see the filters above and docs/vllm.md."
SGLANG = "No SGLang engine reports here: see the filters above and docs/sglang.md."
ENGINES = (
    "No engine reports here: see the filters above, and the dashboard sidestep / Exporter health."
)
TRITON = "No Triton is polled here: sidestep serve --triton URL (docs/triton.md)."
EXPORTER = "No sidestep is scraped here: see the filters above and Prometheus' targets."
GPU = "No GPU of these engines in Prometheus: it needs dcgm-exporter, with the labels namespace and pod of engines."
NO_SATURATION = (
    "No vLLM engine or SGLang scheduler has reported here for a minute (docs/autoscaling.md)."
)
NO_TRAFFIC = "No request in this time, or no engine reports here."
NO_VLLM_TRAFFIC = "No vLLM request in this time, or no vLLM engine reports here."
NO_SGLANG_TRAFFIC = "No SGLang request in this time, or no SGLang engine reports here."
NO_TRITON_TRAFFIC = "No Triton request in this time, or no Triton is polled here (docs/triton.md)."
KV_METRICS = "Only with vLLM's --kv-cache-metrics, or with sidestep's tap (docs/vllm-core.md)."
TAP = "Only with sidestep's tap in vLLM's core: --scheduler-cls (docs/vllm-core.md)."
REQUEST_EVENTS = "Only with SIDESTEP_VLLM_MODE=instead (docs/vllm.md), or with sidestep's tap (docs/vllm-core.md)."
LOOKUPS = "Only with sidestep's tap in vLLM's core, or its plugin in SGLang (docs/kv-residency.md)."
SHARED_CACHE = "Only with several engines of a model at one exporter (docs/kv-residency.md)."
ITERATIONS = (
    "vLLM times its steps with --enable-logging-iteration-details, or sidestep's tap does"
    " (docs/vllm-core.md)."
)
KV_EVENTS = "Only with the engine's KV events: --subscribe kv-events=... (docs/streams.md)."
FORWARD_PASS = (
    "Only with the engine's forward-pass stream: --subscribe forward-pass=... (docs/streams.md)."
)
SUBSCRIPTIONS = "Only with --subscribe (docs/streams.md)."
PASSED_ON = "Only with --scrape, or with metrics= of --triton (docs/scrape.md)."
SPECULATION = "No vLLM here speculates: --speculative-config turns it on."
SGLANG_SPECULATION = "No SGLang here speculates: --speculative-algorithm turns it on."
LORA = "No adapter has a request now; vLLM serves them with --enable-lora."
SGLANG_LORA = "No SGLang here serves LoRA adapters: --enable-lora turns them on."
DISAGGREGATION = "No SGLang here separates prefill from decode: --disaggregation-mode turns it on."
HICACHE = "No SGLang here has a cache in host memory: --enable-hierarchical-cache turns it on."
OFFLOAD = "No vLLM here offloads KV: --kv-transfer-config names a connector that does."
NIXL = "No vLLM here moves KV by NIXL: --kv-transfer-config names the connector."
PARALLEL = "SGLang counts this with data-parallel attention: --enable-dp-attention."
CACHED = "No model here has a response cache: response_cache in its configuration, --cache-config."
RESPONSES = (
    "No model here has statistics of single responses; decoupled ones do, from Triton 24.08 on."
)
BUSY = "Ensembles have none; other models have it after two polls."
PENDING = "Only from Triton's own page: metrics= of --triton (docs/triton.md)."
STATE = "Only with --state.dir: without it nothing outlives the exporter (docs/reliability.md)."
NO_OBJECTIVES = "Only with --slo (docs/slo.md), or no request in this time."
STREAMS = "No engine pushes to this exporter."
STATES = "No engine sends to an exporter here (docs/health.md)."
PROGRESS = "No engine here reports progress: it needs the plugin or the tap (docs/health.md)."
NOT_STALLED = "No engine was stalled in this time."
TENANTS = (
    "Only with --tenants.by, and vLLM's plugin in mode instead or its tap, or SGLang's plugin"
    " (docs/tenants.md)."
)
NO_TENANT_TRAFFIC = (
    "No request of a tenant in this time, or none is counted: --tenants.by (docs/tenants.md)."
)
PRICES = "Only with prices of tokens: --prices.model (docs/tenants.md)."
TENANT_PRICES = (
    "Only with prices of tokens, by tenant: --prices.model, --tenants.by (docs/tenants.md)."
)
GPU_PRICE = "Only with --prices.gpu-hour and NVIDIA's dcgm-exporter (docs/tenants.md)."
LIMITS = (
    "No engine reports limits here: it needs vLLM's tap (docs/vllm-core.md), or SGLang's plugin"
    " (docs/sglang.md)."
)
NO_LIMIT = "No limit keeps requests waiting now, or no engine reports limits (docs/vllm-core.md)."
PARTS = (
    "No request ended in this time, or none has parts: vLLM's plugin in mode instead or its tap, or"
    " SGLang's plugin, sends them (docs/requests.md)."
)
BACKLOG = (
    "No engine reports its backlog: it needs vLLM's tap, or SGLang's plugin (docs/autoscaling.md)."
)
UNCACHED = (
    "Only with SGLang's plugin: other engines look a request up when they admit it"
    " (docs/autoscaling.md)."
)
HAND_OVERS = "No vLLM here has a KV connector: --kv-transfer-config names it (docs/pd.md)."
KV_HELD = (
    "No engine here holds KV for another: it needs vLLM's tap and a KV connector, or SGLang's prefill servers"
    " (docs/pd.md)."
)
TRANSFERS = "No connector here reports transfers: NIXL, Mooncake, 3FS and SGLang do (docs/pd.md)."
