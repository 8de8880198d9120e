# make train   install into .venv and train a real model on two processes
# make test    install and run every check and test: the core and Lightning in .venv, TensorFlow,
#              Keras, JAX, Spark and Ray in .venv-frameworks (`make test-core`, `test-lightning`,
#              `test-tensorflow`, `test-jax`, `test-spark` and `test-ray` do one part)
# make docs    build the documentation site into build/site, in .venv-docs, with all links checked
# make bench   install into .venv and compare collectives with Gloo and Open MPI
#
# PYTHON chooses the interpreter:  make test PYTHON=python3.12

PYTHON ?= python3
VENV   ?= .venv

SHELL   := /bin/bash
BIN     := $(VENV)/bin
FW_BIN  := $(VENV)-frameworks/bin
DOCS_BIN := $(VENV)-docs/bin
PYTEST  ?= -n 2 --dist loadfile
# The build for CPUs is a third of the size, and there is none for other processors than x86-64.
TF      := $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
INSTALL := -m pip --disable-pip-version-check install -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train test test-core test-lightning test-tensorflow test-jax test-spark test-ray lint docs bench clean

help:
	@sed -n 's/^# \{0,1\}//p; t; q' Makefile

train: $(VENV)/.examples
	PATH="$(abspath $(BIN)):$$PATH" horovodrun -np 2 python examples/pytorch/pytorch_mnist.py

test: test-core test-lightning test-tensorflow

test-core: lint
	$(BIN)/python -m pytest $(PYTEST) $(patsubst %,--ignore tests/%,lightning jax spark ray)

test-lightning: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST) tests/lightning

test-tensorflow: $(VENV)-frameworks/.installed
	TF_CPP_MIN_LOG_LEVEL=2 $(FW_BIN)/python -m pytest $(PYTEST) tests/tensorflow tests/keras

test-jax: $(VENV)-frameworks/.installed
	$(FW_BIN)/python -m pytest $(PYTEST) tests/jax

test-spark: $(VENV)-frameworks/.installed
	TF_CPP_MIN_LOG_LEVEL=2 $(FW_BIN)/python -m pytest $(PYTEST) tests/spark

test-ray: $(VENV)-frameworks/.installed
	$(FW_BIN)/python -m pytest $(PYTEST) tests/ray

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/collectives.py

clean:
	rm -rf $(VENV) $(VENV)-frameworks $(VENV)-docs build dist *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp for each set of extras; a changed requirement installs again.
$(VENV)/.examples $(VENV)/.test $(VENV)/.bench: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(INSTALL) -e '.[$*]'
	@touch $@

# tf-keras asks for the package "tensorflow", also where its build for CPUs is there.
$(VENV)-frameworks/.installed: pyproject.toml constraints.txt | $(FW_BIN)/python
	$(FW_BIN)/python $(INSTALL) -e '.[test,keras,jax,spark,ray]' $(TF) flax
	$(FW_BIN)/python $(INSTALL) --no-deps tf-keras
	@touch $@

# The site is made from sources and docstrings: no framework, and not Horovod itself, is installed.
$(VENV)-docs/.installed: docs/site/requirements.txt constraints.txt | $(DOCS_BIN)/python
	$(DOCS_BIN)/python $(INSTALL) -r docs/site/requirements.txt
	@touch $@

$(BIN)/python $(FW_BIN)/python $(DOCS_BIN)/python:
	$(PYTHON) -m venv $(@D)/..
