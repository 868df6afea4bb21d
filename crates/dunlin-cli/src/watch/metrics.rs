//! The metrics, as OpenMetrics text. [`METRICS`] defines all metrics, and docs/reference/metrics.md is
//! generated from it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::snapshot::{SessionLine, Snapshot};
use super::totals::{Histogram, Totals};
use crate::ipsec::AssociationLine;
use crate::line::{MigrationLine, ProgressLine};
use crate::tunnel::line::{LaneLine, PeerLine, RouteLine, TunnelLine};

/// The media type of the text.
pub(super) const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the metrics are read from.
pub(super) struct View<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) totals: &'a Totals,
}

struct Metric {
    kind: Kind,
    /// The name with the unit, without the suffix `_total` of a counter.
    name: &'static str,
    /// The names of the labels, separated by spaces.
    labels: &'static str,
    help: &'static str,
    read: Read,
}

impl Metric {
    /// The name without the unit, and the unit.
    fn parts(&self) -> (&'static str, Option<Unit>) {
        match self.name.rsplit_once('_') {
            Some((name, unit @ ("bytes" | "seconds" | "ratio"))) => {
                (name, Some(Unit::Other(unit.to_owned())))
            }
            _ => (self.name, None),
        }
    }
}

/// Passes each sample to [`Put`]: the values of its labels, and its value.
type Read = fn(&View<'_>, Put<'_>);
type Put<'a> = &'a mut dyn FnMut(&[&str], Value);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Distribution,
}

#[derive(Clone, Debug)]
enum Value {
    Whole(u64),
    Real(f64),
    Values(Histogram),
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Whole(number)
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Whole(number.into())
    }
}

impl From<bool> for Value {
    fn from(is: bool) -> Self {
        Self::Whole(is.into())
    }
}

/// Defines the metrics: the kind, the name with its unit, the names of the labels, what the metric
/// says, and how it is read.
macro_rules! metrics {
    ($($kind:ident $name:literal ($($labels:literal)?) $help:literal => $read:expr;)*) => {
        &[$(Metric {
            kind: Kind::$kind,
            name: $name,
            labels: concat!($($labels)?),
            help: $help,
            read: $read,
        }),*]
    };
}

