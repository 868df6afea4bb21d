//! `dunlin libvirt migrate`: one migration over unix sockets, which `enable --sockets` has
//! prepared.

use std::io::{IsTerminal, stderr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use dunlin_linux::signals::{EndSignals, unblock_in};
use dunlin_tunnel::Parameter;
use serde_json::json;

use super::programs::{ConfigPath, dunlin};
use super::sockets::{DIRECTORY, leaving};
use crate::code::DONE;
use crate::line::print_json;
use crate::text::clean;
use crate::tunnel::Config;

#[derive(Debug, Args)]
pub(crate) struct Migrate {
    #[command(flatten)]
    config: ConfigPath,
    /// The other host's libvirt [default: qemu+ssh://HOST/system].
    #[arg(long, value_name = "URI")]
    to: Option<String>,
    /// Print one JSON object, and virsh's output on standard error.
    #[arg(long)]
    json: bool,
    /// The VM's name, ID or UUID.
    vm: String,
    /// The other host, a --peer of `enable --sockets`.
    host: String,
    /// More flags of `virsh migrate`, such as --postcopy.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    flags: Vec<String>,
}

/// The sockets of one migration. They close when their connections have ended; dropping this value
/// closes the sockets that had no connection.
struct Listeners<'a> {
    config: &'a Path,
    paths: Vec<PathBuf>,
}

impl Migrate {
    pub(crate) fn run(&self) -> Result<i32> {
        // Block the signals, so that an interrupt does not end this process. After an interrupt,
        // virsh cancels the migration, and this process closes the sockets.
        let _ends = EndSignals::block()?;
        let has = |start: &str| self.flags.iter().any(|flag| flag.starts_with(start));
        let has_disks = has("--copy-storage");
        ensure!(
            !(has_disks && self.flags.iter().any(|flag| flag == "--tls")),
            "libvirt copies disks over unix sockets only without --tls: remove --tls; the tunnel \
             encrypts the memory and the disks"
        );
        let route = self.route()?;
        let uuid = self.uuid()?;
        let mut listeners = Listeners {
            config: &self.config.config,
            paths: Vec::new(),
        };
        let mut words = vec!["migrate".to_owned(), "--live".to_owned()];
        let kinds = [("ram", "--migrateuri"), ("disk", "--disks-uri")];
        for (kind, flag) in &kinds[..1 + usize::from(has_disks)] {
            let path = listeners.open(&route, &format!("{uuid}.{kind}"))?;
            words.extend([(*flag).to_owned(), format!("unix://{path}")]);
        }
        if has("--tls") && !has("--tls-destination") {
            words.extend(["--tls-destination".to_owned(), self.host.clone()]);
        }
        words.extend(self.flags.iter().cloned());
        if !self.json && stderr().is_terminal() && !has("--verbose") {
            // virsh shows the progress.
            words.push("--verbose".to_owned());
        }
        let usual = || format!("qemu+ssh://{}/system", self.host);
        words.extend([self.vm.clone(), self.to.clone().unwrap_or_else(usual)]);
        let mut virsh = Command::new("virsh");
        virsh.args(&words);
        if self.json {
            virsh.stdout(stderr());
        }
        unblock_in(&mut virsh);
        let status = virsh.status().context(NO_VIRSH)?;
        ensure!(
            status.success(),
            "virsh migrate failed; see its error above, and the log of the tunnel (journalctl -u \
             dunlin-tunnel) on either host"
        );
        if self.json {
            let (vm, host) = (&self.vm, &self.host);
            print_json(&json!({ "event": "moved", "vm": vm, "uuid": uuid, "host": host }));
        }
        Ok(DONE)
    }

    /// The name of the route to the other host.
    fn route(&self) -> Result<String> {
        let file = &self.config.config;
        let text = std::fs::read_to_string(file).with_context(|| {
            format!(
                "cannot read the configuration {}: run `dunlin libvirt enable --sockets --peer \
                 {}` first, or correct --config",
                file.display(),
                clean(&self.host)
            )
        })?;
        let routes = Config::parse(file, &text)?.routes;
        let mut all = leaving(&routes);
        let route = all.find(|(host, _)| *host == self.host);
        let route = route.map(|(_, entrance)| entrance.route.clone());
        route.ok_or_else(|| {
            let hosts: Vec<_> = leaving(&routes).map(|(host, _)| clean(host)).collect();
            anyhow!(
                "{} has no route to {}: run `dunlin libvirt enable --sockets --peer {}`, or give \
                 one of: {}",
                file.display(),
                self.host,
                self.host,
                hosts.join(", ")
            )
        })
    }

    /// The VM's UUID, because a VM's name can contain characters that a parameter must not contain.
    fn uuid(&self) -> Result<String> {
        let mut virsh = Command::new("virsh");
        virsh.args(["domuuid", &self.vm]).stderr(Stdio::inherit());
        let found = virsh.output().context(NO_VIRSH)?;
        ensure!(
            found.status.success(),
            "virsh does not find VM {} on this host; see its error above",
            clean(&self.vm)
        );
        Ok(String::from_utf8_lossy(&found.stdout).trim().to_owned())
    }
}

const NO_VIRSH: &str = "cannot run virsh: install libvirt's clients";

impl Listeners<'_> {
    /// Opens a socket of this host's tunnel that leads to the socket `name` on the other host;
    /// returns its path.
    fn open(&mut self, route: &str, name: &str) -> Result<String> {
        let vm: Parameter = format!("vm={name}").parse()?;
        let path = format!("{DIRECTORY}/{name}");
        let (vm, socket) = (&*vm.to_string(), &*format!("unix:{path}"));
        let words = ["tunnel", "open", route, "--param", vm, "--listen", socket];
        let opened = dunlin(&words, Some(self.config), None)?;
        ensure!(
            opened.status.success(),
            "the tunnel cannot listen at {path}; see the error of `dunlin tunnel open` above. If \
             an earlier migration of this VM was killed, `dunlin tunnel close unix:{path}` closes \
             its socket"
        );
        self.paths.push(PathBuf::from(&path));
        Ok(path)
    }
}

impl Drop for Listeners<'_> {
    fn drop(&mut self) {
        // The tunnel closes a socket when its connections have ended, and removes the file. The
        // sockets that still exist had no connection.
        for path in self.paths.iter().filter(|path| path.exists()) {
            let listener = format!("unix:{}", path.display());
            let _ = dunlin(&["tunnel", "close", &listener], Some(self.config), None);
        }
    }
}
