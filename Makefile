# make plan        set up everything and plan the built-in workload for a 24 GB GPU
# make test        set up everything and run all checks: formatting, types, architecture, tests
# make heavy       what takes longer: programs on three GPUs interpolated and rehearsed, the README's rehearsed plan, wheels,
#                  the rest of sweeps of which `make test` runs some, training programs as people write them, and PyTorch 2.1,
#                  2.3 and 2.5 (their environments are kept in memplan's cache: 7 GB); more than an hour on two processors, and
#                  `make heavy SHARE=1/4` is a quarter of it
# make docs        the documentation as a site in build/site; a warning, a broken link or anchor among them, is an error
# make screenshots the pictures of the site, with Chromium, where that is installed
# make gpu         on a machine with a GPU: run the accuracy suite on it, compare with rehearsals, record what was seen
# All need python3 (3.10 or later) and make, nothing else. The environment is .venv, about 6 GB: PyTorch's CUDA build is part of it.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: plan test heavy coverage docs screenshots gpu lint types architecture pytest format templates benchmark clean

plan: .venv/ready
	$(BIN)/memplan --gpu-memory 24

test: lint types architecture pytest

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "memplan needs Python 3.10 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 3; }
	@$(PYTHON) -m venv .venv || { echo "python3 cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 3; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m compileall -q memplan  # as pip does for all but editable installs: a tenth of a second at every start
	@touch $@

lint: .venv/ready
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

types: .venv/ready
	$(BIN)/mypy
	$(BIN)/basedpyright --project pyproject.toml --pythonpath $(BIN)/python --level error

architecture: .venv/ready
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

pytest: .venv/ready
	$(BIN)/pytest -n auto --dist worksteal

# What rehearsed processes write is held back, and so would be their coverage, but not in /dev/shm.
coverage: .venv/ready
	COVERAGE_FILE=/dev/shm/memplan.coverage $(BIN)/pytest -n auto --dist worksteal -m 'not gpu' --cov --cov-report=term-missing:skip-covered

heavy: .venv/ready
	$(BIN)/pytest -n auto --dist worksteal -m heavy $(if $(SHARE),--share $(SHARE))

docs: .venv-docs/ready
	.venv-docs/bin/sphinx-build --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees docs build/site

# The site's tools in an environment of their own, which sees what is in .venv and leaves its versions alone: the reference is made by
# importing memplan, and so PyTorch, which need not be installed twice.
.venv-docs/ready: .venv/ready pyproject.toml constraints.txt
	@$(BIN)/python -m venv --clear .venv-docs
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-docs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/installed-beside.pth"
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

# The pictures of the site, by a real browser: Chromium has to be installed.
screenshots: .venv/ready
	$(BIN)/python -m docs.screenshots

gpu: .venv/ready
	$(BIN)/pytest -m gpu
	$(BIN)/python benchmarks/gpu_accuracy.py

format: .venv/ready
	$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

templates: .venv/ready
	$(BIN)/python -m memplan.layouts.templates

benchmark: .venv/ready
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/rehearsal.py
	$(BIN)/python benchmarks/allocator.py
	$(BIN)/python benchmarks/data_loading.py

clean:
	rm -rf .venv .venv-docs .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage dist build
