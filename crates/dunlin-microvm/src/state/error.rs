//! Why a machine's state could not be loaded.

use std::io;

use thiserror::Error;

use crate::control::ControlError;
use crate::wire::DecodeError;

pub(super) const MSRS: &str = "vcpu.msrs";
pub(super) const TSC: &str = "vcpu.tsc";

/// Why a machine's state could not be loaded. The machine that was to take it cannot be used.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The machine is not one that was just built.
    #[error("only a machine that never ran can take over a state")]
    Control(#[from] ControlError),
    /// A section that must be there is not: the source is at fault.
    #[error("section `{section}` of {instance} is missing")]
    Missing {
        /// Its name.
        section: &'static str,
        /// Its instance.
        instance: u32,
    },
    /// The source says that we must know a section that we do not know.
    #[error("section `{section}` of {instance} is required and unknown here: use a newer VMM")]
    Unknown {
        /// Its name.
        section: String,
        /// Its instance.
        instance: u32,
    },
    /// Two sections of one name and instance: the source is at fault.
    #[error("section `{section}` of {instance} comes twice")]
    Twice {
        /// Its name.
        section: String,
        /// Its instance.
        instance: u32,
    },
    /// A layout that we do not know.
    #[error("section `{section}` is of version {version}; this VMM reads 1")]
    Version {
        /// Its name.
        section: &'static str,
        /// Its version.
        version: u32,
    },
    /// The bytes of a section are wrong: the source is at fault.
    #[error("section `{section}` of {instance} cannot be read")]
    Decode {
        /// Its name.
        section: &'static str,
        /// Its instance.
        instance: u32,
        /// What is wrong.
        #[source]
        source: DecodeError,
    },
    /// KVM refused the bytes of a section.
    #[error("KVM does not take `{section}` of {instance}")]
    Kvm {
        /// Its name.
        section: &'static str,
        /// Its instance.
        instance: u32,
        /// What the kernel said, or what is wrong with the length.
        #[source]
        source: io::Error,
    },
    /// KVM refused one MSR.
    #[error("KVM does not take {value:#x} for MSR {index:#x} of vCPU {instance}")]
    Msr {
        /// The vCPU.
        instance: u32,
        /// The MSR.
        index: u32,
        /// Its value at the source.
        value: u64,
    },
    /// This KVM cannot move the guest's TSC, and it would go back.
    #[error(
        "this KVM cannot offset the TSC, and vCPU {instance} would see it go back by {by} ticks"
    )]
    TscWouldGoBack {
        /// The vCPU.
        instance: u32,
        /// How far.
        by: u64,
    },
}

pub(crate) fn decoded<T>(
    section: &'static str,
    instance: u32,
    result: Result<T, DecodeError>,
) -> Result<T, LoadError> {
    result.map_err(|source| LoadError::Decode {
        section,
        instance,
        source,
    })
}

pub(super) fn kvm_refused(section: &'static str, instance: u32) -> impl Fn(io::Error) -> LoadError {
    move |source| LoadError::Kvm {
        section,
        instance,
        source,
    }
}
