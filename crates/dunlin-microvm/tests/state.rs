//! What comes from a peer is checked before it is used, and what a migration loses is found.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod common;

use std::error::Error;
use std::time::Duration;

use common::{copy_pages, kvm, running, wait_for};
use dunlin_microvm::{
    Config, ControlError, DescribeError, Fill, LoadError, SaveError, Section, StopCode, Vm,
    VmDescription, VmState, Workload, check_description,
};

fn source() -> (Vm, Vec<Section>) {
    let vm = running(Config {
        memory_bytes: 8 << 20,
        vcpus: 2,
        fill: Fill::Zero,
        ..Config::default()
    });
    // Of both vCPUs: one that has not begun has nothing to lose.
    wait_for(&vm, "a pass", |vm| vm.full_passes() > 0);
    assert!(matches!(
        vm.save(),
        Err(SaveError::NotPaused(VmState::Running))
    ));
    vm.pause().unwrap();
    let sections = vm.save().unwrap();
    (vm, sections)
}

/// The machine in which a section's bytes were changed, let run.
fn run_changed(name: &str, change: impl Fn(&mut [u8])) -> VmState {
    let (source, mut sections) = source();
    let section = sections
        .iter_mut()
        .find(|section| section.name == name && section.instance == 1)
        .unwrap();
    change(&mut section.bytes);
    let destination = Vm::from_description(source.description()).unwrap();
    copy_pages(&source, &destination, None);
    destination.load(&sections).unwrap();
    destination.resume().unwrap();
    destination.wait_while_running(Duration::from_millis(300))
}

#[test]
fn the_guest_finds_a_lost_sse_register() {
    let Some(_turn) = kvm() else { return };
    assert_eq!(run_changed("vcpu.xsave", |_| {}), VmState::Running);
    // Intel SDM volume 1, section 10.5.1: XMM0 is at 160; the low half of the last register.
    let state = run_changed("vcpu.xsave", |bytes| bytes[160 + 15 * 16] ^= 1);
    let VmState::Stopped(stop) = state else {
        panic!("{state:?}");
    };
    assert_eq!((stop.code, stop.vcpu), (StopCode::LostSse, 1));
}

#[test]
fn the_guest_finds_a_lost_avx_register() {
    let Some(_turn) = kvm() else { return };
    const XSTATE_BV: usize = 512;
    let (_, sections) = source();
    let area = sections
        .iter()
        .find(|section| section.name == "vcpu.xsave")
        .unwrap();
    if area.bytes[XSTATE_BV] & 4 == 0 {
        println!("skipped, the guest has no AVX here");
        return;
    }
    // Section 13.4.3: the upper halves start at 576 in the standard format.
    let state = run_changed("vcpu.xsave", |bytes| bytes[576 + 8 * 16] ^= 1);
    let VmState::Stopped(stop) = state else {
        panic!("{state:?}");
    };
    assert_eq!((stop.code, stop.vcpu), (StopCode::LostAvx, 1));
}

#[test]
fn i7_sections_that_are_cut_off_missing_or_garbage_are_errors() {
    let Some(_turn) = kvm() else { return };
    let (source, sections) = source();
    let load = |sections: &[Section]| {
        let vm = Vm::from_description(source.description()).unwrap();
        let result = vm.load(sections);
        let expected = result.is_ok();
        assert_eq!(vm.state() == VmState::Paused, expected);
        assert_eq!(vm.resume().is_ok(), expected);
        result
    };
    load(&sections).unwrap();
    // Both vCPUs' sections go the same way.
    let one_of_each = sections
        .iter()
        .filter(|section| section.instance == 0)
        .count();
    assert!(one_of_each >= 16, "{one_of_each}");
    for position in 0..one_of_each {
        let name = sections[position].name.clone();
        let changed = |change: &dyn Fn(&mut Section)| {
            let mut sections = sections.clone();
            change(&mut sections[position]);
            load(&sections)
        };
        // MSRs may be fewer.
        if name != "vcpu.msrs" {
            let error = changed(&|section| section.bytes.clear()).unwrap_err();
            assert!(error.to_string().contains(&name), "{error}");
        }
        let error = changed(&|section| {
            section.bytes.pop();
        })
        .unwrap_err();
        assert!(error.to_string().contains(&name), "{error}");
        assert!(error.source().is_some(), "{error}");
        let error = changed(&|section| section.bytes.resize(1 << 20, 0xff)).unwrap_err();
        assert!(error.to_string().contains(&name), "{error}");
        assert!(matches!(
            changed(&|section| section.version = 2),
            Err(LoadError::Version { version: 2, .. })
        ));
        assert!(matches!(
            changed(&|section| section.name.push('?')),
            Err(LoadError::Unknown { .. })
        ));
        assert!(matches!(
            changed(&|section| section.instance = 9),
            Err(LoadError::Unknown { instance: 9, .. })
        ));
        // Garbage of the right length: KVM may take it, or not; it must not end the process.
        let _ = changed(&|section| section.bytes.fill(0xa5));
        let mut fewer = sections.clone();
        fewer.remove(position);
        if name != "vcpu.xcrs" {
            assert!(
                matches!(load(&fewer), Err(LoadError::Missing { .. })),
                "{name}"
            );
        }
    }
    let mut twice = sections.clone();
    twice.push(sections[3].clone());
    assert!(matches!(load(&twice), Err(LoadError::Twice { .. })));
    let mut optional = sections.clone();
    optional.push(Section {
        name: "from the future".into(),
        instance: 7,
        version: 3,
        required: false,
        bytes: vec![1],
    });
    load(&optional).unwrap();
    assert!(matches!(load(&[]), Err(LoadError::Missing { .. })));
}

