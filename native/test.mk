# C tests of the native core, without Python: `make -f native/test.mk` from the root of the repository.
# Plain and sanitized builds with every compiler that is there; the pump's threads also under TSan, and its portable
# path. PACKETS: size of the AEAD comparison.

CORE := $(wildcard native/src/*.c)
HEADERS := $(wildcard native/src/*.h native/tests/*.h)
OUT ?= build/native-tests
PACKETS ?= 1000000
SANITIZED_PACKETS ?= 30000
COMPILERS ?= $(foreach cc,gcc clang,$(if $(shell command -v $(cc)),$(cc)))
WARN := -std=gnu11 -Wall -Wextra -Werror
SANITIZE := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all

RACES := -O1 -g -fno-omit-frame-pointer -fsanitize=thread
LINK := -ldl -lpthread
%/test_fdfaults: LINK += -Wl,--wrap=sendmmsg,--wrap=sendto,--wrap=reserve,--wrap=core_work_new

PORTABLE := -O1 -g -DTSN_PORTABLE_IO

.PHONY: all plain sanitized threads aarch64 fuzz clean
all: plain sanitized threads

plain: $(foreach cc,$(COMPILERS),$(OUT)/$(cc)/test_aead $(OUT)/$(cc)/test_core $(OUT)/$(cc)/test_fdpump $(OUT)/$(cc)/test_fdfaults)
	@set -e; for cc in $(COMPILERS); do echo "== $$cc"; $(OUT)/$$cc/test_core; $(OUT)/$$cc/test_fdpump; $(OUT)/$$cc/test_fdfaults; $(OUT)/$$cc/test_aead $(PACKETS); done

sanitized: $(foreach cc,$(COMPILERS),$(OUT)/$(cc)-san/test_aead $(OUT)/$(cc)-san/test_core $(OUT)/$(cc)-san/test_fdpump $(OUT)/$(cc)-san/test_fdfaults)
	@set -e; for cc in $(COMPILERS); do echo "== $$cc, ASan and UBSan"; $(OUT)/$$cc-san/test_core; $(OUT)/$$cc-san/test_fdpump; $(OUT)/$$cc-san/test_fdfaults; $(OUT)/$$cc-san/test_aead $(SANITIZED_PACKETS); done

# One compiler is enough to find a race.
threads: $(OUT)/races/test_fdpump $(OUT)/races/test_fdfaults $(OUT)/portable/test_fdpump
	@set -e; echo "== TSan"; $(OUT)/races/test_fdpump; $(OUT)/races/test_fdfaults; echo "== portable input and output"; $(OUT)/portable/test_fdpump

$(OUT)/races/test_%: native/tests/test_%.c $(CORE) $(HEADERS)
	@mkdir -p $(@D)
	$(firstword $(COMPILERS)) $(WARN) $(RACES) -o $@ $< $(CORE) $(LINK)

$(OUT)/portable/test_%: native/tests/test_%.c $(CORE) $(HEADERS)
	@mkdir -p $(@D)
	$(firstword $(COMPILERS)) $(WARN) $(PORTABLE) -o $@ $< $(CORE) $(LINK)

define build
$(OUT)/$(1)/test_%: native/tests/test_%.c $(CORE) $(HEADERS)
	@mkdir -p $$(@D)
	$(1) $(WARN) -O3 -o $$@ $$< $(CORE) $$(LINK)
$(OUT)/$(1)-san/test_%: native/tests/test_%.c $(CORE) $(HEADERS)
	@mkdir -p $$(@D)
	$(1) $(WARN) $(SANITIZE) -o $$@ $$< $(CORE) $$(LINK)
endef
$(foreach cc,$(COMPILERS),$(eval $(call build,$(cc))))

# Another architecture, run by qemu: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user. Without OpenSSL to compare with.
CROSS ?= aarch64-linux-gnu-gcc
QEMU ?= qemu-aarch64
aarch64: $(foreach t,core fdpump fdfaults,$(OUT)/aarch64/test_$(t))
	@set -e; echo "== aarch64 under qemu"; for t in core fdpump fdfaults; do $(QEMU) $(OUT)/aarch64/test_$$t; done

$(OUT)/aarch64/test_%: native/tests/test_%.c $(CORE) $(HEADERS)
	@mkdir -p $(@D)
	$(CROSS) $(WARN) -O2 -static -o $@ $< $(CORE) $(LINK)

# libFuzzer (clang). FUZZ_SECONDS each; new inputs stay in $(OUT)/corpus.
FUZZ_SECONDS ?= 60
FUZZERS := datagrams frames pump
fuzz: $(foreach f,$(FUZZERS),$(OUT)/fuzz_$(f))
	@set -e; for f in $(FUZZERS); do mkdir -p $(OUT)/corpus/$$f; \
	  $(OUT)/fuzz_$$f -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -print_final_stats=1 $(OUT)/corpus/$$f native/fuzz/corpus/$$f 2>&1 | tail -12; done

$(OUT)/fuzz_%: native/fuzz/fuzz_%.c $(CORE) $(HEADERS) native/fuzz/common.h
	@mkdir -p $(@D)
	clang $(WARN) $(SANITIZE) -fsanitize=fuzzer -o $@ $< $(CORE) -lpthread

clean:
	rm -rf $(OUT)
