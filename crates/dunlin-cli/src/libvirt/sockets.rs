//! `dunlin libvirt enable --sockets`: migrations over unix sockets, one for each VM, for kernels
//! without nftables. `dunlin libvirt migrate` (`migrate`) uses the routes and the directory that
//! this command sets up.
//!
//! ```text
//! [route."libvirt-b.example"]  to = "b.example:18300"          on the other hosts, and on B:
//! [route."libvirt-b.example"]  target = "unix:DIRECTORY/{vm}"  an arriving VM's QEMU listens there
//! ```

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use anyhow::{Context, Result, bail};
use dunlin_lane::identity::Summary;
use dunlin_lane::names::PeerName;
use dunlin_linux::accounts::{group_id, user_id};
use dunlin_tunnel::{Entrance, Routes};

use super::files::{delete, put, read, write};
use super::host::{self, GROUP, NamedPeer};
use super::programs::{Report, UNITS, dunlin, has_systemd};
use super::qemu_conf::QemuConf;
use super::{block, install};
use crate::code::DONE;
use crate::file::replace;
use crate::tunnel::{Config, PEER_PORT};

/// The directory of the sockets. QEMU creates the sockets of arriving VMs, and the tunnel creates
/// the sockets of leaving VMs.
pub(super) const DIRECTORY: &str = "/run/dunlin/vm";
/// How a route's name begins; the rest is the name of the destination.
pub(super) const ROUTE: &str = "libvirt-";
/// The file from which systemd-tmpfiles creates the directory at boot.
const TMPFILES: &str = "/etc/tmpfiles.d/dunlin-libvirt.conf";
/// libvirt's AppArmor rules for QEMU, and the file with which Dunlin extends them.
const ABSTRACTION: &str = "/etc/apparmor.d/abstractions/libvirt-qemu";
const EXTENSION: &str = "/etc/apparmor.d/abstractions/libvirt-qemu.d/dunlin";
/// The AppArmor rule for the directory: QEMU makes its socket there, and connects to the tunnel's
/// socket there.
const RULE: &str = "/run/dunlin/vm/** rw,";

/// The flags of `enable` that apply with `--sockets`.
pub(super) struct Setup<'a> {
    pub(super) peers: &'a [String],
    pub(super) identity: Option<&'a Path>,
    pub(super) listen: &'a str,
    pub(super) qemu_conf: &'a Path,
    pub(super) config: &'a Path,
    pub(super) dry_run: bool,
    pub(super) report: &'a Report,
}

impl Setup<'_> {
    pub(super) fn run(&self) -> Result<i32> {
        let conf = QemuConf::read(self.qemu_conf)?;
        let (identity, summary) = host::identity(self.identity)?;
        let before = read(self.config)?;
        let peers = self.peers.iter().map(|text| host::peer(text));
        let mut peers = peers.collect::<Result<Vec<_>>>()?;
        for peer in earlier(self.config, before.as_deref())? {
            if !peers.iter().any(|one| one.identity == peer.identity) {
                peers.push(peer);
            }
        }
        let block = routes(&own_names(&summary)?, &peers);
        if self.dry_run {
            match self.report.json {
                true => self.report.step("routes", &block),
                false => println!("{block}\nnothing was changed (--dry-run)"),
            }
            return Ok(DONE);
        }
        let created = || block::created(&identity.display().to_string(), self.listen);
        let text = block::insert(&before.clone().unwrap_or_else(created), &block)?;
        install::let_services_read(&identity)?;
        write(self.config, &text)?;
        if !dunlin(&["tunnel", "check"], Some(self.config), None)?
            .status
            .success()
        {
            put(self.config, before.as_deref())?;
            bail!(
                "the new configuration would be invalid, so the change was undone; see the error \
                 of `dunlin tunnel check` above"
            );
        }
        let report = self.report;
        report.step("written", &self.config.display().to_string());
        let user = host::users(conf.user.as_deref()).pop();
        let user = user.unwrap_or_else(|| "root".to_owned());
        let group = if group_id(GROUP)?.is_some() {
            GROUP
        } else {
            "root"
        };
        make_directory(&user, group, report)?;
        extend_apparmor(report)?;
        start(report)?;
        let mut words = vec!["tunnel", "check", "--connect"];
        words.extend(report.json.then_some("--json"));
        let tried = dunlin(&words, Some(self.config), None)?;
        print!("{}", String::from_utf8_lossy(&tried.stdout));
        if !tried.status.success() {
            report.advise(
                "A peer does not answer, or refuses; see its test above. Run this command there \
                 too, with this host as --peer. Until then migrations to it fail, and the VMs stay.",
            );
        }
        let host = peers.first().map_or("HOST", |one| one.host.as_str());
        report.advise(&format!("Migrate with: dunlin libvirt migrate VM {host}"));
        Ok(DONE)
    }
}

