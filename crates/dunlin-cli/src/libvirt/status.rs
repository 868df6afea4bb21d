//! `dunlin libvirt status`.

use std::fs;
use std::path::Path;

use anyhow::Result;
use clap::Args;
use serde_json::{Value, from_str, json};

use super::programs::{ConfigPath, Report, dunlin};
use super::{block, sockets};
use crate::code::{DONE, FAILED};
use crate::line::print_json;

#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    config: ConfigPath,
    #[command(flatten)]
    report: Report,
}

impl Status {
    pub(crate) fn run(&self) -> Result<i32> {
        let config = &self.config.config;
        let text = fs::read_to_string(config).unwrap_or_default();
        let json = self.report.json;
        if !block::is_in(&text) {
            match json {
                true => print_json(&json!({ "enabled": false })),
                false => println!(
                    "not enabled: {} has no block of `dunlin libvirt enable`",
                    config.display()
                ),
            }
            return Ok(FAILED);
        }
        let flags = if json { &["--json"][..] } else { &[] };
        let mut is_applied = true;
        if !sockets::is_in(&text) {
            let rules = dunlin(&[&["redirect", "show"], flags].concat(), Some(config), None)?;
            print!("{}", String::from_utf8_lossy(&rules.stdout));
            is_applied = rules.status.success();
        }
        let status = dunlin(&[&["status"], flags].concat(), None, None)?;
        let status = String::from_utf8_lossy(&status.stdout).into_owned();
        print!("{status}");
        let is_tunnel = |line: &str| match json {
            true => from_str::<Value>(line).is_ok_and(|line| line["event"] == "tunnel"),
            false => line.starts_with("tunnel "),
        };
        let runs = status.lines().any(is_tunnel);
        if json {
            print_json(
                &json!({ "enabled": true, "rules_applied": is_applied, "tunnel_runs": runs }),
            );
        } else if !runs {
            println!("no tunnel runs: migrations fail, and the VMs stay");
        }
        match runs && is_applied {
            true => Ok(DONE),
            false => Ok(FAILED),
        }
    }
}

/// Whether rules lead the migrations of this host's libvirt into a tunnel, and the tunnel runs.
pub(crate) fn leads_to_a_tunnel(config: &Path) -> bool {
    let text = fs::read_to_string(config).unwrap_or_default();
    if !block::is_in(&text) || sockets::is_in(&text) {
        return false;
    }
    // The exit code of `status` also depends on sessions and journals, which do not matter here.
    let runs = dunlin(&["status"], None, None).is_ok_and(|status| {
        let status = String::from_utf8_lossy(&status.stdout).into_owned();
        status.lines().any(|line| line.starts_with("tunnel "))
    });
    let rules = || dunlin(&["redirect", "show"], Some(config), None);
    runs && rules().is_ok_and(|rules| rules.status.success())
}
