# Each target sets up what it needs; `make PYTHON=python3.12 test` picks another Python.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
RAY ?= ray==2.60.0
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint requirements-ci.txt

.PHONY: predict serve test lint format types docs examples pictures accuracy bench dist clean

predict: $(VENV)/base.stamp  ## the field case, on any machine
	$(BIN)/specsim predict --draft-tokens 3 --accept-rate 0.6

serve: $(VENV)/serve.stamp  ## the planner page
	$(BIN)/specsim serve

test: $(VENV)/test.stamp
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal  # compiled once, not in every process of the tests

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/dev.stamp  ## over the package as an install lays it out
	@rm -rf .mypy_cache/src && mkdir -p .mypy_cache/src/specsim
	@ln -s $(CURDIR)/specsim/* $(CURDIR)/hardware $(CURDIR)/calibration .mypy_cache/src/specsim/
	MYPYPATH=.mypy_cache/src $(BIN)/mypy

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

examples: $(VENV)/dev.stamp  ## renew the outputs that README.md and docs/ show
	$(BIN)/python tests/pages.py

pictures: $(VENV)/dev.stamp  ## renew the pictures of docs/; needs Chromium
	$(BIN)/python tests/pictures.py

accuracy: $(VENV)/base.stamp  ## predictions beside public and recorded measurements
	$(BIN)/python benchmarks/accuracy.py

bench: $(VENV)/dev.stamp  ## speed of specsim itself
	$(BIN)/python benchmarks/speed.py

dist: $(VENV)/dev.stamp
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) build dist site *.egg-info

# The stamps: installed when missing and after a change of the requirements, else left alone.
REQUIREMENTS := pyproject.toml requirements-ci.txt

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "specsim needs Python 3.10 or later: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make an environment: install its venv module"; exit 1; }

$(VENV)/base.stamp: $(REQUIREMENTS) | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/serve.stamp: $(REQUIREMENTS) | $(BIN)/python
	$(PIP) --editable '.[serve]'
	@touch $@ $(VENV)/base.stamp

$(VENV)/dev.stamp: $(REQUIREMENTS) | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/base.stamp

# The tests of calibration run on the CPU build of torch, and one test on Ray. TORCH= and RAY= leave them out, as does a
# platform without a wheel of Ray; those tests then say so and skip.
$(VENV)/test.stamp: $(VENV)/dev.stamp
	$(if $(TORCH),$(PIP) '$(TORCH)' || $(BIN)/python -m pip install -qq torch)
	$(if $(RAY),$(PIP) '$(RAY)' || echo 'no $(RAY) for this platform: its test skips')
	@touch $@

$(VENV)/docs.stamp: $(REQUIREMENTS) | $(BIN)/python
	$(PIP) --editable '.[docs]'
	@touch $@
