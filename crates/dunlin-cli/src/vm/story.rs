//! The messages that a migration logs: about ten lines at level info, and every lane and iteration
//! at debug. The engine calls observers inside its spans, which add the session, the VM and the
//! peer to each message.

use dunlin::engine::Event;
use dunlin::engine::destination::DestinationEvent;
use dunlin::engine::journal::SourceRecord;
use tracing::{Span, debug, error, info, warn};

use crate::line::{Line, millis};

/// Logs an event at the source.
pub(super) fn at_source(event: &Event) {
    match event {
        Event::Recorded(SourceRecord::Migrating) => info!("migration starts"),
        Event::Recorded(record) => debug!("recorded {record}"),
        Event::Accepted { peer } => info!(certificate = peer, "destination accepted the VM"),
        Event::LaneUp { lane } => debug!(lane, "lane is up"),
        Event::LaneLost { lane, why } => warn!(lane, why, "lane is lost"),
        Event::ControlLost { why } => warn!(why, "control lane is lost"),
        Event::ControlResumed => info!("control lane is replaced"),
        Event::Iterated(one) => {
            let (pages, dirtied_pages, wire_bytes) = (one.pages, one.dirtied_pages, one.wire_bytes);
            let ms = millis(one.duration) as u64;
            if one.number == 1 {
                info!(pages, dirtied_pages, wire_bytes, ms, "all memory is sent");
            } else {
                debug!(pages, dirtied_pages, wire_bytes, ms, "iteration ended");
            }
        }
        Event::Throttled { percent } => info!(percent, "guest is throttled"),
        Event::Paused => info!("guest is paused"),
        Event::Committing => info!("commit follows"),
        Event::InDoubt { why } => warn!(why, "in doubt: the guest stays paused here"),
        Event::Running => info!("destination has the VM"),
        Event::Warning(text) => warn!("{text}"),
        _ => {}
    }
}

/// Logs the result of a migration at the source; `session` is the span of the migration.
pub(super) fn ended(session: &Span, line: &Line) {
    match line {
        Line::Moved(moved) => info!(
            parent: session,
            iterations = moved.iterations.len(),
            wire_bytes = moved.wire_bytes,
            total_s = moved.total_s,
            downtime_ms = moved.downtime.total_ms,
            "moved"
        ),
        Line::Failed(failed) => error!(
            parent: session,
            fault = failed.fault,
            at_fault = failed.at_fault,
            vm_is = failed.vm,
            "{}", failed.text
        ),
        _ => {}
    }
}

/// Logs an event at the destination.
pub(super) fn at_destination(event: &DestinationEvent) {
    match event {
        DestinationEvent::Rejected { reason } => warn!("rejected: {reason}"),
        DestinationEvent::Warning(text) => warn!("{text}"),
        DestinationEvent::Connected { .. } => info!("source connected"),
        DestinationEvent::Offered(_) => info!("VM is offered"),
        DestinationEvent::LaneUp { lane } => debug!(lane, "lane is up"),
        DestinationEvent::LaneLost { lane, why } => warn!(lane, why, "lane is lost"),
        DestinationEvent::ControlLost { why } => warn!(why, "control lane is lost"),
        DestinationEvent::ControlResumed => info!("control lane is replaced"),
        DestinationEvent::Ready => info!("memory and state have arrived"),
        DestinationEvent::Committed => info!("source sent commit"),
        DestinationEvent::Running { .. } => info!("VM is here"),
        _ => {}
    }
}