const METRICS: &[Metric] = metrics! {
    Gauge "dunlin_build_info" ("version")
        "The version of the process that serves the metrics; the value is 1."
        => |_, put| put(&[env!("CARGO_PKG_VERSION")], true.into());
    Gauge "dunlin_processes_silent" ("kind")
        "Processes that did not report their status within two seconds: they may be stopped."
        => |view, put| {
        for kind in ["vm", "tunnel", "ipsec", "handoff"] {
            let silent = view.snapshot.silent.iter().filter(|one| one.kind == kind);
            put(&[kind], (silent.count() as u64).into());
        }
    };
    Counter "dunlin_tunnel_route_bytes" ("tunnel route direction")
        "Bytes of hypervisors on a route, without the overhead of encryption: sent to the peer, or \
         received from it."
        => |view, put| {
        routes(view, put, "sent", |route| route.read_bytes.into());
        routes(view, put, "received", |route| route.written_bytes.into());
    };
    Gauge "dunlin_tunnel_route_channels" ("tunnel route")
        "Open connections of hypervisors on a route."
        => |view, put| routes(view, put, "", |route| route.channels.into());
    Counter "dunlin_tunnel_route_channels_ended" ("tunnel route result")
        "Connections of hypervisors that ended: closed, failed, or left-unread, which means \
         closed by a hypervisor that did not read the last bytes."
        => |view, put| {
        routes(view, put, "closed", |route| route.closed.into());
        routes(view, put, "left-unread", |route| route.left_unread.into());
        routes(view, put, "failed", |route| route.failed.into());
    };
    Gauge "dunlin_tunnel_route_trouble" ("tunnel route")
        "Not 0 if the route does not listen although it should, or if the last attempt to reach \
         its peer failed."
        => |view, put| {
        routes(view, put, "", |route| {
            (route.lost.is_some() || route.trouble.is_some()).into()
        })
    };
    Gauge "dunlin_tunnel_peer_lanes" ("tunnel peer at")
        "Open lanes to a peer, of both directions."
        => |view, put| peers(view, put, |peer| peer.lanes.into());
    Gauge "dunlin_tunnel_peer_trouble" ("tunnel peer at")
        "Not 0 if the last attempt to open a lane of a direction failed, or if the peer gets no \
         new connections."
        => |view, put| {
        peers(view, put, |peer| {
            (peer.trouble.is_some() || peer.refused.is_some()).into()
        })
    };
    Gauge "dunlin_tunnel_peer_unacknowledged_bytes" ("tunnel peer at")
        "The standing queue towards a peer: bytes that were read from hypervisors and that the \
         peer has not acknowledged."
        => |view, put| peers(view, put, |peer| peer.unacknowledged_bytes.into());
    Gauge "dunlin_tunnel_peer_held_bytes" ("tunnel peer at")
        "The standing queue from a peer: received bytes that the hypervisors of this host have \
         not read."
        => |view, put| peers(view, put, |peer| peer.held_bytes.into());
    Counter "dunlin_tunnel_lane_bytes" ("tunnel peer at direction lane")
        "Bytes on the connection of an open lane, with the overhead of encryption. A lane that \
         replaces a lost one has a new number."
        => |view, put| lanes(view, put, |lane| lane.bytes.into());
    Counter "dunlin_tunnel_lane_retransmits" ("tunnel peer at direction lane")
        "TCP segments that this host sent again on an open lane."
        => |view, put| lanes(view, put, |lane| lane.retransmits.into());
    Counter "dunlin_tunnel_lanes_lost" ("tunnel")
        "Lanes that were lost or could not be opened."
        => |view, put| tunnels(view, put, |tunnel| Some(tunnel.lanes_lost.into()));
    Counter "dunlin_tunnel_redirects_refused" ("tunnel")
        "Redirected connections that were refused, because no redirect covers their destination."
        => |view, put| {
        tunnels(view, put, |tunnel| {
            Some(tunnel.redirect.as_ref()?.refused.into())
        })
    };
    Gauge "dunlin_tunnel_redirect_rules_applied" ("tunnel")
        "1 if the packet filter has the rules of the redirects; 0 if they differ, are missing or \
         are not watched."
        => |view, put| {
        tunnels(view, put, |tunnel| {
            Some((tunnel.redirect.as_ref()?.rules.state == "applied").into())
        });
    };
    Gauge "dunlin_certificate_expiry_timestamp_seconds" ("kind name item path position")
        "When an item of the identity of a process expires, in seconds since 1970. For a \
         revocation list: when the next one is due. The label kind is tunnel, vm (a process \
         `vm receive`), ipsec (`ipsec serve`) or handoff (`handoff accept`)."
        => |view, put| {
        for (labels, at) in expiries(view.snapshot) {
            put(&labels.each_ref().map(String::as_str), at.into());
        }
    };
    Gauge "dunlin_migrations_active" ("role")
        "Migrations of `dunlin vm` under way."
        => |view, put| {
        for role in ["source", "destination"] {
            let of_role = migrations(view).filter(|(line, _)| line.role == role);
            put(&[role], (of_role.count() as u64).into());
        }
    };
    Gauge "dunlin_migrations_in_doubt" ()
        "VMs that are paused here in doubt: the destination did not report whether they run there, or \
         it reported that they ran there and died."
        => |view, put| {
        let sessions = view.snapshot.sessions.iter();
        let in_doubt = sessions.filter(|one| one.line.resolvable);
        put(&[], (in_doubt.count() as u64).into());
    };
    Counter "dunlin_migration_lane_bytes" ("vm uuid lane")
        "Guest memory that a lane of a migration under way has carried."
        => |view, put| sending_lanes(view, put, |progress| progress.lanes.clone());
    Gauge "dunlin_migration_remaining_bytes" ("vm uuid")
        "Guest memory that is still to be sent in this iteration."
        => |view, put| sending(view, put, |progress| progress.remaining_bytes.into());
    Gauge "dunlin_migration_dirty_pages_per_second" ("vm uuid")
        "Pages per second that the guest wrote during the last iteration."
        => |view, put| sending(view, put, |progress| progress.dirty_pages_per_s.into());
    Gauge "dunlin_migration_iteration" ("vm uuid")
        "The number of the iteration under way."
        => |view, put| sending(view, put, |progress| progress.iteration.into());
    Gauge "dunlin_migration_predicted_downtime_seconds" ("vm uuid")
        "The downtime if the switchover began now."
        => |view, put| {
        sending(view, put, |progress| {
            Value::Real(progress.predicted_downtime_ms / 1000.0)
        })
    };
    Gauge "dunlin_migration_throttle_ratio" ("vm uuid")
        "The part of its CPU time that the guest does not get, because it writes memory faster \
         than the lanes carry it."
        => |view, put| {
        for (line, migration) in migrations(view) {
            let ratio = f64::from(migration.throttle) / 100.0;
            put(&[&line.vm, &line.uuid], Value::Real(ratio));
        }
    };
    Counter "dunlin_migration_lanes_lost" ("vm uuid")
        "Lanes that a migration under way has lost."
        => |view, put| {
        for (line, migration) in migrations(view) {
            put(&[&line.vm, &line.uuid], migration.lanes_lost.into());
        }
    };
    Counter "dunlin_migration_lane_retransmits" ("vm uuid lane")
        "TCP segments that a lane of a migration under way has sent again."
        => |view, put| {
        sending_lanes(view, put, |progress| {
            let lanes = progress.retransmits.iter();
            lanes.map(|(lane, count)| (*lane, (*count).into())).collect()
        })
    };
    Counter "dunlin_migrations" ("role result")
        "Migrations of `dunlin vm` that ended: moved, failed, cancelled or in-doubt."
        => |view, put| {
        for ((role, result), count) in &view.totals.migrations {
            put(&[role, result], (*count).into());
        }
    };
    Counter "dunlin_migrations_sent_bytes" ()
        "Bytes that migrations from this host sent, counted when a migration has moved its VM."
        => |view, put| put(&[], view.totals.sent_bytes.into());
    Distribution "dunlin_migration_duration_seconds" ("role result")
        "The time from a migration's first connection to its end."
        => |view, put| {
        for ((role, result), values) in &view.totals.durations {
            put(&[role, result], Value::Values(values.clone()));
        }
    };
    Distribution "dunlin_migration_downtime_seconds" ()
        "The downtime as the source saw it: from the pause of the guest until it ran at the \
         destination."
        => |view, put| put(&[], Value::Values(view.totals.downtime.clone()));
    Distribution "dunlin_migration_downtime_part_seconds" ("part")
        "Parts of the downtime: pause, last-pages, state, ready and resume. The last pages and \
         the state overlap."
        => |view, put| {
        for (part, values) in &view.totals.parts {
            put(&[part], Value::Values(values.clone()));
        }
    };
    Distribution "dunlin_migration_guest_downtime_seconds" ("role")
        "The downtime as the guest saw it, by its clock."
        => |view, put| {
        for (role, values) in &view.totals.guest_downtimes {
            put(&[role], Value::Values(values.clone()));
        }
    };
    Gauge "dunlin_ipsec_session_up" ("peer ports")
        "1 if the session's policies and SAs protect the ports."
        => |view, put| {
        for session in &view.snapshot.ipsec {
            let ports = session.ports.as_deref().unwrap_or_default();
            put(&[&session.peer, ports], session.up.into());
        }
    };
    Counter "dunlin_ipsec_sa_bytes" ("peer direction spi cpu")
        "Bytes that an SA has protected. The label cpu is empty for an SA that belongs to no CPU."
        => |view, put| associations(view, put, |one| one.bytes);
    Counter "dunlin_ipsec_sa_packets" ("peer direction spi cpu")
        "Packets that an SA has protected."
        => |view, put| associations(view, put, |one| one.packets);
    Counter "dunlin_ipsec_sa_replayed" ("peer direction spi cpu")
        "Packets that the kernel dropped because they had arrived before."
        => |view, put| associations(view, put, |one| Some(one.replayed?.into()));
    Counter "dunlin_ipsec_sa_outside_window" ("peer direction spi cpu")
        "Packets that the kernel dropped because they were too old for the replay window."
        => |view, put| associations(view, put, |one| Some(one.outside_window?.into()));
    Counter "dunlin_ipsec_sa_not_authentic" ("peer direction spi cpu")
        "Packets that the kernel dropped because they were changed or forged."
        => |view, put| associations(view, put, |one| Some(one.not_authentic?.into()));
    Counter "dunlin_handoff_handed_over" ("at name")
        "Connections that `handoff accept` handed over, by its address and the server name."
        => |view, put| {
        for handoff in &view.snapshot.handoffs {
            for (name, count) in &handoff.handed_over {
                put(&[&handoff.address, name], (*count).into());
            }
        }
    };
    Counter "dunlin_handoff_forwarded" ("at")
        "Clients that `handoff accept` forwarded to the server of --else."
        => |view, put| {
        for handoff in &view.snapshot.handoffs {
            put(&[&handoff.address], handoff.forwarded.into());
        }
    };
    Counter "dunlin_handoff_refused" ("at fault")
        "Clients that `handoff accept` refused, and handshakes, hand-offs and forwarded connections \
         that failed, by the fault code."
        => |view, put| {
        for handoff in &view.snapshot.handoffs {
            for (fault, count) in &handoff.refused {
                put(&[&handoff.address, fault], (*count).into());
            }
        }
    };
};

