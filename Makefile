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

# The limit of lines of product code: 54,000, less 258 lines that moved from crates/ to tests/, plus
# 210 for the demo's check outside the downtime, plus 350 for confinement of the hand-off, special
# files in journals, revocation in hand-offs, expired peers and the codes of rejected connections, plus
# 4,958 for redirects: 1,450 for their rules, 900 for libvirt's commands, 1,000 for owners, rates and
# replaced sockets of routes, 550 for the side that opens all lanes, and the rest for the listeners, the
# probe and the status, plus 6,960 for operators: 2,030 for doctor, 1,930 for status sockets, metrics and the
# status page, 1,560 for top, progress and --json, 680 for relays and unix sockets of toolstacks, 460 for init
# and the undoing of enable, 180 for output that ends no process, and 100 for the number of lanes, plus 3,700
# for evacuations: 2,020 for libvirt's, 1,300 for listeners with several sessions and their demo, and 380 for
# metrics of hand-offs, lanes and certificates, plus 120 for work that is done before a migration instead of in it,
# network errors of accept(2) and silent peers, and 140 for offers to sessions that end, VMs and hosts that change
# during an evacuation, and memory that a session leaves, plus 60 for several VMs of one `vm run`, plus 240 for
# limits of the status page's CPU time and of handed-over sockets that wait, and for silent peers of relays, plus 10
# for timelines of several VMs, 90 for threads of trunks that wake less often, and 230 for records that are sealed
# and opened in separate memory, for aligned buffers, and for guests of the benchmark that are partly filled, and
# 250 for a relay's TLS 1.3 records, which are sealed and opened without copies, and 60 for longer texts of
# errors, and 140 for a limit on the lanes' threads of a tunnel that send at once, and 5 for files that several
# processes replace at the same time, and 85 for ratios of the benchmarks to their peers, round by round, and 35 for
# plain lanes that copy no pages, and 156 for a plot over the number of lanes, and for benchmarks that record stolen
# time, vary the order of their turns and check their options before they run, and 18 for round marks, one colour for
# each variant and a line at 1 in the plots, and 35 for the receive window of lanes with a long round trip and its
# benchmark: congestion controls in turn, retransmissions, memory that is freed in parts.
# A change that raises the limit states its reason here.
LINES_LIMIT = 71594

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
