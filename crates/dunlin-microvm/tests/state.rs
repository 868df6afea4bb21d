//! Tests that state from a peer is checked before it is used, and that the loss of state is
//! detected.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use dunlin_microvm::{
    Config, ControlError, DescribeError, Fill, HostOptions, LoadError, SaveError, Section,
    StopCode, Vm, VmDescription, VmState, Workload, check_description,
};
use dunlin_test_base::kvm;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd};
use support::{built, copy_pages, fresh, running, wait_for};

fn source() -> (Vm, Vec<Section>) {
    let vm = running(Config {
        memory_bytes: 8 << 20,
        vcpus: 2,
        fill: Fill::Zero,
        ..Config::default()
    });
    // Wait for both vCPUs, because a vCPU that has not started has no state to lose.
    wait_for(&vm, "a pass", |vm| vm.full_passes() > 0);
    assert!(matches!(
        vm.save(),
        Err(SaveError::NotPaused(VmState::Running))
    ));
    vm.pause().unwrap();
    let sections = vm.save().unwrap();
    (vm, sections)
}

/// Changes the section `name` of the source's vCPU 1 with `change`, loads the sections into a
/// machine, lets it run, and returns its state.
fn run_changed(name: &str, change: impl Fn(&mut [u8])) -> VmState {
    let (source, mut sections) = source();
    let section = sections
        .iter_mut()
        .find(|section| section.name == name && section.instance == 1)
        .unwrap();
    change(&mut section.bytes);
    let destination = built(source.description());
    copy_pages(&source, &destination, None);
    destination.load(&sections).unwrap();
    destination.resume().unwrap();
    // If the guest detects an error, the wait ends immediately. Otherwise every vCPU runs and
    // checks its registers during this time.
    destination.wait_until_ended(Duration::from_millis(300))
}

#[test]
fn the_guest_finds_a_lost_sse_register() {
    let Some(_turn) = kvm() else { return };
    assert_eq!(run_changed("vcpu.xsave", |_| {}), VmState::Running);
    // XMM0 is at offset 160 (Intel SDM volume 1, section 10.5.1). This changes the low half of
    // XMM15.
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
    // In the standard format, the upper halves of the YMM registers start at offset 576 (Intel SDM
    // volume 1, section 13.4.3). The change is in the upper half of YMM8.
    let state = run_changed("vcpu.xsave", |bytes| bytes[576 + 8 * 16] ^= 1);
    let VmState::Stopped(stop) = state else {
        panic!("{state:?}");
    };
    assert_eq!((stop.code, stop.vcpu), (StopCode::LostAvx, 1));
}

/// Claim P12 of docs/security.
#[test]
fn i7_sections_that_are_cut_off_missing_or_garbage_are_errors() {
    let Some(_turn) = kvm() else { return };
    let (source, sections) = source();
    let load = |sections: &[Section]| {
        let vm = built(source.description());
        let result = vm.load(sections);
        let expected = result.is_ok();
        assert_eq!(vm.state() == VmState::Paused, expected);
        assert_eq!(vm.resume().is_ok(), expected);
        result
    };
    load(&sections).unwrap();
    // Test the sections of one vCPU, because those of the other vCPU take the same path.
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
        // A section with fewer MSRs is valid, so an empty section is valid too.
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
        // Write garbage of the correct length. KVM may accept or reject it, but the process must
        // not crash.
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

const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;

/// Returns the bytes of a section of vCPU 1. With vCPU 0, a test would not notice code that always
/// uses the first vCPU.
fn bytes_of<'a>(sections: &'a mut [Section], name: &str) -> &'a mut Vec<u8> {
    let of = |section: &&mut Section| section.name == name && section.instance == 1;
    &mut sections.iter_mut().find(of).unwrap().bytes
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Decodes the MSRs of vCPU 1, by index.
fn msrs_of(sections: &mut [Section]) -> BTreeMap<u32, u64> {
    let entry = |entry: &[u8]| {
        let index = u32::from_le_bytes(entry[..4].try_into().unwrap());
        (index, word(entry, 4))
    };
    let (entries, _) = bytes_of(sections, "vcpu.msrs").as_chunks::<12>();
    entries.iter().map(|bytes| entry(bytes)).collect()
}

