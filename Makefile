# make demo   a whole tailnet on this machine, in seconds (KEEP=1 leaves it running)
# make test   every check: lint, types, layers, tests on both event loops
# The rest: make venv, packages, test-systemd, test-native, bench, fuzz, clean.

.PHONY: FORCE demo test packages test-systemd venv venv-dev test-native bench bench-tun fuzz lint clean
.DEFAULT_GOAL := venv

VENV := .venv
STAMP := $(VENV)/.made
STAMP_DEV := $(VENV)/.made-dev
NATIVE := native/CMakeLists.txt $(wildcard native/src/*.[ch] native/tsnative/*.pyx native/tsnative/*.pxi)

demo: venv
	@$(VENV)/bin/python examples/demo.py

test: venv-dev
	@packaging/test-tools.sh
	@$(VENV)/bin/python tests/check.py $(ARGS)

venv: $(STAMP)
venv-dev: $(STAMP_DEV)

# The editable install knows modules by name: it is made anew when some come or go.
LAYOUT := $(VENV)/.layout
$(LAYOUT): FORCE
	@mkdir -p $(VENV)
	@find tsd tsctl platform native -name '*.py' | LC_ALL=C sort >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(STAMP): pyproject.toml $(NATIVE) $(LAYOUT)
	@packaging/venv.sh
	@touch $@

$(STAMP_DEV): $(STAMP)
	@packaging/venv.sh dev
	@touch $@

lint: venv-dev
	@$(VENV)/bin/python tests/check.py --lint-only

# The .deb and the .rpm, into dist/, for this machine's kind of Python and processor.
packages: venv
	@$(VENV)/bin/python packaging/build_packages.py $(ARGS)

# The .deb under a real systemd, in a Debian root booted in namespaces (root; makes the root once, minutes).
test-systemd: venv-dev
	@$(VENV)/bin/python -m pytest -q -rs tests/systemd

# The C core under ASan and UBSan.
test-native: venv-dev
	@$(MAKE) --no-print-directory -f native/test.mk PYTHON=$(CURDIR)/$(VENV)/bin/python

# Ratios against a peer measured in the same run; JSON in benchmarks/out/.
bench: venv-dev
	@$(VENV)/bin/python -m benchmarks $(ARGS)

# The fast path on kernel TUNs in network namespaces: root, iperf3; TSD_BENCH_LIMIT, TSD_PEER_BIN add contenders.
bench-tun: venv-dev
	@PYTHONPATH=.:platform:native:tests $(VENV)/bin/python -m benchmarks.tun $(ARGS)

# Every parser for a while: make fuzz SECONDS=600
SECONDS ?= 20
fuzz: venv-dev
	@$(VENV)/bin/python tests/fuzz/run.py --seconds=$(SECONDS) $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis benchmarks/out
