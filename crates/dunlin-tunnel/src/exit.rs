//! The exit of a channel: checks that the peer may use the route and connects to the target.

use std::io;
use std::sync::Arc;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::text::harmless;

use super::echo::{self, ECHO_ROUTE};
use super::event::Event;
use super::failure::{Failure, OrFailure};
use super::hub::Hub;
use super::meter::Count;
use super::options::WINDOW_BYTES;
use super::report::{self, REPORT_ROUTE};
use super::route::Target;
use super::socket::{Socket, Stream};
use super::{parameter, target};

/// Connects a channel to its target and reports the result to the core. Runs in a separate thread.
pub(super) fn connect(hub: &Hub, channel: u32, route: &str, parameter: &str) {
    let reached = reach(hub, route, parameter);
    let mut core = hub.lock();
    core.connecting -= 1;
    match reached {
        Ok((socket, window_bytes)) => {
            if core.trunk.connected(channel, window_bytes) {
                let route = route.to_owned();
                let socket = Arc::new(socket);
                core.channels.insert(channel, socket, route);
                hub.watch(&mut core, channel, hub.now_ns());
            } else {
                socket.abort();
            }
        }
        Err(failure) => {
            let (code, text) = (failure.code(), failure.for_peer());
            core.trunk.refuse(channel, code, text, hub.now_ns());
            // Escape the name, because the peer chose it.
            let route = harmless(route);
            hub.site.report(Event::Refused { route, failure });
        }
    }
    hub.settle(&mut core);
}

/// Connects to a built-in route, the echo or the report, for a peer that may use one of this side's
/// targets. `None` if `route` is not built in, if the peer may use no target, or if this side makes
/// no report.
fn built_in(hub: &Hub, route: &str) -> Option<io::Result<Stream>> {
    if !matches!(route, ECHO_ROUTE | REPORT_ROUTE) || !hub.site.has_exit_for(&hub.terms.peer) {
        return None;
    }
    match route {
        REPORT_ROUTE => Some(report::start(hub.site.reporter.as_ref()?, &hub.last_report)),
        _ => Some(echo::start(&hub.echoes)),
    }
}

/// Connects to a route's target. Returns the connection and the route's window.
fn reach(hub: &Hub, route: &str, parameter: &str) -> Result<(Socket, u64), Failure> {
    let Some(exit) = hub.site.exit(route) else {
        if let Some(opened) = built_in(hub, route) {
            let what = format!("cannot serve route {route}");
            let stream = opened.or_failure(FaultCode::Busy, what)?;
            let count = Count::new(hub.site.meter(route), None);
            return Ok((stream.counted(count), WINDOW_BYTES));
        }
        let text = format!(
            "unknown route {:?}: no target on the accepting side",
            harmless(route)
        );
        return Err(Failure::new(FaultCode::UnknownRoute, text));
    };
    let peer = &hub.terms.peer;
    let admitted = hub.site.check_admitted(peer);
    if let Err(refused) = admitted.and_then(|()| exit.allow.authorise_further(peer)) {
        let text = format!("route {route:?} does not allow the connecting host");
        return Err(Failure::new(refused.fault(), text).because(&refused));
    }
    let target = parameter::fill(route, &exit.target, parameter)?;
    if let Target::Unix(path) = &target
        && !parameter.is_empty()
        && hub.site.is_on_demand(path)
    {
        let text = format!(
            "route {route:?}: {target} is a listener of the accepting side, for connections that \
             leave from there"
        );
        return Err(Failure::new(FaultCode::Unauthorised, text));
    }
    let stop = hub.stop.wakeup();
    let socket = target::open(&hub.site, &hub.programs, route, &target, stop)?;
    Ok((socket, exit.window_bytes))
}
