//! The redirect: connections of a toolstack that the kernel's packet filter redirects to loopback.
//!
//! ```text
//!  QEMU connects to 10.77.0.2:49152 ─▶ nftables ─▶ 127.0.0.1:18301: original destination
//!                                                        │ peer by address, port in its range
//!                                                        ▼
//!                              route NAME, parameter port=49152 ═ trunk ═▶ 127.0.0.1:49152 there
//! ```
//!
//! Each peer has a [`Gate`]: a trunk that is kept up, and a listener that is open while the trunk
//! is up. If the peer's tunnel does not answer, the toolstack's connection is therefore refused, as
//! it would be without a tunnel. A connection that is accepted and then reset is worse: QEMU 10.0
//! may crash if that happens while its channels connect.
//!
//! The listener reads the original destination of each connection. It refuses a connection if this
//! destination belongs to no route, for example because a local program has connected to the
//! listener directly.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dunlin_linux::local::FileAccess;
use dunlin_linux::poll::{Interest, Waker, Wakeup, poll, waker};
use dunlin_linux::socket::Accepted;
use dunlin_proto::fault::FaultCode;

use super::carriers::Carriers;
use super::event::Event;
use super::hub::Hub;
use super::listener::{LastingListener, Sockets, next_number};
use super::meter::Count;
use super::parameter::PORT_KEY;
use super::route::Listen;
use super::socket::Stream;
use super::threads::Worker;

/// The first and the longest pause before a peer that does not answer is dialled again.
const AGAIN: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];

/// How often a gate checks whether the control lane of its trunk is up.
const LOOK: Duration = Duration::from_millis(200);

/// How often a gate checks the certificates of its trunk, which takes some signature checks.
const CHECK: Duration = Duration::from_secs(5);

/// Keeps a trunk to a peer up, and listens while the trunk is up. Dropping the gate closes the
/// listener, but not the channels that it has accepted. If the gate is dialling at that time, its
/// thread continues until the dial has ended. The tunnel joins the thread when the tunnel ends.
pub(super) struct Gate {
    stop: Waker,
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.stop.wake();
    }
}

impl Gate {
    /// Starts the gate of the routes that are redirected to the port `at`.
    ///
    /// # Errors
    /// The process has no free file descriptors, or cannot start a thread.
    pub(super) fn start(carriers: &Carriers, at: u16) -> io::Result<Self> {
        let (stop, stopped) = waker()?;
        let own = carriers.clone();
        let body = move || run(&own, at, &stopped);
        if !carriers.site.spawn(format!("dunlin-gate-{at}"), body) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Self { stop })
    }
}

/// The body of a gate's thread.
fn run(carriers: &Carriers, at: u16, stopped: &Wakeup) {
    let [first, most] = AGAIN;
    let mut again = first;
    let mut reported = None;
    loop {
        match open(carriers, at, reported) {
            Ok((hub, listeners)) => {
                (again, reported) = (first, None);
                let _kept = hub.keep();
                let interests = [Interest::read(stopped), Interest::read(hub.stop.wakeup())];
                let mut checked = Instant::now();
                let mut is_usable = || {
                    if checked.elapsed() < CHECK {
                        return true;
                    }
                    checked = Instant::now();
                    carriers.trunks.is_usable(&hub)
                };
                // Keep the listeners open while the trunk has its control lane, because without it
                // the trunk opens no channel. If poll(2) fails, the outer loop opens them again.
                while hub.has_control()
                    && is_usable()
                    && poll(&interests, Some(LOOK)).is_ok_and(|ready| !ready.contains(&true))
                {
                }
                drop(listeners);
            }
            Err(fault) => reported = Some(fault),
        }
        match poll(&[Interest::read(stopped)], Some(again)) {
            Ok(ready) if ready == [false] => again = (again * 2).min(most),
            _ => return,
        }
    }
}

/// Establishes a trunk and opens the listeners, one per address family. Reports the failure of a
/// trunk as an event, except if its code is `reported`, the code of the last report.
fn open(
    carriers: &Carriers,
    at: u16,
    reported: Option<FaultCode>,
) -> Result<(Arc<Hub>, Vec<Worker>), FaultCode> {
    let mut fault = FaultCode::UnknownRoute;
    for entrance in carriers.site.redirected_to(at) {
        match carriers.keep_up(&entrance) {
            Ok(hub) => {
                let listeners = listeners(carriers, at).map_err(|error| {
                    if reported != Some(FaultCode::Kernel) {
                        let text = format!("cannot listen on port {at} of loopback: {error}");
                        carriers.site.report(Event::Warning(text));
                    }
                    FaultCode::Kernel
                })?;
                return Ok((hub, listeners));
            }
            Err(failure) => {
                fault = failure.code();
                if reported != Some(fault) {
                    let to = entrance.to;
                    carriers.site.report(Event::TrunkFailed { to, failure });
                }
            }
        }
    }
    Err(fault)
}

fn listeners(carriers: &Carriers, port: u16) -> io::Result<Vec<Worker>> {
    let mut threads = Vec::new();
    for ip in [
        IpAddr::from(Ipv4Addr::LOCALHOST),
        Ipv6Addr::LOCALHOST.into(),
    ] {
        let mut at = Listen::Tcp(SocketAddr::new(ip, port));
        let opened = LastingListener::open(&mut at, &FileAccess::default(), &Sockets::default());
        let listener = match opened {
            Ok(listener) => listener,
            // The host has no IPv6.
            Err(error) if ip.is_ipv6() && error.kind() == io::ErrorKind::AddrNotAvailable => {
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
    Ok(threads)
}

/// The state of a listener's thread.
struct Listening {
    carriers: Carriers,
    listener: LastingListener,
    /// One listener number for each route and address of a peer. Channels with the same listener
    /// number are connected in the order of acceptance. Only configured peers get a number.
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
            return refuse(format!(
                "the original destination {original} belongs to no redirect"
            ));
        };
        let key = (entrance.route.clone(), entrance.to.clone());
        let number = *self.numbers.entry(key).or_insert_with(next_number);
        let count = Count::new(site.meter(&entrance.route), None);
        let parameter = format!("{PORT_KEY}={}", original.port());
        let socket = stream.counted(count);
        self.carriers.carry(&entrance, number, parameter, socket);
    }
}
