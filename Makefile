# Each target sets up all it needs. Start with `make demo` or `make test`.
.PHONY: venv demo test test-deep test-clients test-engines test-profile test-upgrade test-flaky mutants check fast docs fuzz lock schema clean wheel image lock-image compiled test-compiled bench-cold bench-clients bench-dataplane bench-plan bench-cluster bench-packing bench-weights bench-capacity bench-fabric gpu-kit bench-compare

PY := .venv/bin/python
# The compiled gateway, as users get it. Python finds it before the sources, also in the processes that are started.
WITH_COMPILED := PYTHONPATH=$(CURDIR)/build/compiled:$(CURDIR)
FUZZ_S ?= 600

venv: .venv/ready  ## .venv with all dependencies, made with Python 3.11 or newer
.venv/ready: requirements/dev.lock scripts/venv.sh
	@bash scripts/venv.sh

demo: venv  ## two real models share a device, start from zero and stop again; KEEP=1 keeps them running
	@$(PY) -m examples.demo $(if $(KEEP),--keep)

check: venv  ## format, lint, types, imports, gates (length of files, functions and pages, pure modules), prose of the documentation
	@$(PY) -m tests.run check

fast: venv  ## every test that starts no process and opens no socket; CHANGED=1: only those that reach a file that differs from HEAD (or CHANGED=COMMIT)
	@$(PY) -m tests.run fast $(if $(CHANGED),--changed $(if $(filter 1,$(CHANGED)),HEAD,$(CHANGED)))

test: venv  ## checks and all tests but the deep ones
	@$(PY) -m tests.run test

test-deep: venv  ## every test with all examples and 500 seeds; SHARD=0 to 7: one eighth of what `make test` leaves out
	@$(PY) -m tests.run deep $(if $(SHARD),--shard $(SHARD))

test-clients: venv  ## ten behaviours of each client library of docs/reference/clients.md; installs the clients from their registries
	@$(PY) -m tests.run clients

test-engines: venv  ## the contract of engines for vLLM, transformers serve, Infinity and Ollama; installs them (6 GB) or builds them
	@$(PY) -m tests.run engines

test-profile: venv  ## time of the tests by folder and file, and the slowest tests; TIER=fast or deep
	@rm -f build/costs.jsonl
	@$(PY) -m tests.run $(or $(TIER),test) --costs=$(CURDIR)/build/costs.jsonl; status=$$?; $(PY) -m tests.plugins.report build/costs.jsonl && exit $$status

test-upgrade: venv  ## replaces the processes of another version by this one and back, while clients call; BASE=COMMIT
	@BASE=$(BASE) $(PY) -m tests.integration.network_namespace $(PY) -m pytest -m "" -k upgrade_and_rollback tests/integration/process/faults/test_component_crashes.py tests/integration/cluster/faults/test_control_plane.py

test-flaky: venv  ## repeat make test RUNS times while two processes use the CPU; the results go to tests/flaky-log.tsv
	@$(PY) -m tests.flaky $(or $(RUNS),10) $(or $(TIER),test)

mutants: venv  ## counts the mutants of the planner, the packer and the dispatcher that the tests detect; about an hour
	@$(PY) -m pip install -q --disable-pip-version-check --require-hashes --no-deps --upgrade --target build/mutants/tools -r requirements/mutants.lock
	@PYTHONPATH=build/mutants/tools $(PY) -m tests.mutants $(WORDS)

wheel: venv  ## dist/: the wheel for this Python and machine, with the compiled gateway
	@bash scripts/compiled.sh wheel dist

compiled: venv  ## build/compiled: the unpacked wheel, for benchmarks and tests
	@bash scripts/compiled.sh

test-compiled: venv  ## the gateway's tests with the compiled gateway
	@bash scripts/compiled.sh test -n 5

image: venv  ## dist/pilotlight-image.tar: the OCI image, without a docker engine, and its bill of materials; needs mmdebstrap; LLAMA=1: dist/pilotlight-llama-image.tar, with llama.cpp
	@$(PY) -m scripts.image $(if $(LLAMA),--llama)

