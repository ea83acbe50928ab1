# Each target sets up .venv by itself (Python 3.11+; a CPU build of torch where no GPU is present).
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
PY := $(VENV)/bin/python

# One laptop, one small model: threads that sleep instead of spinning, and never a model hub.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export OMP_WAIT_POLICY ?= passive

# Of the demo: more arguments of `apprentice mcp master`.
DEMO ?=

.PHONY: install demo test lint bench conformance clean
install:
	@test -n "$(PYTHON)" || { echo "Apprentice needs Python 3.11 or newer, and none was found on PATH." >&2; exit 2; }
	@$(PYTHON) tools/setup_env.py --venv $(VENV)

demo: install
	@server="$$($(PY) tools/setup_servers.py time)" && $(PY) -m apprentice mcp master "$$server" --isolation shared --out .apprentice/demo $(DEMO)

test: install lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

bench: install
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(PY) $$script || exit 1; done

conformance: install
	$(PY) tools/conformance.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
