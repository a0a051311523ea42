# make demo: install and run the main job.   make test: the whole suite.   make check: lint and types.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU := $(shell command -v nvidia-smi 2>/dev/null)
TORCH := torch==2.13.0

.PHONY: demo test slow browser pictures ray postgres clients deployment check bench docs wheel gpu tiny install dev clean

demo: install
	@mkdir -p build
	$(BIN)/coserve demo --picture build/demo.svg

# Two workers with one thread each: OpenMP threads that share a core spin and crawl. With `worksteal` the tests
# of a file mostly stay with one worker, which makes what they share once. Bytecode is kept, whatever the
# environment says: forty processes start. A test that takes ten minutes hangs, and ends with all stacks.
test: dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal \
		-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

slow: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

# The page in Chromium, which comes from the system's packages (apt-get install chromium) and needs no network.
browser: dev $(VENV)/.browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/browser

# Makes the docs' pictures of the page anew.
pictures: dev $(VENV)/.browser
	OMP_NUM_THREADS=1 PAGE_PICTURES=docs/pictures $(BIN)/python -m pytest -m browser tests/browser

# Workers on Ray, which is an extra of 285 MB: a minute, alone on the machine.
ray: dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[ray]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "ray and not slow"

# Other people's programs against a server, in an environment of their own of 1.2 GB.
clients: dev build/clients/.installed build/conformance/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m clients tests/clients

build/clients/.installed: tests/clients/requirements.txt tests/clients/constraints.txt
	$(PYTHON) -m venv build/clients
	build/clients/bin/pip install --quiet -c tests/clients/constraints.txt -r tests/clients/requirements.txt
	@touch $@

# The clients' sources have their tests, which wheels do not. Those of llama.cpp (in llama-cpp-python's) and of vLLM
# are for hand-made runs: put them into build/conformance/sources.
build/conformance/.installed: tests/clients/conformance-requirements.txt tests/clients/conformance-constraints.txt
	$(PYTHON) -m venv build/conformance
	build/conformance/bin/pip install --quiet -c tests/clients/conformance-constraints.txt \
		-r tests/clients/conformance-requirements.txt
	build/conformance/bin/pip download --quiet --no-binary :all: --no-deps --dest build/conformance/sources \
		openai==3.52.0 anthropic==2.14.0
	@touch $@

# Files of deploy/ against the schemas of compose and Kubernetes, and by linters, in an environment of their own.
# What the system has of Prometheus' and Docker's own checkers looks at them too.
deployment: build/deployment/.installed
	build/deployment/bin/yamllint --strict --config-file deploy/.yamllint deploy
	build/deployment/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	build/deployment/bin/kubernetes-validate --strict deploy/kubernetes/server.yaml
	build/deployment/bin/hadolint deploy/Containerfile
	if command -v promtool >/dev/null; then promtool check config --syntax-only deploy/prometheus.yml; fi
	if command -v docker-compose >/dev/null; then COSERVE_MODEL=m COSERVE_DATABASE_PASSWORD=p \
		docker-compose --file deploy/compose.yaml config --quiet; fi

build/deployment/.installed: deploy/requirements.txt
	$(PYTHON) -m venv build/deployment
	build/deployment/bin/pip install --quiet -r deploy/requirements.txt
	@touch $@

# On PostgreSQL, which has to be installed.
postgres: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "postgres and not slow"

check: dev
	$(BIN)/ruff check src benchmarks tests examples
	$(BIN)/ruff format --check src benchmarks tests examples
	$(BIN)/mypy

# The site of the documentation, in build/site: opened from the folder, or put behind any web server. A broken
# link or anchor is an error. Nothing is fetched from a network.
docs: dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel: dev
	$(BIN)/python -m build --wheel --no-isolation

bench: dev
	$(BIN)/coserve bench engine --json docs/results/engine.json

# On a GPU, in nine minutes and without a network: what is right, how fast it is, and where the time goes.
# PARTS="coserving" runs one part, in four minutes.
# It makes no environment: PYTHON is one that has torch, Triton and transformers (docs/gpu.md).
DEVICE ?= cuda
SHAPE ?= 8b
gpu:
	@PYTHONPATH=src:benchmarks$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m coserve_benchmarks.gpu \
		--device $(DEVICE) --shape $(SHAPE) --out $(or $(OUT),build/gpu) $(if $(WHEELS),--wheels $(WHEELS)) \
		$(if $(PARTS),--only $(PARTS))

tiny: dev
	$(BIN)/python -m coserve_benchmarks.tiny.build

install: $(VENV)/.installed
dev: $(VENV)/.dev

# torch goes in first and alone: asked for by another package, it would bring several gigabytes of CUDA.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("coserve needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
ifeq ($(GPU),)
	$(BIN)/python -m pip install --quiet '$(TORCH)+cpu' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
else
	$(BIN)/python -m pip install --quiet '$(TORCH)'
endif
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.browser: pyproject.toml $(VENV)/.dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
