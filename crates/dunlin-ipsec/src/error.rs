//! Why a keying session does not start, or has ended.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use crate::xfrm;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::object::NotAnObject;
use dunlin_proto::wire::{DecodeError, EncodeError};
use thiserror::Error;

use dunlin_lane::control::{ControlError, OpenError};

/// An error of a session or of a query. A session that ends with an error removes its policies and
/// SAs, but previously protected ports may stay blocked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum IpsecError {
    /// The kernel's tables cannot be read or changed.
    #[error("{doing}: {source}")]
    Kernel {
        /// The failed operation, or the object that it concerned.
        doing: String,
        /// The kernel's error.
        source: xfrm::Error,
    },
    /// A record or the directory of records cannot be accessed.
    #[error("record {path} cannot be {what}: free disk space, or check the disk and the permissions", path = path.display())]
    Record {
        /// The failed operation, as a participle: `opened`, `written`.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A record exceeds the maximum size of a session's record.
    #[error("record {path} exceeds 64 MiB, the limit of a session's record: look for its entries with `ip xfrm state` and `ip xfrm policy`, remove them, then remove the file", path = path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// Another process holds the lock under which sessions allocate ports.
    #[error("another process has held the lock {path} for too long: find the process with `fuser {path}` and end it, or wait", path = path.display())]
    Locked {
        /// The file.
        path: PathBuf,
    },
    /// Other users may write to the directory of records, or another user owns the directory.
    #[error("record directory {path} has mode {mode:03o} and belongs to user {owner}: other users could write records that make this process remove policies; give the directory to the user of this process (chown) and set mode 700 or 755 (chmod)", path = path.display())]
    Exposed {
        /// The directory.
        path: PathBuf,
        /// The directory's permission bits.
        mode: u32,
        /// The directory's owner, a user ID.
        owner: u32,
    },
    /// A line of a record cannot be parsed.
    #[error("line {line} of record {path} is malformed: look for the record's entries with `ip xfrm state` and `ip xfrm policy`, remove them, then remove the file", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The parse error.
        source: NotAnObject,
    },
    /// A file of procfs cannot be read.
    #[error("{path} cannot be read: check that procfs is mounted and readable")]
    System {
        /// The file of procfs.
        path: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Another program or session has policies for packets of the ports to protect.
    #[error(
        "another policy covers packets of these ports: {0}; choose other ports, or remove that policy"
    )]
    PortsTaken(String),
    /// Another program has removed or changed a policy of the session.
    #[error(
        "another program removed or changed a policy of this session ({0}): packets may have left in \
         the clear for up to one second; identify the program with `ip xfrm monitor`"
    )]
    Removed(String),
    /// Another program has removed or changed an SA of the session.
    #[error(
        "another program removed or changed an SA of this session ({0}): packets were dropped, and \
         none left in the clear; identify the program with `ip xfrm monitor`, then start a new session"
    )]
    RemovedSa(String),
    /// An earlier session left ports blocked. This session needs only some of these ports, and
    /// connections still use the ports of the earlier session.
    #[error(
        "an earlier session has left ports blocked, and {connections} connections still use them; this \
         session requests only a part of these ports: end the connections, or request all ports of \
         the earlier session"
    )]
    LeftInTheWay {
        /// The number of connections.
        connections: usize,
    },
    /// A device is configured to bypass IPsec policies.
    #[error(
        "packets on device {device} bypass IPsec policies because {sysctl} is set: run \
         `sysctl -w {sysctl}=0`"
    )]
    Unguarded {
        /// The device on the route to the peer.
        device: String,
        /// The sysctl that is set.
        sysctl: String,
    },
    /// Both ends of the control connection are this host.
    #[error(
        "{0} is an address of this host, and packets that a host sends to itself bypass IPsec: run the \
         other side on another host"
    )]
    SameHost(IpAddr),
    /// The session would block its own control connection.
    #[error(
        "port {0} of the control connection is one of the ports to protect: protect other ports, or \
         use another port for the control connection"
    )]
    CoversControl(u16),
    /// The session would block the control connection of another session.
    #[error(
        "port {port} belongs to the control connection of another session between these hosts (ports \
         {ports}, process {pid}), which the new session would block: choose ports without {port}"
    )]
    CoversOther {
        /// The port.
        port: u16,
        /// The ports of the other session.
        ports: String,
        /// The process of the other session.
        pid: u32,
    },
    /// A policy for specific ports covers the control connection. In most cases the policy belongs
    /// to another session.
    #[error(
        "the control connection uses port {port} on this host, which another policy covers ({by}): try \
         again to get another port, or keep the ports of sessions out of \
         net.ipv4.ip_local_port_range"
    )]
    ControlCovered {
        /// The local port.
        port: u16,
        /// The policy.
        by: String,
    },
    /// The peer is not allowed to connect from this address.
    #[error(
        "{peer} is not allowed to connect from {address}: connect from an allowed address, or allow this \
         address"
    )]
    WrongAddress {
        /// The peer, as configured.
        peer: String,
        /// The address of the control connection.
        address: IpAddr,
    },
    /// The session uses per-CPU SAs, which the kernel lacks.
    #[error(
        "kernel lacks per-CPU SAs (needs Linux 6.13 or a backport): use a newer kernel, or an SA \
         for each connection"
    )]
    NoPerCpu,
    /// The range for lanes is too short for one session.
    #[error(
        "port range {ports} for lanes contains no block of {block} ports that begins at a multiple \
         of {block}: use a longer range"
    )]
    TooFewPorts {
        /// The configured range.
        ports: String,
        /// The size of a session's block.
        block: u16,
    },
    /// The peer requests ports outside the range that this side allows.
    #[error(
        "ports {asked} requested, but only ports {allowed} are allowed: request ports among these, or \
         allow other ports"
    )]
    PortsNotAllowed {
        /// The requested ports.
        asked: String,
        /// The allowed ports.
        allowed: String,
    },
    /// The control connection could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The control connection failed.
    #[error("the control connection was lost")]
    Control(#[from] ControlError),
    /// A message of the peer cannot be decoded.
    #[error("malformed message from peer")]
    Malformed(#[from] DecodeError),
    /// A value of this side does not fit a message.
    #[error("cannot encode a message to the peer")]
    Encode(#[from] EncodeError),
    /// This side refused the peer's offer, or ended the session because of a message of the peer.
    #[error("{text} ({fault})")]
    Refused {
        /// The code sent to the peer.
        fault: FaultCode,
        /// The text sent to the peer.
        text: String,
    },
    /// The peer refused the session or ended it.
    #[error("ended by the peer: {text} ({fault})")]
    EndedByPeer {
        /// The peer's fault code.
        fault: FaultCode,
        /// The peer's text, sanitized for a terminal.
        text: String,
    },
    /// The peer did not answer in time.
    #[error(
        "timeout: the peer did not send *{0}* in time; the peer's process or the network hangs"
    )]
    Silent(&'static str),
    /// The session was ended on this side.
    #[error("session ended on this side")]
    Ended,
    /// A resource of the system is not available, such as a thread or a socket.
    #[error("{what} is not available")]
    Resources {
        /// The resource.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl IpsecError {
    /// Returns a function that converts a system error about the resource `what`.
    pub(super) fn resources(what: &'static str) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::Resources { what, source }
    }

    /// The fault code, which identifies the side at fault: this host or the peer. If the error ends
    /// a session, this host sends the code to the peer.
    #[must_use]
    pub fn code(&self) -> FaultCode {
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
            Self::Open(error) => error.fault(),
            Self::Control(_) => FaultCode::ControlLost,
            Self::Malformed(error) => error.fault(),
            Self::Encode(_) => FaultCode::Internal,
            Self::Refused { fault, .. } | Self::EndedByPeer { fault, .. } => *fault,
            Self::Silent(_) => FaultCode::ControlLost,
            Self::Ended => FaultCode::Cancelled,
        }
    }
}