#[test]
fn only_a_machine_that_never_ran_can_be_loaded() {
    let Some(_turn) = kvm() else { return };
    let (vm, sections) = source();
    assert!(matches!(vm.load(&sections), Err(LoadError::Control(_))));
    assert_eq!(vm.state(), VmState::Paused);
    let other = Vm::from_description(vm.description()).unwrap();
    assert_eq!(other.start(), Err(ControlError::Empty));
    assert_eq!(other.resume(), Err(ControlError::NotStarted));
}

#[test]
fn a_description_reads_back_and_fits_its_own_host() {
    let Some(_turn) = kvm() else { return };
    let vm = Vm::new(Config {
        name: "ⅳ".into(),
        workload: Workload::HotSet { share_percent: 3 },
        fill_bytes: Some(1 << 20),
        power_off_after: Some(u64::MAX),
        ..Config::default()
    })
    .unwrap();
    let bytes = vm.description().encode();
    let decoded = VmDescription::decode(&bytes).unwrap();
    assert_eq!(&decoded, vm.description());
    check_description(&decoded).unwrap();

    let mut faster = decoded.clone();
    faster.tsc_khz += faster.tsc_khz / 1000;
    match check_description(&faster) {
        Err(DescribeError::TscRate { .. }) => {}
        Ok(()) => println!("this CPU scales the TSC"),
        Err(error) => panic!("{error}"),
    }
    let mut nearly = decoded.clone();
    nearly.tsc_khz += nearly.tsc_khz / 10_000;
    check_description(&nearly).unwrap();

    // Every CPUID word at the end of the table set: more than any host has.
    let mut greedy = bytes.clone();
    let table = greedy.len() - 28 * 10;
    for entry in greedy[table..].chunks_mut(28) {
        entry[..4].copy_from_slice(&7u32.to_le_bytes());
        entry[4..8].copy_from_slice(&0u32.to_le_bytes());
        entry[12..].fill(0xff);
    }
    // The first entry of a leaf counts; take the real one out.
    let at = greedy
        .windows(8)
        .position(|entry| entry == [7, 0, 0, 0, 0, 0, 0, 0])
        .unwrap();
    greedy[at + 12..at + 28].fill(0xff);
    let greedy = VmDescription::decode(&greedy).unwrap();
    assert!(matches!(
        check_description(&greedy),
        Err(DescribeError::Cpuid(_))
    ));
    assert!(Vm::from_description(&greedy).is_err());
}

#[test]
fn i7_a_description_that_is_cut_off_or_garbage_is_an_error() {
    let Some(_turn) = kvm() else { return };
    let bytes = Vm::new(Config::default()).unwrap().description().encode();
    assert!(bytes.len() < 8192, "{}", bytes.len());
    for length in 0..bytes.len() {
        assert!(VmDescription::decode(&bytes[..length]).is_err(), "{length}");
    }
    let long = [&bytes[..], &[0]].concat();
    assert!(VmDescription::decode(&long).is_err());
    assert!(matches!(
        VmDescription::decode(&[3, 0, 1]),
        Err(DescribeError::Version(3))
    ));
    for position in 0..80 {
        for value in [0, 1, 0x7f, 0xff] {
            let mut changed = bytes.clone();
            changed[position] = value;
            if let Ok(description) = VmDescription::decode(&changed) {
                description.config.validate().unwrap();
            }
        }
    }
}
