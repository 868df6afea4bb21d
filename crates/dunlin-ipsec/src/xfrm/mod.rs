//! The kernel's IPsec (xfrm) over netlink: security associations (SAs), which it calls states, and
//! the policies that say which packets need one (include/uapi/linux/xfrm.h, net/xfrm/xfrm_user.c;
//! RFC 4301, RFC 4303).
//!
//! What is made here is one kind alone: ESP in transport mode, AES-256-GCM with a 16-byte tag
//! (RFC 4106), extended sequence numbers, IPv4 or IPv6. An SA may belong to one CPU
//! (`XFRMA_SA_PCPU`, Linux 6.13): what that CPU sends prefers it to one that belongs to none, and
//! no other CPU uses it. Receiving goes by the SPI alone, whatever the CPU. What the kernel makes
//! of all this was tested, and stands in docs/decisions/0013-sas-without-a-daemon.md.
//!
//! - [`Xfrm`] makes, reads and removes them, each by its exact identity; nothing here flushes
//! - [`values`]: what is made and what is read back
//! - [`esp_offload`], [`receive_encapsulated`](dunlin_linux::udp_encap::receive_encapsulated): what
//!   goes with it
//!
//! Keys go from the caller to the kernel through memory that is wiped, and what the kernel says of
//! them when it is asked is compared and wiped, never returned.
//!
//! The layouts of messages and the walk over attributes are netlink-packet-xfrm's and
//! netlink-packet-core's, the socket is netlink-sys's. Two attributes are newer than the first of
//! these, and the one with the key is kept out of it, since it would copy keys into memory that
//! nobody wipes.

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

use self::error::Refusal;
use crate::netlink::{Failure, Link, Request};

/// How often a list that changed while it was read is read again.
const DUMP_ATTEMPTS: usize = 16;

/// A netlink socket for the IPsec of one network namespace. It may be shared among threads, and
/// stays with its namespace whichever thread uses it.
#[derive(Debug)]
pub struct Xfrm(Mutex<Link>);

