//! The state of a paused machine, without its memory, as named sections.
//!
//! Most sections are the kernel's own structures, byte for byte. The order in which they are set
//! (`VCPU_SECTIONS`) matters:
//!
//! - The special registers precede the MSRs, because both contain EFER and the APIC base.
//! - XCR0 precedes the XSAVE area.
//! - The local APIC precedes the MSRs, because KVM ignores a TSC deadline unless the APIC's timer is
//!   in the TSC-deadline mode.
//! - The TSC precedes the MSRs, because KVM computes the time until the TSC deadline from the current
//!   TSC (`start_sw_tscdeadline` of arch/x86/kvm/lapic.c). The TSC has its own section, because it
//!   continues during the migration.
//! - The events and the run state are last.
//!
//! Unsupported sections are skipped unless they are required. The length of a section is checked
//! before its content is used (I7).

use std::io;

use crate::kvm::{MachineState, Vcpu, VcpuState};
pub use dunlin::engine::vmm::Section;
use kvm_bindings::MsrList;
use thiserror::Error;

use crate::control::VmState;
use crate::heart::{Heart, Moment};
use crate::wire::{DecodeError, Reader, Writer, bad_value};

mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod msrs;
mod tsc;

pub use error::LoadError;
pub(crate) use error::decoded;
use error::{MSRS, TSC, kvm_refused};
use msrs::{read_msrs, write_msrs};
use tsc::{Tsc, read_tsc, write_tsc};

/// Why a machine's state could not be saved. The machine is unchanged.
#[derive(Debug, Error)]
pub enum SaveError {
    /// The machine is neither paused nor new.
    #[error("the machine is {0:?}: only a paused or new machine can be saved")]
    NotPaused(VmState),
    /// KVM could not return a part of the state.
    #[error("cannot read section `{section}` (instance {instance}) from KVM")]
    Kvm {
        /// The section's name.
        section: &'static str,
        /// The section's instance.
        instance: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

const VERSION: u32 = 1;
pub(crate) const VMM: &str = "vmm";
pub(crate) const HEART: &str = "heart";
const CLOCK: &str = "clock";
const XCRS: &str = "vcpu.xcrs";

const MACHINE_SECTIONS: [(&str, MachineState); 4] = [
    ("pic.master", MachineState::PIC_MASTER),
    ("pic.slave", MachineState::PIC_SLAVE),
    ("ioapic", MachineState::IOAPIC),
    ("pit", MachineState::PIT),
];

/// One step of loading a vCPU.
#[derive(Clone, Copy)]
enum Step {
    Plain(VcpuState),
    Msrs,
    Tsc,
}

/// A vCPU's sections, in loading order.
const VCPU_SECTIONS: [(&str, Step); 10] = [
    (
        "vcpu.special-registers",
        Step::Plain(VcpuState::SPECIAL_REGISTERS),
    ),
    (XCRS, Step::Plain(VcpuState::XCRS)),
    ("vcpu.xsave", Step::Plain(VcpuState::XSAVE)),
    ("vcpu.lapic", Step::Plain(VcpuState::LAPIC)),
    (TSC, Step::Tsc),
    (MSRS, Step::Msrs),
    ("vcpu.registers", Step::Plain(VcpuState::REGISTERS)),
    (
        "vcpu.debug-registers",
        Step::Plain(VcpuState::DEBUG_REGISTERS),
    ),
    ("vcpu.events", Step::Plain(VcpuState::EVENTS)),
    ("vcpu.run-state", Step::Plain(VcpuState::MP_STATE)),
];

/// The VMM's own state, which is migrated in addition to KVM's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Own {
    pub(crate) throttle_percent: u8,
    pub(crate) power_off_at: u64,
}

/// The parts of a machine that have state to migrate. The machine must be paused or new.
pub(crate) struct Parts<'a> {
    pub(crate) vcpus: &'a [&'a Vcpu],
    /// The MSRs that this host's KVM supports.
    pub(crate) msrs: &'a MsrList,
    pub(crate) heart: &'a Heart,
    pub(crate) tsc_khz: u32,
}

