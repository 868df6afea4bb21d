//! Tests a shortage of descriptors on either side, and of memory at the destination. A separate
//! process runs one role under a limit that rises from session to session, so that sessions fail at
//! different steps. After each session the VM is on exactly one side, and each side that survives
//! reports the reason.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin::Incoming;
use dunlin::engine::destination;
use dunlin::engine::vmm::{Builder, DestinationVm, FaultCode, Offered, Refusal, RunState};
use dunlin::engine::{Cancel, VmIs};
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::{Crypto, Provider};
use dunlin_test_support::engine::*;
use dunlin_test_support::lane::{Authority, DESTINATION, SOURCE, load, names};
use vm_memory::{GuestAddress, GuestMemoryMmap};

const VM_BYTES: usize = 32 << 20;

fn crypto() -> Crypto {
    Crypto::with(Provider::built_in()[0])
}

fn client(directory: &Path) -> ClientTls {
    load(directory)
        .client(&crypto(), names(&[DESTINATION]))
        .unwrap()
}

fn server(directory: &Path) -> ServerTls {
    load(directory).server(&crypto(), names(&[SOURCE])).unwrap()
}

/// Refuses a VM if this process cannot map its memory.
struct Careful(TestBuilder);

impl Builder for Careful {
    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        let ranges: Vec<_> = offered
            .regions
            .iter()
            .map(|region| (GuestAddress(region.guest_physical), region.length as usize))
            .collect();
        match GuestMemoryMmap::<()>::from_ranges(&ranges) {
            Ok(memory) => drop(memory),
            Err(error) => {
                return Err(Refusal {
                    fault: FaultCode::NoMemory,
                    text: format!("guest memory cannot be mapped: {error}"),
                });
            }
        }
        self.0.build(offered)
    }
}

/// The body of the separate process. It is a test function only so that the other tests can start
/// it.
#[test]
#[ignore = "the other tests of this file start it in its own process"]
fn role() {
    let Ok(role) = std::env::var("DUNLIN_TEST_ROLE") else {
        return;
    };
    let directory = PathBuf::from(std::env::var_os("DUNLIN_TEST_IDENTITY").unwrap());
    if role == "destination" {
        let server = server(&directory);
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        say(&format!("at {}", listener.local_addr().unwrap()));
        let mut builder = Careful(TestBuilder::default());
        let result = Incoming::builder(listener, &server).run(&mut builder);
        match result {
            Ok(_) => say("moved"),
            Err(error) => say(&format!("failed {error}")),
        }
        return;
    }
    let client = client(&directory);
    let vm = TestVm::new(VM_BYTES);
    vm.fill(VM_BYTES / 4);
    vm.start(64, Duration::from_micros(100));
    let to = std::env::var("DUNLIN_TEST_TO").unwrap();
    match send(&vm, &to, &client, &verified(4), &Cancel::new()).0 {
        Ok(_) => say("moved"),
        Err(error) => {
            assert_eq!(error.vm, VmIs::AtSource);
            assert!(vm.goes_on());
            say(&format!("failed {error}"));
        }
    }
}

/// Prints on a separate line, because the test harness prints too.
fn say(line: &str) {
    println!("\n> {line}");
    std::io::stdout().flush().unwrap();
}