lock-image: venv  ## updates requirements/debian.lock, the Debian packages of the image, for this architecture; needs mmdebstrap
	@$(PY) -m scripts.image lock

fuzz: venv  ## fuzzes all decoders of external data for FUZZ_S seconds; inputs that fail are kept in tests/fuzz/findings
	@FUZZ_S=$(FUZZ_S) nice -n 19 $(PY) -m tests.fuzz

docs: venv  ## build/docs/site: the documentation as a web site, which requests nothing from other hosts
	@bash scripts/docs.sh

lock:  ## updates requirements/dev.lock for all Python versions and platforms; needs uv on the PATH
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra llama --extra kubernetes --extra agent --group dev pyproject.toml -o requirements/dev.lock
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -c requirements/dev.lock --group mutants -o requirements/mutants.lock
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --group docs -o requirements/docs.lock
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --group installers -o requirements/installers.lock
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --group gpu-kit -o requirements/gpu-kit.lock
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-deps --group engines-triton -o requirements/engines-triton.lock
	@for engine in vllm transformers infinity; do uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --group engines-$$engine -o requirements/engines-$$engine.lock || exit; done

bench-cold: compiled  ## cold starts, bursts, fairness; QUICK=1 for about five minutes
	@$(WITH_COMPILED) $(PY) -Pm bench.cold

bench-dataplane: compiled  ## the gateway compared with nginx and other proxies; QUICK=1 for less than ten minutes
	@$(WITH_COMPILED) $(PY) -Pm bench.dataplane

bench-clients: compiled  ## tokens through nginx, HAProxy and Caddy, requests sent twice, forms of client libraries; QUICK=1 for about a minute
	@$(WITH_COMPILED) $(PY) -Pm bench.clients

bench-plan: venv  ## CPU time of a decision of the autoscaler
	@$(PY) -m bench.plan

bench-cluster: compiled  ## on a real Kubernetes control plane; QUICK=1 for less than ten minutes
	@$(PY) -m tests.integration.cluster.support.programs.build >/dev/null
	@$(WITH_COMPILED) $(PY) -Pm tests.integration.network_namespace $(PY) -Pm bench.cluster

bench-packing: venv  ## FGD's packing experiment with our packer and its peers; QUICK=1: only FGD as a peer
	@$(PY) -m bench.packing

bench-weights: venv  ## pull and push of weights compared with oras-go and oras-py; needs go and docker-registry (or its path in PILOTLIGHT_REGISTRY); QUICK=1 for fewer rounds
	@$(PY) -m bench.weights

bench-capacity: venv  ## the calls of GenTD26 with our planner and with other rules, and 10,000 surges; QUICK=1: a part; GENTD26=FOLDER: the trace
	@$(PY) -m bench.capacity

bench-fabric: venv  ## time until a fabric is asked for a GPU, through its operator and through Redfish, on a real Kubernetes control plane; about three minutes
	@$(PY) -m tests.integration.cluster.support.programs.build >/dev/null
	@$(PY) -Pm tests.integration.network_namespace $(PY) -Pm bench.fabric

PYTHON_VERSION ?= 3.12
BUILD_TOOLS ?= cmake ninja
gpu-kit: venv  ## build/gpu-kit: everything that tests/gpu/run needs on a machine without a network with that PYTHON_VERSION; BUILD_TOOLS= leaves out cmake and ninja
	@$(PY) -m tests.gpu.kit $(PYTHON_VERSION) $(if $(strip $(BUILD_TOOLS)),,--without-build-tools)

bench-compare: venv  ## CPU time per operation of this tree relative to the commit BASE, at most ten minutes for each of PARTS; RECORD=ISSUE adds rows to bench/history.tsv
	@$(PY) -m bench.compare --base '$(BASE)' $(if $(RECORD),--record $(RECORD)) $(or $(PARTS),dataplane:calls dataplane:chunks plan cluster:fold)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .import_linter_cache