fn set_msrs(sections: &mut [Section], msrs: &BTreeMap<u32, u64>) {
    let bytes = bytes_of(sections, "vcpu.msrs");
    bytes.clear();
    for (index, value) in msrs {
        bytes.extend(index.to_le_bytes());
        bytes.extend(value.to_le_bytes());
    }
}

/// Loads the sections into a new machine, and returns the sections that this machine saves.
fn reloaded(source: &Vm, sections: &[Section]) -> Vec<Section> {
    let destination = built(source.description());
    destination.load(sections).unwrap();
    destination.save().unwrap()
}

/// Creates a vCPU like that of a machine. Returns it with the MSRs that KVM lists, and whether KVM
/// offers the TSC deadline.
fn bare_vcpu() -> (VcpuFd, Vec<u32>, bool) {
    let kvm = Kvm::new().unwrap();
    let machine = kvm.create_vm().unwrap();
    machine.create_irq_chip().unwrap();
    let vcpu = machine.create_vcpu(0).unwrap();
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    vcpu.set_cpuid2(&cpuid).unwrap();
    let leaf_1 = cpuid.as_slice().iter().find(|leaf| leaf.function == 1);
    let has_deadline = leaf_1.unwrap().ecx >> 24 & 1 == 1;
    let listed = kvm.get_msr_index_list().unwrap().as_slice().to_vec();
    (vcpu, listed, has_deadline)
}

#[test]
fn i3_a_deadline_that_the_guest_has_armed_is_armed_at_the_destination() {
    let Some(_turn) = kvm() else { return };
    // Offsets of registers of the local APIC (Intel SDM volume 3, section 12.5): the one with the
    // vector and mode of the timer, and the one that enables the APIC.
    const TIMER: usize = 0x320;
    const SPURIOUS: usize = 0xf0;
    const DEADLINE_MODE: u32 = 2 << 17;
    const TEN_MINUTES: u64 = 600_000;
    let (.., has_deadline) = bare_vcpu();
    if !has_deadline {
        println!("skipped, this KVM offers no TSC deadline, so no guest has armed one");
        return;
    }
    let (source, mut sections) = source();
    let timer = (DEADLINE_MODE | 0xec).to_le_bytes();
    let lapic = bytes_of(&mut sections, "vcpu.lapic");
    lapic[TIMER..TIMER + 4].copy_from_slice(&timer);
    lapic[SPURIOUS..SPURIOUS + 4].copy_from_slice(&0x1ff_u32.to_le_bytes());
    // The section ends with the guest's TSC (8 bytes), the TSC's offset (8) and the TSC's rate in
    // kHz (4).
    let tsc = bytes_of(&mut sections, "vcpu.tsc");
    let at = tsc.len() - 20;
    let deadline = word(tsc, at) + u64::from(source.description().tsc_khz) * TEN_MINUTES;
    let mut msrs = msrs_of(&mut sections);
    assert!(
        msrs.insert(MSR_TSC_DEADLINE, deadline).is_some(),
        "not saved"
    );
    set_msrs(&mut sections, &msrs);

    let mut there = reloaded(&source, &sections);
    let lapic = bytes_of(&mut there, "vcpu.lapic");
    assert_eq!(lapic[TIMER..TIMER + 4], timer, "the timer's mode");
    let armed = msrs_of(&mut there)[&MSR_TSC_DEADLINE];
    assert_eq!(armed, deadline, "the deadline");
}

/// Tests that the TSC comes before the deadline in the saved sections. The machine loads the
/// sections in the order in which they were saved. When KVM sets a deadline, it computes the time
/// left from the current TSC, and the TSC of a new machine can be hours behind the source's. The
/// test does not check that time itself, because some KVMs ignore a TSC that is set.
#[test]
fn i3_the_tsc_is_loaded_before_the_deadline_that_counts_by_it() {
    let Some(_turn) = kvm() else { return };
    let (_source, sections) = source();
    for vcpu in 0..2 {
        let place = |name: &str| {
            let of = |section: &Section| section.name == name && section.instance == vcpu;
            sections.iter().position(of).unwrap()
        };
        assert!(place("vcpu.lapic") < place("vcpu.msrs"));
        assert!(place("vcpu.tsc") < place("vcpu.msrs"));
    }
}

