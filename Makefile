# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SOURCES := $(wildcard csrc/*) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: setup demo test lint bench study clean help

help:                      ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

setup: $(STAMP)            ## create .venv and install the package with its tools

demo: setup                ## train the same small transformer under several formats and compare
	$(BIN)/python examples/demo.py

test: lint                 ## linters, then every test
	$(BIN)/python -m pytest

lint: setup                ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:                     ## remove what the commands above made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
