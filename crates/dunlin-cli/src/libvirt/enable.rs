//! `dunlin libvirt enable`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use dunlin_ipsec::PortRange;
use serde_json::{Value, json};

use super::files::{read, write};
use super::host::{self, NamedPeer};
use super::programs::{ConfigPath, NAME, Report, UNITS, dunlin, has_systemd};
use super::qemu_conf::QemuConf;
use super::record::Record;
use super::reserved::SYSCTL;
use super::sockets::Setup;
use super::undo::Before;
use super::{block, install, reserved};
use crate::code::DONE;
use crate::line::print_json;
use crate::progress::{self, Waiting};
use crate::state::StatePath;
use crate::tunnel::{Config, PEER_PORT, Port, RedirectPeer};

#[derive(Debug, Args)]
pub(crate) struct Enable {
    /// Another host: the name or address to which this host's toolstack migrates. That host's
    /// certificate must contain HOST or, if given, NAME; repeatable. Peers of an earlier `enable`
    /// stay.
    #[arg(long = "peer", value_name = "HOST[=NAME]", required = true)]
    peers: Vec<String>,
    /// Directory with this host's certificates [default: /etc/dunlin, /etc/pki/qemu or /etc/pki,
    /// the first that is complete].
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// Copy this host's certificates from DIR, which `dunlin init` has written, to /etc/dunlin,
    /// where the tunnel's service may read them.
    #[arg(long, value_name = "DIR", conflicts_with = "identity")]
    install_identity: Option<PathBuf>,
    /// The toolstack's ports, the same on all hosts [default: those of qemu.conf; Proxmox uses
    /// 60000-60050].
    #[arg(long, value_name = "A-B")]
    ports: Option<PortRange>,
    /// The users that connect to the peers [default: root, and QEMU's user].
    #[arg(long, value_name = "USER,…", value_delimiter = ',')]
    users: Vec<String>,
    /// The addresses of this host at which the toolstack listens for migrations, tried in order
    /// [default: migration_address of qemu.conf, or 127.0.0.1 and ::1; Proxmox needs the address of
    /// its migration network].
    #[arg(long, value_name = "ADDR,…", value_delimiter = ',')]
    local: Vec<IpAddr>,
    /// Hosts without Dunlin, which may migrate to this host in the clear until --plain-until.
    #[arg(
        long,
        value_name = "ADDR,…",
        value_delimiter = ',',
        requires = "plain_until"
    )]
    plain_from: Vec<IpAddr>,
    /// The last day for --plain-from, at most 90 days ahead, such as 2026-12-31.
    #[arg(long, value_name = "DATE", requires = "plain_from")]
    plain_until: Option<String>,
    /// Address at which this host's tunnel listens for peers. Used only if the configuration is
    /// created.
    #[arg(long, value_name = "ADDR", default_value = "[::]:18300")]
    listen: String,
    /// libvirt's configuration of QEMU.
    #[arg(long, value_name = "FILE", default_value = "/etc/libvirt/qemu.conf")]
    qemu_conf: PathBuf,
    /// Use unix sockets, one for each VM, instead of a redirect. Only a redirect needs nftables in
    /// the kernel. With sockets, migrate VMs with `dunlin libvirt migrate`.
    #[arg(long, conflicts_with_all = ["ports", "users", "local", "plain_from"])]
    sockets: bool,
    /// Show what would be done, and change nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    config: ConfigPath,
    #[command(flatten)]
    state: StatePath,
    #[command(flatten)]
    report: Report,
}

/// What `enable` sets up.
struct Plan {
    identity: PathBuf,
    names: String,
    valid_until: String,
    ports: PortRange,
    peers: Vec<NamedPeer>,
    users: Vec<String>,
    local: Vec<IpAddr>,
    plain: Option<Plain>,
}

/// Hosts without Dunlin, and the last day on which they may migrate in the clear.
type Plain = (Vec<IpAddr>, String);

