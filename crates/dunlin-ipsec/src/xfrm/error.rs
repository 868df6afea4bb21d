//! Errors of the kernel's IPsec.

use std::io;

use dunlin_proto::fault::FaultCode;

use crate::netlink::Failure;

/// Why a request failed. After [`Error::Socket`] or [`Error::Answer`], the kernel may have
/// performed the request nevertheless.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The process lacks a capability.
    #[error(
        "{doing} is not permitted: the process lacks CAP_NET_ADMIN in this network namespace; run \
         it as root, or give it that capability"
    )]
    NotPermitted {
        /// The operation.
        doing: &'static str,
    },
    /// The kernel has no IPsec over netlink.
    #[error(
        "kernel lacks IPsec over netlink (CONFIG_XFRM_USER): load the module xfrm_user as root, or \
         use another kernel"
    )]
    Absent,
    /// The kernel lacks ESP for this address family, or the cipher.
    #[error(
        "kernel lacks ESP or rfc4106(gcm(aes)): load the modules esp4, esp6, seqiv and gcm as root, \
         or use another kernel{}", kernel_text(.0)
    )]
    NoEsp(Option<String>),
    /// The kernel already has an SA with this SPI, or a policy with this selector.
    #[error("{what} already in use: choose another, or remove the existing entry")]
    Taken {
        /// `SPI` or `selector`.
        what: &'static str,
    },
    /// This host has no CPU with this number.
    #[error(
        "CPU {cpu} does not exist on this host: choose one of /sys/devices/system/cpu/possible"
    )]
    NoSuchCpu {
        /// The number of the CPU.
        cpu: u32,
    },
    /// The kernel's entry differs from the request.
    #[error(
        "the kernel's entry differs from the request in {what}: the kernel ignored a part of the \
         request, or another program changed the entry (`ip xfrm monitor`)"
    )]
    Differs {
        /// The field that differs.
        what: &'static str,
    },
    /// The kernel refused the request.
    #[error("{doing} failed: {source}{}", kernel_text(.text))]
    Refused {
        /// The operation.
        doing: &'static str,
        /// The kernel's error number.
        source: io::Error,
        /// The kernel's text (`NLMSGERR_ATTR_MSG`).
        text: Option<String>,
    },
    /// The netlink socket failed.
    #[error("{doing}: netlink socket failed: {source}")]
    Socket {
        /// The operation.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The kernel's answer cannot be parsed, or a list changed while it was read.
    #[error(
        "{doing}: unusable answer from the kernel: {what}; try again, and report the kernel's version if this recurs"
    )]
    Answer {
        /// The operation.
        doing: &'static str,
        /// The reason.
        what: &'static str,
    },
}

fn kernel_text(text: &Option<String>) -> String {
    text.as_ref()
        .map(|text| format!(" (kernel: {text})"))
        .unwrap_or_default()
}

impl Error {
    /// [`FaultCode::Kernel`], or [`FaultCode::PortsTaken`] for an object of another program.
    #[must_use]
    pub fn code(&self) -> FaultCode {
        match self {
            Self::Taken { .. } => FaultCode::PortsTaken,
            _ => FaultCode::Kernel,
        }
    }

    /// Converts a failure of the operation `doing`. For some operations the caller converts the
    /// result again to a more specific error, for instance with `of_state`.
    pub(super) fn of(doing: &'static str, why: Failure) -> Self {
        match why {
            Failure::Kernel {
                code: libc::EPERM, ..
            } => Self::NotPermitted { doing },
            Failure::Kernel { code, text } => Self::Refused {
                doing,
                source: io::Error::from_raw_os_error(code),
                text,
            },
            Failure::Changed => Self::Answer {
                doing: "listing",
                what: "the list changed while it was read",
            },
            Failure::Socket(source) => Self::Socket { doing, source },
            Failure::Answer(what) => Self::Answer { doing, what },
        }
    }

    /// Returns the kernel's error number (errno(3)), positive.
    pub(super) fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// Converts an error of adding an SA for `cpu` to a more specific error, if there is one.
    pub(super) fn of_state(self, cpu: Option<u32>) -> Self {
        match (self.errno(), self, cpu) {
            (Some(libc::EEXIST), ..) => Self::Taken { what: "SPI" },
            (Some(libc::ERANGE), _, Some(cpu)) => Self::NoSuchCpu { cpu },
            (
                Some(libc::ENOSYS | libc::ENOENT | libc::EPROTONOSUPPORT),
                Self::Refused { text, .. },
                _,
            ) => Self::NoEsp(text),
            (_, error, _) => error,
        }
    }
}
