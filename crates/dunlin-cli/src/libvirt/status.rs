//! `dunlin libvirt status`.

use std::fs;

use anyhow::Result;
use clap::Args;

use super::programs::{ConfigPath, dunlin};
use super::{block, sockets};
use crate::code::{DONE, FAILED};

#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    config: ConfigPath,
}

impl Status {
    pub(crate) fn run(&self) -> Result<i32> {
        let config = &self.config.config;
        let text = fs::read_to_string(config).unwrap_or_default();
        if !block::is_in(&text) {
            println!(
                "not enabled: {} has no block of `dunlin libvirt enable`",
                config.display()
            );
            return Ok(FAILED);
        }
        let rules = dunlin(&["redirect", "show"], Some(config), None)?;
        print!("{}", String::from_utf8_lossy(&rules.stdout));
        let status = dunlin(&["status"], None, None)?;
        let status = String::from_utf8_lossy(&status.stdout).into_owned();
        print!("{status}");
        let runs = status.lines().any(|line| line.starts_with("tunnel "));
        if !runs {
            println!("no tunnel runs: migrations fail, and the VMs stay");
        }
        match runs && is_applied {
            true => Ok(DONE),
            false => Ok(FAILED),
        }
    }
}
