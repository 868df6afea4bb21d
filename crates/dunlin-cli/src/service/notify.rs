//! Tells the service manager how the service is (sd_notify(3)): a datagram with a few
//! lines to the socket that the environment names, if it names one.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::log::say;

/// Whoever has started this process and wants to be told.
pub(crate) struct Manager(Option<(UnixDatagram, SocketAddr)>);

impl Manager {
    /// The one that the environment names.
    pub(crate) fn find() -> Self {
        let Some(named) = env::var_os("NOTIFY_SOCKET") else {
            return Self(None);
        };
        let found = match named.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            _ => SocketAddr::from_pathname(&named),
        };
        let made = found.and_then(|to| {
            let socket = UnixDatagram::unbound()?;
            if to.as_abstract_name().is_some() {
                // A process that confines itself reaches those abstract sockets alone to which it
                // is connected. If nobody is there now, somebody may be later.
                let _ = socket.connect_addr(&to);
            }
            Ok((socket, to))
        });
        match made {
            Ok(made) => Self(Some(made)),
            Err(error) => {
                untold(&error);
                Self(None)
            }
        }
    }

    /// It listens, or has read its configuration anew.
    pub(crate) fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={status}"));
    }

    /// It reads its configuration anew; *ready* follows.
    pub(crate) fn reloading(&self) {
        let now = dunlin_linux::clock::monotonic().as_micros();
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={now}"));
    }

    /// It takes no more connections and waits for those that are open.
    pub(crate) fn stopping(&self) {
        self.tell("STOPPING=1\nSTATUS=waiting for connections to end");
    }

    fn tell(&self, lines: &str) {
        if let Some((socket, to)) = &self.0
            && let Err(error) = socket.send_to_addr(lines.as_bytes(), to)
        {
            untold(&error);
        }
    }
}

fn untold(error: &io::Error) {
    say(&format!(
        "warning: the service manager cannot be told: {error}"
    ));
}
