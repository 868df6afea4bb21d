//! Helpers for tests with lanes over IPsec between two hosts: the [`IpsecLanes`] of a host, and the
//! counters of its SAs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dunlin_ipsec::lanes::IpsecLanes;
use dunlin_ipsec::{Direction, Event, Mode, Observer, Options, Sender, Status};

use crate::Guest;
use crate::sessions::{inside, netns};

/// The source ports for the sessions of all lanes.
pub const POOL: &str = "24576-28671";

/// The events of a host's sessions so far.
#[derive(Clone, Debug, Default)]
pub struct Said(Arc<Mutex<Vec<Event>>>);

impl Said {
    /// Whether `is` returns true for any event so far.
    ///
    /// # Panics
    /// Another thread has panicked.
    pub fn has(&self, is: impl Fn(&Event) -> bool) -> bool {
        self.0.lock().expect("no thread panicked").iter().any(is)
    }
}

/// Creates the [`IpsecLanes`] of a host, with SAs for these CPUs.
///
/// # Panics
/// The kernel has no IPsec.
#[must_use]
pub fn ipsec_lanes(host: &str, mode: Mode, cpus: &[u32]) -> (IpsecLanes, Said) {
    ipsec_lanes_with(host, mode, cpus, POOL)
}

/// Like [`ipsec_lanes`], but with other ports for the sessions.
///
/// # Panics
/// The kernel has no IPsec.
#[must_use]
pub fn ipsec_lanes_with(host: &str, mode: Mode, cpus: &[u32], ports: &str) -> (IpsecLanes, Said) {
    let records = Path::new(&format!("state-{host}")).join("ipsec");
    let mut options = Options::new(mode, ports.parse().expect("ports"), records);
    options.cpus = cpus.to_vec();
    options.timeout = Duration::from_secs(30);
    let said = Said::default();
    let (heard, at) = (said.clone(), host.to_owned());
    let observer: Observer = Arc::new(move |event: &Event| {
        println!("{at}: {event}");
        let mut said = heard.0.lock().expect("no thread panicked");
        said.push(event.clone());
    });
    let sealed = inside(host, || IpsecLanes::new(options, observer)).expect("the kernel has IPsec");
    (sealed, said)
}

/// Returns the number of bytes that each outbound SA of a session has carried.
///
/// # Panics
/// An SA has been removed.
#[must_use]
pub fn carried(session: &Status) -> BTreeMap<Sender, u64> {
    let outbound = session
        .associations
        .iter()
        .filter(|one| one.association.direction == Direction::Out);
    outbound
        .map(|one| {
            let counters = one.counters.as_ref().expect("the SA exists");
            (one.association.slot.sender, counters.bytes)
        })
        .collect()
}

/// Returns the number of packets that IPsec on a host has dropped or refused, by cause. Every
/// counter in the file counts such packets.
#[must_use]
pub fn refused(guest: &Guest, host: &str) -> Vec<(String, u64)> {
    let text = guest.output("ip", &netns(host, &["cat", "/proc/net/xfrm_stat"]));
    let count = |line: &str| {
        let (name, count) = line.split_once(char::is_whitespace)?;
        let count = count.trim().parse::<u64>().ok()?;
        (count > 0).then(|| (name.to_owned(), count))
    };
    text.lines().filter_map(count).collect()
}

/// Destroys the connections of a host that match a filter of ss(8), as if the peer had vanished and
/// the host had given up the connections.
///
/// # Panics
/// No connection matches the filter.
pub fn cut(guest: &Guest, host: &str, filter: &str) {
    let words = ["-n", "-t", "-K", "-H"];
    let command: Vec<&str> = words.into_iter().chain(filter.split(' ')).collect();
    let said = guest.output("ip", &netns(host, &[&["ss"], &command[..]].concat()));
    assert!(!said.is_empty(), "{host} has no connection {filter}");
}

/// Whether a host has removed all its records of the state that it installed in the kernel.
#[must_use]
pub fn no_records(host: &str) -> bool {
    let folder = Path::new(&format!("state-{host}")).join("ipsec");
    let files = fs::read_dir(folder).expect("the folder exists");
    files
        .filter_map(Result::ok)
        .all(|file| file.path().extension().is_none_or(|kind| kind != "ipsec"))
}
