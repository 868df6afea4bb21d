# The two commands of the README are `make demo` and `make test`.
.PHONY: demo test soak newcomer audit check bench fuzz book package

demo:
	@tools/packages build
	cargo run --locked --release --package dunlin-cli -- demo

test:
	@tools/packages build test
	@tools/test

# Runs the tests of `make test` with more repetitions, and the tests that are too long for it.
soak:
	@tools/packages build test soak
	@tools/test soak

# docs/install.md describes the packages.
package:
	@tools/packages build package
	cargo xtask package

# Follows the README on a bare Debian, as a newcomer would. Needs root; slow.
newcomer:
	@tools/packages newcomer
	@tools/newcomer

# Runs every fuzz target, or only TARGET, under libFuzzer and AddressSanitizer
# for SECONDS each. `make test` runs the same entries for about a second each.
SECONDS ?= 30
TARGET ?=
fuzz:
	@fuzz/run $(SECONDS) $(TARGET)

# Reads the advisory database from the network, which CI does not have.
audit:
	cargo deny check advisories

# The limit of lines of product code, as tools/lines counts them. A commit that raises it states the
# reason in its message: git log -G LINES_LIMIT -- Makefile
LINES_LIMIT = 71850

# Runs the checks that CI runs before the tests.
check:
	@tools/packages build check
	cargo fmt --all --check
	cargo xtask words
	cargo xtask tables --check
	@tools/lines | awk '$$2 == "all" { print $$1 " lines of product code"; exit $$1 > $(LINES_LIMIT) }'
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked --package dunlin --lib --tests --features shuttle -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps
	for features in ring aws-lc-rs aws-lc-sys ring,aws-lc-rs ring,unstable-internals ring,fuzzing; do \
		cargo clippy --locked --package dunlin-lane --no-default-features --features "$$features" -- -D warnings || exit 1; \
	done
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --package dunlin-lane --no-deps
	for package in dunlin dunlin-tunnel dunlin-handoff dunlin-ipsec; do \
		for features in ring aws-lc-rs; do \
			cargo check --locked --package $$package --no-default-features --features "$$features" || exit 1; \
		done; \
	done
	@$(MAKE) --no-print-directory book
	command -v cargo-deny >/dev/null || cargo install --locked --debug cargo-deny@0.20.2
	cargo deny check bans licenses sources
	@tools/advisories
	@tools/publish

# Checks the links of all pages, and builds docs/ into target/book.
MDBOOK = 0.5.4
book:
	[ "$$(mdbook --version 2>/dev/null)" = "mdbook v$(MDBOOK)" ] || \
		cargo install --locked --debug --no-default-features --features search mdbook@$(MDBOOK)
	cargo xtask book

# docs/benchmarking.md explains the figures.
bench:
	@tools/packages build
	cargo run --locked --release --package dunlin-cli -- bench lanes
	cargo run --locked --release --package dunlin-cli -- bench connections
	cargo run --locked --release --package dunlin-cli -- bench thrash
	cargo run --locked --release --package dunlin-cli -- bench whole
