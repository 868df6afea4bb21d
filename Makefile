# The two commands of the README are `make demo` and `make test`.
.PHONY: demo test soak newcomer audit check bench fuzz

demo:
	@tools/packages build
	cargo run --locked --release --package dunlin-cli -- demo

test:
	@tools/packages build test
	@tools/test

# What does not fit into `make test`: the same tests with more repetitions.
soak:
	@tools/packages build test
	@tools/test soak

# What a newcomer sees who has a bare Debian and follows README. As root; long.
newcomer:
	@tools/packages newcomer
	@tools/newcomer

# Every fuzz entry under libFuzzer and AddressSanitizer, SECONDS each; or the
# one that TARGET names. `make test` runs the same entries for a moment.
SECONDS ?= 30
TARGET ?=
fuzz:
	@fuzz/run $(SECONDS) $(TARGET)

# Advisories need a network, which CI does not have.
audit:
	cargo deny check advisories

# What CI checks before the tests.
check:
	@tools/packages build check
	cargo fmt --all --check
	cargo xtask words
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked --package dunlin --lib --tests --features shuttle -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps
	for features in ring aws-lc-rs ring,aws-lc-rs ring,fuzzing; do \
		cargo check --locked --package dunlin-lane --no-default-features --features "$$features" || exit 1; \
	done
	for package in dunlin dunlin-tunnel dunlin-handoff dunlin-ipsec; do \
		for features in ring aws-lc-rs; do \
			cargo check --locked --package $$package --no-default-features --features "$$features" || exit 1; \
		done; \
	done
	command -v cargo-deny >/dev/null || cargo install --locked cargo-deny@0.20.2
	cargo deny check bans licenses sources

# Each prints one JSON object a line; docs/benchmarking.md says how to read them.
bench:
	@tools/packages build
	cargo run --locked --release --package dunlin-cli -- bench lanes
	cargo run --locked --release --package dunlin-cli -- bench connections
	cargo run --locked --release --package dunlin-cli -- bench thrash
