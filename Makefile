# Each target sets up what it needs, a virtual environment and pinned dependencies, on any machine with Python >= 3.11 and make.
#   make install    make demo ARGS='--seconds 15'    make develop    make test    make bench    make lint

VENV := .venv
PYTHON := $(VENV)/bin/python
ARGS ?=
# The stamps contain the directory: scripts and the editable install have absolute paths, so a moved directory needs a new set-up.
HERE := $(shell pwd | cksum | cut -d ' ' -f 1)
READY_DEMO := $(VENV)/.ready-demo-$(HERE)
READY_DEV := $(VENV)/.ready-dev-$(HERE)
# Prefer the distribution's Python: it has profile-guided optimisation. pyenv's has not, and a request then costs 8 % more.
FIND_PYTHON = for p in /usr/bin/python3 python3 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then command -v $$p; exit 0; fi; done; \
	echo "no Python >= 3.11 with venv found: install one (on Debian: apt install python3 python3-venv)" >&2; exit 1

.PHONY: compiled install develop demo docs release test coverage test-e2e test-first-day test-configurations test-kube test-faults test-reload-faults test-go test-arm test-clients test-engines test-ui bench-ui fuzz simulate bench-floods bench-busy bench-overload bench-waiting bench-attack bench-pools bench-reload lint bench bench-routing bench-replay bench-tune bench-replicas bench-scaling profile load proto lock clean
.NOTPARALLEL:  # targets share one environment
# The tests start hundreds of processes: each would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

# The picker, its simulator, Envoy and helm in .venv/bin, interpreted: a minute.
install: $(READY_DEMO)
	@echo "installed in $(VENV)/bin: $$($(VENV)/bin/epp --version)"
	@echo "make compiled (2 minutes, needs gcc and Python's headers): a request then takes a quarter of the CPU"

# The same with all extras, the tools for tests, and the compiled request path.
develop: $(READY_DEV) compiled

demo: $(READY_DEMO)
	@$(VENV)/bin/epp demo $(ARGS)

# All tests but those of the targets below, in JOBS processes. ARGS='-k drain', JOBS=0 for one process and a debugger. EXAMPLES=10 gives each
# property ten times its generated examples.
JOBS ?= 4
test: $(READY_DEV) compiled
	@$(PYTHON) -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

# Whole pickers, simulated model servers and a real Envoy, with faults. ARGS='-k reload'.
test-e2e: $(READY_DEV) compiled
	@$(PYTHON) -m pytest -q -n $(JOBS) --dist worksteal -o testpaths=tests/e2e $(ARGS)

# The tests of flow control, protocol, shared memory and restart policy under branch coverage. Fails below their floors.
coverage: $(READY_DEV)
	@$(PYTHON) -m tests.coverage_floors $(ARGS)

# Follows README and docs literally, in a fresh clone: every block of commands, and the output stated beside it. ARGS=--here uses this tree.
test-first-day:
	@python=$$($(FIND_PYTHON)) && $$python -m tests.first_day $(ARGS)

# Tests with a real API server, and of the objects that helm and kustomize render. Builds these tools first if necessary. 3 minutes, and 8 more the first time. ARGS='--outage-s 60', ARGS='-k gateway'.
test-kube: $(READY_DEV) compiled
	@$(PYTHON) -m tests.kube.binaries
	@$(PYTHON) -m tests.deploy.renderers
	@$(PYTHON) -m pytest -q -o faulthandler_timeout=120 tests/kube tests/deploy/built $(ARGS)

# The parts, then whole requests: this picker, this picker over grpc.aio, and a bare echo on the same transport. About 2 minutes.
# ARGS='--only micro', '--cases short,sse', '--json', '--help'. BASE=HEAD~3 compares this tree with that commit, as ratios: 4 minutes.
BASE ?=
bench: $(READY_DEV) compiled
	@$(PYTHON) -m $(if $(BASE),tests.bench.against "$(BASE)",tests.bench) $(ARGS)

# 1 to 8 workers, 8 to 1,000 endpoints, and the predictions of `epp size` for two loads.
bench-scaling: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.scaling $(ARGS)

# A flame graph of a worker under CASE.
CASE ?= short
profile: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.throughput --cases $(CASE) --targets native --seconds 10 --profile profile-$(CASE).svg $(ARGS)

