//! The redirect: connections of a toolstack that the kernel's packet filter redirects to one
//! listener on loopback.
//!
//! ```text
//!  QEMU connects to 10.77.0.2:49152 ─▶ nftables ─▶ 127.0.0.1:18301: original destination
//!                                                        │ peer by address, port in its range
//!                                                        ▼
//!                              route NAME, parameter port=49152 ═ trunk ═▶ 127.0.0.1:49152 there
//! ```
//!
//! The listener reads the original destination of each connection and finds the peer by address.
//! It refuses a connection if its original destination is not a configured peer and port: for
//! example the connection of a local program that connects to the listener directly.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::Ordering;

use dunlin_linux::poll::Wakeup;
use dunlin_linux::socket::Accepted;
use dunlin_proto::fault::FaultCode;

use super::carriers::Carriers;
use super::event::Event;
use super::listener::{Listener, Sockets, next_number};
use super::meter::Count;
use super::parameter::PORT_KEY;
use super::route::Listen;
use super::socket::Stream;
use super::threads::Worker;

/// The open listeners for redirected connections, one per address family. Dropping it closes them;
/// their channels stay open.
pub(super) struct RedirectListener {
    port: u16,
    _threads: Vec<Worker>,
}

impl RedirectListener {
    /// Listens on the loopback addresses and starts the listeners' threads.
    ///
    /// # Errors
    /// The port cannot be bound.
    pub(super) fn open(carriers: &Carriers, port: u16) -> io::Result<Self> {
        let mut threads = Vec::new();
        for ip in [
            IpAddr::from(Ipv4Addr::LOCALHOST),
            Ipv6Addr::LOCALHOST.into(),
        ] {
            let mut at = Listen::Tcp(SocketAddr::new(ip, port));
            let listener =
                match LastingListener::open(&mut at, &FileAccess::default(), &Sockets::default()) {
                    Ok(listener) => listener,
                    // The host has no IPv6.
                    Err(error)
                        if ip.is_ipv6() && error.kind() == io::ErrorKind::AddrNotAvailable =>
                    {
                        continue;
                    }
                    Err(error) => return Err(error),
                };
            let listening = Listening {
                carriers: carriers.clone(),
                listener,
                numbers: BTreeMap::new(),
            };
            let name = format!("dunlin-redirect-{}", if ip.is_ipv4() { 4 } else { 6 });
            let body = move |stopped: &Wakeup| listening.run(stopped);
            threads.push(Worker::start(name, body)?);
        }
        Ok(Self {
            port,
            _threads: threads,
        })
    }

    /// Whether the listeners have this port.
    pub(super) fn is_at(&self, port: u16) -> bool {
        self.port == port
    }
}

/// The state of a listener's thread.
struct Listening {
    carriers: Carriers,
    listener: Listener,
    /// A number for each route and peer: channels with the same number are connected in the order
    /// of acceptance. Only configured peers get one.
    numbers: BTreeMap<(String, String), u64>,
}

impl Listening {
    fn run(mut self, stopped: &Wakeup) {
        let mut short = false;
        loop {
            match self.listener.wait(stopped, short) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => {
                    let text = format!("stopped accepting redirected connections: {error}");
                    return self.carriers.site.report(Event::Warning(text));
                }
            }
            let was_short = std::mem::take(&mut short);
            match self.listener.accept() {
                Accepted::Connection(stream) => self.take(stream),
                Accepted::Nothing => {}
                Accepted::Shortage(error) | Accepted::Failed(error) => {
                    if !was_short {
                        let text = format!("cannot accept a redirected connection: {error}");
                        self.carriers.site.report(Event::Warning(text));
                    }
                    short = true;
                }
            }
        }
    }

    /// Carries a connection to the peer at its original destination, or closes it.
    fn take(&mut self, stream: Stream) {
        let site = &self.carriers.site;
        let from = stream.client();
        let refuse = |why: String| {
            site.strays.fetch_add(1, Ordering::Relaxed);
            site.reject(&from, FaultCode::UnknownRoute, why);
        };
        let original = match stream.original_destination() {
            Ok(original) => original,
            Err(error) => {
                return refuse(format!(
                    "the original destination is unknown ({error}); the kernel must track \
                     connections to loopback"
                ));
            }
        };
        let Some(entrance) = site.redirected_entrance(original) else {
            return refuse(format!("no route is redirected from {original}"));
        };
        let key = (entrance.route.clone(), entrance.to.clone());
        let number = *self.numbers.entry(key).or_insert_with(next_number);
        let count = Count::new(site.meter(&entrance.route), None);
        let parameter = format!("{PORT_KEY}={}", original.port());
        let socket = stream.counted(count);
        self.carriers.carry(&entrance, number, parameter, socket);
    }
}
