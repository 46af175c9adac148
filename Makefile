# Each target sets up what it needs: a virtual environment and pinned dependencies, on any machine with Python >= 3.11 and make.
#   make demo ARGS='--seconds 15'    make test    make test-faults    make bench    make load    make lint

VENV := .venv
PYTHON := $(VENV)/bin/python
ARGS ?=
# The stamps carry the place: scripts and the editable install hold absolute paths, so a moved directory is set up again.
HERE := $(shell pwd | cksum | cut -d ' ' -f 1)
READY_DEMO := $(VENV)/.ready-demo-$(HERE)
READY_DEV := $(VENV)/.ready-dev-$(HERE)
# The distribution's Python first: it is built with profile-guided optimisation, pyenv's is not, and a request then costs 8 % more.
FIND_PYTHON = for p in /usr/bin/python3 python3 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then command -v $$p; exit 0; fi; done; \
	echo "no Python >= 3.11 with venv found: install one (on Debian: apt install python3 python3-venv)" >&2; exit 1

.PHONY: demo test test-kube test-faults test-go test-clients fuzz simulate bench-floods bench-busy bench-overload bench-waiting lint bench bench-routing bench-scaling profile load proto lock clean
.NOTPARALLEL:  # targets share one environment

demo: $(READY_DEMO)
	@$(VENV)/bin/epp demo $(ARGS)

test: $(READY_DEV)
	@$(PYTHON) -m pytest -q $(ARGS)

# Against a real API server, and what helm and kustomize render; they are built first if need be: about 3 minutes, and 8 more once. ARGS='--outage-s 60', ARGS='-k gateway'.
test-kube: $(READY_DEV)
	@$(PYTHON) -m tests.kube.binaries
	@$(PYTHON) -m tests.deploy.renderers
	@$(PYTHON) -m pytest -q -o faulthandler_timeout=120 tests/kube tests/deploy/built $(ARGS)

# The parts, then whole requests: this picker, the same over grpc.aio, and a bare echo on the same transport. About 2 minutes;
# ARGS='--only micro', '--cases short,sse', '--json', '--help'. BASE=HEAD~3: this tree against that commit, as ratios, 4 minutes.
BASE ?=
bench: $(READY_DEV)
	@$(PYTHON) -m $(if $(BASE),tests.bench.against "$(BASE)",tests.bench) $(ARGS)

# 1 to 8 workers, 8 to 1,000 endpoints, and what `epp size` predicts against two runs.
bench-scaling: $(READY_DEV)
	@$(PYTHON) -m tests.bench.scaling $(ARGS)

# Where the time goes: a flame graph of a worker under CASE.
CASE ?= short
profile: $(READY_DEV)
	@$(PYTHON) -m tests.bench.throughput --cases $(CASE) --targets native --seconds 10 --profile profile-$(CASE).svg $(ARGS)

# Users against the whole cluster, by locust: ARGS='-u 40 -t 60s Chat Documents', URL=http://gateway for a running one, WEB=1 for its page.
URL ?=
WEB ?=
LORAS = sql,poems
LOCUST = -m locust -f loadtest/locustfile.py --csv load-results/load --html load-results/report.html \
	$(if $(WEB),--web-host 127.0.0.1,--headless --only-summary) -u 20 -r 20 -t 30s $(ARGS)
load: $(READY_DEV)
	@mkdir -p load-results
	@$(if $(URL),$(PYTHON) $(LOCUST) -H $(URL),$(VENV)/bin/epp demo --loras $(LORAS) --objects-dir loadtest/objects --run "$(PYTHON) $(LOCUST) -H {url} --adapters $(LORAS)"); \
	code=$$?; echo "load-results/report.html has the curves, load-results/*.csv the figures"; exit $$code

# How well requests are routed, in virtual time: the default configuration against others, about a minute.
bench-routing: $(READY_DEV)
	@$(PYTHON) -m tests.bench.routing $(ARGS)

# Kills workers and supervisors under load; `.ci/run` does a tenth of it.
test-faults: $(READY_DEV)
	@$(PYTHON) -m tests.faults.storm --workers-killed 100 --supervisors-killed 20 $(ARGS)

# h2spec and grpc-go against transport and picker, plaintext and TLS; needs go, and installs the rest.
test-go: $(READY_DEV)
	@$(PYTHON) -m tests.go.run $(ARGS)

# Mutated inputs through every parser, guided by atheris where it is installed; a crash prints the command that replays it.
fuzz: $(READY_DEV)
	@$(PYTHON) -m tests.fuzz $(ARGS)

# Node's gRPC library in Envoy's place; needs node and npm.
test-clients: $(READY_DEV)
	@$(PYTHON) -m tests.clients.run $(ARGS)

# How long one request keeps a worker's loop busy.
bench-busy: $(READY_DEV)
	@$(PYTHON) -m tests.bench.busy $(ARGS)

# Flow control in virtual time: 100,000 random worlds; `make test` runs 2,000.
simulate: $(READY_DEV)
	@$(PYTHON) -m tests.epp.flow.simulation --seeds 100000 --jobs 2 $(ARGS)

# Goodput, fairness and recovery under overload, through Envoy.
bench-overload: $(READY_DEV)
	@$(PYTHON) -m tests.bench.overload $(ARGS)

# Memory of requests that wait, 200,000 fairness ids, and (ARGS=--five-minutes) a wait through Envoy.
bench-waiting: $(READY_DEV)
	@$(PYTHON) -m tests.bench.waiting $(ARGS)

# What attacks on the port cost good traffic beside them.
bench-floods: $(READY_DEV)
	@$(PYTHON) -m tests.bench.floods $(ARGS)

lint: $(READY_DEV)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(PYTHON) -m mypy

# Development tools include all that the demo needs, so either stamp serves it.
$(READY_DEMO): pyproject.toml requirements-demo.txt
	@if [ -e $(READY_DEV) ] && [ ! pyproject.toml -nt $(READY_DEV) ] && [ ! requirements-dev.txt -nt $(READY_DEV) ]; then :; else \
	set -e; $(call install,requirements-demo.txt); fi
	@touch $@

$(READY_DEV): pyproject.toml requirements-dev.txt
	@set -e; $(call install,requirements-dev.txt)
	@touch $@

define install
if ! $(PYTHON) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "making the virtual environment in $(VENV)"; rm -rf $(VENV); python=$$($(FIND_PYTHON)); $$python -m venv $(VENV); fi; \
echo "installing the dependencies of $(1)"; \
$(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r $(1); \
$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
endef

# The message classes, anew from the .proto files beside them; they are committed, and a test compares the two.
proto: $(READY_DEV)
	@$(PYTHON) -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. epp/protocol/proto/*.proto

# The lock files, anew from pyproject.toml: for whoever changes a dependency.
lock: $(READY_DEV)
	@$(PYTHON) -m pip install --quiet uv
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --extra demo --output-file requirements-demo.txt pyproject.toml requirements-build.in
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --extra dev --output-file requirements-dev.txt pyproject.toml requirements-build.in
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --extra k8s --extra otel --constraint requirements-dev.txt --output-file requirements-image.txt pyproject.toml requirements-build.in

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
