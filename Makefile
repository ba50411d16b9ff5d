# Two commands matter: `make train` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.luban-setup

.PHONY: help setup train test lint bench docs clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP) ## a virtual environment with Luban and its dependencies at the tested versions

# One stamp: pip runs again only when what it would install has changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	touch $@

train: setup ## the main job: train a small GPT on the Python library's sources (a few minutes)
	$(BIN)/luban train gpt --quick

test: setup lint ## lint, types and all tests
	$(BIN)/python -m pytest --timeout=300

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup ## kernels beside torch and the chip's peaks, compile time, step time of four models
	$(BIN)/luban bench gemm
	$(BIN)/luban bench attention
	$(BIN)/luban bench ops
	$(BIN)/luban bench compile
	$(BIN)/luban bench models

docs: setup ## run every example of the documentation
	$(BIN)/python -m pytest --timeout=300 tests/test_docs.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
