//! What goes wrong when the kernel's IPsec is asked for something.

use std::io;

use crate::netlink::Failure;

/// Why it was not done; nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The process lacks a capability.
    #[error(
        "{doing} is not permitted: the process lacks CAP_NET_ADMIN in this network namespace; run \
         it as root, or give it that capability"
    )]
    NotPermitted {
        /// What was asked for.
        doing: &'static str,
    },
    /// The kernel has no IPsec that could be asked.
    #[error(
        "this kernel has no IPsec over netlink (CONFIG_XFRM_USER): load the module xfrm_user as \
         root, or use a kernel that has it"
    )]
    Absent,
    /// The kernel has no ESP of this address family, or not the cipher.
    #[error(
        "this kernel lacks ESP or rfc4106(gcm(aes)): load the modules esp4, esp6, seqiv and gcm as \
         root, or use a kernel that has them{}", said(.0)
    )]
    NoEsp(Option<String>),
    /// Somebody else has what was to be ours.
    #[error("another has this {what}: choose another, or remove that one")]
    Taken {
        /// An SPI, or a selector.
        what: &'static str,
    },
    /// A CPU that the machine cannot have.
    #[error(
        "there is no CPU {cpu} in this machine: choose one of /sys/devices/system/cpu/possible"
    )]
    NoSuchCpu {
        /// Its number.
        cpu: u32,
    },
    /// The kernel has something else than it was told.
    #[error("the kernel has not installed what it was told: {what} is not so")]
    Differs {
        /// What of it.
        what: &'static str,
    },
    /// The kernel refuses.
    #[error("{doing} failed: {source}{}", said(.text))]
    Refused {
        /// What was asked for.
        doing: &'static str,
        /// Its error number.
        source: io::Error,
        /// What else it says (`NLMSGERR_ATTR_MSG`).
        text: Option<String>,
    },
    /// The socket to the kernel fails.
    #[error("the kernel cannot be asked, {doing}: {source}")]
    Socket {
        /// What was asked for.
        doing: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// The kernel's answer is not what this program knows.
    #[error("{doing} brought an answer that cannot be read: {what}; report the kernel's version")]
    Answer {
        /// What was asked for.
        doing: &'static str,
        /// What of it.
        what: &'static str,
    },
}

fn said(text: &Option<String>) -> String {
    text.as_ref()
        .map(|text| format!(" (the kernel says: {text})"))
        .unwrap_or_default()
}

/// Why an exchange of messages came to nothing, before it is known what that means for the caller.
#[derive(Debug)]
pub(super) struct Refusal {
    /// What was asked for.
    pub(super) doing: &'static str,
    pub(super) why: Failure,
}

impl Refusal {
    /// The kernel's error number (errno(3)), positive.
    pub(super) fn code(&self) -> Option<i32> {
        match &self.why {
            Failure::Kernel { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// What it means for an SA of `cpu` that was to be added.
    pub(super) fn of_state(self, cpu: Option<u32>) -> Error {
        let code = self.code();
        match (self.why, cpu) {
            _ if code == Some(libc::EEXIST) => Error::Taken { what: "SPI" },
            (_, Some(cpu)) if code == Some(libc::ERANGE) => Error::NoSuchCpu { cpu },
            (
                Failure::Kernel {
                    code: libc::ENOSYS | libc::ENOENT | libc::EPROTONOSUPPORT,
                    text,
                },
                _,
            ) => Error::NoEsp(text),
            (why, _) => Self { why, ..self }.into(),
        }
    }
}

impl From<Refusal> for Error {
    fn from(Refusal { doing, why }: Refusal) -> Self {
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
}
