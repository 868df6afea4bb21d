//! A vCPU's time-stamp counter, which continues during the migration.

use std::io;

use crate::kvm::Vcpu;

use super::error::{LoadError, TSC, kvm_refused};
use super::msrs::{MSR_IA32_TSC, read_msr};
use crate::heart::{Moment, time_to_ticks};
use crate::wire::{DecodeError, Reader, Writer};

/// A vCPU's saved TSC.
pub(super) struct Tsc {
    at: Moment,
    guest_tsc: u64,
    offset: u64,
}

impl Tsc {
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let tsc = Self {
            at: Moment::decode(&mut reader)?,
            guest_tsc: reader.u64("guest TSC")?,
            offset: reader.u64("TSC offset")?,
        };
        // The TSC rate comes from the VM's description; this copy is only for diagnosis.
        reader.u32("TSC rate")?;
        reader.finish("TSC")?;
        Ok(tsc)
    }
}

/// Returns the encoded TSC of a vCPU, with the moment at which the TSC was read.
pub(super) fn read_tsc(vcpu: &Vcpu, tsc_khz: u32) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes);
    Moment::now().encode(&mut writer);
    writer
        .u64(read_msr(vcpu, MSR_IA32_TSC)?)
        .u64(vcpu.tsc_offset()?.unwrap_or(0))
        .u32(tsc_khz);
    Ok(bytes)
}

/// If KVM can offset the TSC, sets the guest's TSC to the saved value plus the time that has passed
/// since the save.
///
/// The offset of each vCPU is the offset of the first vCPU plus the difference between the offsets
/// of the two vCPUs at the source. These differences therefore stay the same, however long the
/// calls take. `first` holds the first vCPU's offsets at the source and on this host.
pub(super) fn write_tsc(
    vcpu: &Vcpu,
    instance: u32,
    tsc_khz: u32,
    source: &Tsc,
    first: &mut Option<(u64, u64)>,
) -> Result<(), LoadError> {
    let refused = kvm_refused(TSC, instance);
    let offset = vcpu.tsc_offset().map_err(&refused)?;
    let now = read_msr(vcpu, MSR_IA32_TSC).map_err(&refused)?;
    let passed = time_to_ticks(Moment::now().since(&source.at), tsc_khz);
    let goal = source.guest_tsc.saturating_add(passed);
    if let Some(offset) = offset {
        let (first_source, first_here) =
            *first.get_or_insert((source.offset, offset.wrapping_add(goal.wrapping_sub(now))));
        let apart = source.offset.wrapping_sub(first_source);
        match vcpu.set_tsc_offset(first_here.wrapping_add(apart)) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
            Err(error) => return Err(refused(error)),
        }
    }
    // KVM cannot offset the TSC. This is harmless if the TSC is not behind its saved value. For
    // example, it is not behind if both machines are on one host.
    match source.guest_tsc.checked_sub(now) {
        None | Some(0) => Ok(()),
        Some(by) => Err(LoadError::TscWouldGoBack { instance, by }),
    }
}
