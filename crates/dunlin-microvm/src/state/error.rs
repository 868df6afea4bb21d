//! The error of loading a machine's state.

use std::io;

use thiserror::Error;

use crate::control::ControlError;
use crate::wire::DecodeError;

pub(super) const MSRS: &str = "vcpu.msrs";
pub(super) const TSC: &str = "vcpu.tsc";

/// Why a machine's state could not be loaded. After any error other than [`LoadError::Control`],
/// the machine cannot be used.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The machine has already run, been loaded or ended.
    #[error("cannot load a state into this machine: only a new, unused machine can load one")]
    Control(#[from] ControlError),
    /// A required section is missing, so the source is at fault.
    #[error("section `{section}` (instance {instance}) is missing")]
    Missing {
        /// The section's name.
        section: &'static str,
        /// The instance: for a section of a vCPU, the vCPU's number.
        instance: u32,
    },
    /// A required section, or this instance of it, is unknown to this VMM.
    #[error("required section `{section}` (instance {instance}) is not supported: use a newer VMM")]
    Unknown {
        /// The section's name.
        section: String,
        /// The section's instance.
        instance: u32,
    },
    /// Two sections have the same name and instance, so the source is at fault.
    #[error("section `{section}` (instance {instance}) appears twice")]
    Twice {
        /// The section's name.
        section: String,
        /// The section's instance.
        instance: u32,
    },
    /// A section has an unsupported version.
    #[error(
        "section `{section}` version {version} not supported (only 1): run the same release of the \
         VMM on both hosts"
    )]
    Version {
        /// The section's name.
        section: &'static str,
        /// The section's version.
        version: u32,
    },
    /// The content of a section is invalid, so the source is at fault.
    #[error("cannot decode section `{section}` (instance {instance})")]
    Decode {
        /// The section's name.
        section: &'static str,
        /// The section's instance.
        instance: u32,
        /// The decoding error.
        #[source]
        source: DecodeError,
    },
    /// A section could not be set in KVM.
    #[error("KVM rejected section `{section}` (instance {instance})")]
    Kvm {
        /// The section's name.
        section: &'static str,
        /// The section's instance.
        instance: u32,
        /// The kernel's error, or the error of a check before the call.
        #[source]
        source: io::Error,
    },
    /// KVM rejected an MSR.
    #[error("KVM rejected the value of MSR {index:#x} of vCPU {instance}")]
    Msr {
        /// The vCPU's number.
        instance: u32,
        /// The MSR's index.
        index: u32,
        /// The MSR's value at the source. The error's text omits it, because it is the guest's data.
        value: u64,
    },
    /// KVM on this host cannot offset the guest's TSC, and without an offset the TSC would go
    /// backwards.
    #[error(
        "the destination's KVM cannot offset the TSC, and the TSC of vCPU {instance} would go back \
         by {by} ticks: choose another host"
    )]
    TscWouldGoBack {
        /// The vCPU's number.
        instance: u32,
        /// The number of ticks by which the TSC would go back.
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
