# One command each: `make demo`, `make test`, `make notebooks`, `make fuzz`, `make bench`. Each
# creates .venv, installs isoshard with the versions of constraints/ for its Python, and does its job;
# a second run installs nothing.
#
# What each change has to pass is in .ci/run; `make test-all` runs all there is: docs/testing.md.
#
#   make demo ARGS="--full"                arguments for the command behind the target
#   make test PYTEST_ARGS="-k shard -x"    arguments for pytest
#   make test-room ROOM=core/plan          the tests of one folder
#   make test WORKERS=8                    processes that share the tests; 0 for none
#   make test PYTHON=python3.12            the Python (>= 3.11) that .venv is made with

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
ROOM ?=
WORKERS ?= 2

# The tests that run on meshes with Explicit axes as well: docs/testing.md.
TYPED := tests/core tests/jax_bridge tests/onnx_bridge $(addprefix tests/torch_bridge/,interop \
	checkpoints models domain handlers spmd distributed dtensor)

# Images of Docker set it. Then each process would compile isoshard's thousand modules, and the tests.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := $(wildcard constraints/$(shell $(PYTHON) -c \
	'import sys; print("python%d.%d.txt" % sys.version_info[:2])' 2>/dev/null))
PINNED := $(addprefix --constraint ,$(CONSTRAINTS)) --no-build-isolation
INSTALL := @sh tools/install.sh packages $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help demo domain notebooks docs docs-browser test test-all conformance aot fuzz bench
.PHONY: device-check bench-peers test-newest test-matrix test-torch-xla test-room
.PHONY: test-torchrun test-clusters lint types wheel clean
.DELETE_ON_ERROR:

help:  ## show the targets
	@echo "isoshard: one sharding spec drives JAX and PyTorch"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-25s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo-installed $(if $(findstring --out,$(ARGS)),$(VENV)/.pictures-installed)  ## train on a mesh from PyTorch, go on in JAX: half a minute (ARGS="--full": three)
	$(BIN)/isoshard demo $(ARGS)

domain: $(VENV)/.pictures-installed  ## a U-Net and a transformer on split fields (ARGS="--quick")
	$(BIN)/python -m examples.domain $(ARGS)

notebooks: $(VENV)/.notebooks-installed  ## run the tutorials and compare with what they keep (5 minutes)
	$(BIN)/python -m examples.notebooks $(ARGS)

docs: $(VENV)/.docs-installed  ## the documentation as a site, in build/site (ARGS="--out folder")
	$(BIN)/python -m tools.site $(ARGS)

docs-browser: docs  ## open it in headless Chromium, search without a network, take pictures
	@command -v $${CHROMIUM:-chromium} >/dev/null || { echo "installing Debian's chromium (400 MB) .."; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }
	$(BIN)/python -m tools.site.browser

test: lint types  ## format, lint, types, and all tests of one machine (PYTEST_ARGS=-x)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-room: $(VENV)/.dev-installed  ## the tests of one folder (ROOM=core/plan, ROOM=torch_bridge)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal tests/$(ROOM) $(PYTEST_ARGS)

test-all: test test-torchrun test-clusters test-torch-xla docs-browser notebooks  ## all there is (hours)
	$(BIN)/pytest tests/aot
	EXAMPLES=500 $(BIN)/pytest -n $(WORKERS) --dist worksteal tests/torch_bridge/generated
	AXIS_TYPES=Explicit $(BIN)/pytest -n $(WORKERS) --dist worksteal $(TYPED)
	$(BIN)/python -m tests.conformance
	$(BIN)/python -m tests.fuzz
	$(BIN)/python -m tools.device_check --device cpu
	MYPYPATH=build/wheel $(BIN)/mypy --config-file tests/typing/mypy.ini tests/typing/consumer.py
	$(BIN)/python -m tests.hidden_names
	$(BIN)/python -m tests.ecosystem

conformance: $(VENV)/.dev-installed  ## torch's operator database (ARGS="--op add"; all of it takes hours)
	$(BIN)/python -m tests.conformance $(ARGS)

aot: $(VENV)/.dev-installed  ## compile operators and models for v5e and H100 without either (6 GB, hours)
	$(BIN)/python -m benchmarks.environments aot
	$(BIN)/python -m tests.aot $(ARGS)

fuzz: $(VENV)/.dev-installed  ## 20,000 random programs against CPU torch (ARGS="--seed new --minutes 2")
	$(BIN)/python -m tests.fuzz $(ARGS)

bench: $(VENV)/.dev-installed  ## measure against hand-written JAX in the same run (ARGS=..)
	$(BIN)/python -m benchmarks.training $(ARGS)
	$(BIN)/python -m benchmarks.recording $(filter --quick --no-peers,$(ARGS))
	$(BIN)/python -m benchmarks.replaying $(filter --quick,$(ARGS))
	$(BIN)/python -m benchmarks.generation $(filter --quick,$(ARGS))
	$(BIN)/python -m benchmarks.serving $(filter --quick,$(ARGS))
	$(BIN)/python -m benchmarks.typed_meshes $(filter --quick,$(ARGS))
	$(BIN)/python -m benchmarks.rounding $(filter --quick,$(ARGS))
	$(BIN)/python -m benchmarks.placing
	$(BIN)/python -m benchmarks.exchange
	$(BIN)/python -m benchmarks.dtensor
	$(BIN)/python -m benchmarks.importing $(filter --quick,$(ARGS))
	$(BIN)/python -m benchmarks.onnx_run
	$(BIN)/python -m benchmarks.domain_halo $(filter --quick,$(ARGS))
	$(BIN)/python -m benchmarks.domain_knn
	$(BIN)/python -m benchmarks.domain_scaling $(filter --quick,$(ARGS))

