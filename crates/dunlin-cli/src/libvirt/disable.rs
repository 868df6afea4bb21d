//! `dunlin libvirt disable`.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use super::files::{delete, read, write};
use super::programs::{ConfigPath, NAME, Report, UNITS, dunlin, has_systemd};
use super::record::Record;
use super::reserved::{self, SYSCTL};
use super::{block, sockets};
use crate::code::DONE;
use crate::state::StatePath;
use crate::tunnel::Config;

#[derive(Debug, Args)]
pub(crate) struct Disable {
    /// Cut the redirected connections that are under way.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    config: ConfigPath,
    #[command(flatten)]
    state: StatePath,
    #[command(flatten)]
    report: Report,
}

impl Disable {
    pub(crate) fn run(&self) -> Result<i32> {
        let config = &self.config.config;
        let text = read(config)?.unwrap_or_default();
        ensure!(
            block::is_in(&text),
            "{} has no block of `dunlin libvirt enable`, so nothing was changed: give --config, or \
             remove the rules with `dunlin redirect remove`",
            config.display()
        );
        if sockets::is_in(&text) {
            return sockets::disable(config, &text, &self.report);
        }
        // Do not change a file that cannot be parsed, because it may have other redirects.
        let parsed = Config::parse(config, &text)?;
        let has_others = parsed.redirects.iter().any(|one| one.name != NAME);
        let rest = block::remove(&text)?;
        let is_empty = block::is_only_ours(&rest) || rest.trim().is_empty();
        if has_others {
            write(config, &rest)?;
            if !dunlin(&["redirect", "apply"], Some(config), Some(&self.state))?
                .status
                .success()
            {
                write(config, &text)?;
                bail!(
                    "the rules of the other redirects cannot be applied, so the configuration and \
                     the rules are as before; see the error of `dunlin redirect apply` above"
                );
            }
            let what = "those of the other redirects stay; libvirt's migrations are in the clear \
                        from now on";
            self.report.step("rules", what);
        } else {
            let mut remove = vec!["redirect", "remove"];
            if self.force {
                remove.push("--force");
            }
            if !dunlin(&remove, None, Some(&self.state))?.status.success() {
                bail!(
                    "the rules cannot be removed, and nothing was changed; see the error of \
                     `dunlin redirect remove` above"
                );
            }
            let what = "removed: migrations are in the clear from now on";
            self.report.step("rules", what);
        }
        if has_systemd() && !has_others {
            // Disable the units of the rules. Disable the tunnel's unit only if nothing is left in
            // its configuration except what `enable` wrote.
            let [rules, watch, tunnel] = UNITS;
            let mut words = vec!["disable", "--now", rules, watch];
            if is_empty {
                words.push(tunnel);
            }
            if !self.report.systemctl(&words)? {
                bail!(
                    "systemctl cannot disable Dunlin's units: correct its error above, and run \
                     this command again"
                );
            }
        }
        match is_empty {
            true => delete(config)?,
            false => write(config, &rest)?,
        }
        self.report.step("restored", &config.display().to_string());
        if has_systemd() && !is_empty {
            self.report
                .systemctl(&["try-reload-or-restart", UNITS[2]])?;
        }
        self.release()?;
        Ok(DONE)
    }

    /// Undoes the reservation of the ports.
    fn release(&self) -> Result<()> {
        let file = Record::path(&self.state)?;
        if let Some(record) = Record::read(&file)? {
            let live = reserved::live()?;
            let mut setting = live.clone();
            for ports in &record.ports {
                let invalid = || format!("{}: {ports:?} is not a range of ports", file.display());
                let ports = ports.parse().with_context(invalid)?;
                setting = reserved::without(&setting, ports, &record.reserved_before);
            }
            if setting != live {
                reserved::set_live(&setting)?;
            }
            let what = format!("ip_local_reserved_ports = {setting}");
            self.report.step("reserved", &what);
            delete(&file)?;
        }
        delete(Path::new(SYSCTL))
    }
}
