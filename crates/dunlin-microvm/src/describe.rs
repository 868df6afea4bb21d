//! The description from which a destination builds or refuses a machine.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;

use std::io;
use std::sync::{Arc, OnceLock};

use crate::kvm::Machine;
use dunlin_linux::mapping::{Backing, HUGE_PAGE_BYTES, allocate};
use kvm_ioctls::Kvm;
use thiserror::Error;

use crate::config::{Config, ConfigError, Fill, GuestKind, NAME_LIMIT_BYTES, Workload};
use crate::cpuid::Table;
use crate::wire::{DecodeError, Reader, Writer, bad_value, optional_u64, put_optional_u64};

/// The first field of a KVM guest's description. The first field states the kind of guest, which
/// determines the layout of the remaining fields. Decoding fails at an unknown value.
const KVM: u16 = 1;
/// The first field of a description, if it describes a process guest. Such a description has no
/// TSC rate and no CPUID table.
const PROCESS: u16 = 2;

/// Frequency of a process guest's clock, in kHz. The clock counts nanoseconds since 1970.
const PROCESS_TSC_KHZ: u32 = 1_000_000;

/// Largest difference at which two TSC rates count as equal, in parts per million: the kernel's
/// default tolerance (`tsc_tolerance_ppm` of arch/x86/kvm/x86.c).
const TSC_TOLERANCE_PPM: u64 = 250;

/// The description from which a destination builds a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmDescription {
    /// The machine's configuration.
    pub config: Config,
    /// Frequency in kHz of the guest's TSC or, for a process guest, of its clock.
    pub tsc_khz: u32,
    pub(crate) cpuid: Table,
}

/// Why this host cannot run the machine that a description describes.
#[derive(Debug, Error)]
pub enum DescribeError {
    /// The bytes cannot be decoded as a description.
    #[error("cannot decode the machine's description")]
    Decode(#[from] DecodeError),
    /// The description has an unknown version, possibly of a newer release.
    #[error(
        "machine description version {0} not supported (only {KVM} and {PROCESS}): run the same \
         release of the VMM on both hosts"
    )]
    Version(u16),
    /// The configuration is invalid.
    #[error("invalid machine configuration")]
    Config(#[from] ConfigError),
    /// The TSC rates of the guest and this host differ, and this host cannot scale the TSC.
    #[error(
        "the destination's TSC runs at {host_khz} kHz, not at the guest's {guest_khz} kHz, and its \
         CPU cannot scale the TSC: choose a host with the guest's TSC rate"
    )]
    TscRate {
        /// The guest's TSC rate in kHz.
        guest_khz: u32,
        /// This host's TSC rate in kHz.
        host_khz: u32,
    },
    /// This host lacks CPU features that the guest sees, or has a CPU of another vendor.
    #[error(
        "the destination's CPU lacks features of the guest: {0}; choose a host with a CPU like the \
         source's"
    )]
    Cpuid(String),
    /// This host's KVM cannot be queried.
    #[error("cannot query KVM on this host")]
    Kvm(#[source] io::Error),
}

/// The CPU features and TSC rate that this host can provide to a guest.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) cpuid: Table,
    pub(crate) tsc_khz: u32,
    pub(crate) can_scale_tsc: bool,
}

