//! A VM that is laid out otherwise at the destination, and a destination whose words would steer a
//! terminal.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;

use dunlin::engine::MigrateError;
use dunlin::engine::vmm::{
    Builder, DestinationVm, DirtyLog, FaultCode, GuestMemory, Offered, Refusal, RunState, Section,
    SourceVm, VmDescription, VmmError,
};
use dunlin::lane::identity::{Identity, LoadOptions};
use dunlin::lane::peers::Peers;
use dunlin::lane::provider::Crypto;
use dunlin::{Incoming, Migration};
use dunlin_microvm::{Config, GuestKind, Movable, Vm};

use crate::GUEST;
use crate::failed;
use crate::host::assert_says;
use crate::support::{Hosts, finish};

fn machine(mebibytes: u64) -> Arc<Movable> {
    let config = Config {
        name: "vm".into(),
        guest: GuestKind::Process,
        memory_bytes: mebibytes << 20,
        ..Config::default()
    };
    Movable::new(Arc::new(Vm::new(config).unwrap()))
}

/// A VM that describes itself as another one.
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

/// Takes one VM in as `builder` does; returns where, and what came of it.
fn taking<B: Builder + Send + 'static>(
    hosts: &Hosts,
    mut builder: B,
) -> (String, thread::JoinHandle<Option<MigrateError>>) {
    let tls = identity(hosts, "b")
        .server(&Crypto::auto(), Peers::AnyFromAuthority)
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let taking = thread::spawn(move || Incoming::builder(listener, &tls).run(&mut builder).err());
    (address, taking)
}

#[test]
fn i7_a_description_that_does_not_fit_its_memory_is_refused_and_said_at_both_sides() {
    let hosts = Hosts::new();
    let destination = hosts.receive("b", "2", "");
    let vm = Arc::new(Misdescribed {
        vm: machine(64),
        as_if: machine(128),
    });
    let error = send(&hosts, Arc::clone(&vm) as _, &destination.address);
    assert_eq!(error.code(), FaultCode::DescriptionRefused);
    let parts = [
        "the source's memory has regions of [67108864] bytes",
        "has [134217728] here",
        "run the same release of the VMM on both hosts",
        "at fault: configuration",
        "goes on at the source",
    ];
    assert_says(&error.to_string(), &parts);
    let rejected = destination.wait_for("rejected");
    assert_says(rejected["text"].as_str().unwrap(), &parts[..4]);
}

/// Builds machines of another size.
struct Larger;

impl Builder for Larger {
    fn build(&mut self, _: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        Ok(machine(128))
    }
}

#[test]
fn another_layout_at_the_destination_is_said_at_both_sides_and_the_vm_stays() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let (address, taking) = taking(&hosts, Larger);
    let mut command = crate::words("vm migrate --json --name vm --peer b.test --to");
    command.arg(address).arg("--identity");
    command.arg(hosts.scratch.join("a")).arg("--control");
    command.arg(&source.control);
    let (text, line) = failed(&hosts, &source, finish(command));
    assert_eq!(line["fault"], "description-refused");
    let parts = [
        "built here has different memory regions than the source's",
        "at fault: configuration",
        "Compare the VM's configuration with what the destination's VMM",
        "goes on at the source",
    ];
    assert_says(&text, &parts);
    let error = taking.join().unwrap().unwrap();
    assert_says(&error.to_string(), &parts[..3]);
}

/// Refuses with words that would clear a screen and tell of a success.
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

#[test]
fn i7_what_a_peer_says_neither_steers_a_terminal_nor_passes_for_our_own_lines() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    for json in [false, true] {
        let (address, taking) = taking(&hosts, Shouting);
        let mut command = crate::words("vm migrate --name vm --peer b.test --to");
        command.arg(address).arg("--identity");
        command.arg(hosts.scratch.join("a")).arg("--control");
        command.arg(&source.control);
        if json {
            command.arg("--json");
        }
        let done = finish(command).expect(1);
        taking.join().unwrap().unwrap();
        let harmful = |c: char| c != '\n' && dunlin::engine::is_harmful(c);
        assert!(!done.out.contains(harmful), "{:?}", done.out);
        assert!(!done.err.contains(harmful), "{:?}", done.err);
        assert!(!done.out.lines().any(|line| line.starts_with("moved")));
        let said = match json {
            true => done.last()["text"].as_str().unwrap().to_owned(),
            false => done.out,
        };
        assert_says(
            &said,
            &[r"\u{1b}[2J\u{9b}31m\r\nmoved\u{202e} (description-refused"],
        );
    }
    hosts.assert_runs(&source);
}
