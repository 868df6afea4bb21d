//! Why an IPsec session does not begin, or is over.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use crate::xfrm;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::object::NotAnObject;
use dunlin_proto::wire::{DecodeError, EncodeError};
use thiserror::Error;

use dunlin_lane::control::ControlError;
use dunlin_lane::handshake::HandshakeError;

/// What went wrong. What a session installed is gone then, save that ports which were
/// protected stay blocked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum IpsecError {
    /// The kernel's tables cannot be read or changed.
    #[error("{doing}: {source}")]
    Kernel {
        /// What was to be done.
        doing: String,
        /// What the kernel said.
        source: xfrm::Error,
    },
    /// What is installed cannot be remembered, so nothing is.
    #[error("the record {path} cannot be {what}: free space there, or check the disk and the permissions", path = path.display())]
    Record {
        /// What was to be done to it.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A record is larger than any session makes it.
    #[error("the record {path} is larger than 64 MiB, which no session's is: compare it with `ip xfrm state` and `ip xfrm policy`, remove what is left, then the file", path = path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// Another process is in the midst of taking ports.
    #[error("another process has held {path} for too long: `fuser {path}` shows which; end it, or wait", path = path.display())]
    Locked {
        /// The file.
        path: PathBuf,
    },
    /// Others may write the directory of records.
    #[error("the records in {path} have mode {mode:03o}: others could have policies removed; make it 700", path = path.display())]
    Exposed {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A record does not say what is installed.
    #[error("line {line} of {path} is no record of Dunlin's: compare it with `ip xfrm state` and `ip xfrm policy`, remove what is left, then the file", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        source: NotAnObject,
    },
    /// What the system says of itself cannot be read.
    #[error("{path} cannot be read")]
    System {
        /// The file of procfs.
        path: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody else has policies for these packets.
    #[error(
        "another policy covers packets of these ports: {0}; choose other ports, or remove that policy"
    )]
    PortsTaken(String),
    /// Somebody has removed or changed a policy of the session.
    #[error(
        "somebody else has removed or changed a policy of this session ({0}): packets may have \
         left in the clear for as long as a second; find who did, with `ip xfrm monitor`"
    )]
    Removed(String),
    /// Somebody has removed or changed an SA of the session.
    #[error(
        "somebody else has removed or changed an SA of this session ({0}): nothing went in the clear, \
         and nothing went at all; find who did, with `ip xfrm monitor`, and begin the session anew"
    )]
    RemovedSa(String),
    /// An earlier session has left ports blocked together with others, and connections use them.
    #[error(
        "an earlier session has left ports blocked, of which some are to be protected now, and \
         {connections} connections use them: end these, or ask for the same ports as before"
    )]
    LeftInTheWay {
        /// How many connections there are.
        connections: usize,
    },
    /// A device takes no notice of IPsec's policies.
    #[error(
        "packets by {device} take no notice of IPsec's policies, since {sysctl} is set: \
         `sysctl -w {sysctl}=0`"
    )]
    Unguarded {
        /// The device by which the peer is reached.
        device: String,
        /// The setting.
        sysctl: String,
    },
    /// Both ends are this host.
    #[error(
        "{0} is an address of this host: what it sends to itself passes no IPsec, and leaves no host"
    )]
    SameHost(IpAddr),
    /// The control connection would be blocked by what it sets up.
    #[error(
        "port {0} of the control connection is one of the ports to be protected: choose ports without it, or have the control connection elsewhere"
    )]
    CoversControl(u16),
    /// Another session's control connection would be blocked.
    #[error(
        "port {port} is that of the control connection of another session between these hosts (of \
         ports {ports}, process {pid}), which would be cut: choose ports without it"
    )]
    CoversOther {
        /// The port.
        port: u16,
        /// What the other session protects.
        ports: String,
        /// Whose session it is.
        pid: u32,
    },
    /// The control connection has got a port that another session protects.
    #[error(
        "the control connection has port {port} here, which another policy is for ({by}): try again \
         for another port, or keep the ports of sessions out of net.ipv4.ip_local_port_range"
    )]
    ControlCovered {
        /// Its port.
        port: u16,
        /// The policy.
        by: String,
    },
    /// The peer may not come from there.
    #[error("{peer} may not come from {address}: `serve --peer NAME={address}` would allow it")]
    WrongAddress {
        /// Who it is, as it was allowed.
        peer: String,
        /// Where it comes from.
        address: IpAddr,
    },
    /// A host has its SAs on CPUs, and its kernel has none for CPUs.
    #[error(
        "this kernel takes an SA for one CPU for one of all CPUs: use --mode connection, or a kernel that has them (Linux 6.13)"
    )]
    NoPerCpu,
    /// No session for lanes could have its ports.
    #[error(
        "{ports} has no whole block of {block} ports, at a multiple of {block}: name a longer range for lanes"
    )]
    TooFewPorts {
        /// What was given.
        ports: String,
        /// How many a session takes.
        block: u16,
    },
    /// The peer asks for what this side's operator does not allow.
    #[error("the peer asks for ports {asked}, and {allowed} are allowed")]
    PortsNotAllowed {
        /// What it asks for.
        asked: String,
        /// What it may.
        allowed: String,
    },
    /// No connection to the peer.
    #[error("{to} cannot be reached")]
    Unreachable {
        /// The peer.
        to: String,
        /// Why.
        source: io::Error,
    },
    /// The peer is not who it has to be, or the other way round.
    #[error("no secure control connection to {to}")]
    Handshake {
        /// The peer.
        to: String,
        /// Why.
        source: HandshakeError,
    },
    /// The control connection broke.
    #[error("the control connection was lost")]
    Control(#[from] ControlError),
    /// The peer's words make no sense.
    #[error("the peer's words make no sense")]
    Malformed(#[from] DecodeError),
    /// The peer says something out of order.
    #[error("the peer breaks the protocol: {0}")]
    Breach(String),
    /// Something of ours does not fit a message.
    #[error("a message cannot be written")]
    Encode(#[from] EncodeError),
    /// This side takes no session of the peer's in.
    #[error("{text} ({fault})")]
    Refused {
        /// Why, as the peer is told.
        fault: FaultCode,
        /// The same in words.
        text: String,
    },
    /// The peer refuses, or has ended it.
    #[error("the peer ended it: {text} ({fault})")]
    EndedByPeer {
        /// Its reason.
        fault: FaultCode,
        /// In its words, harmless for a terminal.
        text: String,
    },
    /// The peer did not answer in time.
    #[error("the peer did not say *{0}* in time: its process hangs, or the network does")]
    Silent(&'static str),
    /// This side was asked to end it.
    #[error("the session was ended here")]
    Ended,
    /// A thread, a socket or random numbers cannot be had.
    #[error("{what} cannot be had")]
    Resources {
        /// What.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl IpsecError {
    /// An error of the system about a resource.
    pub(super) fn resources(what: &'static str) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::Resources { what, source }
    }

    /// The code that the peer is told, and that says who is at fault.
    #[must_use]
    pub fn fault(&self) -> FaultCode {
        match self {
            Self::Kernel { .. }
            | Self::System { .. }
            | Self::Resources { .. }
            | Self::Removed(_)
            | Self::RemovedSa(_)
            | Self::Unguarded { .. } => FaultCode::Kernel,
            Self::Record { .. }
            | Self::TooLarge { .. }
            | Self::Locked { .. }
            | Self::Exposed { .. }
            | Self::Unreadable { .. } => FaultCode::Journal,
            Self::PortsTaken(_)
            | Self::CoversControl(_)
            | Self::CoversOther { .. }
            | Self::ControlCovered { .. }
            | Self::LeftInTheWay { .. } => FaultCode::PortsTaken,
            Self::SameHost(_) => FaultCode::AddressTranslated,
            Self::NoPerCpu | Self::TooFewPorts { .. } => FaultCode::FeatureMissing,
            Self::PortsNotAllowed { .. } | Self::WrongAddress { .. } => FaultCode::Unauthorised,
            Self::Unreachable { .. } | Self::Control(_) => FaultCode::ControlLost,
            Self::Handshake { source, .. } => source.of_control_lane(),
            Self::Malformed(error) => error.fault(),
            Self::Breach(_) => FaultCode::Malformed,
            Self::Encode(_) => FaultCode::Internal,
            Self::Refused { fault, .. } | Self::EndedByPeer { fault, .. } => *fault,
            Self::Silent(_) => FaultCode::ControlLost,
            Self::Ended => FaultCode::Cancelled,
        }
    }
}

/// An error with its causes, in one line.
pub(super) fn in_words(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_words = cause.to_string();
        if !words.contains(&cause_words) {
            words = format!("{words}: {cause_words}");
        }
        next = cause.source();
    }
    words
}
