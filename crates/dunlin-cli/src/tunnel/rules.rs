//! What `dunlin redirect watch` found about the packet filter's rules. The tunnel cannot read the
//! rules itself, because that needs CAP_NET_ADMIN.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dunlin_tunnel::Tunnel;
use serde::Deserialize;
use tracing::{info, warn};

use super::line::RulesLine;
use crate::service::start;

/// The interval at which the tunnel reads the file; `redirect watch` compares the rules at the same
/// interval.
const INTERVAL: Duration = Duration::from_secs(10);
/// The age above which the file's content is ignored: three intervals.
const TOO_OLD_S: u64 = 30;

/// The parts of `state.json` that the tunnel needs.
#[derive(Deserialize)]
struct State {
    state: String,
    difference: Option<String>,
    checked_unix_s: u64,
}

/// The path of `state.json`.
#[derive(Clone, Debug)]
pub(super) struct Rules(PathBuf);

impl Rules {
    pub(super) fn in_directory(directory: &Path) -> Self {
        Self(directory.join("state.json"))
    }

    /// The state of the rules, as `redirect watch` most recently found it.
    pub(super) fn read(&self) -> RulesLine {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_s = now.map_or(0, |since| since.as_secs());
        let text = fs::read_to_string(&self.0);
        match text.map(|text| serde_json::from_str::<State>(&text)) {
            Ok(Ok(found)) if now_s.saturating_sub(found.checked_unix_s) <= TOO_OLD_S => RulesLine {
                state: found.state,
                difference: found.difference,
            },
            Ok(Ok(found)) => unknown(format!(
                "{} is {} s old: start dunlin-redirect-watch.service",
                self.0.display(),
                now_s.saturating_sub(found.checked_unix_s)
            )),
            Ok(Err(error)) => unknown(format!("cannot parse {}: {error}", self.0.display())),
            Err(error) => unknown(format!(
                "cannot read {}: {error}; start dunlin-redirect-watch.service",
                self.0.display()
            )),
        }
    }

    /// Logs each change of the rules' state until the tunnel ends. While the rules are missing or
    /// different, the toolstack's connections can leave in the clear.
    pub(super) fn log_changes(self, tunnel: &Arc<Tunnel>) -> io::Result<()> {
        let tunnel: Weak<Tunnel> = Arc::downgrade(tunnel);
        start("rules", move || {
            let mut before = String::from("applied");
            while let Some(tunnel) = tunnel.upgrade() {
                let found = self.read();
                if tunnel.refused_redirects().is_some() && found.state != before {
                    let text = found.text();
                    match found.state.as_str() {
                        "applied" => info!("{text}"),
                        _ => warn!("{text}"),
                    }
                    before = found.state;
                }
                drop(tunnel);
                thread::sleep(INTERVAL);
            }
        })
    }
}

fn unknown(why: String) -> RulesLine {
    RulesLine {
        state: "unknown".to_owned(),
        difference: Some(why),
    }
}
