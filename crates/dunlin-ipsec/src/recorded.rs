//! Lists the sessions of all processes in this network namespace, from their records and the
//! kernel's tables. The processes need not respond.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dunlin_proto::ipsec::object::{Object, Policy};

use super::error::IpsecError;
use super::record::{Owner, Record, RecordDirectory, Seen};
use super::tables::{AssociationStatus, Tables};

/// How long to wait for another process that holds the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// A recorded session. Its process may be alive or dead.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The record file.
    pub record: PathBuf,
    /// Whether a process still runs the session. If not, its process has died or has given the
    /// session up, and [`clean_up`](super::clean_up) can remove the remaining policies and SAs.
    pub is_kept: bool,
    /// The owner; `None` if the record does not name it.
    pub owner: Option<Owner>,
    /// Whether a process runs the session, and the session's SAs seal the packets that this host
    /// sends on the ports.
    pub protects: bool,
    /// The session's SAs with the kernel's counters.
    pub associations: Vec<AssociationStatus>,
}

/// Returns the sessions recorded in this directory for this network namespace. A session that
/// cannot be read is an `Err` entry. If the directory does not exist, the list is empty. This
/// function changes neither the records nor the kernel's tables.
///
/// # Errors
/// The directory of records or procfs cannot be read, another process holds the directory's lock
/// for too long, or the kernel's tables cannot be opened.
pub fn recorded(records: &Path) -> Result<Vec<Result<Recorded, IpsecError>>, IpsecError> {
    let Some(records) = RecordDirectory::existing(records) else {
        return Ok(Vec::new());
    };
    let found = {
        let _lock = records.lock(LOCK_TIMEOUT)?;
        records.all()?
    };
    // Skip sessions of which nothing is installed.
    let has_objects =
        |found: &Seen| !matches!(found, Ok((record, _)) if record.objects().is_empty());
    let found: Vec<_> = found.into_iter().filter(has_objects).collect();
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let tables = Tables::open(None)?;
    let results = found.into_iter().map(|found| {
        let (record, is_kept) = found?;
        read(&record, is_kept, &tables)
    });
    Ok(results.collect())
}

fn read(record: &Record, is_kept: bool, tables: &Tables) -> Result<Recorded, IpsecError> {
    let associations = record.objects().iter().filter_map(Object::association);
    Ok(Recorded {
        record: record.path().to_owned(),
        is_kept,
        owner: record.owner().cloned(),
        protects: protects(record.policies(), is_kept),
        associations: tables.statuses(associations)?,
    })
}

/// Whether the policies of a running session let packets leave. The record of a dead process still
/// lists these policies after blocking policies have replaced them.
fn protects<'a>(mut policies: impl Iterator<Item = &'a Policy>, is_kept: bool) -> bool {
    is_kept && policies.any(Policy::lets_out)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_session_protects_while_packets_leave_by_its_sas_and_a_process_holds_it() {
        let policy = |words: &str| -> Policy {
            let object: Object = format!("policy {words}").parse().unwrap();
            *object.policy().unwrap()
        };
        let ports = "192.0.2.1 192.0.2.2 ports 0/0x0000 4444/0xffff priority 103";
        let block = policy(&format!("out {ports} block"));
        let out = policy(&format!("out {ports} protect 65536"));
        let inward =
            policy("in 192.0.2.2 192.0.2.1 ports 4444/0xffff 0/0x0000 priority 103 protect 65536");
        assert!(!protects([block, inward].iter(), true));
        assert!(protects([block, inward, out].iter(), true));
        assert!(!protects([out, inward].iter(), false));
    }

    #[test]
    fn without_a_directory_there_are_no_sessions() {
        let nowhere = std::env::temp_dir().join("dunlin-no-such-records");
        assert!(recorded(&nowhere).unwrap().is_empty());
        assert!(!nowhere.exists(), "`recorded` created the directory");
    }
}
