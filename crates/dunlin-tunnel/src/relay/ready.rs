//! The start of a channel that has both connections.

use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dunlin_linux::socket::{Liveness, set_liveness, set_reset_on_close};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::text::harmless;

use super::channel::{Channel, Kernel, Mover, Process, STALL_LOOK};
use super::life::Life;
use crate::counted::Counted;
use crate::failure::Failure;
use crate::options::Limits;
use crate::site::Site;
use crate::socket::Socket;
use dunlin_lane::handshake::relay::Relayed;
use dunlin_lane::relayed::Records;
use dunlin_lane::splice::Stop;

/// A direction frees its buffer after this time without a byte.
const IDLE: Duration = Duration::from_secs(1);

impl Channel {
    /// Creates a channel without threads, and sets the options of its sockets.
    ///
    /// # Errors
    /// setsockopt(2) failed, or the process has no free file descriptors. Both connections
    /// are aborted.
    pub(super) fn new(
        site: &Arc<Site>,
        number: u32,
        route: &str,
        plain: Socket,
        relayed: Relayed,
    ) -> Result<Arc<Self>, Failure> {
        let tls = relayed.stream;
        let mover = prepare(&plain, &tls, relayed.records, &site.limits).map_err(|error| {
            let failure = out_of_resources(&error);
            plain.fail(&failure);
            // Fails only if the connection is closed.
            let _ = set_reset_on_close(&tls);
            failure
        })?;
        Ok(Arc::new(Self {
            number,
            route: route.to_owned(),
            peer: harmless(&relayed.peer.to_string()),
            selector: relayed.peer.selector(),
            at: relayed.at,
            plain,
            tls,
            life: Mutex::new(Life::new()),
            mover,
            pacer: site.pacer_of(&relayed.peer),
            site: Arc::clone(site),
        }))
    }

    /// Starts the threads. The last thread that ends reduces the number of open channels.
    pub(super) fn start(self: &Arc<Self>, counted: Counted) {
        let counted = Arc::new(counted);
        self.spawn("out", &counted, |channel| match &channel.mover {
            Mover::Process(tls) => channel.carry_out(tls),
            Mover::Kernel(kernel) => channel.splice_out(kernel),
        });
        self.spawn("in", &counted, |channel| match &channel.mover {
            Mover::Process(tls) => channel.carry_in(tls),
            Mover::Kernel(kernel) => channel.splice_in(kernel),
        });
    }

    fn spawn(
        self: &Arc<Self>,
        way: &str,
        counted: &Arc<Counted>,
        body: fn(&Self) -> Result<(), Failure>,
    ) {
        let (own, counted) = (Arc::clone(self), Arc::clone(counted));
        let thread = move || {
            let result = body(&own);
            // Reduce the number of open channels before the end is reported, because the next
            // connection may follow immediately.
            drop(counted);
            own.leave(result);
        };
        let name = format!("dunlin-relay-{}-{way}", self.number);
        if !self.site.spawn(name, thread) {
            let failure = Failure::new(FaultCode::Kernel, "cannot start a thread");
            self.leave(Err(failure));
        }
    }
}

/// The failure of a channel that cannot start.
pub(super) fn out_of_resources(error: &io::Error) -> Failure {
    let text = "out of descriptors or threads for a channel";
    Failure::new(FaultCode::DescriptorLimit, text).because(error)
}

fn prepare(
    plain: &Socket,
    tls: &TcpStream,
    records: Records,
    limits: &Limits,
) -> io::Result<Mover> {
    // Keep-alive detects a vanished peer within `vanished`. The watch thread limits how long data
    // may stay unacknowledged. TCP_USER_TIMEOUT is not used for that, because it would also end the
    // connection of a peer that answers but does not read.
    let liveness = Liveness {
        keepalive_idle: limits.vanished / 2,
        keepalive_interval: limits.vanished / 8,
        keepalive_probes: 3,
        user_timeout: Duration::ZERO,
    };
    set_liveness(tls, &liveness)?;
    match records {
        Records::Process(session) => {
            tls.set_read_timeout(Some(IDLE))?;
            plain.block(IDLE, STALL_LOOK)?;
            session.renew_after(limits.lane_records);
            let sending = Mutex::default();
            Ok(Mover::Process(Process { session, sending }))
        }
        Records::Kernel(sealing, opening) => {
            // Both sockets must be in non-blocking mode. The hypervisor's socket already is.
            tls.set_nonblocking(true)?;
            sealing.renew_after(limits.lane_records);
            Ok(Mover::Kernel(Kernel {
                sealing: Mutex::new(sealing),
                opening: Mutex::new(opening),
                outward: Stop::new()?,
                inward: Stop::new()?,
            }))
        }
    }
}
