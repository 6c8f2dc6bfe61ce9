# Every target does its own set-up: the first call makes a virtual environment and installs into it, later ones reuse
# it. Choose another interpreter with PYTHON=python3.12, another place for the environment with VENV=…
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup quickstart generated test test-long test-all test-floors test-newest bad-inputs lint hints types check federation bench studies-pocket results board docs clean

help:  ## Show what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP)  ## Make the environment (every other target does this by itself)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) does not run, or is older than Python 3.11; name another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,references]'
	@touch $(STAMP)

quickstart: $(STAMP)  ## Train a federation on real digits in under a minute
	$(BIN)/python cli.py fit --config configs/quickstart.yaml

test: $(STAMP)  ## Run the tests, in some minutes
	$(BIN)/python -m pytest --numprocesses auto --dist loadscope -m "not long"

test-long: $(STAMP)  ## Run those that take longer: several processes, kills, every documented command
	$(BIN)/python -m pytest --numprocesses auto --dist loadscope -m long

test-all: test test-long  ## Run all tests

# the extras for users
EXTRAS := text,privacy,parquet,datasets,onnx

# the lowest versions that pyproject.toml declares, those of extras included, get an environment of their own
FLOORS_VENV ?= .venv-floors
FLOORS_STAMP := $(FLOORS_VENV)/.installed

$(FLOORS_STAMP): pyproject.toml requirements/floors.txt
	$(PYTHON) -m venv $(FLOORS_VENV)
	$(FLOORS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint requirements/floors.txt --editable '.[dev,$(EXTRAS)]'
	@touch $(FLOORS_STAMP)

test-floors: $(FLOORS_STAMP)  ## Run the quickstart and the tests with the lowest versions that we declare
	$(FLOORS_VENV)/bin/python cli.py fit --config configs/quickstart.yaml
	$(FLOORS_VENV)/bin/python -m pytest --numprocesses auto --dist loadscope -m "not long"

# The newest versions have one of their own, too, brought up to date by each call: with every extra, with what tests compare
# with beside, and with pre-releases. If a pre-release cannot be installed beside the others, exclude it here ('name<2') and say why.
NEWEST_VENV ?= .venv-newest

test-newest:  ## Run the quickstart and the tests with the newest versions, pre-releases too, and with every extra
	$(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --pre --upgrade --upgrade-strategy eager \
	  --editable '.[dev,references,docs,$(EXTRAS)]' peft pycocotools
	$(NEWEST_VENV)/bin/python -m pip freeze
	$(NEWEST_VENV)/bin/python cli.py fit --config configs/quickstart.yaml
	$(NEWEST_VENV)/bin/python -m pytest --numprocesses auto --dist loadscope -m "not long"

bad-inputs: $(STAMP)  ## Draw 500 bad inputs over all options and files; none may end in more than a line
	$(BIN)/python -m tests.bad_inputs --seed 1 --cases 500

generated: $(STAMP)  ## Write the schema and the completions of lit_fed/generated/ anew: after a setting, a class or a file is new
	$(BIN)/python -m website.generated

lint: $(STAMP)  ## Check style, formatting, spelling and which room imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports

hints: $(STAMP)  ## Print the commonest slips of language, before a commit: hints, not faults
	$(BIN)/python -m tests.plain_english what-summary is-no has-not otherwise pronoun what-is so-many inverted error-colon

types: $(STAMP)  ## Check types
	$(BIN)/mypy

check: lint types test-all  ## Everything that must pass before a change lands

federation: $(STAMP)  ## Train over gRPC on this machine, without and with TLS, to the simulation's weights
	$(BIN)/python benchmarks/federation.py
	$(BIN)/python benchmarks/federation.py --tls

bench: $(STAMP)  ## Measure what the loop, groups, evaluation, aggregation, data, start-up and large populations cost
	for one in floor overhead evaluation scale aggregation data startup population large_model large_base; do \
	  $(BIN)/python benchmarks/$$one.py || failed="$$failed $$one"; done; \
	if [ -n "$$failed" ]; then echo "missed a demand:$$failed"; exit 1; fi

studies-pocket: $(STAMP)  ## Run every study in its small profile, and print what became of the claims
	$(BIN)/python cli.py study --config configs/papers/*/studies/*.yaml --profile pocket

results: $(STAMP)  ## Write what became of the claims of all studies that have run to docs/results
	$(BIN)/python cli.py results --config configs/papers/*/studies/*.yaml configs/papers/*/simulations/*.yaml

board: $(STAMP)  ## Watch the runs in TensorBoard
	$(BIN)/tensorboard --logdir lightning_logs

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

docs: $(VENV)/.docs  ## Build the documentation site in site/; a dead link or an undocumented name fails
	$(BIN)/python -m mkdocs build --strict --quiet

clean:  ## Remove the environment and caches, but no run
	rm -rf $(VENV) $(FLOORS_VENV) $(NEWEST_VENV) .venv-3.13 .pytest_cache .mypy_cache .ruff_cache .hypothesis
