# Every target sets up .venv by itself, and again when pyproject.toml or constraints.txt has changed.
PYTHON ?= python3
INSTALLED := .venv/.installed
RUN := .venv/bin/python
SURVEYED := .survey/.installed
LIBRARIES := .survey/libraries/.installed
ENGINES := .survey/engines/.installed
PYRIGHT := .survey/pyright/.installed

.PHONY: demo notebooks test slow sockets durations lint pyright bench coverage survey libraries engines

# Another schedule: make demo SCHEDULE=interleaved CHUNKS=2
demo: $(INSTALLED)
	@$(RUN) notebooks/demo/train.py $(if $(SCHEDULE),--schedule $(SCHEDULE)) $(if $(CHUNKS),--chunks $(CHUNKS))

# Executes every notebook and keeps its outputs; look at the pictures before they are committed.
notebooks: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(RUN) notebooks/renew.py

# One thread each: tests start several processes, and results must not depend on how sums are shared out. Two tests at a
# time: most of them wait for imports and for each other's processes. Each worker takes the tests of a file in a row
# (worksteal), for they share what is traced and built. Bytecode is kept, also where the environment says otherwise: each
# process that a test starts would compile all our sources anew, for 0.14 s [measured].
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -q

test: $(INSTALLED)
	@$(PYTEST) --numprocesses 2 --dist worksteal -m "not slow"

# The tests of tests/slow.txt, which take five times as long as all others together.
slow: $(INSTALLED)
	@$(PYTEST) --numprocesses 2 --dist worksteal -m slow

# What ranks of one machine tell each other goes through shared memory in all tests but those of the transports. These run
# over sockets here: faults, checkpoints, bad input, the same results, where data come from, shared state, precision; and
# again with messages begun in one order, as NCCL needs it.
OVER_SOCKETS := adversary bad_input checkpoint checkpoint_damage checkpoint_folder contents failed_steps faults feed \
  precision predict same_result schedule_features shared_memory shared_state sharing training
sockets: $(INSTALLED)
	@$(PYTEST) --numprocesses 2 --dist worksteal --transport gloo $(OVER_SOCKETS:%=tests/executor/test_%.py)
	@$(PYTEST) --numprocesses 2 --dist worksteal --transport gloo --in-order $(OVER_SOCKETS:%=tests/executor/test_%.py)

durations: $(INSTALLED)
	@$(PYTEST) --durations-to-list -m "not slow"

lint: $(INSTALLED)
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy

# What pyright says of a user's script, which mypy checks in the tests; it fetches its program from npm at its first run.
pyright: $(PYRIGHT)
	@PYTHONPATH=.survey/pyright $(RUN) -m pyright --pythonpath $(RUN) tests/typed_script.py

bench: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(RUN) -m pytest tests/benchmarks -m benchmark -s -q

coverage: $(INSTALLED)
	@OMP_NUM_THREADS=1 PYTHONPATH=notebooks/demo $(RUN) -m tests.coverage.table

survey: $(SURVEYED)
	@OMP_NUM_THREADS=1 PYTHONPATH=.survey:notebooks/demo $(RUN) -m tests.coverage.survey .survey/rows.jsonl $(ONLY)

libraries: $(LIBRARIES)
	@OMP_NUM_THREADS=1 GPIPE_AUTOPLAN_CACHE=off PYTHONPATH=.survey/libraries:notebooks/demo:. \
		$(RUN) -m tests.coverage.library_survey .survey/libraries.jsonl $(ONLY)

engines: $(ENGINES)
	@OMP_NUM_THREADS=1 PYTHONPATH=.survey/engines:. $(RUN) -m pytest -q tests/planner/test_export_engines.py

# In a folder of its own: transformers would use torchvision in the tests as well, whose wheel needs CUDA's libraries.
$(SURVEYED): $(INSTALLED)
	@.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --target .survey timm torchvision
	@touch $@

# Wheels that bring a package named tests would hide our folder of that name. The compiled part of torchaudio needs
# CUDA's libraries; its models do without. The setups of basicsr and norse ask for the torch that is here.
$(LIBRARIES): $(INSTALLED) tests/coverage/libraries.txt
	@.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/coverage/libraries.txt \
		--target .survey/libraries
	@.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation basicsr==1.4.2 norse==1.0.0 \
		--target .survey/libraries
	@rm -rf .survey/libraries/tests .survey/libraries/test .survey/libraries/torchaudio/lib
	@touch $@

# DeepSpeed comes as source, and its setup asks for the torch that is here. Their other dependencies are here, too.
$(ENGINES): $(INSTALLED)
	@DS_ACCELERATOR=cpu .venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--target .survey/engines accelerate==1.15.0 megatron-core==0.16.1 torchtitan==0.3.0 deepspeed==0.19.8 \
		spmd_types tyro typeguard shtab docstring-parser torchdata hjson py-cpuinfo msgpack einops
	@touch $@

$(PYRIGHT): $(INSTALLED)
	@.venv/bin/pip install --quiet --disable-pip-version-check --target .survey/pyright pyright==1.1.414
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up .venv"
	@$(PYTHON) -m venv .venv
	@.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,notebooks]"
	@touch $@
