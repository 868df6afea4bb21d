//! Why a migration or a lane was refused or given up: a stable code, whose
//! fault it is, and what to do.
//!
//! The codes travel in *refuse*, *cancel* and *lane refused*, and head the
//! message with which a process exits. A code is never given another meaning;
//! one that this release does not know is kept as it came.

use std::fmt;

/// Who has to change something, seen from the side that raises the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtFault {
    /// The other side's process.
    Peer,
    /// This side's process or host.
    Local,
    /// What the operators asked for, on one side or between the two.
    Configuration,
    /// A kernel interface that failed.
    Kernel,
    /// What the guest does.
    Guest,
    /// The network between the two.
    Network,
}

impl AtFault {
    /// The same party as seen by the side that is told of the fault.
    #[must_use]
    pub fn seen_by_peer(self) -> Self {
        match self {
            Self::Peer => Self::Local,
            Self::Local | Self::Kernel => Self::Peer,
            Self::Configuration | Self::Guest | Self::Network => self,
        }
    }

    /// The party in a word, for messages.
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

/// A code that this release does not know. Only decoding makes one, so that
/// no known code is hidden in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnknownFault(u16);

/// One row for each code: its number on the wire, its name, who is at fault
/// and what to do. A table keeps the four from drifting apart.
macro_rules! faults {
    ($( $(#[$doc:meta])* $variant:ident = $number:literal, $name:literal, $at_fault:ident, $advice:literal; )*) => {
        /// Why something was refused or given up; 16 bits on the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum FaultCode {
            $( $(#[$doc])* $variant, )*
            /// A code of a newer release.
            Unknown(UnknownFault),
        }

        impl FaultCode {
            /// Every code that this release knows, in the order of their
            /// numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The code for a number from the wire; none is refused.
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

            /// Who has to change something, seen from the side that raises
            /// the fault. An unknown code counts as the raiser's own.
            pub fn at_fault(self) -> AtFault {
                match self {
                    $( Self::$variant => AtFault::$at_fault, )*
                    Self::Unknown(_) => AtFault::Local,
                }
            }

            /// What to do about it, in one sentence.
            pub fn advice(self) -> &'static str {
                match self {
                    $( Self::$variant => $advice, )*
                    Self::Unknown(_) => "Read the peer's log: it is newer and gave a reason that this release does not know.",
                }
            }
        }
    };
}

faults! {
    /// The two sides have no protocol version in common.
    VersionMismatch = 1, "version-mismatch", Configuration,
        "Upgrade the older side: each release talks to the one before it.";
    /// One side requires something that the other does not have.
    FeatureMissing = 2, "feature-missing", Configuration,
        "Upgrade the side that lacks the feature, or do not require it.";
    /// The two sides do not want the same lane security (I6).
    SecurityNotAgreed = 3, "security-not-agreed", Configuration,
        "Ask for TLS lanes, or allow plain lanes on both sides.";
    /// The peer proved who it is, and is not on the list.
    Unauthorised = 4, "unauthorised", Configuration,
        "Give both hosts certificates of one authority, and the peer a name that the other side authorises; replace a certificate that is revoked or denied.";
    /// The destination cannot build the VM that was described.
    DescriptionRefused = 5, "description-refused", Configuration,
        "Compare the VM's configuration with what the destination's VMM and CPU offer.";
    /// The host has not the memory for this VM.
    NoMemory = 6, "no-memory", Local,
        "Free memory or huge pages on that host, raise the limit of the cgroup that its process is in, or choose another destination.";
    /// The bytes break the protocol.
    Malformed = 7, "malformed", Peer,
        "Report it with both logs: one of the two programs has a defect.";
    /// More lanes than were agreed.
    LaneLimit = 8, "lane-limit", Peer,
        "Ask for fewer lanes, or raise the destination's limit.";
    /// A lane's proof does not match the session's secret.
    WrongSecret = 9, "wrong-secret", Peer,
        "Look for a stray or hostile client: this lane does not belong to the session.";
    /// A lane's peer is not the control lane's peer.
    WrongIdentity = 10, "wrong-identity", Peer,
        "Use one identity for all lanes of a session, and check load balancers in between.";
    /// A lane number that was used before (I4).
    DuplicateLane = 11, "duplicate-lane", Peer,
        "Report it if no replay is to be expected: lane numbers are never used twice.";
    /// The guest switched itself off while it was being migrated.
    GuestPoweredOff = 12, "guest-powered-off", Guest,
        "Nothing is left to migrate; start the VM where it is wanted.";
    /// The guest reset, crashed or halted while it was being migrated.
    GuestStopped = 13, "guest-stopped", Guest,
        "Look at the guest's console, then migrate again.";
    /// The guest writes memory faster than the link carries it.
    NotConverging = 14, "not-converging", Guest,
        "Add lanes or bandwidth, raise the downtime limit, or let the guest be throttled or stopped.";
    /// The time limit passed.
    TimeLimit = 15, "time-limit", Configuration,
        "Raise the time limit, or choose the strategy that stops the guest.";
    /// An operator cancelled.
    Cancelled = 16, "cancelled", Local,
        "Migrate again when it is wanted.";
    /// The two memories differ (I3).
    VerificationFailed = 17, "verification-failed", Local,
        "Report it with both logs, and test both hosts' memory.";
    /// The destination's VMM could not load the device state.
    StateLoadFailed = 18, "state-load-failed", Local,
        "Compare the VMM's versions and device configuration on both sides.";
    /// A lane was lost and no other could take over.
    LaneLost = 19, "lane-lost", Network,
        "Check the network between the hosts, then migrate again.";
    /// The control lane was lost or went silent.
    ControlLost = 20, "control-lost", Network,
        "Check the network and the peer's process, and the address that it was given.";
    /// A defect of this program.
    Internal = 21, "internal", Local,
        "Report it with both logs.";
    /// A lane, or an inquiry, for a session that is not known here.
    UnknownSession = 22, "unknown-session", Peer,
        "Check the address; a session ends when its process does.";
    /// A kernel interface failed or is missing.
    Kernel = 23, "kernel", Kernel,
        "Look at the cause: it names what that host's kernel lacks or forbids, such as a module, a limit or a filter of system calls.";
    /// The journal could not be written or read.
    Journal = 24, "journal", Local,
        "Free space where the journal lies, and check that the disk works.";
    /// The memory layout changed under the migration, by hot-plug for example.
    LayoutChanged = 25, "layout-changed", Local,
        "Do not plug memory while a VM migrates; migrate again.";
    /// That destination is taking in another VM.
    Busy = 26, "busy", Configuration,
        "Wait until the other migration is over, or start another receiver.";
    /// The process, or its host, may not open another file or connection.
    DescriptorLimit = 27, "descriptor-limit", Local,
        "Raise the limit of open files there (`ulimit -n`, LimitNOFILE= of a service, fs.file-max), or use fewer lanes.";
    /// The source is there and gets nowhere.
    Standstill = 28, "standstill", Peer,
        "Look at the source's process and its host; if it may be idle for that long, raise the destination's limit.";
    /// A certificate has expired or is not valid yet, by the clock of the host
    /// that looked at it.
    CertificateDate = 29, "certificate-date", Configuration,
        "Compare `date` on both hosts and correct the clock that is wrong; if both are right, renew the certificate.";
    /// What answers at the address is no Dunlin.
    NotDunlin = 30, "not-dunlin", Configuration,
        "Check the address and the port, and what listens there.";
    /// The tunnel has no target of that name.
    UnknownRoute = 31, "unknown-route", Configuration,
        "Give the route the same name in the tunnel's configuration on both hosts, and a target on the one that is connected to.";
    /// A route's parameter is not one that its target takes.
    ParameterRefused = 32, "parameter-refused", Configuration,
        "Leave the parameter out where the target has no place for it, and give one of letters, digits, dots, underscores and hyphens where it has.";
    /// The tunnel's end could not connect a channel to its target.
    TargetUnreachable = 33, "target-unreachable", Local,
        "Look whether the hypervisor on that host listens yet, and where.";
    /// The connection of a channel to a hypervisor broke.
    ChannelBroken = 34, "channel-broken", Local,
        "Read the log of the hypervisor on that host: it reset its connection, or died.";
    /// The tunnel was asked to end, and its channels did not in time.
    Ended = 35, "ended", Local,
        "Start the tunnel on that host again; give it more time to drain if channels were cut off.";
    /// The ports of an IPsec session are those of another, or of a policy that is not
    /// Dunlin's.
    PortsTaken = 36, "ports-taken", Configuration,
        "Choose ports that no other session between these hosts has, and that no policy of another program covers (`ip xfrm policy`).";
    /// An address of one host arrives as another at its peer.
    AddressTranslated = 37, "address-translated", Configuration,
        "Name the peer by an address that it has itself: IPsec in transport mode does not go through a translation of addresses.";
    /// A consumer closed a channel's connection behind the other side's end, and left the last
    /// bytes before it unread.
    LeftUnread = 38, "left-unread", Local,
        "Nothing, if the migration went well; else read the log of the hypervisor on that host.";
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
    fn every_number_comes_back_as_itself() {
        for number in 0..=u16::MAX {
            assert_eq!(FaultCode::from_wire(number).to_wire(), number);
        }
    }

    #[test]
    fn every_code_has_its_own_name_and_says_what_to_do() {
        let names: HashSet<_> = FaultCode::ALL.iter().map(|code| code.name()).collect();
        assert_eq!(names.len(), FaultCode::ALL.len());
        for code in FaultCode::ALL {
            assert!(!names.contains("unknown"));
            assert!(code.advice().ends_with('.'), "{code}");
            // Migrations, tunnels and sessions have them in common, and commands not.
            assert!(!code.advice().contains("dunlin "), "{code}");
            let stable = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
            assert!(code.name().bytes().all(stable), "{code}");
        }
    }

    #[test]
    fn a_peers_fault_is_ours_when_the_peer_is_told() {
        assert_eq!(AtFault::Peer.seen_by_peer(), AtFault::Local);
        assert_eq!(AtFault::Local.seen_by_peer(), AtFault::Peer);
        assert_eq!(AtFault::Guest.seen_by_peer(), AtFault::Guest);
    }
}
