# Each target sets up all it needs. Start with `make demo` or `make test`.
.PHONY: venv demo test check fast lock schema clean bench-cold bench-plan

PY := .venv/bin/python
SEEDS ?= 500

venv: .venv/ready  ## .venv with everything, from the distribution's Python 3.11 or newer where it exists
.venv/ready: requirements/dev.lock pyproject.toml scripts/venv.sh
	@bash scripts/venv.sh

demo: venv  ## two real models, one device, from zero and back (KEEP=1 stays up)
	@$(PY) -m examples.demo $(if $(KEEP),--keep)

check: venv  ## style, types, walls
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports

test: check  ## every check that this machine can run; what cannot run is listed with its reason
	@SEEDS=$(SEEDS) $(PY) -m pytest -n 2 --dist loadgroup tests

fast: venv  ## the pure tests only
	@$(PY) -m pytest -n 2 tests --ignore tests/process --ignore tests/sim

lock:  ## resolves requirements/dev.lock anew; needs uv on the PATH
	@uv pip compile -q --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra llama --group dev pyproject.toml -o requirements/dev.lock

bench-cold: venv  ## cold starts, bursts, fairness; QUICK=1 for about five minutes
	@$(PY) -m bench.cold

bench-plan: venv  ## what a decision costs
	@$(PY) -m bench.plan

clean:
	rm -rf .venv dist .mypy_cache .ruff_cache .import_linter_cache
