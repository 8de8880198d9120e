# make train   install into .venv and train a real model on two processes
# make test    install into .venv and run every check and test
# make bench   install into .venv and compare collectives with Gloo and Open MPI
#
# PYTHON chooses the interpreter:  make test PYTHON=python3.12

PYTHON ?= python3
VENV   ?= .venv

SHELL := /bin/bash
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check install

.DEFAULT_GOAL := help
.PHONY: help train test lint bench clean

help:
	@sed -n 's/^# \{0,1\}//p; t; q' Makefile

train: $(VENV)/.examples
	PATH="$(abspath $(BIN)):$$PATH" horovodrun -np 2 python examples/pytorch/pytorch_mnist.py

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/collectives.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp for each set of extras; a changed requirement installs again.
$(VENV)/.examples $(VENV)/.test $(VENV)/.bench: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt -e '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
