//! The kernel's IPsec (xfrm) over netlink: security associations (SAs), which the kernel calls
//! states, and policies. A policy selects the packets that need an SA (include/uapi/linux/xfrm.h,
//! net/xfrm/xfrm_user.c; RFC 4301, RFC 4303).
//!
//! This module creates only one kind of SA: ESP in transport mode, AES-256-GCM with a 16-byte tag
//! (RFC 4106), extended sequence numbers, IPv4 or IPv6. An SA may belong to one CPU
//! (`XFRMA_SA_PCPU`, Linux 6.13): a lookup on this CPU prefers that SA to an SA without a CPU, and
//! a lookup on another CPU does not find that SA. The kernel finds the SA of an inbound packet by
//! destination and SPI, on any CPU. docs/decisions/0013-sas-without-a-daemon.md has the tests of
//! the kernel's behaviour.
//!
//! - [`Xfrm`] creates, reads and removes SAs and policies, each by its exact identity; no function
//!   flushes the tables
//! - [`values`]: the types of the objects that are created and read back
//! - [`esp_offload`], [`receive_encapsulated`](dunlin_linux::udp_encap::receive_encapsulated):
//!   related kernel features
//!
//! Keys pass from the caller to the kernel through memory that is wiped. A key that the kernel
//! returns is compared and wiped, never passed on.
//!
//! netlink-packet-xfrm and netlink-packet-core provide the message layouts and the iteration over
//! attributes, and netlink-sys provides the socket. This module itself encodes three attributes:
//! two that netlink-packet-xfrm lacks, and the one with the key, because netlink-packet-xfrm would
//! copy keys into memory that is not wiped.

mod decode;
mod encode;
mod error;
mod offload;
#[cfg(test)]
mod tests;
pub mod values;

use dunlin_lane::sync::lock;
use std::net::IpAddr;
use std::sync::Mutex;

use netlink_packet_xfrm as uapi;

pub use self::error::Error;
pub use self::offload::{EspOffload, esp_offload};
pub use self::values::{
    Action, Algorithm, Counters, Installed, KeyAndSalt, LONGEST_REPLAY_WINDOW, Network, Policy,
    Protocol, Selector, State, StateId,
};
pub use dunlin_proto::ipsec::object::{Direction, Encapsulation};
pub use dunlin_proto::ipsec::ports::PortBlock;

use dunlin_proto::ipsec::LEAST_SPI;

use crate::netlink::{Failure, Link, Request};

/// How many times to read a list that changes during the read.
const DUMP_ATTEMPTS: usize = 16;

/// A netlink socket for the IPsec of one network namespace. It may be shared among threads, and
/// keeps its namespace whichever thread uses it.
#[derive(Debug)]
pub struct Xfrm(Mutex<Link>);

impl Xfrm {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// [`Error::Absent`], [`Error::NotPermitted`], and other errors of the socket or the kernel.
    pub fn open() -> Result<Self, Error> {
        let link =
            Link::open(libc::NETLINK_XFRM).map_err(|source| match source.raw_os_error() {
                Some(libc::EPROTONOSUPPORT) => Error::Absent,
                _ => Error::Socket {
                    doing: "opening a netlink socket",
                    source,
                },
            })?;
        let xfrm = Self(Mutex::new(link));
        // This request fails if the process lacks the capability.
        xfrm.exchange(
            "reading the kernel's number of SAs",
            encode::database(),
            |_, _| Ok(()),
        )?;
        Ok(xfrm)
    }

    /// Adds an SA. The kernel uses it from then on.
    ///
    /// # Errors
    /// [`Error::Taken`] if another SA has the same SPI, [`Error::NoSuchCpu`], [`Error::NoEsp`] if
    /// the kernel lacks ESP or the cipher, and other errors of the kernel.
    pub fn add_state(&self, state: &State) -> Result<(), Error> {
        let request = encode::add_state(state);
        let added = self.exchange("adding an SA", request, |_, _| Ok(()));
        added.map_err(|error| error.of_state(state.cpu))
    }

    /// Returns the SA or reservation with this identity; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and other errors of the kernel.
    pub fn state(&self, id: &StateId) -> Result<Option<Installed>, Error> {
        let mut found = None;
        self.read_state(id, |body| {
            found = decode::state(body)?;
            Ok(())
        })?;
        Ok(found)
    }

