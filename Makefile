# Two commands matter to a newcomer: `make demo` and `make test`. Both set up what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.current

RANKS ?=
STEPS ?= 40
OUT ?= out/demo

.PHONY: help setup demo test conformance matrix lint format bench clean

help:  ## Show this list.
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv with everything; does nothing when it is current.

# torch comes first and alone, so that no other package chooses its build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -e '.[demo,test,dev]' -c constraints.txt
	touch $(STAMP)

demo: setup  ## Train MONAI's 3-D U-Net on an MRI volume over RANKS= ranks, compare with one.
	$(BIN)/shardfield demo $(if $(RANKS),--ranks $(RANKS)) --steps $(STEPS) --out $(OUT)

# Compiled code of the suite is written without vector instructions, for inductor asks the machine
# for them in every process, a few seconds each; the conformance run takes what there is.
test: setup  ## Run the whole test suite; ARGS= goes to pytest.
	TORCHINDUCTOR_VEC_ISA_OK=0 OMP_NUM_THREADS=1 KINETO_LOG_LEVEL=6 $(BIN)/python -m pytest $(ARGS)

conformance: setup  ## The suite with 300 or more examples of each property, and the long tests.
	CONFORMANCE=1 OMP_NUM_THREADS=1 KINETO_LOG_LEVEL=6 $(BIN)/python -m pytest --timeout=3600 $(ARGS)

matrix: setup  ## Train every network on every mesh against one process; writes docs/matrix.md.
	OMP_NUM_THREADS=1 KINETO_LOG_LEVEL=6 PYTHONPATH=tests $(BIN)/python -m matrix.document

lint: setup  ## Check format, lint, types and layering.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: setup  ## Format the code and fix what ruff can fix.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## Run the benchmarks: one table.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks

clean:  ## Remove the environment and caches.
	rm -rf $(VENV) out build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