impl Host {
    /// Returns what this host's KVM can provide. The result is kept, because the query creates a
    /// virtual machine and takes a few tens of milliseconds.
    pub(crate) fn get(kvm: &Kvm) -> io::Result<&'static Self> {
        static HOST: OnceLock<Host> = OnceLock::new();
        if let Some(host) = HOST.get() {
            return Ok(host);
        }
        let host = Self::probe(kvm)?;
        Ok(HOST.get_or_init(|| host))
    }

    fn probe(kvm: &Kvm) -> io::Result<Self> {
        let memory = allocate(HUGE_PAGE_BYTES, Backing::Private).map_err(io::Error::other)?;
        let machine = Arc::new(Machine::new(kvm, Arc::new(memory))?);
        Ok(Self {
            cpuid: Table::supported(kvm)?,
            tsc_khz: machine.create_vcpu(0)?.get_tsc_khz()?,
            can_scale_tsc: machine.can_scale_tsc(),
        })
    }

    pub(crate) fn check(&self, description: &VmDescription) -> Result<(), DescribeError> {
        description.config.validate()?;
        if !same_rate(description.tsc_khz, self.tsc_khz) && !self.can_scale_tsc {
            return Err(DescribeError::TscRate {
                guest_khz: description.tsc_khz,
                host_khz: self.tsc_khz,
            });
        }
        match description.cpuid.missing_on(&self.cpuid) {
            None => Ok(()),
            Some(missing) => Err(DescribeError::Cpuid(missing)),
        }
    }
}

/// Queries what this host's KVM can provide, and keeps the result for all VMs of this process. If the
/// process calls this function early, the first VM that arrives does not wait for the query.
///
/// Ignores errors: the creation of a VM repeats a failed query and reports the error.
pub fn query_host() {
    if let Ok(kvm) = Kvm::new() {
        let _ = Host::get(&kvm);
    }
}

/// Checks whether this host's CPU and KVM can run the machine, without building it. For a process
/// guest, checks only the configuration, because such a guest does not depend on the CPU or KVM.
///
/// # Errors
/// The first reason why this host cannot run the machine.
pub fn check_description(description: &VmDescription) -> Result<(), DescribeError> {
    if description.config.guest == GuestKind::Process {
        return Ok(description.config.validate()?);
    }
    let kvm = Kvm::new().map_err(|error| DescribeError::Kvm(error.into()))?;
    Host::get(&kvm)
        .map_err(DescribeError::Kvm)?
        .check(description)
}

/// Whether the two TSC rates are equal within the tolerance.
pub(crate) fn same_rate(guest_khz: u32, host_khz: u32) -> bool {
    let apart = u64::from(guest_khz.abs_diff(host_khz));
    apart * 1_000_000 <= TSC_TOLERANCE_PPM * u64::from(host_khz)
}

impl VmDescription {
    /// Describes a process guest, which does not depend on the host's CPU.
    pub(crate) fn of_process(config: Config) -> Self {
        Self {
            config,
            tsc_khz: PROCESS_TSC_KHZ,
            cpuid: Table::default(),
        }
    }

