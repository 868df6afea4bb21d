//! `dunlin init`: an authority, and for each host a directory with its identity and the tunnel's
//! configuration.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::slice::from_ref;

use anyhow::{Result, ensure};
use clap::{Args, value_parser};
use serde_json::json;

use crate::code::DONE;
use crate::pki;
use crate::tunnel::PEER_PORT;

/// The directory of the authority, next to the directories of the hosts.
const AUTHORITY: &str = "ca";
/// Where a host's files belong.
const PLACE: &str = "/etc/dunlin";
/// The files of a host's identity, and its configuration.
const IDENTITY: [&str; 3] = ["ca-cert.pem", "cert.pem", "key.pem"];
const CONFIG: &str = "tunnel.toml";

#[derive(Debug, Args)]
pub(crate) struct Init {
    /// The hosts, by the DNS names or IP addresses at which they reach each other.
    #[arg(value_name = "HOST", num_args = 2.., required = true, value_parser = parse_host)]
    hosts: Vec<String>,
    /// A new directory, which gets a subdirectory for each host and one for the authority.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Create only identities, for hosts of libvirt: `dunlin libvirt enable` writes the
    /// configuration.
    #[arg(long, conflicts_with = "route")]
    libvirt: bool,
    /// The first part of the routes' names, which are NAME-to-HOST.
    #[arg(long, value_name = "NAME", default_value = "ram", value_parser = parse_route)]
    route: String,
    /// Days until the hosts' certificates expire.
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = value_parser!(u32).range(1..))]
    days: u32,
    /// Days until the authority's certificate expires.
    #[arg(long, value_name = "N", default_value_t = 3650, value_parser = value_parser!(u32).range(1..))]
    ca_days: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Parses the name of a host, which also names its directory.
fn parse_host(text: &str) -> Result<String, String> {
    if text.parse::<IpAddr>().is_ok() {
        return Ok(text.to_owned());
    }
    let is_label = |label: &str| {
        let letters = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !label.is_empty() && !label.starts_with('-') && label.bytes().all(letters)
    };
    match text.split('.').all(is_label) && text != AUTHORITY {
        true => pki::parse_name(text),
        false => Err(
            "neither an IP address nor the DNS name of a host (ca is the authority's directory)"
                .to_owned(),
        ),
    }
}

/// Parses the first part of the routes' names.
fn parse_route(text: &str) -> Result<String, String> {
    let letters = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    match (1..=32).contains(&text.len()) && text.bytes().all(letters) {
        true => Ok(text.to_owned()),
        false => Err("use 1 to 32 letters, digits and hyphens".to_owned()),
    }
}

impl Init {
    pub(crate) fn run(&self) -> Result<i32> {
        let labels = labels(&self.hosts)?;
        pki::make_directory(&self.out)?;
        let authority = self.out.join(AUTHORITY);
        pki::init(&authority, self.ca_days)?;
        for (host, label) in self.hosts.iter().zip(&labels) {
            let directory = self.out.join(host);
            pki::issue(&authority, from_ref(host), self.days, &directory)?;
            if !self.libvirt {
                let text = self.config(host, label, &labels);
                pki::write(&directory.join(CONFIG), &text, 0o644)?;
            }
        }
        match self.json {
            true => self.print_json(&authority),
            false => self.print(&authority),
        }
        Ok(DONE)
    }