impl Parts<'_> {
    pub(crate) fn save(&self, own: Own) -> Result<Vec<Section>, SaveError> {
        let mut sections = vec![
            section(VMM, 0, own.encode()),
            section(HEART, 0, self.heart.encode()),
        ];
        let mut put = |name, instance, bytes| sections.push(section(name, instance, bytes));
        let machine = self.vcpus[0].machine();
        let kvm = |section, instance| {
            move |source| SaveError::Kvm {
                section,
                instance,
                source,
            }
        };
        let clock = machine
            .read_state(MachineState::CLOCK)
            .map_err(kvm(CLOCK, 0))?;
        let mut bytes = Vec::new();
        Moment::now().encode(&mut Writer::new(&mut bytes));
        put(CLOCK, 0, [bytes, clock].concat());
        for (name, state) in MACHINE_SECTIONS {
            put(name, 0, machine.read_state(state).map_err(kvm(name, 0))?);
        }
        for (instance, vcpu) in (0..).zip(self.vcpus) {
            for (name, step) in VCPU_SECTIONS {
                let bytes = match step {
                    Step::Plain(state) => match vcpu.read_state(state) {
                        // A CPU without XSAVE has no XCRs.
                        Err(_) if name == XCRS => continue,
                        bytes => bytes,
                    },
                    Step::Msrs => read_msrs(vcpu, self.msrs),
                    Step::Tsc => read_tsc(vcpu, self.tsc_khz),
                };
                put(name, instance, bytes.map_err(kvm(name, instance))?);
            }
        }
        Ok(sections)
    }

    /// Loads all sections. After an error, some sections may have been loaded.
    pub(crate) fn load(&self, sections: &[Section]) -> Result<Own, LoadError> {
        check_names(sections, |name| self.instances(name))?;
        let own = decoded(VMM, 0, Own::decode(find(sections, VMM, 0)?))?;
        decoded(HEART, 0, self.heart.load(find(sections, HEART, 0)?))?;
        let machine = self.vcpus[0].machine();
        for (name, state) in MACHINE_SECTIONS {
            let bytes = find(sections, name, 0)?;
            machine
                .write_state(state, bytes)
                .map_err(kvm_refused(name, 0))?;
        }
        let mut first_tsc = None;
        for (instance, vcpu) in (0..).zip(self.vcpus) {
            for (name, step) in VCPU_SECTIONS {
                let bytes = match find(sections, name, instance) {
                    Err(LoadError::Missing { .. }) if name == XCRS => continue,
                    bytes => bytes?,
                };
                match step {
                    Step::Plain(state) => vcpu
                        .write_state(state, bytes)
                        .map_err(kvm_refused(name, instance))?,
                    Step::Msrs => write_msrs(vcpu, instance, bytes)?,
                    Step::Tsc => {
                        let source = decoded(TSC, instance, Tsc::decode(bytes))?;
                        write_tsc(vcpu, instance, self.tsc_khz, &source, &mut first_tsc)?;
                    }
                }
            }
        }
        self.write_clock(find(sections, CLOCK, 0)?)?;
        Ok(own)
    }

    /// The maximum number of sections with this name.
    fn instances(&self, name: &str) -> u32 {
        if VCPU_SECTIONS.iter().any(|(known, _)| *known == name) {
            self.vcpus.len() as u32
        } else {
            let known = MACHINE_SECTIONS.iter().any(|(known, _)| *known == name)
                || [VMM, HEART, CLOCK].contains(&name);
            known.into()
        }
    }

    /// Sets kvmclock to its saved value plus the time that has passed since it was saved.
    fn write_clock(&self, bytes: &[u8]) -> Result<(), LoadError> {
        let mut reader = Reader::new(bytes);
        let at = decoded(CLOCK, 0, Moment::decode(&mut reader))?;
        let nanoseconds = decoded(CLOCK, 0, reader.u64("clock"))?;
        // Ignore the other fields of `struct kvm_clock_data`, which describe the source's host.
        decoded(CLOCK, 0, reader.bytes("clock data", 40))?;
        decoded(CLOCK, 0, reader.finish("clock data"))?;
        let passed = Moment::now().since(&at).as_nanos() as u64;
        let mut clock = nanoseconds.saturating_add(passed).to_le_bytes().to_vec();
        clock.resize(48, 0);
        self.vcpus[0]
            .machine()
            .write_state(MachineState::CLOCK, &clock)
            .map_err(kvm_refused(CLOCK, 0))
    }
}

impl Own {
    pub(crate) fn encode(self) -> Vec<u8> {
        let mut bytes = vec![self.throttle_percent];
        bytes.extend(self.power_off_at.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let own = Self {
            throttle_percent: reader.u8("throttle")?,
            power_off_at: reader.u64("visits before the power-off")?,
        };
        if own.throttle_percent > 99 {
            return Err(bad_value(&reader, "throttle", own.throttle_percent.into()));
        }
        reader.finish("the VMM's own state")?;
        Ok(own)
    }
}

/// Creates a required section.
pub(crate) fn section(name: &str, instance: u32, bytes: Vec<u8>) -> Section {
    Section {
        name: name.to_owned(),
        instance,
        version: VERSION,
        required: true,
        bytes,
    }
}

/// Checks that every section is known or optional, and that no known section appears twice.
/// `instances` returns the maximum number of sections with a given name.
pub(crate) fn check_names(
    sections: &[Section],
    instances: impl Fn(&str) -> u32,
) -> Result<(), LoadError> {
    for (position, section) in sections.iter().enumerate() {
        let (name, instance) = (section.name.as_str(), section.instance);
        let limit = instances(name);
        if instance >= limit && section.required {
            return Err(LoadError::Unknown {
                section: name.to_owned(),
                instance,
            });
        }
        let same = |other: &Section| other.name == name && other.instance == instance;
        if instance < limit && sections[..position].iter().any(same) {
            return Err(LoadError::Twice {
                section: name.to_owned(),
                instance,
            });
        }
    }
    Ok(())
}

pub(crate) fn find<'a>(
    sections: &'a [Section],
    name: &'static str,
    instance: u32,
) -> Result<&'a [u8], LoadError> {
    let section = sections
        .iter()
        .find(|section| section.name == name && section.instance == instance)
        .ok_or(LoadError::Missing {
            section: name,
            instance,
        })?;
    if section.version != VERSION {
        return Err(LoadError::Version {
            section: name,
            version: section.version,
        });
    }
    Ok(&section.bytes)
}
