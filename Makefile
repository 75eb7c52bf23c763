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
CHAT ?= --chat
CHATS := --prompts spec-bench $(CHAT) --per-category 1
ASKED := $(CHATS) --threads 2
PEERS := --method plain --method self --method generate
# A Python that has this package, and llama-cpp-python for figures beside llama.cpp.
LLAMA_PYTHON ?= $(BIN)/python
LLAMA := $(shell $(LLAMA_PYTHON) -c "import llama_cpp" 2>/dev/null && \
	echo --method llama.cpp --method llama.cpp-flash)

.PHONY: demo test test-gpu test-oldest newest test-newest test-later checkpoints benchmark benchmark-smollm2 benchmark-context
.PHONY: benchmark-gpu speed figures architecture lines lint wheels
.DELETE_ON_ERROR:

demo: .venv/installed
	$(BIN)/layerskip demo

test: .venv/installed
	$(BIN)/pytest

# The tests on the oldest torch and transformers that pyproject.toml admits: an environment of their own,
# of several gigabytes where the package index has no CPU build of that torch. Its Triton cannot interpret
# kernels beside NumPy 2.4.
OLDEST := $(shell sed -nE 's/^ *"(torch|transformers)>=([0-9.]+).*/\1==\2/p' pyproject.toml)
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/pytest -W default --deselect tests/test_kernels.py::test_on_a_cpu

# The tests on the newest releases of what pyproject.toml bounds, up to these bounds, likewise.
BOUNDED := $(shell sed -nE 's/^ *"([a-z_]+)>=.*,<.*/\1/p' pyproject.toml)
NEWEST := .venv-newest/bin/python -m pip
test-newest: newest
	.venv-newest/bin/pytest

newest:
	test -d .venv-newest || $(PYTHON) -m venv .venv-newest
	$(NEWEST) install --quiet --upgrade $(BOUNDED) --editable '.[test]'

# Then the same with later releases than the bounds admit, if there are any; pip names those bounds.
test-later:
	$(NEWEST) install --quiet --upgrade $(BOUNDED)
	if $(NEWEST) check | grep '^layerskip'; then .venv-newest/bin/pytest; fi

# With the Python that has the machine's own PyTorch, and with whatever versions it has.
test-gpu:
	$(GPU_PYTHON) -m pytest -o addopts=--strict-markers -W default -m gpu \
		tests/test_gpu.py tests/test_kernels.py

# Real checkpoints, into checkpoints/: 0.4 GB to download, 2 GB to keep, terms that it states.
checkpoints: .venv/installed-checkpoints
	$(BIN)/python scripts/make_checkpoints.py

# Measures anew, about twelve minutes on a quiet core; a target alone goes on where it stopped:
# `make runs/benchmark/demo-llama-greedy.jsonl`.
benchmark: .venv/installed
	rm -f $(SAMPLED) $(GREEDY)
	$(MAKE) $(SAMPLED) $(GREEDY)
	$(BIN)/layerskip report $(SAMPLED) $(GREEDY) --output $(RUNS)/report

# The same for a real checkpoint, on two threads: ten minutes. Greedy runs stand beside llama.cpp where
# LLAMA_PYTHON has it.
REAL_GREEDY := $(RUNS)/smollm2-float32.jsonl $(RUNS)/smollm2-bfloat16.jsonl
REAL := $(REAL_GREEDY) $(RUNS)/smollm2-sampled.jsonl
benchmark-smollm2: checkpoints
	rm -f $(REAL)
	$(MAKE) $(REAL)
	$(BIN)/layerskip report $(REAL) --output $(RUNS)/smollm2-report

$(REAL_GREEDY): $(RUNS)/smollm2-%.jsonl:
	$(LLAMA_PYTHON) -m layerskip benchmark smollm2 $(ASKED) --repeats 1 --dtype $* \
		--max-new-tokens 64 $(PEERS) --method generate-prompt-lookup $(LLAMA) --output $@

