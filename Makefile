# The front door. `make` lists what can be done; every target sets itself up first.
SHELL := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
# A folder made by `lsai new lab` has no sources: there the installed `lsai` serves, and nothing is set up.
SOURCES := $(wildcard pyproject.toml)
BIN    := $(if $(SOURCES),$(VENV)/bin,$(patsubst %/,%,$(dir $(shell command -v lsai))))
LSAI   := $(BIN)/lsai
# PROFILE: machine profile (detected if empty). ONLY, SKIP: comma-separated studies or variants, or patterns of them. STUDY: one study.
PROFILE ?=
ONLY    ?=
SKIP    ?=
STUDY   ?= memory
# NO_RUN=1: the report from the records there are. BUDGET=20m: run what is expected to fit that time, in the order of the book.
NO_RUN  ?=
BUDGET  ?=
# ARGS: further options of `lsai submit`, for example ARGS="--per-variant --time 04:00:00".
ARGS    ?=
# TORCH_INDEX: package index to take torch from, for example https://download.pytorch.org/whl/cpu for the small CPU build.
TORCH_INDEX ?=
# LOCK: the tested versions of all packages; `make setup LOCK=` takes the newest that pyproject.toml allows, of torch, too.
LOCK ?= envs/constraints.txt
TORCH ?= $(if $(LOCK),torch<2.14,torch)
# PORT, LAB_ARGS: of `make lab`, for example PORT=8890 LAB_ARGS="--no-browser --allow-root".
PORT ?=
LAB_ARGS ?=

pip = $(BIN)/python -m pip install -q $(if $(LOCK),-c $(LOCK))
options = $(if $(PROFILE),--profile $(PROFILE)) $(if $(ONLY),--only '$(ONLY)') $(if $(SKIP),--skip '$(SKIP)')

.DEFAULT_GOAL := help
.PHONY: help setup lock lab report run submit claims test attack lint clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  options: PROFILE=cpu|gpu|h200|quick|... ONLY=a,b SKIP=c STUDY=memory (run, submit) TORCH_INDEX=url VENV=folder PORT=8890 LAB_ARGS=--no-browser (lab) LOCK= (newest packages)"

setup: $(if $(SOURCES),$(VENV)/.base)  ## create the virtual environment and install the package

# One stamp per set of extras, so that a report does not wait for the test tools. Debian's Python lacks venv and pip at first,
# and leaves half an environment: what this file made it makes again, anything else is its owner's to mend.
$(VENV)/.base: pyproject.toml
	@$(PYTHON) lsai_lab/machine/platforms.py || exit 2
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  if [ -e $(VENV) ] && [ ! -e $(VENV)/.made ]; then \
	    echo "error: $(VENV) is no environment with pip, and not made by make; delete it, or choose another with VENV=..." >&2; exit 2; \
	  fi; \
	  rm -rf $(VENV) && mkdir -p $(VENV) && touch $(VENV)/.made; \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip --version >/dev/null || { \
	    echo "error: $(PYTHON) makes no environment with pip; install its venv module (Debian, Ubuntu: apt-get install python3-venv), then make again" >&2; exit 2; }; }
	@echo "installing packages into $(VENV) (minutes the first time) ..."
	@$(if $(TORCH_INDEX),$(BIN)/python -m pip install -q --index-url $(TORCH_INDEX) "torch>=2.11" "$(TORCH)")
	@$(pip) "$(TORCH)" -e '.[report]'
	@! git rev-parse -q --git-dir >/dev/null 2>&1 || git config filter.without-outputs.clean '$(BIN)/python -m lsai_lab.project.strip'
	@touch $@

$(VENV)/.%: $(VENV)/.base
	@echo "installing the extra '$*' ..."
	@$(pip) -e '.[$*]'
	@touch $@

# Two steps: a fresh environment with the newest versions, and what is in it without torch and its CUDA libraries.
lock:  ## refresh envs/constraints.txt with the newest versions that are allowed (then run `make test`)
	@rm -rf .cache/lock && $(MAKE) --no-print-directory .cache/lock/.base VENV=.cache/lock LOCK=
	@.cache/lock/bin/python -m pip install -q -e '.[lab,test,dev]'
	@{ grep '^#' envs/constraints.txt; .cache/lock/bin/python -m pip freeze --exclude-editable | \
	  grep -viE '^(torch|triton|setuptools|pip|cuda-[a-z]+|nvidia-(cu|nccl|nvjit|nvsh|nvtx)[a-z0-9-]*)(==| @)'; } > .cache/lock/constraints.txt
	@mv .cache/lock/constraints.txt envs/constraints.txt

# It opens at notebooks/README.md; envs/jupyterlab says that Markdown is rendered and lines wrap.
start = /lab/tree/notebooks/README.md
lab: $(if $(SOURCES),$(VENV)/.lab)  ## JupyterLab with the notebooks and the project's kernel
	$(BIN)/jupyter lab --notebook-dir=. --LabApp.default_url='$(start)' --LabApp.app_settings_dir=envs/jupyterlab \
	  --ContentsManager.pre_save_hook=lsai_lab.project.strip.before_saving \
	  --ContentsManager.post_save_hook=lsai_lab.project.strip.saved $(if $(PORT),--port $(PORT)) $(LAB_ARGS)

report: setup  ## run the studies for this machine and render the lab report (HTML and PDF); FULL=1 runs everything, NO_RUN=1 nothing
	@test "$(origin STUDY)" != "command line" || { echo "error: make report takes ONLY=$(STUDY) (STUDY is for run and submit)" >&2; exit 2; }
	@$(LSAI) report $(options) $(if $(NO_RUN),--no-run) $(if $(FULL),--full) $(if $(BUDGET),--budget '$(BUDGET)')

run: setup  ## run one study (STUDY=...) without rendering
	@$(LSAI) study $(STUDY) $(options)

submit: setup  ## submit STUDY to the cluster PROFILE (params/clusters), for example PROFILE=alps ARGS=--dry-run
	@test -n "$(PROFILE)" || { echo "error: say which cluster: make submit STUDY=$(STUDY) PROFILE=alps (params/clusters)" >&2; exit 2; }
	@$(LSAI) submit $(STUDY) --cluster $(PROFILE) $(if $(ONLY),--only '$(ONLY)') $(if $(SKIP),--skip '$(SKIP)') $(ARGS)

claims: setup  ## recompute every headline statement from the committed records
	@$(LSAI) claims

# One worker per core, by groups of files, the longest first (tests/conftest.py). TESTS="-n 0 ..." runs them in one process.
MARKS ?= not slow
test: $(VENV)/.test  ## the tests; MARKS=slow those that take longer (Slurm, faults, whole reports, kills), MARKS= all
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(if $(MARKS),-m "$(MARKS)") $(TESTS)

# ARGS: for example ARGS='--only "record mutations" --number 50 --seed 2'.
attack: $(VENV)/.test  ## faults by the hundred: damaged records, text that wants to be markup; how many are survived, 1 if too few
	@OMP_NUM_THREADS=1 $(BIN)/python tests/attack.py $(ARGS)

lint: $(VENV)/.dev  ## style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/python -m lsai_lab.project.strip notebooks/*.ipynb && $(BIN)/mypy

clean:  ## remove what can be rebuilt: rendered reports, caches (records in runs/ and data/ stay)
	rm -rf reports/_output reports/_book reports/_build reports/runs reports/data reports/explore reports/colors.css reports/*.ipynb reports/_quarto-executed.yml reports/.quarto .cache .pytest_cache .mypy_cache .ruff_cache build *.egg-info