    /// Checks that the kernel's SA matches `state`, including its key.
    ///
    /// # Errors
    /// [`Error::Differs`] names the field that differs, for instance the CPU, which kernels without
    /// per-CPU SAs ignore. All other errors are those of [`Xfrm::state`].
    pub fn verify(&self, state: &State) -> Result<(), Error> {
        let mut differs = Some("that it is missing");
        self.read_state(&state.id, |body| {
            differs = match decode::state(body)? {
                None => Some("the protocol"),
                Some(installed) => installed
                    .difference(state)
                    .or_else(|| (!decode::has_key(body, &state.key)).then_some("the key")),
            };
            Ok(())
        })?;
        differs.map_or(Ok(()), |what| Err(Error::Differs { what }))
    }

    fn read_state(
        &self,
        id: &StateId,
        mut take: impl FnMut(&[u8]) -> Result<(), &'static str>,
    ) -> Result<(), Error> {
        let request = encode::state_by_id(uapi::XFRM_MSG_GETSA, id);
        let answered = self.exchange("reading an SA", request, |kind, body| match kind {
            uapi::XFRM_MSG_NEWSA => take(body),
            _ => Ok(()),
        });
        exists(answered, libc::ESRCH).map(drop)
    }

    /// Removes an SA; returns `false` if it did not exist. Connections that used it look for
    /// another SA at their next packet.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and other errors of the kernel.
    pub fn remove_state(&self, id: &StateId) -> Result<bool, Error> {
        let request = encode::state_by_id(uapi::XFRM_MSG_DELSA, id);
        let removed = self.exchange("removing an SA", request, |_, _| Ok(()));
        exists(removed, libc::ESRCH)
    }

    /// Returns all ESP SAs and reservations in the namespace, of any program.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and other errors of the kernel.
    pub fn states(&self) -> Result<Vec<Installed>, Error> {
        self.list(
            "listing SAs",
            uapi::XFRM_MSG_GETSA,
            uapi::XFRM_MSG_NEWSA,
            decode::state,
        )
    }