    /// Encodes the description, at most 8 KiB: version, configuration, TSC rate, CPUID
    /// table. A process guest has no TSC rate and no CPUID table.
    pub fn encode(&self) -> Vec<u8> {
        let config = &self.config;
        // The name fits, because `Config::validate` limits its length.
        let name = config.name.as_bytes();
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes);
        writer
            .u16(match config.guest {
                GuestKind::Kvm => KVM,
                GuestKind::Process => PROCESS,
            })
            .u16(name.len() as u16)
            .bytes(name)
            .bytes(&config.uuid)
            .u64(config.memory_bytes)
            .u8(config.vcpus)
            .u8(match config.backing {
                Backing::Private => 0,
                Backing::Memfd => 1,
                Backing::Huge => 2,
            })
            .u8(config.fill as u8);
        put_optional_u64(&mut writer, config.fill_bytes);
        let (workload, share) = match config.workload {
            Workload::Idle => (0, 0),
            Workload::Sequential => (1, 0),
            Workload::Random => (2, 0),
            Workload::HotSet { share_percent } => (3, share_percent),
        };
        writer.u8(workload).u8(share);
        put_optional_u64(&mut writer, config.working_set_bytes);
        writer.u64(config.dirty_rate).u64(config.seed);
        put_optional_u64(&mut writer, config.power_off_after);
        if config.guest == GuestKind::Kvm {
            self.cpuid.encode(writer.u32(self.tsc_khz));
        }
        bytes
    }

    /// Decodes the result of [`VmDescription::encode`].
    ///
    /// # Errors
    /// `Decode`, `Version` or `Config`.
    pub fn decode(bytes: &[u8]) -> Result<Self, DescribeError> {
        let mut reader = Reader::new(bytes);
        let guest = match reader.u16("version")? {
            KVM => GuestKind::Kvm,
            PROCESS => GuestKind::Process,
            version => return Err(DescribeError::Version(version)),
        };
        let config = Config {
            name: reader.text("name", NAME_LIMIT_BYTES)?.to_owned(),
            uuid: reader.array("UUID")?,
            guest,
            memory_bytes: reader.u64("memory")?,
            vcpus: reader.u8("vCPUs")?,
            backing: match reader.u8("backing")? {
                0 => Backing::Private,
                1 => Backing::Memfd,
                2 => Backing::Huge,
                value => return Err(bad_value(&reader, "backing", value.into()).into()),
            },
            fill: match reader.u8("fill")? {
                0 => Fill::Zero,
                1 => Fill::Random,
                2 => Fill::Mixed,
                3 => Fill::Sparse,
                value => return Err(bad_value(&reader, "fill", value.into()).into()),
            },
            fill_bytes: optional_u64(&mut reader, "fill limit")?,
            workload: match (reader.u8("workload")?, reader.u8("hot share")?) {
                (0, 0) => Workload::Idle,
                (1, 0) => Workload::Sequential,
                (2, 0) => Workload::Random,
                (3, share_percent) => Workload::HotSet { share_percent },
                (value, _) => return Err(bad_value(&reader, "workload", value.into()).into()),
            },
            working_set_bytes: optional_u64(&mut reader, "working set")?,
            dirty_rate: reader.u64("dirty rate")?,
            seed: reader.u64("seed")?,
            power_off_after: optional_u64(&mut reader, "visits before the power-off")?,
        };
        let description = match guest {
            GuestKind::Process => Self::of_process(config),
            GuestKind::Kvm => Self {
                config,
                tsc_khz: reader.u32("TSC rate")?,
                cpuid: Table::decode(&mut reader)?,
            },
        };
        reader.finish("description")?;
        description.config.validate()?;
        Ok(description)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_different_tsc_rate_is_refused_if_it_cannot_be_scaled() {
        let empty = || Table::decode(&mut Reader::new(&[0, 0])).unwrap();
        let described = |tsc_khz| VmDescription {
            config: Config::default(),
            tsc_khz,
            cpuid: empty(),
        };
        let host = |can_scale_tsc| Host {
            cpuid: empty(),
            tsc_khz: 2_000_000,
            can_scale_tsc,
        };
        host(false).check(&described(2_000_500)).unwrap();
        host(false).check(&described(1_999_500)).unwrap();
        for tsc_khz in [2_000_501, 1_999_499, 0, u32::MAX] {
            assert!(matches!(
                host(false).check(&described(tsc_khz)),
                Err(DescribeError::TscRate {
                    host_khz: 2_000_000,
                    ..
                })
            ));
        }
        host(true).check(&described(2_000_501)).unwrap();
    }

    #[test]
    fn i7_a_process_guests_description_has_no_cpu_and_an_exact_length() {
        let description = VmDescription::of_process(Config {
            guest: GuestKind::Process,
            name: "p".into(),
            ..Config::default()
        });
        let bytes = description.encode();
        assert_eq!(bytes[0], 2);
        assert_eq!(VmDescription::decode(&bytes).unwrap(), description);
        check_description(&description).unwrap();
        for length in 0..bytes.len() {
            assert!(VmDescription::decode(&bytes[..length]).is_err());
        }
        // Six bytes are as long as the fields that only a KVM guest's description has: the TSC rate
        // and the CPUID count.
        let long = [&bytes[..], &[0; 6]].concat();
        assert!(VmDescription::decode(&long).is_err());
    }
}