impl Enable {
    pub(crate) fn run(&self) -> Result<i32> {
        if self.sockets {
            return self.setup()?.run();
        }
        let plan = self.plan()?;
        plan.show(&self.report);
        if self.dry_run {
            if !self.report.json {
                println!("\n{}", plan.block());
                println!("nothing was changed (--dry-run)");
            }
            return Ok(DONE);
        }
        let mut before = Before::take(&self.config.config, &self.state, &self.report)?;
        let tried = self.change(&plan, &mut before);
        let tried = tried.map_err(|error| before.restore(error))?;
        if tried == Tried::Silent {
            self.report.advise(
                "A peer does not answer yet. Run `dunlin libvirt enable` there too, with this \
                 host as --peer. Until then migrations to it fail, and the VMs stay. If it was \
                 done there, a firewall may block the port of its tunnel: `dunlin tunnel check \
                 --connect` tries again.",
            );
        }
        let host = plan.peers.first().map_or("HOST", |one| one.host.as_str());
        let virsh = format!("Migrate as before: virsh migrate --live VM qemu+ssh://{host}/system");
        self.report.advise(&virsh);
        Ok(DONE)
    }

    fn setup(&self) -> Result<Setup<'_>> {
        Ok(Setup {
            peers: &self.peers,
            identity: self.identity()?,
            listen: &self.listen,
            qemu_conf: &self.qemu_conf,
            config: &self.config.config,
            dry_run: self.dry_run,
            report: &self.report,
        })
    }

    /// Carries out the plan. Returns the result of testing the path to the peers.
    fn change(&self, plan: &Plan, before: &mut Before) -> Result<Tried> {
        let config = &self.config.config;
        self.write(before.config(), plan)?;
        let waiting = Waiting::new(self.report.json, "testing the path to each peer");
        let tried = self.try_path()?;
        drop(waiting);
        ensure!(
            tried != Tried::Fails,
            "the path to a peer does not work; see its test (`tried`) above"
        );
        self.reserve(plan)?;
        before.rules_follow();
        let applied = dunlin(&["redirect", "apply"], Some(config), Some(&self.state))?;
        ensure!(
            applied.status.success(),
            "the rules cannot be applied; see the error of `dunlin redirect apply` above"
        );
        let what = "in force: only the tunnel reaches these ports, at the peers and here";
        self.report.step("rules", what);
        before.units_follow();
        start(&self.report)?;
        Ok(tried)
    }

    /// The directory of the certificates. With --install-identity, this installs them first, except
    /// in a dry run.
    fn identity(&self) -> Result<Option<&Path>> {
        match &self.install_identity {
            Some(from) if self.dry_run => Ok(Some(from)),
            Some(from) => {
                install::install(from, &self.report)?;
                Ok(Some(Path::new(install::PLACE)))
            }
            None => Ok(self.identity.as_deref()),
        }
    }

    fn plan(&self) -> Result<Plan> {
        let conf = QemuConf::read(&self.qemu_conf)?;
        let (identity, summary) = host::identity(self.identity()?)?;
        if !self.dry_run {
            install::let_services_read(&identity)?;
        }
        let names: Vec<_> = summary.names.iter().map(ToString::to_string).collect();
        let ports = self.ports.unwrap_or(conf.ports);
        host::check_listeners(ports)?;
        let peers = self.peers.iter().map(|text| host::peer(text));
        let peers = peers.collect::<Result<Vec<_>>>()?;
        let users = match self.users.is_empty() {
            true => host::users(conf.user.as_deref()),
            false => self.users.clone(),
        };
        let local = match self.local.is_empty() {
            false => self.local.clone(),
            true => conf.listens_at()?.map_or_else(
                || vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
                |address| vec![address],
            ),
        };
        let (earlier, plain) = self.earlier()?;
        let mut peers = peers;
        for mut peer in earlier {
            let is_new = |at: &IpAddr| !peers.iter().any(|one| one.addresses.contains(at));
            peer.addresses.retain(is_new);
            if !peer.addresses.is_empty() {
                peers.push(peer);
            }
        }
        let given = self
            .plain_until
            .clone()
            .map(|day| (self.plain_from.clone(), day));
        note(&conf, &identity, &self.report);
        Ok(Plan {
            identity,
            names: names.join(", "),
            valid_until: summary.not_after,
            ports,
            peers,
            users,
            local,
            plain: given.or(plain),
        })
    }

    /// What an earlier `enable` wrote to the configuration: the peers, and the hosts without
    /// Dunlin.
    fn earlier(&self) -> Result<(Vec<NamedPeer>, Option<Plain>)> {
        let config = &self.config.config;
        let Some(text) = read(config)?.filter(|text| block::is_in(text)) else {
            return Ok((Vec::new(), None));
        };
        let parsed = Config::parse(config, &text)?;
        if let Some(Port::At(listen)) = &parsed.listen
            && listen.port() != PEER_PORT
        {
            let what = format!(
                "peers expect this host's tunnel at port {PEER_PORT}, but `listen` in {} \
                 has port {}: change it",
                config.display(),
                listen.port()
            );
            self.report.step("note", &what);
        }
        let mut redirects = parsed.redirects.into_iter();
        let Some(own) = redirects.find(|one| one.name == NAME) else {
            return Ok((Vec::new(), None));
        };
        let peer = |one: &RedirectPeer| host::peer(&format!("{}={}", one.host, one.identity));
        let peers = own.peers.iter().map(peer).collect::<Result<_>>()?;
        let plain = own.plain.map(|plain| (plain.from, plain.until.to_string()));
        Ok((peers, plain))
    }

    /// Reserves the ports now and after each boot, and records what was reserved before.
    fn reserve(&self, plan: &Plan) -> Result<()> {
        let file = Record::path(&self.state)?;
        let live = reserved::live()?;
        let merged = reserved::with(&live, plan.ports);
        let mut record = Record::read(&file)?.unwrap_or_else(|| Record {
            ports: Vec::new(),
            reserved_before: live.clone(),
        });
        let ports = plan.ports.to_string();
        if !record.ports.contains(&ports) {
            record.ports.push(ports);
        }
        record.write(&file)?;
        if live != merged {
            reserved::set_live(&merged)?;
        }
        let text = format!(
            "# Written by `dunlin libvirt enable`.\nnet.ipv4.ip_local_reserved_ports = {merged}\n"
        );
        write(Path::new(SYSCTL), &text)?;
        let what = format!("ip_local_reserved_ports = {merged}");
        self.report.step("reserved", &what);
        Ok(())
    }

    /// Writes the configuration.
    fn write(&self, before: Option<&str>, plan: &Plan) -> Result<()> {
        let config = &self.config.config;
        let created = || block::created(&plan.identity.display().to_string(), &self.listen);
        let text = before.map_or_else(created, str::to_owned);
        let text = block::insert(&text, &plan.block())?;
        let rest = block::remove(&text)?;
        ensure!(
            !rest.contains(&format!("[redirect.{NAME}]")),
            "{} has a [redirect.{NAME}] that this command has not written: rename it",
            config.display()
        );
        write(config, &text)?;
        let checked = dunlin(&["tunnel", "check"], Some(config), None)?;
        ensure!(
            checked.status.success(),
            "the new configuration would be invalid; see the error of `dunlin tunnel check` above"
        );
        self.report.step("written", &config.display().to_string());
        Ok(())
    }

    /// Sends bytes to each peer and back.
    fn try_path(&self) -> Result<Tried> {
        let words = ["tunnel", "check", "--connect", "--json"];
        let tried = dunlin(&words, Some(&self.config.config), None)?;
        let mut path = Tried::Works;
        for line in String::from_utf8_lossy(&tried.stdout).lines() {
            let line: Value = serde_json::from_str(line)
                .context("cannot parse a line that `dunlin tunnel check --json` printed")?;
            let works = line["event"] == "checked";
            if works || line["event"] == "failed" {
                progress::clear();
                self.report.step("tried", &text_of(&line));
            }
            match (works, path) {
                (true, _) => {}
                (false, Tried::Works | Tried::Silent) if line["fault"] == UNREACHABLE => {
                    path = Tried::Silent;
                }
                (false, _) if line["event"] == "failed" => path = Tried::Fails,
                (false, _) => {}
            }
        }
        Ok(path)
    }
}

