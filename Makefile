# Everything a fresh clone is asked to do. Each target first installs what it
# lacks (scripts/setup.sh) and says so.

PYTHON ?= python3
BIN := .venv/bin
# Versions of Slurm beside the one at hand, which is the oldest.
BETWEEN := 24.11
NEWEST := 26.05
# Those that `make matrix` runs on; "installed" is the one at hand.
MATRIX ?= installed $(BETWEEN) $(NEWEST)
# The tests that need nothing but Slurm, and not long.
USUAL := not long and not servers and not database and not browser
# Further arguments for pytest, as in `make test ARGS='-k spool'`.
ARGS ?=

export PYTHON
# Without bytecode each process of a daemon compiles Steward anew, which takes four times the CPU
# time of its imports, and pytest rewrites the assertions of all tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check matrix matrix-search bench soak docs docs-site setup setup-python
.PHONY: setup-parts setup-tests setup-site setup-slurm setup-web setup-browser setup-servers setup-databases setup-debootstrap setup-dist dist clean

help: ## Show this list
	@echo "make TARGET, where TARGET is"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: setup-slurm setup-web ## Watch Steward keep the scripts of a real Slurm cluster (KEEP=1 leaves it up)
	@$(BIN)/steward demo $(if $(KEEP),--keep)

test: setup-slurm setup-web setup-tests ## Run the tests, with the Slurm at hand; under ten minutes
	@ARGS='$(ARGS)' scripts/test.sh "2:not wide and $(USUAL)" 2:unit

# The longest first. On newer versions of Slurm, run the tests of what they print and load.
# `make soak` repeats the others on them, and those of older search servers.
test-all: setup-slurm setup-web setup-tests setup-site setup-browser setup-servers setup-databases setup-debootstrap setup-dist ## Run all tests, and those of what Slurm prints and loads on each version
	@ARGS='$(ARGS)' scripts/test.sh "2:long and not database and not soak" soak "2:@$(NEWEST) interface" \
		"database and not servers and not browser" "2:wide and $(USUAL)" "servers and not long" \
		"2:not wide and $(USUAL)" "2:@$(BETWEEN) interface" 2:unit browser

check: setup-tests ## Lint, format and types, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

matrix: setup-slurm setup-web setup-tests setup-debootstrap ## Run the tests that talk to Slurm on each version of it
	@ARGS='$(ARGS)' scripts/matrix.sh $(MATRIX)

matrix-search: setup-slurm setup-servers ## Run the tests of search servers on their older majors
	STEWARD_ELASTICSEARCH=8 STEWARD_OPENSEARCH=2 $(BIN)/pytest tests/integration -m search $(ARGS)

bench: export PYTHONPATH := tests:tests/integration
bench: setup-slurm setup-web setup-servers ## Measure, on tmpfs or in BENCH_DIR; fail if a bar is missed
	$(BIN)/python bench/suite.py $(ARGS)

soak: setup-slurm setup-servers setup-databases setup-debootstrap ## Run what repeats: long storms, a week's operation in an hour, older servers
	STEWARD_SOAK_S=$${STEWARD_SOAK_S:-3600} $(BIN)/pytest -s tests/integration/test_soak.py
	$(BIN)/python bench/soak.py $(ARGS)
	STEWARD_BANK_JOBS=1000 $(BIN)/pytest tests/integration/test_bank_job_mix.py -k kills
	STEWARD_STORM_JOBS=20000 $(BIN)/pytest tests/integration/test_sinks_kill.py
	scripts/test.sh "2:@$(NEWEST) not interface" "2:@$(BETWEEN) not interface" older-search

docs: setup-slurm setup-web setup-tests setup-browser ## Write the output blocks of README and docs anew, from the demo
	$(BIN)/python scripts/write_docs.py
	PYTHONPATH=tests:tests/integration:tests/browser $(BIN)/python scripts/write_screenshots.py

docs-site: setup-site ## Build the documentation site, with search, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site has the site: $(BIN)/python -m http.server --directory build/site"

index: setup-python ## Write the index of actions anew, from their declarations
	$(BIN)/python scripts/write_action_index.py

dist: setup-tests setup-web setup-dist ## Make what is installed elsewhere: packages, wheel and sources, in dist/
	PYTHONPATH=scripts $(BIN)/python -m packages $(ARGS)

setup: setup-slurm setup-tests ## Install what the other targets need, and nothing else

setup-python: ## Make .venv, with Steward in it
	@scripts/setup.sh python

setup-parts: setup-python ## Add the drivers of optional parts: Kafka, Parquet, PostgreSQL
	@scripts/setup.sh parts

setup-tests: setup-python
	@scripts/setup.sh tests

setup-site: setup-tests
	@scripts/setup.sh site

setup-web: setup-python
	@scripts/setup.sh web

setup-browser: setup-tests
	@scripts/setup.sh browser

setup-slurm: setup-python
	@scripts/setup.sh slurm

setup-databases: setup-tests
	@scripts/setup.sh databases

setup-servers: setup-tests
	@scripts/setup.sh servers

setup-dist:
	@scripts/setup.sh dist

setup-debootstrap:
	@scripts/setup.sh debootstrap

clean: ## Remove what was made here: .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
