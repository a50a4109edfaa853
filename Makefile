PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test lint lowest

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /  make \1\t/'

install: $(VENV)/installed  ## make .venv with what is locked in constraints.txt

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install  ## pre-train, fine-tune the three arms, print the table, leave runs/demo (ARGS=--overwrite starts again)
	$(BIN)/python eval/compare.py --recipe compare_demo --output runs/demo $(ARGS)

test: install  ## run the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile

lowest:  ## run the test suite with the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[dev]'
	.venv-lowest/bin/python -m pytest -n 2 --dist loadfile

lint: install  ## ruff, and mypy over the public functions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