/// Prints what the operator should check.
fn note(conf: &QemuConf, identity: &Path, report: &Report) {
    for key in host::unreadable_keys(identity)
        .iter()
        .filter(|_| has_systemd())
    {
        let what = format!(
            "dunlin-tunnel.service cannot read {}: run `chgrp -R dunlin {}` and `chmod -R g+rX {}`, \
             or add the group of the key to the service (docs/tunnel/operation.md)",
            key.display(),
            identity.display(),
            identity.display()
        );
        report.step("note", &what);
    }
    if let Some(host) = &conf.host {
        let what = format!(
            "sources connect to {host} (migration_host in qemu.conf), so the peers' configurations \
             must list it as an address of this host"
        );
        report.step("note", &what);
    }
}

/// The result of testing the path to the peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tried {
    /// Bytes went to all peers and back.
    Works,
    /// At least one peer does not answer. The tests of all other peers succeed.
    Silent,
    /// At least one peer answers, but refuses or has an unexpected identity.
    Fails,
}

/// The fault code that `tunnel check` prints if a peer does not answer.
const UNREACHABLE: &str = "control-lost";

/// What a line of `tunnel check` says.
fn text_of(line: &Value) -> String {
    match (line["text"].as_str(), line["to"].as_str()) {
        (Some(text), _) => text.to_owned(),
        (None, Some(to)) => format!(
            "{:.0} MiB to {to} and back: {:.2} GiB/s",
            line["bytes"].as_f64().unwrap_or_default() / (1_u64 << 20) as f64,
            line["gib_per_s"].as_f64().unwrap_or_default()
        ),
        (None, None) => String::new(),
    }
}

