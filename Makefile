# `make demo` and `make test` work on a fresh machine: without an active virtual environment they make `.venv`.
PYTHON ?= python3
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
RUN := $(VENV)/bin/python
# A TensorFlow that is there already, whichever distribution it came from, is kept.
TENSORFLOW = $(shell $(RUN) -c "import importlib.util as u; print('' if u.find_spec('tensorflow') else 'cpu,')")

.PHONY: demo test coverage lint format clean

demo: $(VENV)/.vit-keras-zoo-demo
	$(RUN) examples/digits.py

test: $(VENV)/.vit-keras-zoo-test
	$(RUN) -m pytest

# Tracing every line takes as long again as the tests.
coverage: $(VENV)/.vit-keras-zoo-test
	$(RUN) -m pytest --cov

lint: $(VENV)/.vit-keras-zoo-lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/.vit-keras-zoo-lint
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

$(VENV)/.vit-keras-zoo-%: setup.cfg pyproject.toml | $(RUN)
	$(RUN) -m pip install --quiet --editable ".[$(TENSORFLOW)$*]"
	touch $@

$(RUN):
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage demo_output
