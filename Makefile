# The same commands as in README.md and CI, for those who have make.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: install up test slow steady lint check bill audit pins
install: .venv/installed
.venv/installed: pyproject.toml lab/pyproject.toml demo_model/pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[test]' --editable ./lab --editable ./demo_model
	touch $@
up: install
	$(BIN)/mmrt up
test: install
	$(BIN)/python -m pytest tests lab/tests demo_model/tests
slow: install
	$(BIN)/pip install --quiet --editable '.[docs,fuzz]'
	MMRT_TEST_EXAMPLES=all $(BIN)/python -m pytest -m slow tests lab/tests demo_model/tests
steady: install
	.ci/steady
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m mmrt_lab.budgets.ahead_of_time
check: test lint
# What mmrt needs, as CycloneDX in .nightly/sbom.json; its known faults; and constraints with hashes for `pip install --require-hashes`.
bill: install
	.ci/audit bill
audit: install
	.ci/audit
pins: install
	$(BIN)/python .ci/pins.py $(BIN)/python pins.txt
