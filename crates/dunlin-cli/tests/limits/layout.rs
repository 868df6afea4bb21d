//! A source VM with a wrong description of its memory, a VM that has another memory layout at the
//! destination, and a destination that sends control characters of a terminal.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;

use dunlin::engine::vmm::{
    Builder, DestinationVm, DirtyLog, FaultCode, GuestMemory, Offered, Refusal, RunState, Section,
    SourceVm, VmDescription, VmmError,
};
use dunlin::engine::{AtFault, MigrateError, VmIs};
use dunlin::lane::identity::{Identity, LoadOptions};
use dunlin::lane::peers::Peers;
use dunlin::lane::provider::Crypto;
use dunlin::{Incoming, Migration};
use dunlin_microvm::{Config, GuestKind, HostOptions, Movable, Vm};

use crate::host::assert_says;
use crate::support::{Hosts, finish};
use crate::{GUEST, failed, text};

fn machine(mebibytes: u64) -> Arc<Movable> {
    let config = Config {
        name: "vm".into(),
        guest: GuestKind::Process,
        memory_bytes: mebibytes << 20,
        ..Config::default()
    };
    Movable::new(Arc::new(
        Vm::with_options(config, HostOptions::default()).unwrap(),
    ))
}

/// A VM that returns the description of another VM.
struct Misdescribed {
    vm: Arc<Movable>,
    as_if: Arc<Movable>,
}

impl SourceVm for Misdescribed {
    fn describe(&self) -> Result<VmDescription, VmmError> {
        self.as_if.describe()
    }
    fn memory(&self) -> Arc<dyn GuestMemory> {
        SourceVm::memory(&*self.vm)
    }
    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        self.vm.dirty_logs()
    }
    fn run_state(&self) -> RunState {
        self.vm.run_state()
    }
    fn pause(&self) -> Result<(), VmmError> {
        self.vm.pause()
    }
    fn resume(&self) -> Result<(), VmmError> {
        SourceVm::resume(&*self.vm)
    }
    fn throttle(&self, percent: u8) -> Result<bool, VmmError> {
        self.vm.throttle(percent)
    }
    fn save(&self) -> Result<Vec<Section>, VmmError> {
        self.vm.save()
    }
    fn deactivate(&self) -> Result<(), VmmError> {
        self.vm.deactivate()
    }
    fn reactivate(&self) -> Result<(), VmmError> {
        self.vm.reactivate()
    }
    fn hold(&self) -> Result<(), VmmError> {
        self.vm.hold()
    }
    fn destroy(&self) {
        self.vm.destroy();
    }
}

fn identity(hosts: &Hosts, name: &str) -> Identity {
    let directory = hosts.scratch.join(name);
    Identity::load(&directory, LoadOptions::default())
        .unwrap()
        .0
}

fn send(hosts: &Hosts, vm: Arc<dyn SourceVm>, to: &str) -> MigrateError {
    let tls = identity(hosts, "a")
        .client(&Crypto::auto(), Peers::AnyFromAuthority)
        .unwrap();
    Migration::builder(vm, to, &tls).run().err().unwrap()
}

/// Receives one VM with `builder`. Returns the listen address, and the receiving thread, which
/// returns the error.
fn receiving<B: Builder + Send + 'static>(
    hosts: &Hosts,
    mut builder: B,
) -> (String, thread::JoinHandle<Option<MigrateError>>) {
    let tls = identity(hosts, "b")
        .server(&Crypto::auto(), Peers::AnyFromAuthority)
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let receiving =
        thread::spawn(move || Incoming::builder(listener, &tls).run(&mut builder).err());
    (address, receiving)
}

#[test]
fn i7_a_description_that_does_not_fit_its_memory_is_refused_and_reported_on_both_sides() {
    let hosts = Hosts::new();
    let destination = hosts.receive("b", "2", "");
    let vm = Arc::new(Misdescribed {
        vm: machine(64),
        as_if: machine(128),
    });
    let error = send(&hosts, Arc::clone(&vm) as _, &destination.address);
    assert_eq!(
        (error.code(), error.at_fault(), error.vm),
        (
            FaultCode::DescriptionRefused,
            AtFault::Configuration,
            VmIs::AtSource
        )
    );
    let sizes = ["[67108864]", "[134217728]"];
    assert_says(&error.to_string(), &sizes);
    let rejected = text(&destination.wait_for("rejected"));
    assert_says(&rejected, &sizes);
    assert_says(
        &rejected,
        &["(description-refused, at fault: configuration)"],
    );
}

/// Builds VMs with more memory than the source's.
struct Larger;

impl Builder for Larger {
    fn build(&mut self, _: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        Ok(machine(128))
    }
}

#[test]
fn another_layout_at_the_destination_is_reported_on_both_sides_and_the_vm_stays() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let (address, receiving) = receiving(&hosts, Larger);
    let mut command = crate::words("vm migrate --json --name vm --peer b.test --to");
    command.arg(address).arg("--identity");
    command.arg(hosts.scratch.join("a")).arg("--control");
    command.arg(&source.control);
    let fault = FaultCode::DescriptionRefused;
    let said = failed(
        &hosts,
        &source,
        finish(command),
        fault.name(),
        "configuration",
    );
    assert_says(&said, &["memory regions"]);
    let error = receiving.join().unwrap().unwrap();
    assert_eq!(
        (error.code(), error.at_fault()),
        (fault, AtFault::Configuration)
    );
}

/// Refuses every VM. Unescaped, the text of the refusal would clear a screen and print a line that
/// reports success.
struct Shouting;

const SHOUT: &str = "\u{1b}[2J\u{9b}31m\r\nmoved\u{202e}";

impl Builder for Shouting {
    fn build(&mut self, _: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        Err(Refusal {
            fault: FaultCode::DescriptionRefused,
            text: SHOUT.into(),
        })
    }
}

/// Claim P14 of docs/security.
#[test]
fn i7_a_peers_text_neither_controls_a_terminal_nor_imitates_our_lines() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    for json in [false, true] {
        let (address, receiving) = receiving(&hosts, Shouting);
        let mut command = crate::words("vm migrate --name vm --peer b.test --to");
        command.arg(address).arg("--identity");
        command.arg(hosts.scratch.join("a")).arg("--control");
        command.arg(&source.control);
        if json {
            command.arg("--json");
        }
        let done = finish(command).expect(1);
        receiving.join().unwrap().unwrap();
        let harmful = |c: char| c != '\n' && dunlin_proto::text::is_harmful(c);
        assert!(!done.out.contains(harmful), "{:?}", done.out);
        assert!(!done.err.contains(harmful), "{:?}", done.err);
        assert!(!done.out.lines().any(|line| line.starts_with("moved")));
        let said = match json {
            true => done.last()["text"].as_str().unwrap().to_owned(),
            false => done.out,
        };
        assert_says(
            &said,
            &[r"the destination reports: \u{1b}[2J\u{9b}31m\r\nmoved\u{202e} (description-refused"],
        );
    }
    hosts.assert_runs(&source);
}
