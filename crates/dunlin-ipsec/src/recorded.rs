//! Sessions as their records and the kernel have them: of all processes in this network
//! namespace, whether these answer or not.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dunlin_proto::ipsec::object::{Object, Policy};

use super::error::IpsecError;
use super::record::{Owner, Record, RecordDirectory, Seen};
use super::tables::{AssociationStatus, Tables};

/// How long another process may be at taking ports before it is told of.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// A session that somebody has, or has left.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Its record.
    pub record: PathBuf,
    /// Whether a process keeps it. If not, that process has died or given it up, and
    /// [`clean_up`](super::clean_up) takes back what there is of it.
    pub is_kept: bool,
    /// Whose it is; none in a record of another release.
    pub owner: Option<Owner>,
    /// Whether what this host sends over the ports goes by its SAs; otherwise it is blocked.
    pub protects: bool,
    /// Its SAs, with what they have carried as the kernel has counted it.
    pub associations: Vec<AssociationStatus>,
}

/// The sessions on record in this directory, of this network namespace. One that cannot be told
/// of is an error of its own. Without a directory there are none. Changes nothing.
///
/// # Errors
/// The records cannot be looked for.
pub fn recorded(records: &Path) -> Result<Vec<Result<Recorded, IpsecError>>, IpsecError> {
    let Some(records) = RecordDirectory::standing(records) else {
        return Ok(Vec::new());
    };
    let found = {
        let _lock = records.lock(LOCK_TIMEOUT)?;
        records.all()?
    };
    // Of one that has installed nothing yet there is nothing to tell.
    let has_objects =
        |found: &Seen| !matches!(found, Ok((record, _)) if record.objects().is_empty());
    let found: Vec<_> = found.into_iter().filter(has_objects).collect();
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let tables = Tables::open(None)?;
    let told = found.into_iter().map(|found| {
        let (record, is_kept) = found?;
        tell(&record, is_kept, &tables)
    });
    Ok(told.collect())
}

fn tell(record: &Record, is_kept: bool, tables: &Tables) -> Result<Recorded, IpsecError> {
    let associations = record.objects().iter().filter_map(Object::association);
    Ok(Recorded {
        record: record.path().to_owned(),
        is_kept,
        owner: record.owner().cloned(),
        protects: protects(record.policies(), is_kept),
        associations: tables.statuses(associations)?,
    })
}

/// Whether policies stand by which packets leave. What a process has left blocks them as soon as
/// somebody has taken back its SAs, and the record names the policies until then.
fn protects<'a>(mut policies: impl Iterator<Item = &'a Policy>, is_kept: bool) -> bool {
    is_kept && policies.any(Policy::lets_out)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_session_protects_when_packets_leave_by_its_sas_and_somebody_keeps_it() {
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
        assert!(!nowhere.exists(), "it changes nothing");
    }
}
