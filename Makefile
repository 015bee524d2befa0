# uv creates the environment. If uv is missing, the first target that needs it installs it into .uv.
UV_VERSION := 0.13.8
UV := $(or $(shell command -v uv),.uv/bin/uv)
USUAL := not timing and not exhaustive
LEAVES := accounting collectives ddp flashattn2 interp paramserver scaling tinyml zero
ARGS ?=

# Without bytecode files, importing torch takes several times as long.
unexport PYTHONDONTWRITEBYTECODE
# One thread per process: otherwise two ranks on two cores wait for each other's threads.
export OMP_NUM_THREADS ?= 1

.PHONY: help sync run test test-timing test-exhaustive test-isolated test-oldest-torch test-gpu mutate lint types bench docs site report pins

help:  ## List all targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 20

$(filter .uv/bin/uv,$(UV)):
	python3 -m venv .uv
	.uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

sync: $(filter .uv/bin/uv,$(UV))  ## Create the environment with all packages and tools
	$(UV) sync

run: sync  ## Plan, train, inspect, compress and audit a small model; ARGS="--steps 50" passes options
	$(UV) run llmsys run $(ARGS)

# Three test processes for two cores: some compute while others wait for a rank that hangs.
test: sync  ## Run every test except those of the next two targets
	$(UV) run pytest -n 3 --dist loadfile --no-loadscope-reorder -m "$(USUAL)" $(ARGS)

test-timing: sync  ## Run the tests that assert times and ratios of times, on an idle machine
	$(UV) run pytest -m "timing and not exhaustive" $(ARGS)

test-exhaustive: sync  ## Run the tests of every combination and seed, which take many minutes
	$(UV) run --group oracles --group docs pytest -m exhaustive --hypothesis-profile explore $(ARGS)
	$(UV) run pytest -n 5 --dist loadfile --no-loadscope-reorder -m "$(USUAL)" --seed-offset 1 $(ARGS)

test-isolated: sync  ## Run each package's tests in an environment without the other packages
	@for leaf in $(LEAVES); do \
		echo "== $$leaf alone"; \
		UV_COMPILE_BYTECODE=0 $(UV) run --isolated --package $$leaf \
			pytest -o "pythonpath=. tests" -m "$(USUAL)" packages/$$leaf || exit 1; \
	done

test-oldest-torch: sync  ## Run the packages' tests with the oldest torch and triton that they accept
	$(UV) run python tests/oldest_torch.py -n 5 --dist loadfile --no-loadscope-reorder -m "$(USUAL)" packages $(ARGS)

test-gpu:  ## Run the GPU tests and benchmarks with the packages that python has, without uv or an index
	tests/gpu.sh $(ARGS)

mutate: sync  ## Inject faults into short runs and list which audit check finds each
	$(UV) run python packages/llmsys-suite/tests/mutate.py --write docs/benchmarking.md $(ARGS)

lint: sync  ## Check style
	$(UV) run ruff check .
	$(UV) run ruff format --check .

types: sync  ## Check types
	$(UV) run mypy packages/*/src docs/answers/measure.py

bench: sync  ## Run every package's benchmark and rewrite the figures in READMEs and docs/results
	$(UV) run python docs/measure.py $(ARGS)

docs: sync  ## Rewrite the pages and pictures whose figures are computed
	$(UV) run python docs/computed.py

site: sync  ## Build a site of all pages, with search and API pages: docs/_site/index.html
	$(UV) run --group docs python docs/website.py

report: sync  ## Rewrite the report of a run: ARGS=runs/NAME
	$(UV) run llmsys report $(ARGS)

pins: sync  ## Raise every pin to the newest version before the exclude-newer date of pyproject.toml
	$(UV) run python tests/pins.py
