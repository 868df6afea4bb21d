//! What a tunnel reports to its peers about its host. The tunnel collects the report before its
//! process is confined. Later it updates only the clock, the rules and the certificates.

use std::fs;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use dunlin_lane::fastest;
use dunlin_lane::sync::lock;
use dunlin_tunnel::Identities;
use serde::{Deserialize, Serialize};

use super::rules::Rules;
use crate::identity::chosen;

/// A report about a host, as JSON on the wire (docs/wire/tunnel.md). A peer's report may lack any
/// field.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Report {
    pub(crate) version: Option<String>,
    pub(crate) kernel: Option<String>,
    /// `kernel` or `process`: where the records of lanes are sealed.
    pub(crate) records: Option<String>,
    pub(crate) why: Option<String>,
    pub(crate) library: Option<String>,
    pub(crate) tcp_rmem: Option<u64>,
    pub(crate) tcp_wmem: Option<u64>,
    pub(crate) certificate_ends_s: Option<u64>,
    pub(crate) clock_ms: Option<u64>,
    /// The state of the packet filter's rules, if the tunnel has redirects.
    pub(crate) rules: Option<String>,
}

/// Makes the reports of a running tunnel.
#[derive(Clone, Debug)]
pub(super) struct Reporter {
    report: Arc<Mutex<Report>>,
    rules: Rules,
}

impl Reporter {
    pub(super) fn new(identities: &Identities, has_rules: bool, rules: Rules) -> Result<Self> {
        let choice = chosen(&identities.crypto)?;
        let by = if choice.is_kernel {
            "kernel"
        } else {
            "process"
        };
        let last = |name: &str| {
            let text = fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok()?;
            text.split_whitespace().last()?.parse().ok()
        };
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").ok();
        let report = Report {
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            kernel: kernel.map(|text| text.trim_end().to_owned()),
            records: Some(by.to_owned()),
            why: Some(choice.reason),
            library: Some(fastest::auto().provider.to_string()),
            tcp_rmem: last("tcp_rmem"),
            tcp_wmem: last("tcp_wmem"),
            ..Report::default()
        };
        let reporter = Self {
            report: Arc::new(Mutex::new(report)),
            rules,
        };
        reporter.renew(identities, has_rules);
        Ok(reporter)
    }

    /// Updates the parts of the report that a new configuration changes.
    pub(super) fn renew(&self, identities: &Identities, has_rules: bool) {
        let dates = identities.accepting.dates().iter();
        let ends = dates.map(|one| unix(one.not_after).0).min();
        let mut report = lock(&self.report);
        report.certificate_ends_s = ends;
        // The empty text is a placeholder: the method `text` reads the state for each report.
        report.rules = has_rules.then(String::new);
    }

    /// Returns the function that makes a report for each peer that asks.
    pub(super) fn answers(&self) -> impl Fn() -> String + Send + Sync + use<> {
        let reporter = self.clone();
        move || reporter.text()
    }

    /// The report, with the current time and the current state of the rules.
    fn text(&self) -> String {
        let mut report = lock(&self.report).clone();
        report.clock_ms = Some(unix(SystemTime::now()).1);
        if report.rules.is_some() {
            report.rules = Some(self.rules.read().state);
        }
        // Texts and numbers always have a JSON form.
        serde_json::to_string(&report).unwrap_or_default()
    }
}

impl Report {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text).context("the peer's report is malformed (at fault: peer)")
    }
}

/// A time in seconds and in milliseconds since 1970.
pub(crate) fn unix(time: SystemTime) -> (u64, u64) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let milliseconds = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    (since.as_secs(), milliseconds)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use serde_json::{Map, Value};

    use super::*;

    /// A report has exactly the fields that docs/wire/tunnel.md lists.
    ///
    /// Claim P25 of docs/security.
    #[test]
    fn a_report_has_the_documented_fields_and_no_other() {
        let text = || Some("x".to_owned());
        let report = Report {
            version: text(),
            kernel: text(),
            records: text(),
            why: text(),
            library: text(),
            tcp_rmem: Some(1),
            tcp_wmem: Some(1),
            certificate_ends_s: Some(1),
            clock_ms: None,
            rules: text(),
        };
        let reporter = Reporter {
            report: Arc::new(Mutex::new(report)),
            rules: Rules::in_directory(Path::new("/none")),
        };
        let sent: Map<String, Value> = serde_json::from_str(&reporter.text()).unwrap();
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/wire/tunnel.md");
        let page = fs::read_to_string(page).unwrap();
        let (_, listed) = page.split_once("Its fields, all optional:").unwrap();
        let (listed, _) = listed.split_once("The asking side").unwrap();
        let words = listed.split('`').skip(1).step_by(2);
        // The page also mentions `auto`, which is a setting's value and not a field.
        let mut fields: Vec<_> = words.filter(|word| *word != "auto").collect();
        fields.sort_unstable();
        assert!(sent.keys().eq(&fields), "{:?}, not {fields:?}", sent.keys());
    }
}
