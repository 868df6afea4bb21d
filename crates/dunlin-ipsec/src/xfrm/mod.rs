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
//! - [`esp_offload`], [`receive_encapsulated`](dunlin_linux::udp_encap::receive_encapsulated), [`Statistics`]: what goes with it
//!
//! Keys go from the caller to the kernel through memory that is wiped, and what the kernel says of
//! them when it is asked is compared and wiped, never returned.
//!
//! The layouts of messages and the walk over attributes are netlink-packet-xfrm's and
//! netlink-packet-core's, the socket is netlink-sys's. Two attributes are newer than the first of
//! these, and the one with the key is kept out of it, since it would copy keys into memory that
//! nobody wipes.

#[cfg(feature = "rig")]
mod acquire;
mod decode;
mod encode;
mod error;
mod offload;
mod statistics;
#[cfg(test)]
mod tests;
pub mod values;

use dunlin_lane::sync::lock;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Mutex;

use netlink_packet_xfrm as uapi;

#[cfg(feature = "rig")]
pub use self::acquire::Acquires;
pub use self::error::Error;
pub use self::offload::{EspOffload, esp_offload};
pub use self::statistics::Statistics;
pub use self::values::{
    Action, Algorithm, Counters, Database, Direction, Encapsulation, Installed, KeyAndSalt,
    LONGEST_REPLAY_WINDOW, Network, PerCpu, Policy, PolicyDirection, Ports, Protocol, Selector,
    State, StateId,
};

use self::error::Refusal;
use crate::netlink::{Failure, Link, Request};