/// MSRs that a guest may have set, although the test guest has not. Each has a value that differs
/// from its value after a reset. `true` marks MSRs that every KVM has.
const GUESTS_MSRS: [(&str, u32, u64, bool); 18] = [
    ("IA32_SYSENTER_CS", 0x174, 0x10, true),
    ("IA32_SYSENTER_ESP", 0x175, 0xffff_8880_0000_1000, true),
    ("IA32_SYSENTER_EIP", 0x176, 0xffff_ffff_8100_1000, true),
    ("STAR", 0xc000_0081, 0x0023_0010_0000_0000, true),
    ("LSTAR", 0xc000_0082, 0xffff_ffff_8100_2000, true),
    ("CSTAR", 0xc000_0083, 0xffff_ffff_8100_3000, true),
    ("FMASK", 0xc000_0084, 0x4_7700, true),
    ("KERNEL_GS_BASE", 0xc000_0102, 0xffff_8880_0000_2000, true),
    ("IA32_PAT", 0x277, 0x0407_0506_0007_0106, true),
    ("IA32_TSC_AUX", 0xc000_0103, 5, false),
    ("IA32_MISC_ENABLE", 0x1a0, 1, true),
    // KVM's own MSRs, for a guest that supports them. Except for the last two, the values are
    // addresses of memory that the guest has reserved, with flags in the low bits.
    ("KVM_WALL_CLOCK", 0x4b56_4d00, 0x5000, true),
    ("KVM_SYSTEM_TIME", 0x4b56_4d01, 0x5401, true),
    ("KVM_ASYNC_PF_EN", 0x4b56_4d02, 0x5801, true),
    ("KVM_STEAL_TIME", 0x4b56_4d03, 0x5c01, true),
    ("KVM_PV_EOI_EN", 0x4b56_4d04, 0x6001, true),
    ("KVM_POLL_CONTROL", 0x4b56_4d05, 0, false),
    ("KVM_ASYNC_PF_INT", 0x4b56_4d06, 0xf3, false),
];

#[test]
fn i3_registers_that_the_test_guest_does_not_use_come_back() {
    let Some(_turn) = kvm() else { return };
    let (vcpu, listed, _) = bare_vcpu();
    let (source, mut sections) = source();
    let mut msrs = msrs_of(&mut sections);

    // Every MSR that KVM lists and can read is saved, except the TSC, which has its own section.
    let readable = |index: u32| {
        let entry = kvm_msr_entry {
            index,
            ..Default::default()
        };
        let read = vcpu.get_msrs(&mut Msrs::from_entries(&[entry]).unwrap());
        read.unwrap() == 1
    };
    let left_out = |index: &&u32| **index != MSR_TSC && !msrs.contains_key(index);
    let left_out: Vec<u32> = listed.iter().filter(left_out).copied().collect();
    let lost: Vec<&u32> = left_out.iter().filter(|index| readable(**index)).collect();
    assert!(lost.is_empty(), "not saved: {lost:x?}");
    assert!(!msrs.contains_key(&MSR_TSC), "the MSRs include the TSC");

    for (name, index, value, is_everywhere) in GUESTS_MSRS {
        match msrs.get_mut(&index) {
            Some(saved) => *saved = value,
            None => assert!(!is_everywhere && !listed.contains(&index), "{name}"),
        }
    }
    set_msrs(&mut sections, &msrs);
    // In `struct kvm_sregs`, the segments come first, with 24 bytes each. Tables and control
    // registers follow.
    let special = bytes_of(&mut sections, "vcpu.special-registers");
    const FS_BASE: usize = 3 * 24;
    const GS_BASE: usize = 4 * 24;
    const EFER: usize = 264;
    const APIC_BASE: usize = 272;
    special[FS_BASE..FS_BASE + 8].copy_from_slice(&0x7f00_0000_1000_u64.to_le_bytes());
    special[GS_BASE..GS_BASE + 8].copy_from_slice(&0xffff_8880_0000_3000_u64.to_le_bytes());
    // Enable system calls, in addition to the bits that long mode needs.
    let efer = word(special, EFER) | 1;
    assert_ne!(
        efer,
        word(special, EFER),
        "the test guest has system calls enabled"
    );
    special[EFER..EFER + 8].copy_from_slice(&efer.to_le_bytes());
    let special = special.clone();

    let mut there = reloaded(&source, &sections);
    let found = msrs_of(&mut there);
    for (name, index, value, _) in GUESTS_MSRS {
        if msrs.contains_key(&index) {
            assert_eq!(found.get(&index), Some(&value), "{name}");
        }
    }
    assert_eq!(
        found.keys().collect::<Vec<_>>(),
        msrs.keys().collect::<Vec<_>>()
    );
    let special_there = bytes_of(&mut there, "vcpu.special-registers");
    for (name, at) in [
        ("FS base", FS_BASE),
        ("GS base", GS_BASE),
        ("EFER", EFER),
        ("APIC base", APIC_BASE),
    ] {
        assert_eq!(word(special_there, at), word(&special, at), "{name}");
    }
}

