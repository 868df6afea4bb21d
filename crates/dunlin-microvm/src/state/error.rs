//! Why a machine's state could not be loaded.

use std::io;

use thiserror::Error;

use crate::control::ControlError;
use crate::wire::DecodeError;

pub(super) const MSRS: &str = "vcpu.msrs";
pub(super) const TSC: &str = "vcpu.tsc";

/// Why a machine's state could not be loaded. The machine cannot be used afterwards.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The machine has already run or been loaded.
    #[error("only a machine that has never run can load a state")]
    Control(#[from] ControlError),
    /// A mandatory section is missing: the source is at fault.
    #[error("section `{section}` of {instance} is missing")]
    Missing {
        /// The section's name.
        section: &'static str,
        /// The section's instance.
        instance: u32,
    },
    /// A required section is not supported.
    #[error("required section `{section}` of {instance} is not supported: use a newer VMM")]
    Unknown {
        /// The section's name.
        section: String,
        /// The section's instance.
        instance: u32,
    },
    /// Two sections have the same name and instance: the source is at fault.
    #[error("section `{section}` of {instance} appears twice")]
    Twice {
        /// The section's name.
        section: String,
        /// The section's instance.
        instance: u32,
    },
    /// An unsupported version of a section.
    #[error("section `{section}` version {version} not supported (only 1)")]
    Version {
        /// The section's name.
        section: &'static str,
        /// The section's version.
        version: u32,
    },
    /// The content of a section is invalid: the source is at fault.
    #[error("cannot decode section `{section}` of {instance}")]
    Decode {
        /// The section's name.
        section: &'static str,
        /// The section's instance.
        instance: u32,
        /// The decoding error.
        #[source]
        source: DecodeError,
    },
    /// KVM rejected the content of a section.
    #[error("KVM rejected section `{section}` of {instance}")]
    Kvm {
        /// The section's name.
        section: &'static str,
        /// The section's instance.
        instance: u32,
        /// The kernel's error, or the wrong length.
        #[source]
        source: io::Error,
    },
    /// KVM rejected an MSR.
    #[error("KVM rejected the value {value:#x} for MSR {index:#x} of vCPU {instance}")]
    Msr {
        /// The vCPU.
        instance: u32,
        /// The MSR.
        index: u32,
        /// The MSR's value at the source.
        value: u64,
    },
    /// This KVM cannot offset the guest's TSC, so the TSC would go backwards.
    #[error(
        "this KVM cannot offset the TSC; the TSC of vCPU {instance} would go back by {by} ticks"
    )]
    TscWouldGoBack {
        /// The vCPU.
        instance: u32,
        /// By how many ticks.
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