device-check: $(VENV)/.dev-installed  ## values and speed on the device that JAX sees (ARGS="--device cpu": tiny sizes)
	$(BIN)/python -m tools.device_check $(ARGS)

bench-peers: $(VENV)/.dev-installed  ## install the peers that `make bench` measures beside us (9 GB)
	$(BIN)/python -m benchmarks.environments torchax torch-xla

# One process more than elsewhere: ranks wait for each other, and for time limits.
test-torchrun: $(VENV)/.dev-installed  ## DTensor ranks and JAX's runtime, in 2 and 4 processes
	$(BIN)/pytest -n $$(($(WORKERS) + 1)) --dist loadfile tests/multi_process $(PYTEST_ARGS)

test-clusters: $(VENV)/.clusters-installed  ## the training script under torchrun, SLURM, Open MPI and Ray
	CLUSTERS_PYTHON=$(CURDIR)/$(VENV)-clusters/bin/python $(BIN)/pytest tests/clusters $(PYTEST_ARGS)

test-newest:  ## samples, demo, JAX's internals on the newest JAX and torch (6 GB; PYTHON=: on its newest)
	$(PYTHON) -m tools.versions check $(if $(filter command,$(origin PYTHON)),latest,newest)

test-matrix:  ## all tests with all versions of docs/compatibility.md (30 GB, hours; ARGS=newest)
	$(PYTHON) -m tools.versions test $(ARGS)

test-torch-xla: $(VENV)/.dev-installed  ## over the real torch_xla 2.9, and the same as it (7 GB)
	$(BIN)/python -m benchmarks.environments torch-xla --test

lint: $(VENV)/.dev-installed  ## ruff: format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: wheel  ## pyrefly on the installed wheel, and pyright on a user's program
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/pyright --pythonpath $(BIN)/python

# build/lib is setuptools' own folder: what an earlier build left there would end up in the wheel.
wheel: $(VENV)/.dev-installed  ## build the wheel and unpack it into build/wheel
	rm -rf build
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/dist .
	$(PIP) install --quiet --no-deps --no-index --target build/wheel build/dist/isoshard-*.whl

clean:  ## remove .venv, caches and everything built
	rm -rf $(VENV) .venv-* build dist isoshard.egg-info .pytest_cache .ruff_cache .hypothesis out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is newer than what it was made from, or it is made again.
$(VENV)/.created:
	@sh tools/install.sh environment $(PYTHON) $(VENV)
	@touch $@

$(VENV)/.demo-installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(INSTALL) "setuptools, which builds isoshard" $(PINNED) setuptools
	$(INSTALL) "isoshard, jax, torch and flax: about a minute, by the network" $(PINNED) --editable '.[torch,flax]'
	@touch $@

$(VENV)/.pictures-installed: $(VENV)/.demo-installed
	$(INSTALL) "matplotlib" $(PINNED) --editable '.[demo]'
	@touch $@

$(VENV)/.notebooks-installed: $(VENV)/.demo-installed
	$(INSTALL) "what the notebooks need" $(PINNED) --editable '.[notebooks]'
	@touch $@

# Sources are read, not imported: neither torch nor Flax is installed for it.
$(VENV)/.docs-installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(INSTALL) "setuptools, which builds isoshard" $(PINNED) setuptools
	$(INSTALL) "isoshard, jax and Sphinx" $(PINNED) --editable '.[docs]'
	@touch $@

# Ray and the types of Kubernetes' manifests, apart from what users of isoshard install; torch, JAX
# and isoshard are those of $(VENV). Munge, SLURM and Open MPI are Debian's.
$(VENV)/.clusters-installed: $(VENV)/.dev-installed
	@for one in slurmctld slurmd munged mpirun; do command -v $$one >/dev/null && continue; \
	  echo "installing Debian's slurm-wlm, munge and openmpi-bin (160 MB) .."; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends slurm-wlm munge openmpi-bin; break; done
	@sh tools/install.sh environment $(PYTHON) $(VENV)-clusters
	@$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	  > "$$($(VENV)-clusters/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth"
	@sh tools/install.sh packages $(VENV)-clusters/bin/python "Ray, and the types of JobSet and Kubernetes" \
	  $(addprefix --constraint ,$(CONSTRAINTS)) 'ray[train]>=2.50' kubernetes-validate kubeflow-trainer-api pyyaml
	@touch $@

# Apart, for tests/ecosystem: torchvision does not load beside torch's CPU build, and transformers
# and others import it wherever they find it.
$(VENV)/.dev-installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(INSTALL) "setuptools, which builds isoshard" $(PINNED) setuptools
	$(INSTALL) "isoshard, jax, torch and what the tests need: about a minute, by the network" $(PINNED) --editable '.[torch,flax,dev]'
	$(INSTALL) "torchvision, timm and vit-pytorch, into a folder of their own" $(PINNED) --no-deps --upgrade \
	  --target $(VENV)/vision timm torchvision vit-pytorch
	@touch $(VENV)/.demo-installed $@
