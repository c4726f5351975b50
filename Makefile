# Everything runs in .venv, which the first target that needs it creates.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CODE := cluster workers scheduler tests benchmarks helm
ARGS ?=

.PHONY: all serve test test-full lint format bench gpu-check clean

all: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python=""; \
	for name in "$${PYTHON:-}" python3 python3.13 python3.12 python3.11; do \
	  if [ -n "$$name" ] && "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "chunkserve needs Python 3.11 or newer; none found as python3, python3.13, python3.12 or python3.11 (set PYTHON=...)" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "$$python has no venv module; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	fi; \
	"$$python" -m venv --clear $(VENV)
	$(PY) -m pip install --disable-pip-version-check --no-input -q -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(STAMP)
	$(PY) -m cluster serve $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(STAMP)
	$(VENV)/bin/ruff check --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)

test: lint
	$(PY) -m pytest -m "not full" $(ARGS)

test-full: lint
	$(PY) -m pytest $(ARGS)

bench: $(STAMP)
	$(PY) -m benchmarks $(ARGS)

gpu-check: $(STAMP)
	$(PY) tests/gpu $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
