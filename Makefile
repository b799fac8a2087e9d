# Each target sets up all it needs. Start with `make demo` or `make test`.
.PHONY: venv demo test test-deep test-profile test-flaky check fast fuzz lock schema clean wheel image compiled test-compiled bench-cold bench-dataplane bench-plan bench-cluster bench-packing bench-weights bench-capacity bench-fabric gpu-kit bench-compare

PY := .venv/bin/python
# What users get: the compiled gateway, found before the one beside it by us and by all that we start.
WITH_COMPILED := PYTHONPATH=$(CURDIR)/build/compiled:$(CURDIR)
FUZZ_S ?= 600

venv: .venv/ready  ## .venv with everything, from the distribution's Python 3.11 or newer where it exists
.venv/ready: requirements/dev.lock scripts/venv.sh
	@bash scripts/venv.sh

demo: venv  ## two real models, one device, from zero and back (KEEP=1 stays up)
	@$(PY) -m examples.demo $(if $(KEEP),--keep)

check: venv  ## format, lint, types, imports, gates (file and function length, pure modules)
	@$(PY) -m tests.run check

fast: venv  ## every test that starts no process and opens no socket; CHANGED=1: only those that reach a file that differs from HEAD (or CHANGED=COMMIT)
	@$(PY) -m tests.run fast $(if $(CHANGED),--changed $(if $(filter 1,$(CHANGED)),HEAD,$(CHANGED)))

test: venv  ## checks and all tests but the deep ones
	@$(PY) -m tests.run test

test-deep: venv  ## every test with all examples and 500 seeds; SHARD=0 to 7: one eighth of what `make test` leaves out
	@$(PY) -m tests.run deep $(if $(SHARD),--shard $(SHARD))

test-profile: venv  ## what the tests cost, by folder and file, and the slowest; TIER=fast or deep
	@rm -f build/costs.jsonl
	@$(PY) -m tests.run $(or $(TIER),test) --costs=$(CURDIR)/build/costs.jsonl; status=$$?; $(PY) -m tests.plugins.report build/costs.jsonl && exit $$status

test-flaky: venv  ## repeat make test RUNS times while two processes use the CPU; the results go to tests/flaky-log.tsv
	@$(PY) -m tests.flaky $(or $(RUNS),10) $(or $(TIER),test)

wheel: venv  ## dist/: the wheel for this Python and machine, with the gateway compiled
	@bash scripts/compiled.sh wheel dist

compiled: venv  ## build/compiled: that wheel laid open, for benches and tests
	@bash scripts/compiled.sh

test-compiled: venv  ## the gateway's tests against it
	@bash scripts/compiled.sh test

image: venv  ## dist/pilotlight-image.tar: the OCI image, without a docker engine; needs mmdebstrap
	@$(PY) scripts/image.py

fuzz: venv  ## the wire, bodies, messages and manifests, for FUZZ_S seconds; what breaks them is kept in tests/fuzz/found
	@FUZZ_S=$(FUZZ_S) nice -n 19 $(PY) -m tests.fuzz

lock:  ## resolves requirements/dev.lock anew, for every Python and machine (markers stay); needs uv on the PATH
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra llama --extra kubernetes --extra agent --group dev pyproject.toml -o requirements/dev.lock

bench-cold: compiled  ## cold starts, bursts, fairness; QUICK=1 for about five minutes
	@$(WITH_COMPILED) $(PY) -Pm bench.cold

bench-dataplane: compiled  ## one gateway beside nginx and other proxies; QUICK=1 for less than ten minutes
	@$(WITH_COMPILED) $(PY) -Pm bench.dataplane

bench-plan: venv  ## what a decision costs
	@$(PY) -m bench.plan

bench-cluster: compiled  ## on a real Kubernetes control plane; QUICK=1 for less than ten minutes
	@$(PY) -m tests.cluster.building >/dev/null
	@$(WITH_COMPILED) $(PY) -Pm tests.cluster.network $(PY) -Pm bench.cluster

bench-packing: venv  ## the packing experiment of FGD with ours and its peers; QUICK=1 without the peers but FGD
	@$(PY) -m bench.packing

bench-weights: venv  ## weights from and to a registry beside oras-go and oras-py; needs go and docker-registry (or its name in PILOTLIGHT_REGISTRY); QUICK=1 for fewer rounds
	@$(PY) -m bench.weights

bench-capacity: venv  ## GenTD26's Calls through the plan and through others' rules, and 10,000 surges; QUICK=1 for less; the trace: GENTD26=FOLDER
	@$(PY) -m bench.capacity

bench-fabric: venv  ## how soon a fabric is asked for a GPU, by its operator and by Redfish, on a real Kubernetes control plane; about three minutes
	@$(PY) -m tests.cluster.building >/dev/null
	@$(PY) -Pm tests.cluster.network $(PY) -Pm bench.fabric

PYTHON_VERSION ?= 3.12
gpu-kit: venv  ## build/gpu-kit: what tests/gpu/run needs on a machine without a network, for its PYTHON_VERSION
	@$(PY) -m tests.gpu.kit $(PYTHON_VERSION)

bench-compare: venv  ## CPU time per operation of this tree relative to the commit BASE, at most ten minutes for each of PARTS; RECORD=ISSUE adds rows to bench/history.tsv
	@$(PY) -m bench.compare --base '$(BASE)' $(if $(RECORD),--record $(RECORD)) $(or $(PARTS),dataplane:calls dataplane:chunks plan cluster:fold)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .import_linter_cache