/// The names and addresses in this host's certificate that peers may use for this host, without
/// wildcards.
fn own_names(summary: &Summary) -> Result<Vec<String>> {
    let name = |name: &PeerName| match name {
        PeerName::Dns(name) if !name.starts_with('*') => Some(name.clone()),
        PeerName::Ip(address) => Some(address.to_string()),
        _ => None,
    };
    let names: Vec<String> = summary.names.iter().filter_map(name).collect();
    if names.is_empty() {
        bail!(
            "this host's certificate contains no address, and no host name without a wildcard: create a certificate that contains one of them"
        );
    }
    Ok(names)
}

/// The routes for VMs that arrive here, and for VMs that leave to a peer.
fn routes(own: &[String], peers: &[NamedPeer]) -> String {
    let allow: Vec<_> = peers
        .iter()
        .map(|one| format!("{:?}", one.identity))
        .collect();
    let allow = allow.join(", ");
    let target = format!("unix:{DIRECTORY}/{{vm}}");
    let arriving = own
        .iter()
        .map(|name| format!("[route.\"{ROUTE}{name}\"]\ntarget = {target:?}\nallow = [{allow}]\n"));
    let leaving = peers.iter().filter(|one| !own.contains(&one.identity));
    let leaving = leaving.map(|NamedPeer { host, identity, .. }| {
        let host = match host.contains(':') {
            true => format!("[{host}]"),
            false => host.clone(),
        };
        format!(
            "[route.\"{ROUTE}{identity}\"]\nto = \"{host}:{PEER_PORT}\"\npeers = [{identity:?}]\n"
        )
    });
    arriving.chain(leaving).collect()
}

/// The peers of an earlier `enable --sockets`.
fn earlier(config: &Path, text: Option<&str>) -> Result<Vec<NamedPeer>> {
    let Some(text) = text.filter(|text| block::is_in(text)) else {
        return Ok(Vec::new());
    };
    let routes = Config::parse(config, text)?.routes;
    let named = leaving(&routes).map(|(host, entrance)| {
        let identity = &entrance.route[ROUTE.len()..];
        host::peer(&format!("{host}={identity}"))
    });
    named.collect()
}

/// The routes to peers, each with the host to which it leads.
pub(super) fn leaving(routes: &Routes) -> impl Iterator<Item = (&str, &Entrance)> {
    let ours = routes.entrances().iter();
    let ours = ours.filter(|one| one.route.starts_with(ROUTE));
    ours.filter_map(|one| {
        let (host, _) = one.to.rsplit_once(':')?;
        Some((host.trim_matches(['[', ']']), one))
    })
}

/// Creates the directory now, and lets systemd-tmpfiles create it at each boot. QEMU's user owns
/// it. The sockets in it get the directory's group, so that the tunnel reaches QEMU's sockets.
fn make_directory(user: &str, group: &str, report: &Report) -> Result<()> {
    let text = format!(
        "# Written by `dunlin libvirt enable --sockets`.\nd {DIRECTORY} 2770 {user} {group} -\n"
    );
    replace(Path::new(TMPFILES), &text, 0o644)?;
    let id = |found: std::io::Result<Option<u32>>, name: &str| match name.parse() {
        Ok(number) => Ok(number),
        Err(_) => found?.with_context(|| {
            format!("the user or group {name} does not exist: install libvirt first")
        }),
    };
    let (user_id, group_id) = (id(user_id(user), user)?, id(group_id(group), group)?);
    fs::create_dir_all(DIRECTORY)
        .and_then(|()| chown(DIRECTORY, Some(user_id), Some(group_id)))
        .and_then(|()| fs::set_permissions(DIRECTORY, Permissions::from_mode(0o2770)))
        .with_context(|| format!("cannot create {DIRECTORY}"))?;
    let what = format!("{DIRECTORY} (owner {user}, group {group})");
    report.step("directory", &what);
    Ok(())
}

