//! Tunnels in `dunlin status`.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::control_service::{Request, described};
use super::line::{RouteLine, TunnelLine};
use crate::line::Line;
use crate::text::{clean, count};

const MIB: f64 = (1_u64 << 20) as f64;

/// Status of the tunnel behind a control socket.
pub(crate) fn status_within(socket: &Path, limit: Duration) -> Result<TunnelLine> {
    let mut client = Request::Status.ask(socket, Some(limit))?;
    client.expect(|line| match line {
        Line::Tunnel(line) => Some(*line),
        _ => None,
    })
}

/// Prints the status as text.
pub(crate) fn show(line: &TunnelLine) {
    println!(
        "tunnel {}: process {}, for {:.0} s; peers connect to {}",
        clean(&line.name),
        line.pid,
        line.running_s,
        clean(line.address.as_deref().unwrap_or("no address"))
    );
    for route in &line.routes {
        println!("  {}", clean(&of_route(route, line.over_ms)));
        show_lost(route.lost.as_deref());
        if let Some(why) = &route.trouble {
            println!("    last attempt to connect failed: {}", clean(why));
        }
    }
    if let Some(redirect) = &line.redirect {
        let refused = count(redirect.refused, "connection");
        println!("  redirect: {}; {refused} refused", redirect.rules.text());
    }
    for listener in &line.listeners {
        let closed = if listener.listens {
            ""
        } else {
            ", accepts no more"
        };
        let text = format!(
            "{}: {}{closed}",
            described(listener),
            count(listener.channels, "channel")
        );
        println!("  {}", clean(&text));
        show_lost(listener.lost.as_deref());
    }
    for peer in &line.peers {
        let text = format!(
            "peer {} at {}: {}, {}; {:.1} MiB queued here, {:.1} MiB unacknowledged",
            peer.peer,
            peer.at,
            count(peer.channels, "channel"),
            count(peer.lanes, "lane"),
            peer.held_bytes as f64 / MIB,
            peer.unacknowledged_bytes as f64 / MIB,
        );
        println!("  {}{}", clean(&text), limit(peer.limit_bytes_per_s));
        if let Some(why) = &peer.refused {
            println!("    opens no new channel: {}", clean(why));
        }
        if let Some(why) = &peer.trouble {
            println!("    lanes cannot be opened: {}", clean(why));
        }
    }
}

fn show_lost(why: Option<&str>) {
    if let Some(why) = why {
        println!("    does not listen now: {}", clean(why));
    }
}

fn of_route(route: &RouteLine, over_ms: f64) -> String {
    let mut text = format!("route {}", route.route);
    if let Some(listens) = &route.listens {
        text.push_str(&format!(", listens on {listens}"));
    }
    if let Some(to) = &route.to {
        text.push_str(&format!(", to {to}"));
    }
    if let Some(target) = &route.target {
        text.push_str(&format!(", target {target}"));
    }
    text.push_str(&format!(
        ": {}, {} ended, {} of them failed",
        count(route.channels, "channel"),
        route.closed + route.left_unread + route.failed,
        route.failed
    ));
    if route.left_unread > 0 {
        text.push_str(&format!(
            ", {} closed by the hypervisor before it read their last bytes",
            route.left_unread
        ));
    }
    if route.channels > 0 {
        text.push_str(&format!(
            "; {:.1} MiB/s in and {:.1} MiB/s out over the last {over_ms:.0} ms",
            route.read_bytes_per_s / MIB,
            route.written_bytes_per_s / MIB,
        ));
    }
    text + &limit(route.limit_bytes_per_s)
}

fn limit(bytes_per_s: Option<u64>) -> String {
    bytes_per_s.map_or(String::new(), |rate| {
        format!("; limited to {:.1} MiB/s", rate as f64 / MIB)
    })
}
