//! Reasons to refuse or end a session, a lane or a channel: a stable code, the party at fault, and
//! advice.
//!
//! The codes travel in messages such as *refuse*, *cancel* and *lane refused*. If a command fails,
//! its error message ends with the name of the code. A code never changes its meaning. Codes
//! unknown to this release are kept unchanged.

use std::fmt;

/// The party that has to change something, from the point of view of the side
/// that raises the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtFault {
    /// The peer's process.
    Peer,
    /// This side's process or host.
    Local,
    /// The configuration of one side, or of both in combination.
    Configuration,
    /// A kernel interface.
    Kernel,
    /// The guest.
    Guest,
    /// The network between the hosts.
    Network,
}

/// Returns the party from the point of view of the side that receives the fault. For example,
/// `Local` becomes `Peer`.
#[must_use]
pub fn seen_by_peer(at_fault: AtFault) -> AtFault {
    match at_fault {
        AtFault::Peer => AtFault::Local,
        AtFault::Local | AtFault::Kernel => AtFault::Peer,
        AtFault::Configuration | AtFault::Guest | AtFault::Network => at_fault,
    }
}

impl AtFault {
    /// The party's name, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Local => "this side",
            Self::Configuration => "configuration",
            Self::Kernel => "kernel",
            Self::Guest => "guest",
            Self::Network => "network",
        }
    }
}

impl fmt::Display for AtFault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A code unknown to this release. Only decoding creates values of this type, so none of them is a
/// known code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnknownFault(u16);