/// The items of all identities by their labels, with the time at which each expires. If several
/// processes have the same labels, the earliest time is used: processes with a later time have
/// loaded a newer file, and the process with the earliest time must still load it.
fn expiries(snapshot: &Snapshot) -> BTreeMap<[String; 5], u64> {
    let tunnels = snapshot.tunnels.iter();
    let tunnels = tunnels.map(|one| ("tunnel", &one.name, &one.certificates));
    let handoffs = snapshot.handoffs.iter();
    let handoffs = handoffs.map(|one| ("handoff", &one.address, &one.certificates));
    let others = snapshot.identities.iter();
    let others = others.map(|one| (&*one.kind, &one.name, &one.certificates));
    let mut earliest = BTreeMap::new();
    for (kind, name, certificates) in tunnels.chain(handoffs).chain(others) {
        for one in certificates {
            let position = one.position.to_string();
            let labels = [kind, name, &one.item, &one.path, &position].map(str::to_owned);
            let at = earliest.entry(labels).or_insert(one.not_after_unix_s);
            *at = one.not_after_unix_s.min(*at);
        }
    }
    earliest
}

/// Calls `put` with the `value` of each tunnel that has one.
fn tunnels(view: &View<'_>, put: Put<'_>, value: fn(&TunnelLine) -> Option<Value>) {
    for tunnel in &view.snapshot.tunnels {
        if let Some(value) = value(tunnel) {
            put(&[&tunnel.name], value);
        }
    }
}