impl Xfrm {
    /// Opens one in the calling thread's network namespace.
    ///
    /// # Errors
    /// [`Error::Absent`], [`Error::NotPermitted`], or what socket(2) says.
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
        // Fails here where the process lacks the capability.
        xfrm.exchange(
            "asking how many SAs there are",
            encode::database(),
            |_, _| Ok(()),
        )?;
        Ok(xfrm)
    }

    /// Adds an SA, which carries packets from then on.
    ///
    /// # Errors
    /// [`Error::Taken`] where another SA has its SPI, [`Error::NoSuchCpu`], [`Error::NoEsp`] where
    /// the kernel lacks ESP or the cipher, and what else the kernel says.
    pub fn add_state(&self, state: &State) -> Result<(), Error> {
        let request = encode::add_state(state);
        let added = self.exchange("adding an SA", request, |_, _| Ok(()));
        added.map_err(|refusal| refusal.of_state(state.cpu))
    }

    /// What the kernel has under this identity, a reservation too; `None` where it has nothing.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn state(&self, id: &StateId) -> Result<Option<Installed>, Error> {
        let mut found = None;
        self.read_state(id, |body| {
            found = decode::state(body)?;
            Ok(())
        })?;
        Ok(found)
    }

    /// Asks the kernel whether it has an SA just as `state` says, its key included.
    ///
    /// # Errors
    /// [`Error::Differs`] with what is not so, for instance the CPU, which kernels without SAs of
    /// one CPU pass over in silence; and as [`Xfrm::state`].
    pub fn verify(&self, state: &State) -> Result<(), Error> {
        let mut differs = Some("there is none");
        self.read_state(&state.id, |body| {
            differs = match decode::state(body)? {
                None => Some("it is none of ESP"),
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
        take: impl FnMut(&[u8]) -> Result<(), &'static str>,
    ) -> Result<(), Error> {
        let mut take = take;
        let request = encode::state_by_id(uapi::XFRM_MSG_GETSA, id);
        let answered = self.exchange("reading an SA", request, |kind, body| match kind {
            uapi::XFRM_MSG_NEWSA => take(body),
            _ => Ok(()),
        });
        match answered {
            Err(refusal) if refusal.code() == Some(libc::ESRCH) => Ok(()),
            other => other.map_err(Error::from),
        }
    }

    /// Removes one; `false`: it was not there. Connections that went by it look for another at
    /// their next packet.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn remove_state(&self, id: &StateId) -> Result<bool, Error> {
        let request = encode::state_by_id(uapi::XFRM_MSG_DELSA, id);
        match self.exchange("removing an SA", request, |_, _| Ok(())) {
            Ok(()) => Ok(true),
            Err(refusal) if refusal.code() == Some(libc::ESRCH) => Ok(false),
            Err(refusal) => Err(refusal.into()),
        }
    }

    /// All SAs and reservations of ESP in the namespace, whoever made them.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn states(&self) -> Result<Vec<Installed>, Error> {
        self.list(
            "listing SAs",
            uapi::XFRM_MSG_GETSA,
            uapi::XFRM_MSG_NEWSA,
            decode::state,
        )
    }

    /// Adds a policy. Packets of connections that stand are judged by it from then on.
    ///
    /// # Errors
    /// [`Error::Taken`] where a policy of the same selector and direction stands, whatever its
    /// action and priority; the kernel keeps one.
    pub fn add_policy(&self, policy: &Policy) -> Result<(), Error> {
        let request = encode::add_policy(uapi::XFRM_MSG_NEWPOLICY, policy);
        match self.exchange("adding a policy", request, |_, _| Ok(())) {
            Err(refusal) if refusal.code() == Some(libc::EEXIST) => {
                Err(Error::Taken { what: "selector" })
            }
            other => other.map_err(Error::from),
        }
    }

    /// Puts a policy in the place of the one with the same selector and direction, whosever it
    /// is, or adds it where there is none. There is no moment without either.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn replace_policy(&self, policy: &Policy) -> Result<(), Error> {
        let request = encode::add_policy(uapi::XFRM_MSG_UPDPOLICY, policy);
        self.exchange("replacing a policy", request, |_, _| Ok(()))
            .map_err(Error::from)
    }

    /// The policy that the kernel has for just this selector and direction.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn policy(
        &self,
        selector: &Selector,
        direction: Direction,
    ) -> Result<Option<Policy>, Error> {
        Ok(self
            .indexed_policy(selector, direction)?
            .map(|(policy, _)| policy))
    }

    fn indexed_policy(
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
        match answered {
            Err(refusal) if refusal.code() == Some(libc::ENOENT) => Ok(None),
            other => other.map(|()| found).map_err(Error::from),
        }
    }

    /// Removes just this policy; `false`: it is not there. One with the same selector that says
    /// something else is another, and stays.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn remove_policy(&self, policy: &Policy) -> Result<bool, Error> {
        let index = match self.indexed_policy(&policy.selector, policy.direction)? {
            Some((held, index)) if held == *policy => index,
            _ => return Ok(false),
        };
        let request = encode::policy_by_index(uapi::XFRM_MSG_DELPOLICY, index, policy.direction);
        match self.exchange("removing a policy", request, |_, _| Ok(())) {
            Ok(()) => Ok(true),
            Err(refusal) if refusal.code() == Some(libc::ENOENT) => Ok(false),
            Err(refusal) => Err(refusal.into()),
        }
    }

    /// All policies of the namespace, whoever made them, but for those of single sockets and of
    /// packets that pass through the host.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn policies(&self) -> Result<Vec<Policy>, Error> {
        let policies = self.list(
            "listing policies",
            uapi::XFRM_MSG_GETPOLICY,
            uapi::XFRM_MSG_NEWPOLICY,
            decode::policy,
        )?;
        Ok(policies.into_iter().map(|(policy, _)| policy).collect())
    }

    /// Whether the kernel has ESP with AES-GCM, over IPv4 or IPv6: adds an SA between
    /// documentation addresses (RFC 5737, RFC 3849), which no policy uses, and removes it.
    ///
    /// # Errors
    /// [`Error::NoEsp`] where it has neither, [`Error::NotPermitted`], and what else the kernel
    /// says.
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
            // Nothing goes by it.
            key: KeyAndSalt::new(&[0; KeyAndSalt::BYTES]),
            replay_window: 32,
            encapsulation: None,
            selector: None,
        });
        match added {
            Ok(()) => self.remove_state(&id).map(drop),
            // The SA of another probe, which is evidence enough and not ours to remove.
            Err(Error::Taken { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether an SA may belong to one CPU. The kernel passes over the number in silence where it
    /// may not. Linux 6.13 was the first with such SAs, and older series have taken them over: a
    /// version does not tell.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn has_per_cpu_sas(&self) -> Result<bool, Error> {
        Ok(self.probe()?.cpu == Some(0))
    }

    /// Whether the kernel keeps which way an SA is used (Linux 6.10). One that does not wants a
    /// replay window of outbound SAs with extended sequence numbers too.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn keeps_directions(&self) -> Result<bool, Error> {
        Ok(self.probe()?.direction == Some(Direction::In))
    }

    /// What the kernel keeps of an SA for CPU 0 with a direction: reserves an SPI between
    /// documentation addresses (RFC 5737), reads the reservation back, and removes it. It needs no
    /// key, and carries nothing.
    fn probe(&self) -> Result<Installed, Error> {
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
        let what = "it names no SPI";
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
            let listed = self.exchange(doing, encode::list(ask), |kind, body| {
                if kind == answer {
                    all.extend(decode(body)?);
                }
                Ok(())
            });
            match listed {
                Ok(()) => return Ok(all),
                Err(Refusal {
                    why: Failure::Changed,
                    ..
                }) => {}
                Err(refusal) => return Err(refusal.into()),
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
    ) -> Result<(), Refusal> {
        // What is behind the lock is a socket and a number, of which neither is left half done.
        let mut link = lock(&self.0);
        link.exchange(request, take)
            .map_err(|why| Refusal { doing, why })
    }
}
