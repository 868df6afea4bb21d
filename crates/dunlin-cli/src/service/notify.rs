//! Reports the service's status to the service manager (sd_notify(3)): datagrams of a few lines to
//! the socket in `NOTIFY_SOCKET`, if that is set.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::log::warn;

/// The service manager, if it requested status reports.
pub(crate) struct Manager(Option<(UnixDatagram, SocketAddr)>);

impl Manager {
    /// The manager that the environment names, if any.
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
                // Connect now, because a confined process reaches only those abstract sockets to
                // which it is already connected. An error is ignored, because the receiver may not
                // exist yet.
                let _ = socket.connect_addr(&to);
            }
            Ok((socket, to))
        });
        match made {
            Ok(made) => Self(Some(made)),
            Err(error) => {
                cannot_notify(&error);
                Self(None)
            }
        }
    }

    /// Reports that the service is ready, or that a reload has succeeded or failed.
    pub(crate) fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={status}"));
    }

    /// Reports that the service is reloading its configuration. A call of [`Self::ready`] follows.
    pub(crate) fn reloading(&self) {
        let now = dunlin_linux::clock::monotonic().as_micros();
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={now}"));
    }

    /// Reports that the service accepts no more connections and is waiting for the open ones to
    /// end.
    pub(crate) fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=waiting for connections to end");
    }

    fn send(&self, lines: &str) {
        if let Some((socket, to)) = &self.0
            && let Err(error) = socket.send_to_addr(lines.as_bytes(), to)
        {
            cannot_notify(&error);
        }
    }
}

fn cannot_notify(error: &io::Error) {
    warn([format!("cannot notify the service manager: {error}")]);
}
