# Everything from a fresh checkout: `make demo` shows it, `make test` checks it. Both set up .venv first, once.
# ARGS goes to the command: make demo ARGS="--sessions 1 --turns 2", make unit ARGS="-k pool".

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=
# protoc finds its plugins on the path.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo test test-rdma unit lint format proto clean setup
.DEFAULT_GOAL := help

help:
	@echo "make demo    replay a real agent trace over two nodes on this machine   (ARGS=--help for its options)"
	@echo "make test    formatting, lint, types, floors, protocol, then all tests"
	@echo "make test-rdma   real RDMA verbs, in a small VM: minutes"
	@echo "make unit    the quick tests only"
	@echo "make lint    all checks of make test but the tests"
	@echo "make format  rewrite the sources in the house's format"
	@echo "make proto   generate the protocol's Python code anew"
	@echo "make clean   remove .venv, caches and build output"

setup: $(STAMP)

# What is compiled is built along with the rest, where there is a compiler, and for RDMA libibverbs-dev.
$(STAMP): pyproject.toml .ci/venv kvmoverd/adapters/memory/_copy.c kvmoverd/adapters/transport/verbs/_post.c
	@PYTHON=$(PYTHON) .ci/venv $(VENV)
	@touch $@

demo: $(STAMP)
	@$(BIN)/kvmoverd demo $(ARGS)

# The VM first, with the machine to itself; then all the rest, whose closing line ends the output.
test: lint
	@$(BIN)/pytest -m rdma -rP tests/rdma_vm
	@$(BIN)/pytest -m "not rdma" $(ARGS)

# What runs is in tests/rdma_vm; -rP prints the figures.
test-rdma: $(STAMP)
	@$(BIN)/pytest -m rdma -rP tests/rdma_vm $(ARGS)

# What pytest has compiled is kept for the next time, whatever the environment says: it takes longer than a third of the tests.
unit: $(STAMP)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff format --check --quiet . || { echo "not in the house's format; run: make format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python proto/generate.py --check

format: $(STAMP)
	@$(BIN)/ruff check --quiet --select I --fix .
	@$(BIN)/ruff format .

proto: $(STAMP)
	@$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find kvmoverd -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