/// Fields that the test guest leaves as they are after a reset, or that it does not check. The test
/// gives each field a different value. An entry has the section, the offset and the bytes. The
/// offsets follow from the structures in the kernel's `asm/kvm.h`.
const FIELDS: [(&str, usize, &[u8]); 20] = [
    // R15, and RFLAGS with the direction flag set.
    ("vcpu.registers", 120, &[0x15; 8]),
    ("vcpu.registers", 136, &[0x02, 0x04]),
    // CR2.
    ("vcpu.special-registers", 232, &[0, 0x10, 0xad, 0xde]),
    // XCR0 with x87 and SSE, in the first entry.
    ("vcpu.xcrs", 16, &[3, 0, 0, 0]),
    // DR0, DR3, DR7.
    ("vcpu.debug-registers", 0, &[0, 0x10, 0, 0x10]),
    ("vcpu.debug-registers", 24, &[0, 0x30, 0, 0x10]),
    ("vcpu.debug-registers", 40, &[0x81, 0x04]),
    // An exception that is being delivered, with an error code. One NMI is pending, and further
    // NMIs are masked.
    ("vcpu.events", 0, &[1, 14, 1]),
    ("vcpu.events", 4, &[2]),
    ("vcpu.events", 13, &[1, 1]),
    // In the local APIC: an interrupt in service and a requested interrupt (both with vector 0x31),
    // and LINT1 configured as NMI.
    ("vcpu.lapic", 0x112, &[2]),
    ("vcpu.lapic", 0x212, &[2]),
    ("vcpu.lapic", 0x360, &[0, 0x04, 0, 0]),
    // The state of a halted vCPU.
    ("vcpu.run-state", 0, &[3]),
    // In each 8259 interrupt controller: the interrupt mask and the first vector.
    ("pic.master", 10, &[0xfb]),
    ("pic.master", 13, &[0x30]),
    ("pic.slave", 10, &[0xfe]),
    ("pic.slave", 13, &[0x38]),
    // The last pin, with vector 0x42, masked.
    ("ioapic", 216, &[0x42, 0, 1, 0]),
    // The count of the third channel.
    ("pit", 48, &[0x34, 0x12]),
];