# Simulated users of the whole cluster, with locust: ARGS='-u 40 -t 60s Chat Documents'; URL=http://gateway for a running one; WEB=1 for locust's page.
URL ?=
WEB ?=
LORAS = sql,poems
LOCUST = -m locust -f loadtest/load/locustfile.py --csv load-results/load --html load-results/report.html \
	$(if $(WEB),--web-host 127.0.0.1,--headless --only-summary) -u 20 -r 20 -t 30s $(ARGS)
load: $(READY_DEV) compiled
	@mkdir -p load-results
	@$(if $(URL),$(PYTHON) $(LOCUST) -H $(URL),$(VENV)/bin/epp demo --loras $(LORAS) --objects-dir loadtest/objects --run "$(PYTHON) $(LOCUST) -H {url} --adapters $(LORAS)"); \
	code=$$?; echo "load-results/report.html has the curves and the figures per task, load-results/*.csv the figures"; exit $$code

# The quality of routing, in virtual time: configurations and published formulas on four models of servers, many minutes.
# ARGS='--only slots/documents --jobs 2' runs a part.
bench-routing: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.routing $(ARGS)

# How close replays are to what is really run, on three kinds of traffic: 7 minutes. ARGS='--seconds 20 --only chats'.
bench-replay: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.replay $(ARGS)

# What `epp record tune` brings over the field's weights, on seven kinds of traffic, in virtual time. ARGS='--only chats --trials 10'.
bench-tune: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.tune $(ARGS)

# Replicas with a real redis-server, which must be in PATH: what they see of each other, and what it costs.
bench-replicas: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.replicas $(ARGS)

# Kills workers and supervisors under load. `.ci/run` kills a tenth of them.
test-faults: $(READY_DEV) compiled
	@$(PYTHON) -m tests.faults.storm --workers-killed 100 --supervisors-killed 20 $(ARGS)

# Kills processes at random points of 300 reloads. `.ci/run` kills ten.
test-reload-faults: $(READY_DEV) compiled
	@$(PYTHON) -m tests.faults.reloads $(ARGS)

# Starts a picker with each configuration of FOLDER and simulated endpoints, and routes one request: 0.3 s each.
FOLDER ?= deploy/config
test-configurations: $(READY_DEV)
	@$(PYTHON) -m tests.field "$(FOLDER)" $(ARGS)

# h2spec and grpc-go with the transport and the picker, plaintext and TLS. Downloads Go if it is missing.
test-go: $(READY_DEV) compiled
	@$(PYTHON) -m tests.go.run $(ARGS)

# Mutated inputs for every parser, guided by atheris if it is installed. A crash prints the command that replays it.
fuzz: $(READY_DEV) compiled
	@$(PYTHON) -m tests.fuzz $(ARGS)

# Node's gRPC library in place of Envoy. Downloads Node and npm if they are missing.
test-clients: $(READY_DEV) compiled
	@$(PYTHON) -m tests.clients.run $(ARGS)

# Real engines with tiny models: vLLM on the CPU and llama.cpp. The first time downloads 3 GB and takes 8 GB on disk. 8 minutes, and 6 more the first time.
# Where that cannot be, the last line says why.
test-engines: $(READY_DEV) compiled
	@$(PYTHON) -m tests.engines.setup; case $$? in 0) $(PYTHON) -m pytest -q -o timeout=900 -o faulthandler_timeout=600 tests/engines $(ARGS);; \
	3) ;; *) exit 1;; esac

# The page /ui in Debian's chromium, with ten faults and hostile names: keyboard, axe-core, policy. Screenshots in .cache/ui. A minute.
INSTALL_UI = $(PIP_INSTALL) --require-hashes -r requirements-ui.txt
test-ui: $(READY_DEV) compiled
	@$(INSTALL_UI)
	@$(PYTHON) -m tests.ui.run $(ARGS)

# What five viewers of the page cost at 1,000 endpoints, and how soon a browser can use it. 2 minutes.
bench-ui: $(READY_DEV) compiled
	@$(INSTALL_UI)
	@$(PYTHON) -m tests.ui.viewers $(ARGS)

# Tests of `epp` and `shm`, the hammer and one routed request on aarch64, emulated by qemu-user: an hour or more. ARGS=--smoke: minutes.
test-arm: $(READY_DEV)
	@$(PYTHON) -m tests.arm $(ARGS)

# The longest time that one request keeps a worker's event loop busy.
bench-busy: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.busy $(ARGS)

