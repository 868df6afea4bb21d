//! Entrances: the listeners of the configuration. The tunnel carries their connections to a peer.

use dunlin_lane::sync::lock;
use std::io;
use std::sync::{Arc, Mutex};

use dunlin_linux::local::FileAccess;
use dunlin_linux::poll::Wakeup;
use dunlin_linux::socket::Accepted;

use super::carriers::Carriers;
use super::event::Event;
use super::failure::{Failure, Lost};
use super::listener::{LastingListener, Sockets, next_number};
use super::meter::Count;
use super::options::Entrance;
use super::route::Listen;
use super::threads::Worker;

/// An open entrance. Dropping it closes the listener; its channels stay open.
pub(super) struct EntranceListener {
    /// The settings for new connections. A reload may replace them.
    settings: Arc<Mutex<Settings>>,
    /// The address of the listener, with the port that the kernel chose in place of port 0.
    pub(super) listens_on: Listen,
    lost: Lost,
    _thread: Worker,
}

#[derive(Clone)]
struct Settings {
    entrance: Entrance,
    access: FileAccess,
}

impl EntranceListener {
    /// Opens the listener and starts its thread.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(super) fn open(
        carriers: &Carriers,
        entrance: Entrance,
        access: &FileAccess,
        passed: &Sockets,
    ) -> io::Result<Self> {
        let mut listens_on = entrance.listen.clone();
        let listener = LastingListener::open(&mut listens_on, access, passed)?;
        let number = next_number();
        let access = *access;
        let settings = Arc::new(Mutex::new(Settings { entrance, access }));
        let (carriers, own, lost) = (carriers.clone(), Arc::clone(&settings), listener.lost());
        let name = format!("dunlin-entrance-{number}");
        let body = move |stopped: &Wakeup| listen(&carriers, &own, number, listener, stopped);
        let thread = Worker::start(name, body)?;
        Ok(Self {
            settings,
            listens_on,
            lost,
            _thread: thread,
        })
    }

    pub(super) fn entrance(&self) -> Entrance {
        lock(&self.settings).entrance.clone()
    }

    /// The reason why the listener is not reachable at present; `None` if it is reachable.
    pub(super) fn lost(&self) -> Option<Failure> {
        lock(&self.lost).clone()
    }

    /// Whether this listener has the address of `other`. If the port is 0, the route must also be
    /// the same.
    pub(super) fn is_at(&self, other: &Entrance) -> bool {
        let own = &lock(&self.settings).entrance;
        let chosen = matches!(&other.listen, Listen::Tcp(address) if address.port() == 0);
        own.listen == other.listen && (!chosen || own.route == other.route)
    }

    /// Replaces the settings for later connections with those of `other`, which has the same
    /// address. If `access` has changed, a listener on a unix socket creates the socket anew within
    /// a second.
    pub(super) fn set_entrance(&self, other: &Entrance, access: &FileAccess) {
        *lock(&self.settings) = Settings {
            entrance: other.clone(),
            access: *access,
        };
    }
}

/// The body of an entrance's thread.
fn listen(
    carriers: &Carriers,
    settings: &Mutex<Settings>,
    number: u64,
    mut listener: LastingListener,
    stopped: &Wakeup,
) {
    let site = &carriers.site;
    let mut short = false;
    loop {
        match listener.wait(stopped, short) {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => {
                let route = &lock(settings).entrance.route;
                let text = format!("route {route} stopped accepting connections: {error}");
                return site.report(Event::Warning(text));
            }
        }
        let Settings { entrance, access } = lock(settings).clone();
        listener.check(site, &entrance.route, &access);
        let was_short = std::mem::take(&mut short);
        match listener.accept() {
            Accepted::Connection(stream) => {
                let count = Count::new(site.meter(&entrance.route), None);
                carriers.carry(&entrance, number, String::new(), stream.counted(count));
            }
            Accepted::Nothing => {}
            // `Failed` includes the case that an option of the new connection cannot be set. That
            // is temporary, so treat it like a shortage of descriptors or memory.
            Accepted::Shortage(error) | Accepted::Failed(error) => {
                if !was_short {
                    let route = &entrance.route;
                    let text = format!("route {route} cannot accept a connection: {error}");
                    site.report(Event::Warning(text));
                }
                short = true;
            }
        }
    }
}