$(RUNS)/smollm2-sampled.jsonl:
	$(BIN)/layerskip benchmark smollm2 $(ASKED) --repeats 1 --max-new-tokens 64 $(PEERS) \
		--method generate-prompt-lookup --do-sample --temperature 0.8 --output $@

# Its speed by length of context, greedy and sampled, about twelve minutes on two quiet cores; beside
# llama.cpp where the Python that LLAMA_PYTHON names has that and this package.
CONTEXT_MODEL ?= smollm2
CONTEXTS ?= 1000 4000 7500
AT := $(CONTEXT_MODEL) $(ASKED) $(CONTEXTS:%=--context %) --repeats 1 --warmup 0
LONG_GREEDY := $(RUNS)/context-bfloat16-greedy.jsonl $(RUNS)/context-float32-greedy.jsonl
LONG_SAMPLED := $(RUNS)/context-bfloat16-sampled.jsonl $(RUNS)/context-float32-sampled.jsonl
benchmark-context: $(if $(filter smollm2,$(CONTEXT_MODEL)),checkpoints,.venv/installed)
	rm -f $(LONG_GREEDY) $(LONG_SAMPLED)
	$(MAKE) $(LONG_GREEDY) $(LONG_SAMPLED)
	$(BIN)/layerskip report $(LONG_GREEDY) $(LONG_SAMPLED) --output $(RUNS)/context-report

$(LONG_GREEDY): $(RUNS)/context-%-greedy.jsonl:
	$(LLAMA_PYTHON) -m layerskip benchmark $(AT) --dtype $* --max-new-tokens 64 --output $@ \
		$(PEERS) $(LLAMA)

$(LONG_SAMPLED): $(RUNS)/context-%-sampled.jsonl:
	$(BIN)/layerskip benchmark $(AT) --dtype $* --max-new-tokens 64 --output $@ \
		--method plain --method self --do-sample --temperature 0.8

# All that is said of a GPU, ten minutes: that checkpoint, published shapes, servers, the library's ways.
benchmark-gpu: checkpoints
	$(BIN)/python scripts/benchmark_gpu.py --output $(RUNS)/gpu.json

.PHONY: $(SAMPLED) $(GREEDY) $(REAL) $(LONG_GREEDY) $(LONG_SAMPLED)
.PRECIOUS: $(SAMPLED) $(GREEDY)
$(SAMPLED): $(RUNS)/%-sampled.jsonl: .venv/installed
	$(BIN)/layerskip benchmark $* --do-sample --temperature 0.8 --per-category 4 $(MEASURE) --explain --output $@

$(GREEDY): $(RUNS)/%-greedy.jsonl: .venv/installed
	$(BIN)/layerskip benchmark $* --per-category 3 $(MEASURE) --output $@

# Five ratios of a shipped model beside the limits in scripts/floors.json, in half a minute.
speed: .venv/installed
	$(BIN)/python scripts/speed.py

# README's figures beside docs/figures.json, which takes up the runs that are there.
figures: .venv/installed
	$(BIN)/python scripts/figures.py $(wildcard $(RUNS)/*.jsonl)

# A wheel with the native passes built, into dist/, for this Python, torch and kind of processor: where it
# is installed beside that torch no compiler is needed.
wheels: .venv/installed-dev
	$(BIN)/python scripts/make_wheels.py dist

# The picture and the table of docs/architecture.md, from the imports.
architecture: .venv/installed
	$(BIN)/python scripts/rooms.py

# Lines of code by room.
lines:
	$(PYTHON) scripts/lines.py

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[test]'
	touch $@

.venv-oldest/installed: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet $(OLDEST) --editable '.[test]'
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) --editable '.[dev]'
	touch $@

.venv/installed-checkpoints: .venv/installed
	$(INSTALL) --editable '.[checkpoints]'
	touch $@