# Flow control in virtual time: 100,000 random runs. `make test` has 800.
simulate: $(READY_DEV) compiled
	@$(PYTHON) -m tests.epp.flow.simulation --seeds 100000 --jobs 2 $(ARGS)

# Goodput, fairness, recovery and budgets of tenants under overload, through Envoy.
bench-overload: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.overload $(ARGS)

# Memory of waiting requests and of 200,000 fairness ids, and (ARGS=--five-minutes) a wait through Envoy.
bench-waiting: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.waiting $(ARGS)

# How often an attacker tells which request another tenant has sent, with cache salts and without. 20 minutes; ARGS="--tries 1000": 2.
bench-attack: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.attack $(ARGS)

# Many pools in one picker: idle, under load, one of them flooded, and a thousand.
bench-pools: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.pools $(ARGS)

# 200 reloads of the configuration under streamed answers through Envoy: failed requests, time until in force, memory.
bench-reload: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.reload $(ARGS)

# The cost for good traffic of attacks on the port.
bench-floods: $(READY_DEV) compiled
	@$(PYTHON) -m tests.bench.floods $(ARGS)

# A release of the current commit in dist/: packages, chart, documentation, image, bills of materials, notes, checksums. Many minutes.
# ARGS=--native makes one wheel and no image: a minute. ARGS=--reproduce makes everything twice and compares the bytes.
release: $(READY_DEV)
	@$(PYTHON) -m release $(ARGS)

# The documentation as a site in site/. A dead link is an error. The site loads nothing from other hosts.
docs: $(READY_DEV)
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict $(ARGS)

lint: $(READY_DEV)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(PYTHON) -m mypy

# Compiles the request path where a C compiler and Python's headers are; elsewhere it says why not. Nothing happens when it is up to date.
# EPP_COMPILED=0 leaves it out and runs interpreted.
compiled: $(READY_DEMO)
	@[ "$$EPP_COMPILED" = 0 ] || $(PYTHON) -m compiled.build

# The development tools include everything for the demo, so either stamp is enough.
$(READY_DEMO): pyproject.toml requirements-demo.txt
	@if [ -e $(READY_DEV) ] && [ ! pyproject.toml -nt $(READY_DEV) ] && [ ! requirements-dev.txt -nt $(READY_DEV) ]; then :; else \
	set -e; $(call install,requirements-demo.txt); fi
	@touch $@

$(READY_DEV): pyproject.toml requirements-dev.txt
	@set -e; $(call install,requirements-dev.txt)
	@touch $@

# The lock file names every dependency, and pip first: an older pip takes twice the CPU for the others. compileall compiles on all CPUs, pip
# on one. Without --no-deps, pip before 23.1 looks up the newest release of a package that is needed with an extra (coverage[toml]), and
# refuses it because it is not the locked one.
PIP_INSTALL = $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile
define install
if ! $(PYTHON) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "making the virtual environment in $(VENV)"; rm -rf $(VENV); python=$$($(FIND_PYTHON)); $$python -m venv $(VENV); fi; \
echo "installing the dependencies of $(1)"; \
sed -n '/^pip==/,/[^\\]$$$$/p' $(1) | $(PIP_INSTALL) --require-hashes -r /dev/stdin; \
$(PIP_INSTALL) --require-hashes -r $(1); \
$(PIP_INSTALL) --no-build-isolation --editable .; \
$(PYTHON) -m compileall -q -j 0 $(VENV)/lib || true
endef

# Generates the message classes from the .proto files. They are committed; a test compares both.
proto: $(READY_DEV)
	@$(PYTHON) -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. loadtest/load/proto/*.proto

# Generates the lock files from pyproject.toml. Run it after a change of a dependency.
lock: $(READY_DEV)
	@$(PYTHON) -m pip install --quiet uv
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --extra demo --extra manifests --output-file requirements-demo.txt pyproject.toml requirements-build.in
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --extra dev --output-file requirements-dev.txt pyproject.toml requirements-build.in
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --extra cel --extra k8s --extra kv-events --extra otel --extra replicas --constraint requirements-dev.txt --output-file requirements-image.txt pyproject.toml requirements-build.in
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --constraint requirements-dev.txt --output-file requirements-ui.txt requirements-ui.in

clean:
	rm -rf $(VENV) .cache build compiled/built dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
