# make train   install into .venv and train a real model on two processes
# make test    install and run every check and test: .venv for all but TensorFlow and Keras,
#              .venv-tensorflow for those (`make test-core`, `make test-lightning` and
#              `make test-tensorflow` do one part)
# make bench   install into .venv and compare collectives with Gloo and Open MPI
#
# PYTHON chooses the interpreter:  make test PYTHON=python3.12

PYTHON ?= python3
VENV   ?= .venv

SHELL   := /bin/bash
BIN     := $(VENV)/bin
TF_BIN  := $(VENV)-tensorflow/bin
PYTEST  ?= -n 2 --dist loadfile
# The build for CPUs is a third of the size, and there is none for other processors than x86-64.
TF      := $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
INSTALL := -m pip --disable-pip-version-check install -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train test test-core test-lightning test-tensorflow lint bench clean

help:
	@sed -n 's/^# \{0,1\}//p; t; q' Makefile

train: $(VENV)/.examples
	PATH="$(abspath $(BIN)):$$PATH" horovodrun -np 2 python examples/pytorch/pytorch_mnist.py

test: test-core test-lightning test-tensorflow

test-core: lint
	$(BIN)/python -m pytest $(PYTEST) --ignore tests/lightning

test-lightning: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST) tests/lightning

test-tensorflow: $(VENV)-tensorflow/.installed
	TF_CPP_MIN_LOG_LEVEL=2 $(TF_BIN)/python -m pytest $(PYTEST) tests/tensorflow tests/keras

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/collectives.py

clean:
	rm -rf $(VENV) $(VENV)-tensorflow build dist *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp for each set of extras; a changed requirement installs again.
$(VENV)/.examples $(VENV)/.test $(VENV)/.bench: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(INSTALL) -e '.[$*]'
	@touch $@

# tf-keras asks for the package "tensorflow", also where its build for CPUs is there.
$(VENV)-tensorflow/.installed: pyproject.toml constraints.txt | $(TF_BIN)/python
	$(TF_BIN)/python $(INSTALL) -e '.[test]' $(TF) keras jax
	$(TF_BIN)/python $(INSTALL) --no-deps tf-keras
	@touch $@

$(BIN)/python $(TF_BIN)/python:
	$(PYTHON) -m venv $(@D)/..