/// A separate process that runs one role. The shell's `ulimit` limits its descriptors or memory.
struct Limited {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Limited {
    fn start(role: &str, identity: &Path, to: &str, limit: &str) -> Self {
        let mut child = Command::new("sh")
            .arg("-c")
            .arg(format!("ulimit {limit} && exec \"$0\" \"$@\""))
            .arg(std::env::current_exe().unwrap())
            .args([
                "role",
                "--exact",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("DUNLIN_TEST_ROLE", role)
            .env("DUNLIN_TEST_IDENTITY", identity)
            .env("DUNLIN_TEST_TO", to)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The next line that the process prints; `None` after its end.
    fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(said) = line.strip_prefix("> ") {
                return Some(said.trim_end().to_owned());
            }
        }
    }

    /// Waits for the end of the process. Returns its next line and its standard error.
    fn end(mut self) -> (Option<String>, String) {
        let said = self.next();
        let mut errors = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        stderr.read_to_string(&mut errors).unwrap();
        self.child.wait().unwrap();
        (said, errors)
    }
}

/// The outcomes of all limits.
#[derive(Debug, Default)]
struct Tally {
    moved: u32,
    failed_in_words: u32,
    /// The process did not reach a session.
    never_began: u32,
    /// An allocation failed, which aborts a Rust process.
    died: u32,
}

/// Runs destinations in separate processes under rising limits, and sources in this
/// process. `may_die` is set if memory is limited.
fn destinations(limits: impl Iterator<Item = String>, may_die: bool) -> Tally {
    let authority = Authority::new();
    let client = client(&authority.host(&[SOURCE]));
    let identity = authority.host(&[DESTINATION]);
    let mut tally = Tally::default();
    for limit in limits {
        let mut limited = Limited::start("destination", &identity, "", &limit);
        let Some(address) = limited.next() else {
            let _ = limited.end();
            tally.never_began += 1;
            continue;
        };
        let to = address.strip_prefix("at ").unwrap().to_owned();
        let vm = TestVm::new(VM_BYTES);
        vm.fill(VM_BYTES / 4);
        vm.start(64, Duration::from_micros(100));
        let cancel = Cancel::new();
        let began = Instant::now();
        let (result, _) = send(&vm, &to, &client, &verified(4), &cancel);
        assert!(began.elapsed() < Duration::from_secs(30), "{limit}");
        if result.is_err() {
            // A destination that has rejected a connection waits for the next one, so end its
            // process.
            let _ = limited.child.kill();
        }
        let (said, errors) = limited.end();
        match result {
            Ok(report) => {
                assert_eq!(report.digests_equal, Some(true));
                assert_eq!(*vm.state.lock().unwrap(), RunState::Stopped("moved".into()));
                assert_eq!(said.as_deref(), Some("moved"), "{limit}: {errors}");
                tally.moved += 1;
            }
            Err(error) => {
                assert_eq!(error.vm, VmIs::AtSource, "{limit}: {error}");
                assert!(vm.goes_on(), "{limit}: {error}");
                assert_ne!(said.as_deref(), Some("moved"), "{limit}: {error}");
                println!("{limit}: source: {error}");
                println!("{limit}: destination: {}", said.as_deref().unwrap_or("-"));
                if errors.contains("panicked") || errors.contains("memory allocation of") {
                    assert!(may_die, "{limit}: {errors}");
                    tally.died += 1;
                } else {
                    tally.failed_in_words += 1;
                }
            }
        }
    }
    tally
}

/// Runs sources, with their VMs, in separate processes under rising limits.
fn sources(limits: impl Iterator<Item = String>) -> Tally {
    let authority = Authority::new();
    let server = server(&authority.host(&[DESTINATION]));
    let identity = authority.host(&[SOURCE]);
    let options = destination::Options::default();
    let mut tally = Tally::default();
    for limit in limits {
        let receiving = Receiving::start(&server, &options, TestBuilder::default());
        let to: SocketAddr = receiving.address;
        let limited = Limited::start("source", &identity, &to.to_string(), &limit);
        let (said, errors) = limited.end();
        let (result, builder, _) = receiving.finish(said.as_deref() != Some("moved"));
        let runs_here = builder
            .built
            .is_some_and(|vm| vm.calls().contains(&"resume"));
        match said.as_deref() {
            Some("moved") => {
                result.unwrap();
                assert!(runs_here);
                tally.moved += 1;
            }
            Some(failed) => {
                assert!(!runs_here, "{limit}: {failed}");
                assert!(failed.contains("the VM stays at the source"), "{failed}");
                println!("{limit}: source: {failed}");
                tally.failed_in_words += 1;
            }
            None => {
                assert!(!runs_here, "{limit}: {errors}");
                tally.never_began += 1;
            }
        }
    }
    tally
}

/// Tries every limit in the soak test, otherwise every third.
fn stride() -> usize {
    match std::env::var_os("DUNLIN_SOAK") {
        Some(soak) if soak == "1" => 1,
        _ => 3,
    }
}

fn files(numbers: std::ops::RangeInclusive<u32>) -> impl Iterator<Item = String> {
    numbers
        .step_by(stride())
        .map(|number| format!("-n {number}"))
}

#[test]
fn i2_a_destination_without_descriptors_leaves_the_vm_at_the_source() {
    let tally = destinations(files(6..=32), false);
    println!("destination, descriptors: {tally:?}");
    assert!(tally.failed_in_words >= 1 && tally.moved >= 1, "{tally:?}");
}

#[test]
fn i2_a_source_without_descriptors_keeps_its_vm() {
    let tally = sources(files(3..=32));
    println!("source, descriptors: {tally:?}");
    // At limits slightly above those that fail, the source opens only some of its lanes and the
    // migration succeeds.
    let too_few = tally.failed_in_words + tally.never_began;
    assert!(too_few >= 1 && tally.moved >= 1, "{tally:?}");
}

#[test]
fn i2_a_destination_without_memory_leaves_the_vm_at_the_source() {
    // Limits of the address space in KiB: from the minimum for the process to enough for the VM.
    let limits = (0..24)
        .step_by(stride())
        .map(|step| format!("-v {}", (24 + 12 * step) << 10));
    let tally = destinations(limits, true);
    println!("destination, memory: {tally:?}");
    assert!(tally.failed_in_words >= 1 && tally.moved >= 1, "{tally:?}");
}
