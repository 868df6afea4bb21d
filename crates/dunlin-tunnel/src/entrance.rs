//! Entrances: the listeners of the configuration. The tunnel carries their connections to a peer.

use dunlin_lane::sync::lock;
use std::io;
use std::sync::{Arc, Mutex};

use dunlin_linux::local::FileAccess;
use dunlin_linux::poll::Wakeup;
use dunlin_linux::socket::Accepted;

use super::carriers::Carriers;
use super::event::Event;
use super::listener::{Listener, SocketFile, Sockets, next_number};
use super::meter::Count;
use super::options::Entrance;
use super::route::Listen;
use super::threads::Worker;

/// An open entrance. Dropping it closes the listener; its channels stay open.
pub(super) struct EntranceListener {
    /// The settings for new connections. A reload may replace them.
    entrance: Arc<Mutex<Entrance>>,
    /// The address of the listener, with the port that the kernel chose in place of port 0.
    pub(super) listens_on: Listen,
    _thread: Worker,
    /// The file of a unix socket, removed after the thread has ended.
    _file: Option<SocketFile>,
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
        let (listener, file) = Listener::open(&mut listens_on, access, passed)?;
        let number = next_number();
        let entrance = Arc::new(Mutex::new(entrance));
        let (carriers, own) = (carriers.clone(), Arc::clone(&entrance));
        let name = format!("dunlin-entrance-{number}");
        let body = move |stopped: &Wakeup| listen(&carriers, &own, number, &listener, stopped);
        let thread = Worker::start(name, body)?;
        Ok(Self {
            entrance,
            listens_on,
            _thread: thread,
            _file: file,
        })
    }

    pub(super) fn entrance(&self) -> Entrance {
        lock(&self.entrance).clone()
    }

    /// Whether this listener has the address of `other`. If the port is 0, the route must also be
    /// the same.
    pub(super) fn is_at(&self, other: &Entrance) -> bool {
        let own = lock(&self.entrance);
        let chosen = matches!(&other.listen, Listen::Tcp(address) if address.port() == 0);
        own.listen == other.listen && (!chosen || own.route == other.route)
    }

    /// Replaces the settings for later connections with those of `other`, which has the same
    /// address.
    pub(super) fn set_entrance(&self, other: &Entrance) {
        *lock(&self.entrance) = other.clone();
    }
}

/// The body of an entrance's thread.
fn listen(
    carriers: &Carriers,
    entrance: &Mutex<Entrance>,
    number: u64,
    listener: &Listener,
    stopped: &Wakeup,
) {
    let site = &carriers.site;
    let mut short = false;
    loop {
        match listener.wait(stopped, short) {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => {
                let route = &lock(entrance).route;
                let text = format!("route {route} stopped accepting connections: {error}");
                return site.report(Event::Warning(text));
            }
        }
        let was_short = std::mem::take(&mut short);
        match listener.accept() {
            Accepted::Connection(stream) => {
                let entrance = lock(entrance).clone();
                let count = Count::new(site.meter(&entrance.route), None);
                carriers.carry(&entrance, number, String::new(), stream.counted(count));
            }
            Accepted::Nothing => {}
            // An error of a new socket is temporary, so treat it like a shortage of descriptors or
            // memory.
            Accepted::Shortage(error) | Accepted::Failed(error) => {
                if !was_short {
                    let route = &lock(entrance).route;
                    let text = format!("route {route} cannot accept a connection: {error}");
                    site.report(Event::Warning(text));
                }
                short = true;
            }
        }
    }
}
