# `make demo` and `make test` do everything on a fresh machine.
# Reader on Linux without an NVIDIA GPU: a small torch instead of gigabytes of CUDA with
#   make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)

.PHONY: setup demo test check-full lint course lab bench clean

setup: $(VENV)/.installed

# The stamp is newer than what it was made from, so a second call installs nothing.
$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt -e .
	touch $@

demo: setup
	$(BIN)/python -m minivllm compare

test: setup
	$(BIN)/python -m pytest

check-full: setup lint
	$(BIN)/python -m pytest -m "full or not full"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# After a change of a chapter's text or of code that a chapter quotes.
course: setup
	$(BIN)/python tools/build_exercises.py
	$(BIN)/python tools/weave.py --excerpts-only
	$(BIN)/python tools/build_notebooks.py
	$(BIN)/python tools/weave.py
	$(BIN)/python tools/check_links.py

lab: setup
	$(BIN)/jupyter lab notebooks

bench: setup
	$(BIN)/python benchmarks/past_key_values.py
	$(BIN)/python benchmarks/replay.py
	$(BIN)/python benchmarks/block_manager.py
	$(BIN)/python benchmarks/paged_attention.py
	$(BIN)/python benchmarks/compare.py

clean:
	rm -rf $(VENV) out
