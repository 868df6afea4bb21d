//! A migration from one QEMU to another, by their own means.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Machine, MachineError, PATIENCE};

/// How memory travels.
#[derive(Clone, Debug)]
pub struct Migration {
    /// Where the destination listens: `tcp:ADDRESS:PORT` or `unix:PATH`.
    pub listen: String,
    /// Where the source connects to: the same, or something in between that leads there.
    pub connect: String,
    /// Connections for memory beside the main one; the main one alone when not said.
    pub multifd: Option<u8>,
    /// Certificates of both sides ([`super::Credentials`]), and the name that the source expects
    /// of the destination.
    pub tls: Option<(PathBuf, String)>,
    /// Bytes per second; without a limit when not said.
    pub bandwidth: Option<u64>,
    /// Longest pause that the source may predict for the switchover.
    pub downtime_limit: Duration,
}

impl Migration {
    /// One plain connection without a limit, with QEMU's own downtime limit.
    #[must_use]
    pub fn tcp(address: SocketAddr) -> Self {
        Self::through(&format!("tcp:{address}"), &format!("tcp:{address}"))
    }

    /// The same, where the source connects to something in between.
    #[must_use]
    pub fn through(connect: &str, listen: &str) -> Self {
        Self {
            listen: listen.to_owned(),
            connect: connect.to_owned(),
            multifd: None,
            tls: None,
            bandwidth: None,
            downtime_limit: Duration::from_millis(300),
        }
    }

    fn apply(&self, machine: &mut Machine, endpoint: &str) -> Result<(), MachineError> {
        let mut parameters = json!({
            "max-bandwidth": self.bandwidth.unwrap_or(0),
            "downtime-limit": u64::try_from(self.downtime_limit.as_millis()).unwrap_or(u64::MAX),
        });
        let mut capabilities = vec![json!({"capability": "events", "state": true})];
        if let Some(channels) = self.multifd {
            parameters["multifd-channels"] = channels.into();
            capabilities.push(json!({"capability": "multifd", "state": true}));
        }
        let qmp = machine.qmp();
        if let Some((folder, name)) = &self.tls {
            qmp.execute(
                "object-add",
                json!({
                    "qom-type": "tls-creds-x509", "id": "migration-tls", "dir": folder,
                    "endpoint": endpoint, "verify-peer": true,
                }),
            )?;
            parameters["tls-creds"] = "migration-tls".into();
            if endpoint == "client" {
                parameters["tls-hostname"] = name.as_str().into();
            }
        }
        qmp.execute(
            "migrate-set-capabilities",
            json!({"capabilities": capabilities}),
        )?;
        qmp.execute("migrate-set-parameters", parameters)?;
        Ok(())
    }
}

/// What the source says about a migration that completed.
#[derive(Clone, Debug)]
pub struct Migrated {
    /// From the first byte to the last.
    pub total: Duration,
    /// How long the guest stood still.
    pub downtime: Duration,
    /// Passes over the dirty pages.
    pub passes: u64,
    /// Bytes of memory that were sent.
    pub sent_bytes: u64,
    /// Everything that QEMU said (`query-migrate`).
    pub raw: Value,
}

/// Migrates, and returns when the guest stands at the destination, paused. The source keeps its
/// copy, paused too, so that the two can be compared.
///
/// # Errors
/// It did not complete; the source runs on unless [`MachineError::Migration`] names the
/// destination.
pub fn migrate(
    source: &mut Machine,
    destination: &mut Machine,
    migration: &Migration,
) -> Result<Migrated, MachineError> {
    begin(source, destination, migration)?;
    finish(source, "source")?;
    finish(destination, "destination")?;
    let raw = source.qmp().execute("query-migrate", json!({}))?;
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    Ok(Migrated {
        total: Duration::from_millis(number(&raw["total-time"])),
        downtime: Duration::from_millis(number(&raw["downtime"])),
        passes: number(&raw["ram"]["dirty-sync-count"]),
        sent_bytes: number(&raw["ram"]["transferred"]),
        raw,
    })
}

/// Has the destination listen and the source begin; [`finish`] waits for the end.
///
/// # Errors
/// One of them refuses.
pub fn begin(
    source: &mut Machine,
    destination: &mut Machine,
    migration: &Migration,
) -> Result<(), MachineError> {
    migration.apply(destination, "server")?;
    migration.apply(source, "client")?;
    destination
        .qmp()
        .execute("migrate-incoming", json!({"uri": migration.listen}))?;
    source
        .qmp()
        .execute("migrate", json!({"uri": migration.connect}))?;
    // What QEMU says of an earlier attempt lies before this; it says of some twice that they failed.
    source.qmp().wait_event(PATIENCE, |name, data| {
        name == "MIGRATION" && data["status"] == "setup"
    })?;
    Ok(())
}

/// Waits until a machine's migration has ended; `side` is for the error.
///
/// # Errors
/// It ended otherwise than completed, or does not end.
pub fn finish(machine: &mut Machine, side: &'static str) -> Result<(), MachineError> {
    let ends = ["completed", "failed", "cancelled"];
    let event = machine.qmp().wait_event(PATIENCE, |name, data| {
        name == "MIGRATION"
            && data["status"]
                .as_str()
                .is_some_and(|status| ends.contains(&status))
    })?;
    let status = event["data"]["status"].as_str().unwrap_or_default();
    if status == "completed" {
        return Ok(());
    }
    let details = machine.qmp().execute("query-migrate", json!({}));
    let reason = details.map_or_else(
        |error| error.to_string(),
        |details| {
            let reason = details["error-desc"].as_str().unwrap_or_default();
            format!("{reason} {}", machine.messages())
        },
    );
    Err(MachineError::Migration {
        side,
        status: status.to_owned(),
        reason,
    })
}

/// Cancels a migration at the source, and waits until the guest runs on there.
///
/// # Errors
/// It cannot be cancelled any more.
pub fn cancel(source: &mut Machine) -> Result<(), MachineError> {
    source.qmp().execute("migrate_cancel", json!({}))?;
    match finish(source, "source") {
        Err(MachineError::Migration { status, .. }) if status == "cancelled" => Ok(()),
        Ok(()) => Err(MachineError::Migration {
            side: "source",
            status: "completed".to_owned(),
            reason: "it was too late to cancel it".to_owned(),
        }),
        Err(other) => Err(other),
    }
}