#[test]
fn i3_every_piece_of_state_comes_back_to_its_own_place() {
    let Some(_turn) = kvm() else { return };
    let (source, mut sections) = source();
    let before = sections.clone();
    let is_of_a_vcpu = |name: &str| name.starts_with("vcpu.");
    for (name, at, bytes) in FIELDS {
        let instance = u32::from(is_of_a_vcpu(name));
        let of = |section: &&mut Section| section.name == name && section.instance == instance;
        let Some(section) = sections.iter_mut().find(of) else {
            // A CPU without XSAVE has no XCRs.
            assert_eq!(name, "vcpu.xcrs");
            continue;
        };
        assert_ne!(
            &section.bytes[at..at + bytes.len()],
            bytes,
            "{name} at {at}"
        );
        section.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }
    let there = reloaded(&source, &sections);
    let at_place = |name: &str, instance| {
        let of = |section: &&Section| section.name == name && section.instance == instance;
        there.iter().find(of).map(|section| &section.bytes)
    };
    for (name, at, bytes) in FIELDS {
        if let Some(found) = at_place(name, u32::from(is_of_a_vcpu(name))) {
            assert_eq!(&found[at..at + bytes.len()], bytes, "{name} at {at}");
        }
        // The same field of vCPU 0 has not changed.
        if is_of_a_vcpu(name) {
            let own = before
                .iter()
                .find(|own| own.name == name && own.instance == 0);
            let own = own.map(|own| &own.bytes[at..at + bytes.len()]);
            let found = at_place(name, 0).map(|found| &found[at..at + bytes.len()]);
            assert_eq!(found, own, "{name} at {at} of vCPU 0");
        }
    }
}

#[test]
fn i3_the_clock_that_kvm_shows_goes_on_while_the_machine_moves() {
    let Some(_turn) = kvm() else { return };
    const HOUR_NS: u64 = 3_600_000_000_000;
    const AWAY: Duration = Duration::from_millis(300);
    // Offset of the guest's clock in the section. Two clocks of the host and the host's boot id
    // precede it.
    const NANOSECONDS: usize = 16 + 36;
    let (source, mut sections) = source();
    let clock = |sections: &[Section]| {
        let section = sections.iter().find(|section| section.name == "clock");
        let bytes = &section.unwrap().bytes;
        (word(bytes, 0), word(bytes, NANOSECONDS))
    };
    // Change the state as if the guest had run for an hour longer.
    let (left_ns, guest_ns) = clock(&sections);
    let section = sections.iter_mut().find(|section| section.name == "clock");
    let bytes = &mut section.unwrap().bytes[NANOSECONDS..NANOSECONDS + 8];
    bytes.copy_from_slice(&(guest_ns + HOUR_NS).to_le_bytes());
    // The restored clock must include the time spent in this sleep.
    std::thread::sleep(AWAY);
    let (came_ns, there_ns) = clock(&reloaded(&source, &sections));
    let host = Duration::from_nanos(came_ns - left_ns);
    let guest = Duration::from_nanos(there_ns - (guest_ns + HOUR_NS));
    assert!(guest.abs_diff(host) < AWAY / 2, "{guest:?} in {host:?}");
}

#[test]
fn only_a_machine_that_never_ran_can_be_loaded() {
    let Some(_turn) = kvm() else { return };
    let (vm, sections) = source();
    assert!(matches!(vm.load(&sections), Err(LoadError::Control(_))));
    assert_eq!(vm.state(), VmState::Paused);
    let other = built(vm.description());
    assert_eq!(other.start(), Err(ControlError::Empty));
    assert_eq!(other.resume(), Err(ControlError::NotStarted));
}

#[test]
fn a_description_reads_back_and_fits_its_own_host() {
    let Some(_turn) = kvm() else { return };
    let vm = fresh(Config {
        name: "ⅳ".into(),
        workload: Workload::HotSet { share_percent: 3 },
        fill_bytes: Some(1 << 20),
        power_off_after: Some(u64::MAX),
        ..Config::default()
    });
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

    // Replace the last ten entries of the table by entries of leaf 7 in which all feature bits are
    // set, so that the guest needs more features than any host has.
    let mut greedy = bytes.clone();
    let table = greedy.len() - 28 * 10;
    for entry in greedy[table..].chunks_mut(28) {
        entry[..4].copy_from_slice(&7u32.to_le_bytes());
        entry[4..8].copy_from_slice(&0u32.to_le_bytes());
        entry[12..].fill(0xff);
    }
    // The check uses only the first entry of a leaf, so overwrite the real entry of leaf 7, too.
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
    assert!(Vm::from_description(&greedy, HostOptions::default()).is_err());
}

#[test]
fn i7_a_description_that_is_cut_off_or_garbage_is_an_error() {
    let Some(_turn) = kvm() else { return };
    let bytes = fresh(Config::default()).description().encode();
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