    /// Adds a policy. It applies to existing connections from then on.
    ///
    /// # Errors
    /// [`Error::Taken`] if a policy with the same selector and direction exists, regardless of its
    /// action and priority: the kernel keeps only one. [`Error::NotPermitted`], and other errors of
    /// the kernel.
    pub fn add_policy(&self, policy: &Policy) -> Result<(), Error> {
        let request = encode::add_policy(uapi::XFRM_MSG_NEWPOLICY, policy);
        match self.exchange("adding a policy", request, |_, _| Ok(())) {
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                Err(Error::Taken { what: "selector" })
            }
            other => other,
        }
    }

    /// Replaces the policy with the same selector and direction, even if another program installed
    /// that policy. If there is none, adds this policy. During the replacement, either the old or
    /// the new policy is in force at any moment.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and other errors of the kernel.
    pub fn replace_policy(&self, policy: &Policy) -> Result<(), Error> {
        let request = encode::add_policy(uapi::XFRM_MSG_UPDPOLICY, policy);
        self.exchange("replacing a policy", request, |_, _| Ok(()))
    }

    /// Returns the policy with exactly this selector and direction, and its index in the kernel.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and other errors of the kernel.
    pub fn policy(
        &self,
        selector: &Selector,
        direction: Direction,
    ) -> Result<Option<(Policy, u32)>, Error> {
        let mut found = None;
        let request = encode::policy_by_selector(uapi::XFRM_MSG_GETPOLICY, selector, direction);
        let answered = self.exchange("reading a policy", request, |kind, body| {
            if kind == uapi::XFRM_MSG_NEWPOLICY {
                found = decode::policy(body)?;
            }
            Ok(())
        });
        exists(answered, libc::ENOENT)?;
        Ok(found)
    }

    /// Removes exactly this policy; returns `false` if it does not exist. A policy with the same
    /// selector but other contents stays.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and other errors of the kernel.
    pub fn remove_policy(&self, policy: &Policy) -> Result<bool, Error> {
        let index = match self.policy(&policy.selector, policy.direction)? {
            Some((held, index)) if held == *policy => index,
            _ => return Ok(false),
        };
        let request = encode::policy_by_index(uapi::XFRM_MSG_DELPOLICY, index, policy.direction);
        let removed = self.exchange("removing a policy", request, |_, _| Ok(()));
        exists(removed, libc::ENOENT)
    }

    /// Returns all policies of the namespace, of any program, except those of single sockets and of
    /// forwarded packets.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and other errors of the kernel.
    pub fn policies(&self) -> Result<Vec<Policy>, Error> {
        let policies = self.list(
            "listing policies",
            uapi::XFRM_MSG_GETPOLICY,
            uapi::XFRM_MSG_NEWPOLICY,
            decode::policy,
        )?;
        Ok(policies.into_iter().map(|(policy, _)| policy).collect())
    }

    /// Checks that the kernel has ESP with AES-GCM, over IPv4 or IPv6: adds an SA between
    /// documentation addresses (RFC 5737, RFC 3849), which no policy uses, and removes it.
    ///
    /// # Errors
    /// [`Error::NoEsp`] if the kernel has it for neither address family, [`Error::NotPermitted`],
    /// and other errors of the kernel.
    pub fn esp(&self) -> Result<(), Error> {
        let [v4_source, v4] = [1, 2].map(|last| IpAddr::from([192, 0, 2, last]));
        let [v6_source, v6] = [1, 2].map(|last| IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, last]));
        match self.esp_between(v4_source, v4) {
            Err(none @ Error::NoEsp(_)) => self.esp_between(v6_source, v6).map_err(|_| none),
            other => other,
        }
    }

    fn esp_between(&self, source: IpAddr, destination: IpAddr) -> Result<(), Error> {
        let id = StateId {
            destination,
            spi: LEAST_SPI,
        };
        let added = self.add_state(&State {
            id,
            source,
            reqid: 1,
            direction: Direction::In,
            cpu: None,
            // No packet is sealed with this key.
            key: KeyAndSalt::new(&[0; KeyAndSalt::BYTES]),
            replay_window: 32,
            encapsulation: None,
            selector: None,
        });
        match added {
            Ok(()) => self.remove_state(&id).map(drop),
            // Another probe has installed the same SA, so the kernel has ESP. This probe must not
            // remove the SA of the other probe.
            Err(Error::Taken { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns what the kernel stores of an SA for CPU 0 with direction [`Direction::In`]: reserves
    /// an SPI between documentation addresses (RFC 5737), reads the reservation back, and removes
    /// it. A reservation has no key and carries nothing.
    ///
    /// A kernel without per-CPU SAs ignores the CPU. Linux 6.13 introduced them and older series
    /// have backports, so the version does not show whether the kernel has them. A kernel before
    /// 6.10 ignores the direction, and requires a replay window for outbound SAs with extended
    /// sequence numbers.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and other errors of the kernel.
    pub fn probe(&self) -> Result<Installed, Error> {
        const DOING: &str = "reserving an SPI";
        let [from, to] = [1, 2].map(|last| IpAddr::from([192, 0, 2, last]));
        let request = encode::allocate_spi(from, to, Direction::In, 0);
        let mut reserved = None;
        self.exchange(DOING, request, |kind, body| {
            if kind == uapi::XFRM_MSG_NEWSA {
                reserved = decode::state(body)?;
            }
            Ok(())
        })?;
        let what = "no SPI in the answer";
        let none = || Error::Answer { doing: DOING, what };
        let id = reserved.ok_or_else(none)?.id;
        let held = self.state(&id);
        self.remove_state(&id)?;
        held?.ok_or_else(none)
    }

    fn list<T>(
        &self,
        doing: &'static str,
        ask: u16,
        answer: u16,
        decode: impl Fn(&[u8]) -> Result<Option<T>, &'static str>,
    ) -> Result<Vec<T>, Error> {
        for _ in 0..DUMP_ATTEMPTS {
            let mut all = Vec::new();
            let listed = lock(&self.0).exchange(encode::list(ask), |kind, body| {
                if kind == answer {
                    all.extend(decode(body)?);
                }
                Ok(())
            });
            match listed {
                Ok(()) => return Ok(all),
                Err(Failure::Changed) => {}
                Err(why) => return Err(Error::of(doing, why)),
            }
        }
        Err(Error::Answer {
            doing,
            what: "the list changes faster than it can be read",
        })
    }

    fn exchange(
        &self,
        doing: &'static str,
        request: Request,
        take: impl FnMut(u16, &[u8]) -> Result<(), &'static str>,
    ) -> Result<(), Error> {
        // The lock guards a socket and a counter; a panic leaves neither inconsistent.
        let answered = lock(&self.0).exchange(request, take);
        answered.map_err(|why| Error::of(doing, why))
    }
}

/// Returns whether the kernel has the object of a request. If the object is missing, the kernel
/// refuses the request with the error number `absent`.
fn exists(answered: Result<(), Error>, absent: i32) -> Result<bool, Error> {
    match answered {
        Err(error) if error.errno() == Some(absent) => Ok(false),
        other => other.map(|()| true),
    }
}