/// Defines the fault codes. Each row has a code's number on the wire, its name, the party at fault
/// and the advice.
macro_rules! faults {
    ($( $(#[$doc:meta])* $variant:ident = $number:literal, $name:literal, $at_fault:ident, $advice:literal; )*) => {
        /// The reason why a peer refused a request or ended a session, a lane or a channel; 16 bits
        /// on the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum FaultCode {
            $( $(#[$doc])* $variant, )*
            /// A code of a newer release.
            Unknown(UnknownFault),
        }

        impl FaultCode {
            /// Every code known to this release, ordered by number.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The code for a number from the wire; accepts every number.
            pub fn from_wire(number: u16) -> Self {
                match number {
                    $( $number => Self::$variant, )*
                    _ => Self::Unknown(UnknownFault(number)),
                }
            }

            /// The number on the wire.
            pub fn to_wire(self) -> u16 {
                match self {
                    $( Self::$variant => $number, )*
                    Self::Unknown(UnknownFault(number)) => number,
                }
            }

            /// A short name that never changes, for logs, metrics and scripts.
            pub fn name(self) -> &'static str {
                match self {
                    $( Self::$variant => $name, )*
                    Self::Unknown(_) => "unknown",
                }
            }

            /// The party that has to change something, from the point of view
            /// of the side that raises the fault. For an unknown code, it is the
            /// side that raises the fault.
            pub fn at_fault(self) -> AtFault {
                match self {
                    $( Self::$variant => AtFault::$at_fault, )*
                    Self::Unknown(_) => AtFault::Local,
                }
            }

            /// What the operator can do, in one sentence.
            pub fn advice(self) -> &'static str {
                match self {
                    $( Self::$variant => $advice, )*
                    Self::Unknown(_) => "Read the peer's log: the peer is newer and sent a code that this release cannot interpret.",
                }
            }
        }
    };
}

faults! {
    /// The two sides have no protocol version in common.
    VersionMismatch = 1, "version-mismatch", Configuration,
        "Upgrade the older side: each release interoperates with the one before it.";
    /// One side requires a feature that the other side lacks.
    FeatureMissing = 2, "feature-missing", Configuration,
        "Upgrade the side that lacks the feature, or do not require it.";
    /// The two sides do not agree on the lane security (I6).
    SecurityNotAgreed = 3, "security-not-agreed", Configuration,
        "Use TLS lanes; otherwise allow plain lanes on both sides, or set up IPsec on both sides.";
    /// One side does not accept the other side's certificate.
    Unauthorised = 4, "unauthorised", Configuration,
        "Give both hosts certificates from the same authority, and authorise the name of each host on the other; replace a revoked or denied certificate.";
    /// The destination cannot build the VM that was described.
    DescriptionRefused = 5, "description-refused", Configuration,
        "Compare the VM's configuration with what the destination's VMM and CPU offer.";
    /// The host lacks the memory for this VM.
    NoMemory = 6, "no-memory", Local,
        "Free memory or huge pages on that host, raise the memory limit of its cgroup, or choose another destination.";
    /// Bytes from the peer violate the protocol.
    Malformed = 7, "malformed", Peer,
        "Report it with both logs: one of the two programs has a defect.";
    /// More lanes are requested or open than the destination allows.
    LaneLimit = 8, "lane-limit", Peer,
        "Ask for fewer lanes, or raise the destination's limit.";
    /// A lane's proof does not match the session's secret.
    WrongSecret = 9, "wrong-secret", Peer,
        "Look for a stray or hostile client: this lane does not belong to the session.";
    /// The peer of a connection is not the peer of its session.
    WrongIdentity = 10, "wrong-identity", Peer,
        "Use one identity for all lanes of a session, and check load balancers in between.";
    /// A lane has a number that was used before (I4).
    DuplicateLane = 11, "duplicate-lane", Peer,
        "Report it unless a replay is expected: a session uses each lane number once.";
    /// The guest powered itself off during the migration.
    GuestPoweredOff = 12, "guest-powered-off", Guest,
        "Nothing is left to migrate; start the VM on the host of your choice.";
    /// The guest reset, crashed or halted during the migration.
    GuestStopped = 13, "guest-stopped", Guest,
        "Check the guest's console, then migrate again.";
    /// The downtime limit cannot be met: the guest writes memory faster than the link carries it,
    /// or the switchover alone takes longer.
    NotConverging = 14, "not-converging", Guest,
        "Add lanes or bandwidth, raise the downtime limit, or allow throttling or stopping the guest.";
    /// The migration reached its time limit.
    TimeLimit = 15, "time-limit", Configuration,
        "Raise the time limit, or choose the strategy that stops the guest.";
    /// An operator or the VMM cancelled the migration.
    Cancelled = 16, "cancelled", Local,
        "Migrate again if wanted.";
    /// The memories of source and destination differ (I3), or could not be compared.
    VerificationFailed = 17, "verification-failed", Local,
        "Report it with both logs, and test the memory of both hosts.";
    /// The destination's VMM could not load the device state.
    StateLoadFailed = 18, "state-load-failed", Local,
        "Compare the VMM's versions and device configuration on both sides.";
    /// A lane was lost, or no lane could be opened.
    LaneLost = 19, "lane-lost", Network,
        "Check the network between the hosts, then migrate again.";
    /// The control lane was lost, went silent or could not be opened.
    ControlLost = 20, "control-lost", Network,
        "Check the network, the peer's process, and the address that is configured for the peer.";
    /// A failure of this program or of its VMM.
    Internal = 21, "internal", Local,
        "Report it with both logs.";
    /// A lane or an inquiry names an unknown session.
    UnknownSession = 22, "unknown-session", Peer,
        "Check the address, and whether the peer's process was restarted: that ends its sessions.";
    /// A kernel interface failed or is missing.
    Kernel = 23, "kernel", Kernel,
        "Check the cause: it names what that host's kernel lacks or forbids, such as a module, a limit or a filter of system calls.";
    /// The journal could not be written or read.
    Journal = 24, "journal", Local,
        "Check the cause: it names what is in the way, such as a full disk, a permission, another process or an undecided session.";
    /// The memory layout changed during the migration, for example by hot-plug.
    LayoutChanged = 25, "layout-changed", Local,
        "Do not plug memory while a VM migrates; then migrate again.";
    /// The destination is receiving another VM, or a limit of the tunnel is reached.
    Busy = 26, "busy", Configuration,
        "Wait for other migrations to end; otherwise start another receiver, or raise the limit that the text names.";
    /// The process or its host has reached the limit of open files.
    DescriptorLimit = 27, "descriptor-limit", Local,
        "Raise the limit of open files there (`ulimit -n`, LimitNOFILE= of a service, fs.file-max), or use fewer lanes.";
    /// The source is connected but makes no progress.
    Standstill = 28, "standstill", Peer,
        "Check the source's process and host; if the source may be idle that long, raise the destination's limit.";
    /// A certificate has expired or is not valid yet, by the clock of the host
    /// that verified it.
    CertificateDate = 29, "certificate-date", Configuration,
        "Compare `date` on both hosts and correct the clock that is wrong; if both are right, renew the certificate.";
    /// The program at the address is not Dunlin.
    NotDunlin = 30, "not-dunlin", Configuration,
        "Check the address and port, and which program listens there.";
    /// The tunnel has no route of the requested name, or that route has no target.
    UnknownRoute = 31, "unknown-route", Configuration,
        "Give the route the same name in the tunnel's configuration on both hosts, and a target on the accepting one.";
    /// The route's target does not accept this parameter.
    ParameterRefused = 32, "parameter-refused", Configuration,
        "Give the channel the parameter that the target names, as NAME=VALUE of letters, digits, dots, underscores and hyphens, and none if the target has no placeholder.";
    /// The accepting tunnel could not connect a channel to its target.
    TargetUnreachable = 33, "target-unreachable", Local,
        "Check that the hypervisor on that host listens, and at which address.";
    /// A channel's connection to a hypervisor broke.
    ChannelBroken = 34, "channel-broken", Local,
        "Read the log of the hypervisor on that host: it reset its connection, or died.";
    /// The tunnel was asked to stop, and its channels did not end in time.
    Ended = 35, "ended", Local,
        "Start the tunnel on that host again; give it more time to drain if channels were aborted.";
    /// The ports of a keying session belong to another session, or to a policy
    /// of another program.
    PortsTaken = 36, "ports-taken", Configuration,
        "Choose ports that no other session between these hosts uses and no policy of another program covers (`ip xfrm policy`).";
    /// The two sides see different addresses for the same host.
    AddressTranslated = 37, "address-translated", Configuration,
        "Use an address that is configured on the peer itself: IPsec transport mode does not pass address translation.";
    /// The program that receives a channel's bytes closed its connection without reading the last
    /// bytes, after the sending program had ended the channel.
    LeftUnread = 38, "left-unread", Local,
        "Ignore it if the migration succeeded; otherwise read the log of the hypervisor on that host.";
    /// A listener's unix socket was removed or replaced, and its path cannot be bound again.
    ListenerLost = 39, "listener-lost", Local,
        "End the process that listens at that path, or create the directory again; the listener returns within a second after that.";
    /// The unix socket of a target was replaced while channels were connected to the earlier
    /// socket.
    TargetReplaced = 40, "target-replaced", Configuration,
        "Give each VM a socket of its own: write {vm} into the target's path, and open a listener for each migration; or migrate one VM after the other.";
}

impl fmt::Display for FaultCode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(UnknownFault(number)) => write!(formatter, "unknown fault {number}"),
            known => formatter.write_str(known.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_number_survives_a_round_trip() {
        for number in 0..=u16::MAX {
            assert_eq!(FaultCode::from_wire(number).to_wire(), number);
        }
    }

    #[test]
    fn every_code_has_a_unique_name_and_advice() {
        let names: HashSet<_> = FaultCode::ALL.iter().map(|code| code.name()).collect();
        assert_eq!(names.len(), FaultCode::ALL.len());
        for code in FaultCode::ALL {
            assert!(!names.contains("unknown"));
            assert!(code.advice().ends_with('.'), "{code}");
            // Several programs share the advice, so it contains no `dunlin` command line.
            assert!(!code.advice().contains("dunlin "), "{code}");
            let stable = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
            assert!(code.name().bytes().all(stable), "{code}");
        }
    }

    #[test]
    fn the_peers_fault_is_local_from_the_peers_point_of_view() {
        assert_eq!(seen_by_peer(AtFault::Peer), AtFault::Local);
        assert_eq!(seen_by_peer(AtFault::Local), AtFault::Peer);
        assert_eq!(seen_by_peer(AtFault::Guest), AtFault::Guest);
    }
}
