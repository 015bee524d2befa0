# uv does the set-up. Where it is absent, the first target that needs it installs it into .uv.
UV_VERSION := 0.13.8
UV := $(or $(shell command -v uv),.uv/bin/uv)
USUAL := not timing and not exhaustive
LEAVES := accounting collectives ddp flashattn2 interp paramserver scaling tinyml zero
ARGS ?=

# Without byte-code, importing torch takes several times as long.
unexport PYTHONDONTWRITEBYTECODE
# One thread a process: two ranks on two cores otherwise wait for each other's threads.
export OMP_NUM_THREADS ?= 1

.PHONY: help sync run test test-timing test-exhaustive test-isolated test-oldest-torch test-gpu mutate lint types bench docs site report pins

help:  ## Say what each target does
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

$(filter .uv/bin/uv,$(UV)):
	python3 -m venv .uv
	.uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

sync: $(filter .uv/bin/uv,$(UV))  ## Make the environment: all packages, all tools
	$(UV) sync

run: sync  ## Take a small model through its whole life; ARGS="--steps 50" passes options on
	$(UV) run llmsys run $(ARGS)

# Five for two cores: some compute while others wait for a rank that hangs.
test: sync  ## Run every test but those of the next two targets
	$(UV) run pytest -n 5 --dist loadfile --no-loadscope-reorder -m "$(USUAL)" $(ARGS)

test-timing: sync  ## Run those that assert a ratio of times: they need an idle machine
	$(UV) run pytest -m "timing and not exhaustive" $(ARGS)

test-exhaustive: sync  ## Run those that try every combination and seed, for many minutes
	$(UV) run --group oracles --group docs pytest -m exhaustive --hypothesis-profile explore $(ARGS)
	$(UV) run pytest -n 5 --dist loadfile --no-loadscope-reorder -m "$(USUAL)" --seed-offset 1 $(ARGS)

test-isolated: sync  ## Run each package's tests in an environment that holds that package alone
	@for leaf in $(LEAVES); do \
		echo "== $$leaf alone"; \
		UV_COMPILE_BYTECODE=0 $(UV) run --isolated --package $$leaf \
			pytest -o "pythonpath=. tests" -m "$(USUAL)" packages/$$leaf || exit 1; \
	done

test-oldest-torch: sync  ## Run the tests of "make test" with the oldest torch and triton that packages accept
	$(UV) run python tests/oldest_torch.py -n 5 --dist loadfile --no-loadscope-reorder -m "$(USUAL)" packages $(ARGS)

test-gpu:  ## Run the GPU tests and benches with what python has there: no uv, no index
	tests/gpu.sh $(ARGS)

mutate: sync  ## Inject faults into short runs and list which audit check finds each
	$(UV) run python packages/llmsys-suite/tests/mutate.py --write docs/benchmarking.md $(ARGS)

lint: sync  ## Check style
	$(UV) run ruff check .
	$(UV) run ruff format --check .

types: sync  ## Check types
	$(UV) run mypy packages/*/src

bench: sync  ## Run every package's bench and write what READMEs and docs/results quote
	$(UV) run python docs/measure.py $(ARGS)

docs: sync  ## Write the pages and pictures whose figures are computed
	$(UV) run python docs/computed.py

site: sync  ## Make a site of all pages, with search and API pages: docs/_site/index.html
	$(UV) run --group docs python docs/website.py

report: sync  ## Write the report of a run anew: ARGS=runs/NAME
	$(UV) run llmsys report $(ARGS)

pins: sync  ## Raise every pin to the newest that the exclude-newer date of pyproject.toml allows
	$(UV) run python tests/pins.py
