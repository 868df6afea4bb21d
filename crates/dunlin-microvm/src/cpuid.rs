//! The CPUID table of a guest, and the check that this host provides the features in it.

use std::io;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Kvm, VcpuFd};

use crate::wire::{DecodeError, Reader, Writer};

/// Size of an encoded CPUID entry in a description.
const ENTRY_BYTES: usize = 28;

/// The CPUID table of a guest or of a host's KVM.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Table(Vec<kvm_cpuid_entry2>);

/// Equality is total: the bindings do not derive `Eq` for an entry, but all its fields are
/// integers.
impl Eq for Table {}

/// An output register of CPUID with feature bits. A guest that has seen a feature needs it on every
/// host.
struct Word {
    function: u32,
    index: u32,
    register: usize,
    /// Bits that are not compared, because they show what the guest has enabled, and not what the
    /// host offers: OSXSAVE and OSPKE.
    ignored: u32,
}

const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;

const fn word(function: u32, index: u32, register: usize, ignored: u32) -> Word {
    Word {
        function,
        index,
        register,
        ignored,
    }
}

/// The registers with feature bits (Intel SDM volume 2, CPUID; AMD APM volume 3, appendix E).
const WORDS: [Word; 16] = [
    word(1, 0, ECX, 1 << 27),
    word(1, 0, EDX, 0),
    word(7, 0, EBX, 0),
    word(7, 0, ECX, 1 << 4),
    word(7, 0, EDX, 0),
    word(7, 1, EAX, 0),
    word(7, 1, EDX, 0),
    word(7, 2, EDX, 0),
    // The state components that XCR0 can enable, and the instructions that save them.
    word(0xd, 0, EAX, 0),
    word(0xd, 0, EDX, 0),
    word(0xd, 1, EAX, 0),
    word(0x8000_0001, 0, ECX, 0),
    word(0x8000_0001, 0, EDX, 0),
    word(0x8000_0007, 0, EDX, 0),
    word(0x8000_0008, 0, EBX, 0),
    word(0x8000_0021, 0, EAX, 0),
];

impl Table {
    /// Returns the table of all features that this host's KVM supports.
    pub(crate) fn supported(kvm: &Kvm) -> io::Result<Self> {
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
        Ok(Self(supported.as_slice().to_vec()))
    }

    fn register(&self, function: u32, index: u32, register: usize) -> u32 {
        self.0
            .iter()
            .find(|entry| entry.function == function && entry.index == index)
            .map_or(0, |entry| {
                [entry.eax, entry.ebx, entry.ecx, entry.edx][register]
            })
    }

    /// Whether the guest sees both XSAVE and AVX, so that it can use AVX.
    pub(crate) fn has_avx(&self) -> bool {
        const XSAVE_AND_AVX: u32 = 1 << 26 | 1 << 28;
        self.register(1, 0, ECX) & XSAVE_AND_AVX == XSAVE_AND_AVX
    }

    /// What `host` lacks, as text for display: both CPU vendors if they differ, otherwise the
    /// features of this table that `host` does not have. `None` if nothing is missing.
    pub(crate) fn missing_on(&self, host: &Self) -> Option<String> {
        let vendor = |table: &Self| [EBX, EDX, ECX].map(|register| table.register(0, 0, register));
        if vendor(self) != vendor(host) {
            let name = |table| {
                let bytes = vendor(table).map(u32::to_le_bytes).concat();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            let (here, there) = (name(host), name(self));
            return Some(format!("CPU vendor {there}, while the host has {here}"));
        }
        let missing: Vec<String> = WORDS
            .iter()
            .filter_map(|word| {
                let of = |table: &Self| table.register(word.function, word.index, word.register);
                let bits = of(self) & !of(host) & !word.ignored;
                (bits != 0).then(|| {
                    format!(
                        "CPUID {:#x}.{} {} {bits:#010x}",
                        word.function,
                        word.index,
                        ["EAX", "EBX", "ECX", "EDX"][word.register]
                    )
                })
            })
            .collect();
        (!missing.is_empty()).then(|| missing.join(", "))
    }

    /// Sets the table on one vCPU. Fields that contain the vCPU's number get `index`.
    pub(crate) fn show(&self, vcpu: &VcpuFd, index: u8) -> io::Result<()> {
        let mut entries = self.0.clone();
        for entry in &mut entries {
            match entry.function {
                1 => entry.ebx = entry.ebx & 0x00ff_ffff | u32::from(index) << 24,
                0xb | 0x1f => entry.edx = u32::from(index),
                _ => {}
            }
        }
        let table = CpuId::from_entries(&entries).map_err(|_| io::ErrorKind::InvalidInput)?;
        Ok(vcpu.set_cpuid2(&table)?)
    }

    pub(crate) fn encode(&self, writer: &mut Writer<'_>) {
        writer.u16(self.0.len() as u16);
        for entry in &self.0 {
            writer.u32(entry.function).u32(entry.index).u32(entry.flags);
            writer.u32(entry.eax).u32(entry.ebx);
            writer.u32(entry.ecx).u32(entry.edx);
        }
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let what = "number of CPUID entries";
        let entries = reader.count(what, KVM_MAX_CPUID_ENTRIES, ENTRY_BYTES)?;
        let mut table = Vec::with_capacity(entries);
        for _ in 0..entries {
            let mut field = || reader.u32("CPUID entry");
            table.push(kvm_cpuid_entry2 {
                function: field()?,
                index: field()?,
                flags: field()?,
                eax: field()?,
                ebx: field()?,
                ecx: field()?,
                edx: field()?,
                ..Default::default()
            });
        }
        Ok(Self(table))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::wire::DecodeReason;

    fn table(vendor: u32, features: u32) -> Table {
        let basic = kvm_cpuid_entry2 {
            eax: 0xd,
            ebx: vendor,
            ..Default::default()
        };
        let features = kvm_cpuid_entry2 {
            function: 1,
            ecx: features,
            ..Default::default()
        };
        Table(vec![basic, features])
    }

    #[test]
    fn a_host_must_have_the_guests_features_and_may_have_more() {
        let guest = table(1, 0b0110);
        assert_eq!(guest.missing_on(&guest), None);
        assert_eq!(guest.missing_on(&table(1, 0b1110)), None);
        // OSXSAVE (bit 27) is ignored, because it shows what the guest has enabled, and not what
        // the host offers.
        assert_eq!(table(1, 1 << 27).missing_on(&table(1, 0)), None);
        let missing = guest.missing_on(&table(1, 0b0100)).unwrap();
        assert_eq!(missing, "CPUID 0x1.0 ECX 0x00000002");
        assert!(guest.missing_on(&table(2, 0b0110)).is_some());
    }

    #[test]
    fn i7_a_table_is_bounded() {
        let bytes = [&257_u16.to_le_bytes()[..], &[0; 257 * 28]].concat();
        let error = Table::decode(&mut Reader::new(&bytes)).unwrap_err();
        assert_eq!(error.what, "number of CPUID entries");
        assert!(matches!(error.why, DecodeReason::OverLimit { .. }));
    }
}
