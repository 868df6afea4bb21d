//! `dunlin libvirt status`.

use std::fs;

use anyhow::Result;
use clap::Args;

use super::{ConfigPath, block, dunlin};
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
        let mut code = DONE;
        for (words, config) in [
            (&["redirect", "show"][..], Some(config.as_path())),
            (&["status"], None),
        ] {
            let output = dunlin(words, config)?;
            print!("{}", String::from_utf8_lossy(&output.stdout));
            if !output.status.success() {
                code = FAILED;
            }
        }
        Ok(code)
    }
}
