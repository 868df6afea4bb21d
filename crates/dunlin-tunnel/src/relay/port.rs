//! A port of a relay: it accepts TLS clients.

use dunlin_lane::sync::lock;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::text::harmless;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};

use dunlin_linux::poll::Wakeup;
use dunlin_linux::socket::set_reset_on_close;

use crate::event::Event;
use crate::listener::next_number;
use crate::route::RelayExit;
use crate::site::Site;
use crate::threads::Worker;
use dunlin_lane::accept::{RelayArrival, accept_relayed};
use dunlin_lane::handshake::relay::Relayed;
use dunlin_lane::policy::ServerTls;

/// An open port. Dropping it closes the listener; its channels stay open.
pub(super) struct Port {
    pub(super) address: SocketAddr,
    exit: Arc<Mutex<RelayExit>>,
    tls: ServerTls,
    _thread: Worker,
}

impl Port {
    /// Opens a port. `secured` receives each client that the route allows, with the internal
    /// number of the `Port` (not the TCP port).
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(super) fn open(
        site: &Arc<Site>,
        exit: RelayExit,
        tls: ServerTls,
        secured: impl Fn(u64, RelayExit, Box<Relayed>) + Send + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(exit.listen)?;
        let address = listener.local_addr()?;
        let number = next_number();
        let exit = Arc::new(Mutex::new(exit));
        let (site, own, own_tls) = (Arc::clone(site), Arc::clone(&exit), tls.clone());
        let body = move |stopped: &Wakeup| {
            let result = accept_relayed(&listener, &own_tls, stopped, |arrival| {
                let exit = of(&own);
                if let Some(relayed) = allowed(&site, &exit, arrival) {
                    secured(number, exit, relayed);
                }
            });
            if let Err(error) = result {
                let route = of(&own).route;
                let text = format!("route {route} stopped accepting TLS clients: {error}");
                site.report(Event::Warning(text));
            }
        };
        let name = format!("dunlin-relay-port-{number}");
        let thread = Worker::start(name, body)?;
        Ok(Self {
            address,
            exit,
            tls,
            _thread: thread,
        })
    }

    /// Whether this port has the address of `other`. If the port number is 0, the route must also
    /// be the same.
    pub(super) fn is_at(&self, other: &RelayExit) -> bool {
        let own = of(&self.exit);
        own.listen == other.listen && (other.listen.port() != 0 || own.route == other.route)
    }

    pub(super) fn route(&self) -> String {
        of(&self.exit).route
    }

    /// Replaces the settings for later clients.
    pub(super) fn renew(&self, exit: RelayExit, tls: &ServerTls) {
        *lock(&self.exit) = exit;
        self.tls.replace(tls);
    }
}

fn of(exit: &Mutex<RelayExit>) -> RelayExit {
    lock(exit).clone()
}

/// Returns the client if the route still allows it. The configuration may have changed since the
/// handshake.
fn allowed(site: &Site, exit: &RelayExit, arrival: RelayArrival) -> Option<Box<Relayed>> {
    let (from, fault, why) = match arrival {
        RelayArrival::Secured(relayed) => match exit.allow.authorise_further(&relayed.peer) {
            Ok(_) => return Some(relayed),
            Err(refused) => {
                // Fails only if the connection is closed.
                let _ = set_reset_on_close(&relayed.stream);
                (relayed.at, FaultCode::Unauthorised, refused.to_string())
            }
        },
        RelayArrival::Rejected { from, reason } => (from, reason.fault(), reason.to_string()),
        RelayArrival::Starved(error) => {
            site.cannot_accept(&format!("route {}", exit.route), &error);
            return None;
        }
    };
    site.reject(from, fault, harmless(&why));
    None
}