/// Calls `put` with the `value` of each route. `last` is the value of the metric's last label.
fn routes(view: &View<'_>, put: Put<'_>, last: &str, value: fn(&RouteLine) -> Value) {
    for tunnel in &view.snapshot.tunnels {
        for route in &tunnel.routes {
            put(&[&tunnel.name, &route.route, last], value(route));
        }
    }
}

/// Calls `put` with the `value` of each peer.
fn peers(view: &View<'_>, put: Put<'_>, value: fn(&PeerLine) -> Value) {
    for tunnel in &view.snapshot.tunnels {
        for peer in &tunnel.peers {
            put(&[&tunnel.name, &peer.peer, &peer.at], value(peer));
        }
    }
}

/// Calls `put` with the `value` of each lane of each trunk.
fn lanes(view: &View<'_>, put: Put<'_>, value: fn(&LaneLine) -> Value) {
    for tunnel in &view.snapshot.tunnels {
        for peer in &tunnel.peers {
            for lane in &peer.by_lane {
                let number = lane.lane.to_string();
                let of = [
                    &*tunnel.name,
                    &peer.peer,
                    &peer.at,
                    &lane.direction,
                    &number,
                ];
                put(&of, value(lane));
            }
        }
    }
}

/// The migrations under way, on either side.
fn migrations<'a>(view: &View<'a>) -> impl Iterator<Item = (&'a SessionLine, &'a MigrationLine)> {
    let sessions = view.snapshot.sessions.iter().map(|one| &one.line);
    sessions.filter_map(|line| Some((line, line.live.as_ref()?.migration.as_ref()?)))
}

