# `make demo`, `make test` and `make benchmark` need nothing but Python (3.11 or later) and make.
PYTHON ?= python3
BIN := .venv/bin
GPU_PYTHON ?= $(if $(wildcard $(BIN)/pytest),$(BIN)/python,$(PYTHON))
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

RUNS := runs/benchmark
MODELS := demo-llama demo-gemma2
SAMPLED := $(MODELS:%=$(RUNS)/%-sampled.jsonl)
GREEDY := $(MODELS:%=$(RUNS)/%-greedy.jsonl)
MEASURE := --repeats 1 --threads 1
ASKED := --prompts spec-bench $(CHAT) --limit 1 --max-new-tokens 64 --repeats 1 --threads 2
QUESTIONS := $(ASKED) --method plain --method self --method generate --method generate-prompt-lookup

.PHONY: demo test test-gpu checkpoints benchmark benchmark-smollm2 benchmark-context lint picture
.DELETE_ON_ERROR:

demo: .venv/installed
	$(BIN)/layerskip demo

test: .venv/installed
	$(BIN)/pytest

# With the Python that has the machine's own PyTorch, and with whatever versions it has.
test-gpu:
	$(GPU_PYTHON) -m pytest -o addopts=--strict-markers -W default -m gpu tests/test_gpu.py

# Real checkpoints, into checkpoints/: 0.4 GB to download, 2 GB to keep, terms that it states.
checkpoints: .venv/installed-checkpoints
	$(BIN)/python scripts/make_checkpoints.py

# Measures anew, about twelve minutes on a quiet core; a target alone goes on where it stopped:
# `make runs/benchmark/demo-llama-greedy.jsonl`.
benchmark: .venv/installed
	rm -f $(SAMPLED) $(GREEDY)
	$(MAKE) $(SAMPLED) $(GREEDY)
	$(BIN)/layerskip report $(SAMPLED) $(GREEDY) --output $(RUNS)/report

# The same of a real checkpoint, which no one trained for this: two threads, ten minutes.
REAL := $(RUNS)/smollm2-greedy.jsonl $(RUNS)/smollm2-sampled.jsonl $(RUNS)/smollm2-bfloat16.jsonl
benchmark-smollm2: checkpoints
	rm -f $(REAL)
	$(BIN)/layerskip benchmark smollm2 $(QUESTIONS) --output $(RUNS)/smollm2-greedy.jsonl
	$(BIN)/layerskip benchmark smollm2 $(QUESTIONS) --do-sample --temperature 0.8 \
		--output $(RUNS)/smollm2-sampled.jsonl
	$(BIN)/layerskip benchmark smollm2 $(ASKED) --method plain --method self --dtype bfloat16 \
		--output $(RUNS)/smollm2-bfloat16.jsonl
	$(BIN)/layerskip report $(REAL) --output $(RUNS)/smollm2-report

# Its speed by length of context, greedy and sampled, about twelve minutes on two quiet cores; beside
# llama.cpp where the Python that LLAMA_PYTHON names has that and this package.
CONTEXT_MODEL ?= smollm2
CHAT ?= --chat
CONTEXTS ?= 1000 4000 7500
LLAMA_PYTHON ?= $(BIN)/python
AT := $(CONTEXT_MODEL) --prompts spec-bench $(CHAT) $(CONTEXTS:%=--context %) --limit 1 --repeats 1 \
	--warmup 0 --threads 2
LONG_GREEDY := $(RUNS)/context-bfloat16-greedy.jsonl $(RUNS)/context-float32-greedy.jsonl
LONG_SAMPLED := $(RUNS)/context-bfloat16-sampled.jsonl $(RUNS)/context-float32-sampled.jsonl
benchmark-context: $(if $(filter smollm2,$(CONTEXT_MODEL)),checkpoints,.venv/installed)
	rm -f $(LONG_GREEDY) $(LONG_SAMPLED)
	$(MAKE) $(LONG_GREEDY) $(LONG_SAMPLED)
	$(BIN)/layerskip report $(LONG_GREEDY) $(LONG_SAMPLED) --output $(RUNS)/context-report

$(LONG_GREEDY): $(RUNS)/context-%-greedy.jsonl:
	if $(LLAMA_PYTHON) -c "import llama_cpp" 2>/dev/null; \
	then $(LLAMA_PYTHON) scripts/compare.py llama-cpp $(AT) --dtype $* --new-tokens 64 --output $@; \
	else $(BIN)/layerskip benchmark $(AT) --dtype $* --max-new-tokens 64 --output $@ \
		--method plain --method self --method generate; fi

$(LONG_SAMPLED): $(RUNS)/context-%-sampled.jsonl:
	$(BIN)/layerskip benchmark $(AT) --dtype $* --max-new-tokens 64 --output $@ \
		--method plain --method self --do-sample --temperature 0.8

.PHONY: $(SAMPLED) $(GREEDY) $(LONG_GREEDY) $(LONG_SAMPLED)
.PRECIOUS: $(SAMPLED) $(GREEDY)
$(SAMPLED): $(RUNS)/%-sampled.jsonl: .venv/installed
	$(BIN)/layerskip benchmark $* --do-sample --temperature 0.8 --limit 4 $(MEASURE) --trace --output $@

$(GREEDY): $(RUNS)/%-greedy.jsonl: .venv/installed
	$(BIN)/layerskip benchmark $* --limit 3 $(MEASURE) --output $@

# The README's picture of one round.
picture: .venv/installed
	$(BIN)/python scripts/picture.py docs/picture.png

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[test]'
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) --editable '.[dev]'
	touch $@

.venv/installed-checkpoints: .venv/installed
	$(INSTALL) --editable '.[checkpoints]'
	touch $@