    /// The files of a host.
    fn files(&self) -> Vec<&'static str> {
        let config = (!self.libvirt).then_some(CONFIG);
        IDENTITY.into_iter().chain(config).collect()
    }

    /// The configuration of a host. A migration uses the route that is named after its destination.
    fn config(&self, host: &str, label: &str, labels: &[String]) -> String {
        let route = &self.route;
        let others = || {
            self.hosts
                .iter()
                .zip(labels)
                .filter(|(one, _)| *one != host)
        };
        let mut text = format!(
            "# The tunnel of {host}: {PLACE}/{CONFIG}, written by `dunlin init`.\n\
             # docs/reference/config.md describes every key. After a change:\n\
             #   dunlin tunnel check --config {PLACE}/{CONFIG} && systemctl reload dunlin-tunnel\n\n\
             # Where the tunnels of the other hosts connect: TCP port {PEER_PORT} must be open to them.\n\
             listen = \"[::]:{PEER_PORT}\"\n\
             # The directory of ca-cert.pem, cert.pem and key.pem.\n\
             identity = \"{PLACE}\"\n"
        );
        for (peer, label) in others() {
            text += &format!(
                "\n# To {peer}: the hypervisor on this host connects to this socket.\n\
                 [route.{route}-to-{label}]\n\
                 listen = \"unix:/run/dunlin/{route}-to-{label}.sock\"\n\
                 to = \"{}\"\n\
                 # Who may connect, if the hypervisor does not run as root (docs/tunnel/operation.md):\n\
                 #socket_group = \"libvirt-qemu\"\n\
                 #socket_mode = \"0660\"\n\
                 # The maximum rate of this host in bytes per second, and the number of its lanes.\n\
                 #rate = \"500M\"\n\
                 #lanes = 4\n",
                address(peer),
            );
        }
        let allow: Vec<_> = others().map(|(peer, _)| format!("{peer:?}")).collect();
        text += &format!(
            "\n# To this host: the hypervisor that waits for the VM listens at this socket. The tunnel's\n\
             # user must be able to connect to it (docs/tunnel/operation.md, \"User and group\").\n\
             [route.{route}-to-{label}]\n\
             target = \"unix:/run/dunlin/{route}-in.sock\"\n\
             # Only these hosts may send, with a certificate of the authority in ca-cert.pem.\n\
             allow = [{}]\n\n\
             # The memory of the tunnel: MemoryMax= of its unit depends on these.\n\
             #[limits]\n\
             #trunks = 64\n\
             #peer_memory = \"256M\"\n",
            allow.join(", ")
        );
        text
    }

    /// The command that copies a host's files, and the commands to run on the host as root.
    fn commands(&self, host: &str) -> (String, Vec<String>) {
        let directory = self.out.join(host);
        let copy = format!("scp -r {} root@{}:", directory.display(), bracketed(host));
        if self.libvirt {
            let others = self.hosts.iter().filter(|one| *one != host);
            let peers: String = others.map(|peer| format!(" --peer {peer}")).collect();
            let enable = format!("dunlin libvirt enable{peers} --install-identity {host}");
            return (copy, vec![enable]);
        }
        let install = format!("install -m 640 -g dunlin -t {PLACE} {host}/* && rm -r {host}");
        (
            copy,
            vec![install, "systemctl enable --now dunlin-tunnel".to_owned()],
        )
    }

    fn print(&self, authority: &Path) {
        println!(
            "{}: the authority. It can issue a certificate for any host: keep it secret and off \
             the hosts. `dunlin pki issue` needs it.",
            authority.display()
        );
        for host in &self.hosts {
            println!();
            for file in self.files() {
                let from = self.out.join(host).join(file);
                let secret = if file == "key.pem" { "  (secret)" } else { "" };
                println!("{} -> {host}:{PLACE}/{file}{secret}", from.display());
            }
            let (copy, commands) = self.commands(host);
            println!("here:\n  {copy}\non {host}, as root, with Dunlin's package installed:");
            for command in commands {
                println!("  {command}");
            }
        }
    }

    fn print_json(&self, authority: &Path) {
        let host = |host: &String| {
            let directory = self.out.join(host);
            let file = |file: &str| {
                json!({
                    "file": directory.join(file),
                    "to": format!("{PLACE}/{file}"),
                    "secret": file == "key.pem",
                })
            };
            let files: Vec<_> = self.files().into_iter().map(file).collect();
            let (copy, commands) = self.commands(host);
            json!({ "host": host, "files": files, "copy": copy, "commands": commands })
        };
        let hosts: Vec<_> = self.hosts.iter().map(host).collect();
        println!("{}", json!({ "authority": authority, "hosts": hosts }));
    }
}

/// For each host, returns the part of a route's name that identifies the host. If the first labels
/// of the DNS names all differ, this is the first label, and otherwise the whole name. An IP
/// address is always used whole.
fn labels(hosts: &[String]) -> Result<Vec<String>> {
    let plain = |text: &str| text.replace(['.', ':'], "-");
    let first = |host: &String| match host.parse::<IpAddr>() {
        Ok(_) => plain(host),
        Err(_) => plain(host.split('.').next().unwrap_or(host)),
    };
    let differ = |labels: &[String]| {
        let mut sorted = labels.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        sorted.len() == labels.len()
    };
    let short: Vec<_> = hosts.iter().map(first).collect();
    let long: Vec<_> = hosts.iter().map(|host| plain(host)).collect();
    ensure!(
        differ(&long),
        "two hosts have the same name, or differ only in `.`, `:` and `-`: name each host once"
    );
    Ok(if differ(&short) { short } else { long })
}

/// The address of a host's tunnel.
fn address(host: &str) -> String {
    format!("{}:{PEER_PORT}", bracketed(host))
}

/// The host, in brackets if it is an IPv6 address.
fn bracketed(host: &str) -> String {
    match host.contains(':') {
        true => format!("[{host}]"),
        false => host.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn hosts_have_names_that_a_directory_and_a_peer_may_have() {
        for good in ["a.example", "host-1", "192.0.2.1", "2001:db8::1"] {
            assert_eq!(parse_host(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            ".",
            "..",
            "a/b",
            "-rf",
            "*.example",
            "spiffe://x/y",
            "ca",
            "a b",
        ] {
            assert!(parse_host(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn routes_are_named_after_the_shortest_names_that_differ() {
        let of = |hosts: &[&str]| {
            let hosts: Vec<_> = hosts.iter().map(|&host| host.to_owned()).collect();
            labels(&hosts)
        };
        assert_eq!(of(&["a.example", "b.example"]).unwrap(), ["a", "b"]);
        let long = of(&["a.east.example", "a.west.example"]).unwrap();
        assert_eq!(long, ["a-east-example", "a-west-example"]);
        assert_eq!(
            of(&["192.0.2.1", "2001:db8::1"]).unwrap(),
            ["192-0-2-1", "2001-db8--1"]
        );
        assert!(of(&["a.example", "a.example"]).is_err());
        assert_eq!(address("2001:db8::1"), "[2001:db8::1]:18300");
    }
}
