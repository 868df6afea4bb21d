//! QEMU migrates a running guest through a tunnel.

use std::fs;
use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Context, Result};
use dunlin_rig::machine::{Machine, Migration, QmpError, Setup, TIMEOUT, begin, finish};
use serde_json::{Value, json};

use super::ends::{SERVER, Site, Variant};
use super::pair::Pair;
use super::{vcpu, whole};

/// The duration and downtime of a migration.
pub(super) struct Moved {
    pub(super) total_s: f64,
    /// The downtime that QEMU's source reports.
    pub(super) downtime_ms: f64,
    /// The time from the stop of the source's guest to its start at the destination.
    pub(super) guest_downtime_ms: f64,
}

/// The limits of a migration.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// The limit on the downtime that QEMU predicts.
    pub(super) downtime: Duration,
    /// If the guest still runs at the source after this time, the migration counts as one that does
    /// not converge.
    pub(super) migration: Duration,
}

/// Migrates a new guest. `channels` is the number of multifd channels, or `None` without multifd.
///
/// Returns `None` if the guest still runs at the source after `limits.migration`.
pub(super) fn migrate(
    site: &Site,
    pair: &Pair,
    setup: &Setup,
    channels: Option<u8>,
    limits: Limits,
) -> Result<Option<Moved>> {
    // A previous QEMU may have left its socket behind.
    let _ = fs::remove_file(site.qemu());
    let mut source = Machine::start(setup, None)?;
    let mut destination = Machine::start_incoming(setup, None)?;
    source.wait_ready()?;
    vcpu::limit_qemu(&mut source, setup)?;
    let mut migration = Migration::through(
        &format!("unix:{}", pair.qemu.display()),
        &format!("unix:{}", site.qemu().display()),
    );
    migration.multifd = channels;
    migration.downtime_limit = limits.downtime;
    if pair.variant == Variant::QemuTls {
        migration.tls = Some((site.credentials.folder(), SERVER.to_owned()));
    }
    whole::touch(&setup.workload)?;
    let moved = watch(&mut source, &mut destination, &migration, limits.migration);
    moved.with_context(|| {
        let (source, destination) = (source.messages(), destination.messages());
        let variant = pair.variant;
        format!(
            "the migration through {variant} failed; the source says {source:?}, the destination \
             {destination:?}"
        )
    })
}

fn watch(
    source: &mut Machine,
    destination: &mut Machine,
    migration: &Migration,
    limit: Duration,
) -> Result<Option<Moved>> {
    begin(source, destination, migration)?;
    // Because of this command, the destination resumes the guest as soon as the guest has arrived.
    destination.qmp().execute("cont", json!({}))?;
    let is = |wanted: &'static str| move |name: &str, _: &Value| name == wanted;
    let stopped = match source.qmp().wait_event(limit, is("STOP")) {
        Err(QmpError::Socket(_, error)) if error.kind() == ErrorKind::TimedOut => return Ok(None),
        stopped => stopped?,
    };
    let resumed = destination.qmp().wait_event(TIMEOUT, is("RESUME"))?;
    finish(source, "source")?;
    finish(destination, "destination")?;
    destination.next_beat()?;
    let said = source.qmp().execute("query-migrate", json!({}))?;
    let number = |name: &str| said[name].as_f64().unwrap_or_default();
    let pause = at(&resumed)?.saturating_sub(at(&stopped)?);
    Ok(Some(Moved {
        total_s: number("total-time") / 1e3,
        downtime_ms: number("downtime"),
        guest_downtime_ms: pause.as_secs_f64() * 1e3,
    }))
}

/// The time of an event according to this host's clock.
fn at(event: &Value) -> Result<Duration> {
    let stamp = &event["timestamp"];
    let part = |name: &str| stamp[name].as_u64().context("a QMP event has no time");
    Ok(Duration::from_secs(part("seconds")?) + Duration::from_micros(part("microseconds")?))
}
