//! The output of `virsh domjobinfo --rawstats`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

/// A job of a domain: one under way, or the last one that ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Job {
    /// The job's type: a value of libvirt's enum virDomainJobType.
    kind: u64,
    fields: BTreeMap<String, String>,
}

/// virDomainJobType: no job, the jobs under way, and one that has succeeded.
const NONE: u64 = 0;
const UNDER_WAY: [u64; 2] = [1, 2];
const COMPLETED: u64 = 3;
/// virDomainJobOperation: a migration, at its source.
const MIGRATION_OUT: u64 = 5;

impl Job {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut job = Self::default();
        let mut kind = None;
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let (key, value) = line
                .split_once(':')
                .with_context(|| format!("virsh printed {line:?} instead of a field of a job"))?;
            match key.trim() {
                "Job type" => kind = Some(value.trim()),
                key => {
                    // Keep the first field of this name: a later line can be a part of an error's
                    // text.
                    let value = value.trim().to_owned();
                    job.fields.entry(key.to_owned()).or_insert(value);
                }
            }
        }
        let kind = kind.context("virsh printed no type of the job")?;
        job.kind = match kind {
            "None" => NONE,
            kind => kind
                .parse()
                .with_context(|| format!("virsh printed {kind:?} instead of the type of a job"))?,
        };
        ensure!(
            job.kind <= 5,
            "virsh printed {kind:?} instead of the type of a job"
        );
        Ok(job)
    }

    pub(super) fn number(&self, field: &str) -> Option<u64> {
        self.fields.get(field)?.parse().ok()
    }

    /// Whether a migration of this VM to another host is under way.
    pub(super) fn is_leaving(&self) -> bool {
        UNDER_WAY.contains(&self.kind) && self.number("operation") == Some(MIGRATION_OUT)
    }

    pub(super) fn is_completed(&self) -> bool {
        self.kind == COMPLETED
    }

    /// The reason that libvirt gives for a failed job.
    pub(super) fn error(&self) -> Option<&str> {
        self.fields.get("errmsg").map(String::as_str)
    }

    /// The bytes of memory and disks that were sent.
    pub(super) fn bytes(&self) -> Option<u64> {
        self.number("data_processed")
            .or_else(|| self.number("memory_processed"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_job_under_way_is_read() {
        let text = "Job type: 2\n\noperation: 5\ntime_elapsed: 512\ndata_processed: 1048576\n";
        let job = Job::parse(text).unwrap();
        assert!(job.is_leaving() && !job.is_completed());
        assert_eq!(
            (job.bytes(), job.number("time_elapsed")),
            (Some(1 << 20), Some(512))
        );
        for text in [
            "Job type: 0\n",
            "Job type: 2\noperation: 4\n",
            "Job type: 3\noperation: 5\n",
        ] {
            assert!(!Job::parse(text).unwrap().is_leaving(), "{text}");
        }
    }

    /// Tests output that virsh does not print.
    #[test]
    fn i7_malformed_output_is_an_error_or_a_missing_figure() {
        for text in [
            "",
            "operation: 5\n",
            "Job type: lots\n",
            "Job type: 77\n",
            "Job type: 2\nx\n",
        ] {
            assert!(Job::parse(text).is_err(), "{text:?}");
        }
        let job = Job::parse("Job type: 2\noperation: 5\ndata_processed: -1\n").unwrap();
        assert_eq!(job.bytes(), None);
        // An error text of several lines replaces no field.
        let job = Job::parse("Job type: 4\ndowntime: 7\nerrmsg: a\ndowntime: 9\n").unwrap();
        assert_eq!((job.number("downtime"), job.error()), (Some(7), Some("a")));
    }
}
