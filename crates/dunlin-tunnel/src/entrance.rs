//! Entrances: a listener for each, whose connections are carried to the peer.

use dunlin_lane::sync::lock;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dunlin_linux::poll::{Interest, Wakeup, poll};

use super::carriers::Carriers;
use super::event::Event;
use super::listener::{Listener, SocketFile, Sockets, next_number};
use super::meter::Count;
use super::options::Entrance;
use super::route::Listen;
use super::threads::Worker;

/// How long nobody is accepted when descriptors or memory ran out.
const SHORTAGE_REST: Duration = Duration::from_millis(100);
/// An entrance that is open. It is closed when this is dropped; channels stay.
pub(super) struct EntranceListener {
    /// Where its connections go; a reload may change it.
    entrance: Arc<Mutex<Entrance>>,
    /// Where it listens: a port of 0 is the one that the kernel chose.
    listens_on: Listen,
    _thread: Worker,
    /// Removed when the thread has ended.
    _file: Option<SocketFile>,
}

impl EntranceListener {
    /// Opens an entrance.
    ///
    /// # Errors
    /// It cannot listen there.
    pub(super) fn open(
        carriers: &Carriers,
        entrance: Entrance,
        passed: &Sockets,
    ) -> io::Result<Self> {
        let mut listens_on = entrance.listen.clone();
        let (listener, file) = Listener::open(&mut listens_on, passed)?;
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

    pub(super) fn listens_on(&self) -> &Listen {
        &self.listens_on
    }

    /// Whether it is where an entrance is to be. One that left its port to the
    /// kernel is known by its route.
    pub(super) fn is_at(&self, other: &Entrance) -> bool {
        let own = lock(&self.entrance);
        let chosen = matches!(&other.listen, Listen::Tcp(address) if address.port() == 0);
        own.listen == other.listen && (!chosen || own.route == other.route)
    }

    /// Has its next connections go where another entrance of the same place leads.
    pub(super) fn lead(&self, other: &Entrance) {
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
        let stop = Interest {
            fd: stopped.as_fd(),
            read: true,
            write: false,
        };
        let timeout = short.then_some(SHORTAGE_REST);
        let interests = [stop, listener.interest()];
        let watched = if short { 1 } else { 2 };
        match poll(&interests[..watched], timeout) {
            Ok(ready) if ready[0] => return,
            Ok(_) => {}
            Err(error) => {
                let route = &lock(entrance).route;
                let text = format!("route {route} accepts no connections any more: {error}");
                return site.tell(Event::Warning(text));
            }
        }
        match listener.accept() {
            Ok(socket) => {
                short = false;
                let entrance = lock(entrance).clone();
                let count = Count::new(site.meter(&entrance.route), None);
                carriers.carry(&entrance, number, String::new(), socket.counted(count));
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::Interrupted
                | io::ErrorKind::ConnectionAborted => short = false,
                // For want of descriptors, which others may give back.
                _ => {
                    if !short {
                        let route = &lock(entrance).route;
                        let text = format!("route {route} cannot accept a connection: {error}");
                        site.tell(Event::Warning(text));
                    }
                    short = true;
                }
            },
        }
    }
}
