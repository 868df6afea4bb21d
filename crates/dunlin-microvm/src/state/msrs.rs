//! A vCPU's model-specific registers.

use std::io;

use crate::kvm::Vcpu;
use kvm_bindings::{MsrList, Msrs, kvm_msr_entry};

use super::error::{LoadError, MSRS, decoded, kvm_refused};
use crate::wire::{DecodeError, Reader, Writer, bad_value};

/// The time-stamp counter. It continues during the migration and has its own section.
pub(super) const MSR_IA32_TSC: u32 = 0x10;

/// Bytes of an encoded MSR: its index and value.
const MSR_BYTES: usize = 12;

/// Returns index and value of every MSR of `known` that can be read, except the TSC.
pub(super) fn read_msrs(vcpu: &Vcpu, known: &MsrList) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes);
    let mut left = known.as_slice();
    while !left.is_empty() {
        let mut entries = msrs_of(left.iter().map(|&index| (index, 0)))?;
        // KVM stops at the first MSR that it cannot read.
        let read = vcpu.get_msrs(&mut entries)?;
        for entry in &entries.as_slice()[..read] {
            if entry.index != MSR_IA32_TSC {
                writer.u32(entry.index).u64(entry.data);
            }
        }
        left = left.get(read + 1..).unwrap_or_default();
    }
    Ok(bytes)
}

/// Decodes the result of [`read_msrs`] and drops the TSC, if present.
fn decode(bytes: &[u8]) -> Result<Vec<(u32, u64)>, DecodeError> {
    let mut reader = Reader::new(bytes);
    let count = bytes.len() / MSR_BYTES;
    if count > kvm_bindings::KVM_MAX_MSR_ENTRIES {
        return Err(bad_value(&reader, "number of MSRs", count as u64));
    }
    let mut values = Vec::with_capacity(count);
    while reader.left() > 0 {
        values.push((reader.u32("MSR index")?, reader.u64("MSR value")?));
    }
    values.retain(|(index, _)| *index != MSR_IA32_TSC);
    Ok(values)
}

/// Sets every MSR saved by [`read_msrs`].
pub(super) fn write_msrs(vcpu: &Vcpu, instance: u32, bytes: &[u8]) -> Result<(), LoadError> {
    let values = decoded(MSRS, instance, decode(bytes))?;
    let refused = kvm_refused(MSRS, instance);
    let mut left = &values[..];
    while !left.is_empty() {
        let msrs = msrs_of(left.iter().copied()).map_err(&refused)?;
        // KVM stops at the first MSR that it rejects.
        let set = vcpu
            .set_msrs(&msrs)
            .map_err(|error| refused(error.into()))?;
        if let Some(&(index, value)) = left.get(set) {
            // Some MSRs cannot be written. This is harmless if this vCPU's MSR already has the
            // value.
            if read_msr(vcpu, index).ok() != Some(value) {
                return Err(LoadError::Msr {
                    instance,
                    index,
                    value,
                });
            }
        }
        left = left.get(set + 1..).unwrap_or_default();
    }
    Ok(())
}

fn msrs_of(values: impl Iterator<Item = (u32, u64)>) -> io::Result<Msrs> {
    let entries: Vec<kvm_msr_entry> = values
        .map(|(index, data)| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        })
        .collect();
    Msrs::from_entries(&entries).map_err(|_| io::ErrorKind::InvalidInput.into())
}

pub(super) fn read_msr(vcpu: &Vcpu, index: u32) -> io::Result<u64> {
    let mut msrs = msrs_of([(index, 0)].into_iter())?;
    match vcpu.get_msrs(&mut msrs)? {
        1 => Ok(msrs.as_slice()[0].data),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}