/// SPIs below are the IANA's (RFC 4303, section 2.1).
pub const FIRST_SPI: u32 = 256;

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
        // Whoever may not ask anything is told so here.
        xfrm.database()?;
        Ok(xfrm)
    }

    /// Reserves an SPI for an SA from `from` to `to`. It is taken by a state without a key, which
    /// carries nothing and goes by itself after 30 seconds (`net.core.xfrm_acq_expires`) unless
    /// [`Xfrm::add_state`] completes it, with the same `reqid`, `direction` and CPU.
    ///
    /// # Errors
    /// [`Error::NoSpi`] where none of `range` is free, [`Error::Reserved`] for one that begins
    /// below [`FIRST_SPI`], [`Error::NoSuchCpu`], and what else the kernel says.
    pub fn allocate_spi(
        &self,
        from: IpAddr,
        to: IpAddr,
        reqid: u32,
        direction: Direction,
        cpu: Option<u32>,
        range: RangeInclusive<u32>,
    ) -> Result<u32, Error> {
        const DOING: &str = "reserving an SPI";
        if *range.start() < FIRST_SPI {
            return Err(Error::Reserved {
                spi: *range.start(),
            });
        }
        let request = encode::allocate_spi(from, to, reqid, direction, cpu, &range);
        let mut reserved = None;
        let answered = self.exchange(DOING, request, |kind, body| {
            if kind == uapi::XFRM_MSG_NEWSA {
                reserved = Some(decode::state(body)?);
            }
            Ok(())
        });
        answered.map_err(|refusal| match (refusal.code(), cpu) {
            (Some(libc::ENOENT), _) => Error::NoSpi { range },
            (Some(libc::EINVAL | libc::ERANGE), Some(cpu)) if refusal.names_a_cpu() => {
                Error::NoSuchCpu { cpu }
            }
            _ => refusal.into(),
        })?;
        let reserved = reserved.flatten().ok_or(Error::Answer {
            doing: DOING,
            what: "it names no SPI",
        })?;
        Ok(reserved.id.spi)
    }

    /// Adds an SA, which from then on carries packets: a new one (`XFRM_MSG_NEWSA`), or, where its
    /// SPI was reserved by [`Xfrm::allocate_spi`] for the same `reqid` and source, in place of the
    /// reservation (`XFRM_MSG_UPDSA`). An SA that has a key is never changed: the kernel would
    /// take such an update and silently keep the old key.
    ///
    /// # Errors
    /// [`Error::Taken`] where another SA has its SPI, [`Error::NoSuchCpu`], [`Error::NoEsp`] where
    /// the kernel lacks ESP or the cipher, and what else the kernel says.
    pub fn add_state(&self, state: &State) -> Result<(), Error> {
        const DOING: &str = "adding an SA";
        // A reservation may expire between two of these steps, once.
        for _ in 0..3 {
            let request = encode::add_state(uapi::XFRM_MSG_NEWSA, state);
            let refusal = match self.exchange(DOING, request, |_, _| Ok(())) {
                Ok(()) => return Ok(()),
                Err(refusal) => refusal,
            };
            if refusal.code() != Some(libc::EEXIST) {
                return Err(refusal.of_state(state.cpu));
            }
            match self.state(&state.id)? {
                None => continue,
                Some(held) if held.is_reservation_for(state) => {}
                Some(_) => return Err(Error::Taken { what: "SPI" }),
            }
            let request = encode::add_state(uapi::XFRM_MSG_UPDSA, state);
            match self.exchange("completing an SA", request, |_, _| Ok(())) {
                Ok(()) => return Ok(()),
                Err(refusal) if refusal.code() == Some(libc::ESRCH) => {}
                Err(refusal) => return Err(refusal.of_state(state.cpu)),
            }
        }
        Err(Error::Taken { what: "SPI" })
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
        let request = encode::add_policy(uapi::XFRM_MSG_NEWPOLICY, policy, 0);
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
        let request = encode::add_policy(uapi::XFRM_MSG_UPDPOLICY, policy, 0);
        self.exchange("replacing a policy", request, |_, _| Ok(()))
            .map_err(Error::from)
    }

    /// A policy with `XFRM_POLICY_CPU_ACQUIRE`: a CPU that has no SA asks for one (Linux 6.13).
    /// Dunlin makes none such; a test shows why.
    ///
    /// # Errors
    /// As [`Xfrm::add_policy`].
    #[cfg(feature = "rig")]
    pub fn add_policy_that_asks(&self, policy: &Policy) -> Result<(), Error> {
        const CPU_ACQUIRE: u8 = 4;
        let request = encode::add_policy(uapi::XFRM_MSG_NEWPOLICY, policy, CPU_ACQUIRE);
        self.exchange("adding a policy", request, |_, _| Ok(()))
            .map_err(Error::from)
    }

    /// The policy that the kernel has for just this selector and direction.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn policy(
        &self,
        selector: &Selector,
        direction: PolicyDirection,
    ) -> Result<Option<Policy>, Error> {
        Ok(self
            .indexed_policy(selector, direction)?
            .map(|(policy, _)| policy))
    }

    fn indexed_policy(
        &self,
        selector: &Selector,
        direction: PolicyDirection,
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

    /// All policies of the namespace, whoever made them, but for those of single sockets.
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
            spi: FIRST_SPI,
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

    /// Whether SAs of one CPU are what the kernel knows: reserves an SPI for CPU 0 between
    /// addresses that nobody has (RFC 5737), reads it back, and gives it up.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn per_cpu(&self) -> Result<PerCpu, Error> {
        let [from, to] = [1, 2].map(|last| IpAddr::from([192, 0, 2, last]));
        let spi = self.allocate_spi(from, to, 0, Direction::In, Some(0), FIRST_SPI..=u32::MAX)?;
        let id = StateId {
            destination: to,
            spi,
        };
        let held = self.state(&id);
        self.remove_state(&id)?;
        Ok(match held?.and_then(|held| held.cpu) {
            Some(0) => PerCpu::Supported,
            _ => PerCpu::Ignored,
        })
    }

    /// Whether the kernel keeps which way an SA is used (Linux 6.10), looked for as by
    /// [`Xfrm::per_cpu`]. One that does not wants a replay window of outbound SAs with extended
    /// sequence numbers too.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn keeps_directions(&self) -> Result<bool, Error> {
        let [from, to] = [1, 2].map(|last| IpAddr::from([192, 0, 2, last]));
        let spi = self.allocate_spi(from, to, 0, Direction::In, None, FIRST_SPI..=u32::MAX)?;
        let id = StateId {
            destination: to,
            spi,
        };
        let held = self.state(&id);
        self.remove_state(&id)?;
        Ok(held?.and_then(|held| held.direction) == Some(Direction::In))
    }

    /// How many SAs there are, and how the kernel keeps them.
    ///
    /// # Errors
    /// [`Error::NotPermitted`], and what else the kernel says.
    pub fn database(&self) -> Result<Database, Error> {
        const DOING: &str = "asking how many SAs there are";
        let mut found = None;
        self.exchange(DOING, encode::database(), |kind, body| {
            if kind == uapi::XFRM_MSG_NEWSADINFO {
                found = Some(decode::database(body)?);
            }
            Ok(())
        })?;
        found.ok_or(Error::Answer {
            doing: DOING,
            what: "it does not say",
        })
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