/// Calls `put` with the `value` of each migration from this host that has sent memory.
fn sending(view: &View<'_>, put: Put<'_>, value: fn(&ProgressLine) -> Value) {
    for (line, migration) in migrations(view) {
        if let Some(progress) = &migration.progress {
            put(&[&line.vm, &line.uuid], value(progress));
        }
    }
}

/// Calls `put` with the counter of each lane of each migration from this host that has sent memory.
fn sending_lanes(view: &View<'_>, put: Put<'_>, counters: fn(&ProgressLine) -> Vec<(u16, u64)>) {
    for (line, migration) in migrations(view) {
        for (lane, count) in migration.progress.iter().flat_map(counters) {
            put(&[&line.vm, &line.uuid, &lane.to_string()], count.into());
        }
    }
}

/// Calls `put` with the counter `value` of each SA. A removed SA has no counters.
fn associations(view: &View<'_>, put: Put<'_>, value: fn(&AssociationLine) -> Option<u64>) {
    for session in &view.snapshot.ipsec {
        for one in &session.associations {
            let spi = format!("{:#010x}", one.spi);
            let cpu = one.cpu.map_or(String::new(), |cpu| cpu.to_string());
            if let Some(value) = value(one) {
                put(&[&session.peer, &one.direction, &spi, &cpu], value.into());
            }
        }
    }
}

/// Writes all metrics.
pub(super) fn text(view: &View<'_>) -> String {
    let families = METRICS.iter().map(|metric| {
        let mut samples = BTreeMap::new();
        (metric.read)(view, &mut |labels, value| {
            let labels = metric.labels.split(' ').zip(labels);
            let labels = labels.map(|(name, value)| (name, (*value).to_owned()));
            // Several connections of a relay to one peer have the same labels, and peers may send
            // the same name for several VMs. The values of such samples are added if they are whole
            // numbers.
            match (samples.entry(labels.collect()), value) {
                (Entry::Occupied(mut sum), Value::Whole(more)) => {
                    if let Value::Whole(sum) = sum.get_mut() {
                        *sum = sum.saturating_add(more);
                    }
                }
                (Entry::Occupied(_), _) => {}
                (Entry::Vacant(free), value) => {
                    free.insert(value);
                }
            }
        });
        (metric, samples)
    });
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Families(families.collect())));
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = text::encode(&mut text, &registry);
    text
}

/// Samples by the names and the values of their labels.
type Samples = BTreeMap<Vec<(&'static str, String)>, Value>;

struct Families(Vec<(&'static Metric, Samples)>);

impl fmt::Debug for Families {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Families").finish_non_exhaustive()
    }
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (metric, samples) in &self.0 {
            let (name, unit) = metric.parts();
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Distribution => MetricType::Histogram,
            };
            let help = metric.help;
            let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
            for (labels, value) in samples {
                encode(family.encode_family(labels)?, metric.kind, value)?;
            }
        }
        Ok(())
    }
}

fn encode(mut encoder: MetricEncoder<'_>, kind: Kind, value: &Value) -> fmt::Result {
    match (kind, value) {
        (Kind::Counter, Value::Whole(number)) => {
            encoder.encode_counter::<NoLabelSet, _, u64>(number, None)
        }
        (_, Value::Whole(number)) => encoder.encode_gauge(number),
        (_, Value::Real(number)) => encoder.encode_gauge(number),
        (_, Value::Values(values)) => {
            let (sum, count) = (values.sum, values.count());
            encoder.encode_histogram::<NoLabelSet>(sum, count, &values.buckets, None)
        }
    }
}

#[cfg(test)]
mod tests;