impl Plan {
    fn show(&self, report: &Report) {
        let peer = |one: &NamedPeer| json!({"identity": one.identity, "addresses": one.addresses});
        if report.json {
            let peers: Vec<Value> = self.peers.iter().map(peer).collect();
            print_json(&json!({
                "step": "plan",
                "identity": self.identity,
                "names": self.names,
                "valid_until": self.valid_until,
                "ports": self.ports.to_string(),
                "users": self.users,
                "peers": peers,
                "redirect": self.block(),
            }));
            return;
        }
        let (identity, names, until) = (self.identity.display(), &self.names, &self.valid_until);
        report.step(
            "identity",
            &format!("{identity} ({names}, valid until {until})"),
        );
        report.step("ports", &self.ports.to_string());
        report.step("users", &self.users.join(", "));
        for peer in &self.peers {
            let addresses: Vec<_> = peer.addresses.iter().map(ToString::to_string).collect();
            let what = format!("{} = {}", peer.identity, addresses.join(", "));
            report.step("peer", &what);
        }
    }

    /// The text of the redirect's table in the configuration file (TOML).
    fn block(&self) -> String {
        let quoted = |words: Vec<String>| {
            let words: Vec<_> = words.iter().map(|word| format!("{word:?}")).collect();
            words.join(", ")
        };
        let peers = self.peers.iter().flat_map(|peer| {
            let of = |address: &IpAddr| format!("\"{address}\" = {:?}", peer.identity);
            peer.addresses.iter().map(of)
        });
        let local = self.local.iter().map(ToString::to_string).collect();
        let mut block = format!(
            "[redirect.{NAME}]\nports = \"{}\"\npeers = {{ {} }}\nusers = [{}]\nlocal = [{}]\n",
            self.ports,
            peers.collect::<Vec<_>>().join(", "),
            quoted(self.users.clone()),
            quoted(local),
        );
        if let Some((from, until)) = &self.plain {
            let from = from.iter().map(ToString::to_string).collect();
            let from = quoted(from);
            block.push_str(&format!(
                "plain_from = [{from}]\nplain_until = \"{until}\"\n"
            ));
        }
        block
    }
}

/// Enables and starts the units, and lets a running tunnel read the configuration.
fn start(report: &Report) -> Result<()> {
    if !has_systemd() {
        let what = "systemd does not run here: start `dunlin redirect watch` and `dunlin tunnel \
                    run`, each with --config, and apply the rules after each boot with `dunlin \
                    redirect apply`";
        report.step("units", what);
        return Ok(());
    }
    let mut words = vec!["enable", "--now"];
    words.extend(UNITS);
    ensure!(
        report.systemctl(&words)? && report.systemctl(&["reload-or-restart", UNITS[2]])?,
        "the units cannot be started: see `journalctl -u dunlin-tunnel`"
    );
    let what = format!("{} are enabled and run", UNITS.join(", "));
    report.step("units", &what);
    Ok(())
}
