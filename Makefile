# Every target makes what it needs; on a bare Debian 12 start with `make demo` or `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_VENV := build/demo-venv
DEMO_STAMP := $(DEMO_VENV)/.installed
SOURCES := exporter adapters tests benchmarks chaos fuzz

# Hundreds of tests start a Python process, which begins sooner with its modules compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo compose test test-all quick check lint fix bench chaos fuzz soak docs site screens golden test-engines vllm-sources test-otlp test-lowest deploy-test image-test pod-test dist dist-test tools clean

# Only the product and what `sidestep top` needs; DEMO="--open", "--web.listen-address 127.0.0.1:9858", ...
demo: $(DEMO_STAMP)
	$(DEMO_VENV)/bin/sidestep demo $(DEMO)

# The same beside Prometheus and Grafana, in containers: docs/demo.md.
compose:
	docker compose -f deploy/compose/compose.yaml up --build

# Most tests wait for other processes most of the time, so four run on two cores; what a module starts
# serves all its tests.
test: $(STAMP) tools
	$(BIN)/pytest -n 4 --dist loadfile

# The tests that start no process and no browser, and take little time.
quick: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadfile --quick

# With the long forms of tests, such as installations on other Pythons, and ten times the
# examples of properties.
test-all: $(STAMP) tools
	$(BIN)/pytest -n 3 --dist loadfile --hypothesis-profile long -m "not dist and not engine and not image and not otlp and not pod"

check: $(STAMP) lint
	$(BIN)/python tools/docs.py --check
	$(BIN)/python -m tools.boards --check
	$(BIN)/python tools/charts.py --check
	$(MAKE) --no-print-directory test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One table of sidestep and its peers, over half an hour; BENCH="--quick", "--only scrape load". "--write" puts it
# into docs/performance.md; then `make docs` brings its figures into README.md.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH)

# Every fault over every transport: over an hour. CHAOS="--quick", "--fault kill --seed 7", ...
chaos: $(STAMP)
	$(BIN)/python -m chaos $(CHAOS)

# Bytes as a peer may send them, guided by coverage, SECONDS for each way in; then CONNECTIONS that
# flood and reset, of each kind: half an hour.
fuzz: SECONDS ?= 60
fuzz: CONNECTIONS ?= 1000
fuzz: $(STAMP)
	$(BIN)/pip install --quiet -e '.[fuzz]'
	$(BIN)/python -m fuzz --seconds $(SECONDS)
	$(BIN)/python -m fuzz.hostile_connections --connections $(CONNECTIONS)

# Engines that come and go beside hostile peers, for hours: one table, and an error if a count differs or
# memory rises.
soak: HOURS ?= 2
soak: $(STAMP)
	$(BIN)/python -m fuzz.soak --hours $(HOURS)

docs: $(STAMP)
	$(BIN)/python tools/docs.py
	$(BIN)/python -m tools.boards
	$(BIN)/python tools/charts.py

# The documents as a site with a search, in build/site; a broken link ends it.
site: $(STAMP)
	$(BIN)/mkdocs build

# Pictures of the dashboards for the documents; look at each.
screens: $(STAMP) tools
	PYTHONPATH=tests/support $(BIN)/python -m tools.screens

# Pages that tests compare byte by byte; review the diff.
golden: $(STAMP)
	$(BIN)/pytest tests/exposition/test_golden.py --update-golden

# A real vLLM, SGLang, Triton and llama.cpp on the CPU: 6 GB to install, minutes to run, 6 GiB of memory.
test-engines: $(STAMP)
	tools/setup_vllm.sh
	tools/setup_sglang.sh
	tools/setup_triton.sh
	tools/setup_llamacpp.sh
	$(BIN)/pytest -m engine --timeout 900 tests/real_engines tests/test_benchmarks.py
	build/vllm-venv/bin/python -m pytest -c /dev/null --rootdir . --noconftest -q tests/real_engines/test_vllm_connectors.py

# The newest vLLM's Python, whose statistics must have each field that the plugin reads: 300 MB to download.
vllm-sources: $(STAMP)
	PYTHON=$(BIN)/python tools/setup_vllm_sources.sh
	$(BIN)/pytest tests/adapters/vllm/test_vllm_sources.py

# A real Collector, Prometheus 3 and Phoenix that take OTLP: five minutes and 5 GB to make, then a minute.
test-otlp: $(STAMP)
	tools/setup_otlp.sh build/otlp
	$(BIN)/pytest -m otlp --timeout 600 tests/otlp

# With every dependency at the lowest version that pyproject.toml declares, and with the newest, on other
# Pythons.
test-lowest: $(STAMP)
	$(BIN)/pytest -m long tests/test_installations.py

# Manifests against schemas, and charts by Go's templates: 40 s to install, and kubectl must be there.
deploy-test: $(STAMP)
	tools/setup_deploy.sh build/deploy
	$(BIN)/pytest tests/deploy

# The image, built by buildah on a base of Debian's packages and run: as root, minutes.
image-test: $(STAMP)
	$(BIN)/pytest -m image -s --timeout 900 tests/deploy/test_image.py

# Pods of the overlays as real containers, with a real Prometheus: as root with podman, runc and kubectl.
pod-test: $(STAMP)
	tools/setup_debian.sh podman=podman runc=runc prometheus=promtool iproute2=ip
	$(BIN)/pytest -m pod --timeout 600 tests/deploy/test_running_pods.py

# All that a release consists of, in dist/: as root on Debian, minutes. DIST="packages charts" builds parts.
dist: $(STAMP)
	$(BIN)/python -m tools.dist $(DIST)

# What is in dist/, installed and run; nothing of the checkout is used but the tests.
dist-test: $(STAMP)
	tools/setup_debian.sh debootstrap=debootstrap podman=podman runc=runc man-db=man mandoc=mandoc
	$(BIN)/pytest -m dist --timeout 900 tests/dist

tools:
	tools/setup_debian.sh prometheus=promtool chromium=chromium tmux=tmux
	tools/setup_later_debian.sh build/prometheus-3 forky prometheus promtool
	tools/setup_later_debian.sh build/victoria-metrics forky victoria-metrics

$(STAMP): pyproject.toml tools/setup_python.sh
	PYTHON=$(PYTHON) tools/setup_python.sh $(VENV) dev
	touch $@

$(DEMO_STAMP): pyproject.toml tools/setup_python.sh
	PIP_NO_COMPILE=1 PYTHON=$(PYTHON) tools/setup_python.sh $(DEMO_VENV) top
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
