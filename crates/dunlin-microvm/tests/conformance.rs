//! Runs the library's conformance tests on the whole VMM, with each kind of guest.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use dunlin::engine::vmm::{Builder, DestinationVm, Offered, Refusal, SourceVm, VmmError};
use dunlin::testing::{Effort, Vmm, check_vmm};
use dunlin_microvm::{Backing, Config, Fill, GuestKind, MachineBuilder, Movable, Workload};
use dunlin_test_base::kvm;
use support::running;

struct Microvm {
    config: Config,
    builder: MachineBuilder,
    built: Option<Arc<Movable>>,
}

impl Vmm for Microvm {
    fn start(&mut self) -> Result<Arc<dyn SourceVm>, VmmError> {
        Ok(Movable::new(Arc::new(running(self.config.clone()))))
    }

    fn builder(&mut self) -> &mut dyn Builder {
        self
    }

    fn built(&mut self) -> Option<Arc<dyn SourceVm>> {
        self.built.clone().map(|vm| vm as _)
    }
}

impl Builder for Microvm {
    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        let vm = self.builder.build(offered)?;
        self.built = self.builder.take();
        Ok(vm)
    }
}

fn conforms(guest: GuestKind, unsteady: &[&str]) {
    for backing in [Backing::Private, Backing::Memfd] {
        let mut vmm = Microvm {
            config: Config {
                guest,
                backing,
                memory_bytes: 16 << 20,
                vcpus: 2,
                fill: Fill::Mixed,
                workload: Workload::Random,
                dirty_rate: 40_000,
                ..Config::default()
            },
            builder: MachineBuilder::default(),
            built: None,
        };
        let seen = check_vmm(&mut vmm, &Effort::default())
            .unwrap_or_else(|violation| panic!("{guest:?}, {backing:?}: {violation:?}"));
        println!("{guest:?}, {backing:?}: {seen:?}");
        assert!(seen.throttles);
        assert!(seen.dirty.pages > 1000, "{seen:?}");
        assert_eq!(seen.unsteady, unsteady);
    }
}

#[test]
fn i3_i5_the_machine_keeps_what_the_traits_promise_with_a_kvm_guest() {
    let Some(_kvm) = kvm() else { return };
    // These sections differ between two saves: the clock and the TSC advance, and KVM puts the time
    // of loading into the state of the timer chip (`pit`).
    conforms(GuestKind::Kvm, &["clock", "pit", "vcpu.tsc"]);
}

#[test]
fn i3_i5_the_machine_keeps_what_the_traits_promise_with_a_process_guest() {
    conforms(GuestKind::Process, &[]);
}
