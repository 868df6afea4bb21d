//! A migration from one QEMU to another with QEMU's own protocol.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Machine, MachineError, TIMEOUT};

/// The parameters of a migration.
#[derive(Clone, Debug)]
pub struct Migration {
    /// The address on which the destination listens: `tcp:ADDRESS:PORT` or `unix:PATH`.
    pub listen: String,
    /// The address to which the source connects: the address on which the destination listens, or
    /// that of a proxy.
    pub connect: String,
    /// The number of multifd connections. With `None`, all memory is sent over the main
    /// connection.
    pub multifd: Option<u8>,
    /// The folder with the certificates of both sides ([`super::Credentials`]), and the name that
    /// the source requires in the destination's certificate.
    pub tls: Option<(PathBuf, String)>,
    /// The bandwidth limit in bytes per second; `None` for no limit.
    pub bandwidth: Option<u64>,
    /// The source begins the switchover when the downtime that it predicts is at most this long.
    pub downtime_limit: Duration,
}

impl Migration {
    /// A migration over one unencrypted connection, without a bandwidth limit and with QEMU's
    /// default downtime limit.
    #[must_use]
    pub fn tcp(address: SocketAddr) -> Self {
        Self::through(&format!("tcp:{address}"), &format!("tcp:{address}"))
    }

    /// Like [`Migration::tcp`], with a source that connects to a proxy.
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

/// The source's report about a completed migration.
#[derive(Clone, Debug)]
pub struct Migrated {
    /// The time from the first byte to the last.
    pub total: Duration,
    /// The downtime of the guest.
    pub downtime: Duration,
    /// Iterations over the dirty pages.
    pub passes: u64,
    /// Bytes of memory sent.
    pub sent_bytes: u64,
    /// The complete result of `query-migrate`.
    pub raw: Value,
}

/// Migrates, and returns with the guest paused at the destination. The source keeps its copy,
/// which is also paused, for a comparison.
///
/// # Errors
/// The migration did not complete. If [`MachineError::Migration`] names the destination, the guest
/// stays paused at the source. After any other error, the guest continues to run at the source.
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

/// Starts listening at the destination and sending at the source; [`finish`] waits for the end.
///
/// # Errors
/// One of the machines refuses the command.
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
    // This also skips events of earlier migrations. QEMU reports the failure of some migrations
    // twice, and `finish` must not treat the second report as the end of this migration.
    source.qmp().wait_event(TIMEOUT, |name, data| {
        name == "MIGRATION" && data["status"] == "setup"
    })?;
    Ok(())
}

/// Waits until a machine's migration has ended; `side` is used in the error.
///
/// # Errors
/// The migration did not complete, or did not end within [`TIMEOUT`].
pub fn finish(machine: &mut Machine, side: &'static str) -> Result<(), MachineError> {
    let ends = ["completed", "failed", "cancelled"];
    let event = machine.qmp().wait_event(TIMEOUT, |name, data| {
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

/// Cancels a migration at the source, and waits until the guest runs there again.
///
/// # Errors
/// The migration can no longer be cancelled.
pub fn cancel(source: &mut Machine) -> Result<(), MachineError> {
    source.qmp().execute("migrate_cancel", json!({}))?;
    match finish(source, "source") {
        Err(MachineError::Migration { status, .. }) if status == "cancelled" => Ok(()),
        Ok(()) => Err(MachineError::Migration {
            side: "source",
            status: "completed".to_owned(),
            reason: "it was too late to cancel the migration".to_owned(),
        }),
        Err(other) => Err(other),
    }
}