/// Extends libvirt's AppArmor profiles of VMs. The profile of a running VM changes with the VM's
/// next start or migration.
fn extend_apparmor(report: &Report) -> Result<()> {
    let Ok(abstraction) = fs::read_to_string(ABSTRACTION) else {
        return Ok(());
    };
    if abstraction.contains("<abstractions/libvirt-qemu.d>") {
        let text = format!("# Written by `dunlin libvirt enable --sockets`.\n{RULE}\n");
        replace(Path::new(EXTENSION), &text, 0o644)?;
        report.step("apparmor", EXTENSION);
    } else {
        let what = format!(
            "this version of libvirt has no folder for additions: write this line into \
             /etc/apparmor.d/local/abstractions/libvirt-qemu: {RULE}"
        );
        report.step("apparmor", &what);
    }
    Ok(())
}

fn start(report: &Report) -> Result<()> {
    let [.., tunnel] = UNITS;
    if !has_systemd() {
        let what = format!(
            "systemd does not run here: start `dunlin tunnel run`, and make {DIRECTORY} after each boot"
        );
        report.step("unit", &what);
    } else if report.systemctl(&["enable", "--now", tunnel])?
        && report.systemctl(&["reload-or-restart", tunnel])?
    {
        report.step("unit", &format!("{tunnel} is enabled and runs"));
    } else {
        bail!("{tunnel} cannot be started: see `journalctl -u {tunnel}`");
    }
    Ok(())
}

/// Whether `enable --sockets` wrote the block in the configuration.
pub(super) fn is_in(text: &str) -> bool {
    block::is_in(text) && text.contains(&format!("[route.\"{ROUTE}"))
}

/// Undoes `enable --sockets`.
pub(super) fn disable(config: &Path, text: &str, report: &Report) -> Result<i32> {
    let rest = block::remove(text)?;
    let is_empty = block::is_only_ours(&rest) || rest.trim().is_empty();
    let [.., tunnel] = UNITS;
    match is_empty {
        true => delete(config)?,
        false => write(config, &rest)?,
    }
    for file in [TMPFILES, EXTENSION] {
        delete(Path::new(file))?;
    }
    // Ignore an error: the QEMU of an arriving VM may have a socket in the directory.
    let _ = fs::remove_dir(DIRECTORY);
    if has_systemd() {
        let words: &[&str] = match is_empty {
            true => &["disable", "--now", tunnel],
            false => &["try-reload-or-restart", tunnel],
        };
        report.systemctl(words)?;
    }
    report.step("restored", &config.display().to_string());
    Ok(DONE)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_routes_of_all_hosts_fit_together() {
        let peer = |name: &str| NamedPeer {
            host: format!("{name}.example"),
            identity: format!("{name}.example"),
            addresses: Vec::new(),
        };
        let parse = |own: &str, peers: &[&str]| {
            let peers: Vec<_> = peers.iter().map(|name| peer(name)).collect();
            let block = routes(&[format!("{own}.example")], &peers);
            let text = block::created("/etc/dunlin", "[::]:18300");
            let text = block::insert(&text, &block).unwrap();
            assert!(is_in(&text));
            let config = Config::parse(Path::new("t.toml"), &text).unwrap();
            (config.routes, text)
        };
        let (a, _) = parse("a", &["b", "c"]);
        let hosts: Vec<_> = leaving(&a).map(|(host, one)| (host, &*one.route)).collect();
        let expected = [
            ("b.example", "libvirt-b.example"),
            ("c.example", "libvirt-c.example"),
        ];
        assert_eq!(hosts, expected);
        // B serves the route by which A reaches it.
        let (_, b) = parse("b", &["a", "c"]);
        let arriving = "[route.\"libvirt-b.example\"]\ntarget = \"unix:/run/dunlin/vm/{vm}\"\n\
                        allow = [\"a.example\", \"c.example\"]\n";
        assert!(b.contains(arriving), "{b}");
    }
}
