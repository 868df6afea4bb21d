//! The text of the rules, in the language of nft(8). Pure: the same redirects and addresses yield
//! the same text.
//!
//! ```text
//!  a local user's SYN  ─▶ nat_output: to the tunnel's listener, for the configured users
//!                         output: any other SYN to the peers is reset
//!  a routed SYN        ─▶ forward: reset if it is to a peer (for example, from a VM)
//!  a SYN from the wire ─▶ input: reset, except from the hosts in plain_from
//! ```
//!
//! The rules for a redirect's ports match only SYNs, because other hosts can use these ports as
//! ephemeral ports: replies to such ports pass, and so do established connections. The rules that
//! redirect match only SYNs for another reason: they must not redirect connections that are older
//! than the rules. A NAT chain gets the packet with which the kernel begins to track a connection.
//! If the connection is older than the rules, this can be any packet (`nf_conntrack_tcp_loose`).

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::IpAddr;

use sha2::{Digest, Sha256};
use time::Time;

use super::peers::Addressed;
use crate::tunnel::Redirect;

/// The family and the name of the table.
pub(super) const TABLE: &str = "inet dunlin";
/// The family and the name of a copy for comparisons.
pub(super) const COPY: &str = "inet dunlin_expected";
/// The chains: name, type, hook and priority. `nat_output` has the priority of destination NAT. The
/// priority is written as a number, because nft 1.0.6 accepts the name `dstnat` only for other
/// hooks.
pub(super) const CHAINS: [(&str, &str, &str, i32); 4] = [
    ("nat_output", "nat", "output", -100),
    ("output", "filter", "output", 0),
    ("forward", "filter", "forward", 0),
    ("input", "filter", "input", 0),
];
/// The beginning of the line that attaches a chain to its hook.
const BASE: &str = "\t\ttype ";
/// The beginning of the comment that contains the digest.
pub(super) const MARK: &str = "dunlin redirect ";

/// The rules of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rules {
    /// A transaction for `nft -f`, which replaces the table.
    pub(super) text: String,
    /// SHA-256 of the rules, in hexadecimal. The table contains it.
    pub(super) digest: String,
}

/// The rules for these redirects.
pub(super) fn rules(redirects: &[Addressed], owner: &str) -> Rules {
    let chains = chains(redirects, owner, "");
    let digest = Sha256::digest(chains.as_bytes());
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let chains = self::chains(redirects, owner, &digest);
    // The first line makes the second one valid if there is no table.
    let text = format!(
        "table {TABLE}\n\
         delete table {TABLE}\n\
         table {TABLE} {{\n\
         \tcomment \"{MARK}{digest}\"\n\
         {chains}}}\n"
    );
    Rules { text, digest }
}

/// The transaction that makes a copy of these rules. The copy filters no packet, because its chains
/// have no hooks. (The flag *dormant* would also prevent filtering, but nft 1.0.6 lists a table
/// with this flag as invalid JSON.)
pub(super) fn copied(text: &str) -> String {
    let text = text.replace(&format!("table {TABLE}"), &format!("table {COPY}"));
    let lines = text.split_inclusive('\n');
    lines.filter(|line| !line.starts_with(BASE)).collect()
}

/// The chains. The digest is in the comment of the table, and also in the comment of the first rule
/// of `input`, because nft's JSON does not contain comments of tables.
fn chains(redirects: &[Addressed], owner: &str, digest: &str) -> String {
    let all = |rules: &dyn Fn(&Addressed) -> String| -> String {
        let rules: Vec<_> = redirects.iter().map(rules).collect();
        rules.concat()
    };
    let redirect = all(&|to| {
        let users = format!("meta skuid {{ {} }} ", users(&to.redirect));
        let ports: BTreeSet<u16> = to.listeners.values().copied().collect();
        let rules = ports.into_iter().map(|port| {
            let verdict = format!("redirect to :{port}");
            to_peers(to, &users, &verdict, "redirected", Some(port))
        });
        rules.collect()
    });
    let local = listeners(redirects, owner) + LOCAL;
    let reject = all(&|to| to_peers(to, "", RESET, "rejected", None));
    let from_wire = all(&from_wire);
    let mark = format!("\t\tiif \"lo\" accept comment \"{MARK}{digest}\"\n");
    let mut text = String::new();
    let rules: [(&str, &str); 4] = [
        (LOCAL, &redirect),
        (&local, &reject),
        ("", &reject),
        (&mark, &from_wire),
    ];
    for ((name, kind, hook, priority), (first, rules)) in CHAINS.into_iter().zip(rules) {
        let _ = write!(
            text,
            "\n\tchain {name} {{\n\
             {BASE}{kind} hook {hook} priority {priority}; policy accept;\n\
             {first}{rules}\t}}\n"
        );
    }
    text
}

/// Leaves connections of this host to its own addresses as they are, so that one configuration with
/// the addresses of all hosts serves each host.
const LOCAL: &str = "\t\tfib daddr type local return\n";

/// Rules for the ports of the tunnel's listeners. They see packets that `nat_output` has redirected
/// already.
///
/// Only root and the tunnel's user may send a SYN or SYN-ACK from these ports. Otherwise another
/// user's program could listen there while the tunnel does not, or connect to a client of the
/// toolstack that waits for an answer (TCP's simultaneous open). Packets of sockets without a known
/// user are dropped too.
///
/// The kernel remembers the translation of a connection for some seconds after its reset, and
/// applies it to a new connection from the same port without consulting `nat_output`. Connections
/// of users other than the configured ones are therefore rejected here as well.
fn listeners(redirects: &[Addressed], owner: &str) -> String {
    let of = |to: &Addressed| to.listeners.values().copied().collect::<BTreeSet<u16>>();
    let all: BTreeSet<u16> = redirects.iter().flat_map(of).collect();
    let owner = match owner {
        "root" => "0".to_owned(),
        other => format!("0, {}", quoted(other)),
    };
    let sent = format!(
        "oif \"lo\" tcp sport {{ {} }} tcp flags & syn == syn",
        list(&all)
    );
    let mut text = format!(
        "\t\t{sent} meta skuid {{ {owner} }} return\n\
         \t\t{sent} counter drop comment \"listeners\"\n"
    );
    for to in redirects {
        let (name, ports) = (&to.redirect.name, to.redirect.ports);
        let _ = writeln!(
            text,
            "\t\ttcp dport {{ {} }} ct original proto-dst {ports} {SYN} meta skuid != {{ {} }} \
             counter {RESET} comment \"{name} rejected\"",
            list(&of(to)),
            users(&to.redirect)
        );
    }
    text
}

fn list(ports: &BTreeSet<u16>) -> String {
    let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
    ports.join(", ")
}

fn users(redirect: &Redirect) -> String {
    let users: Vec<_> = redirect.users.iter().map(|user| quoted(user)).collect();
    users.join(", ")
}

/// A connection's first segment.
const SYN: &str = "tcp flags & (syn | ack) == syn";
/// A reset instead of a drop, so that the toolstack's connection fails at once instead of after
/// minutes.
const RESET: &str = "reject with tcp reset";

/// Rules for connections to the peers, one for each address family. If `at` is given, the rules
/// cover only the peers for which this host's tunnel listens at that port.
fn to_peers(to: &Addressed, users: &str, verdict: &str, what: &str, at: Option<u16>) -> String {
    let Redirect { name, ports, .. } = &to.redirect;
    let mut text = String::new();
    for (family, is_ipv4) in [("ip", true), ("ip6", false)] {
        let of_family = to.addresses.keys().filter(|one| {
            let listener = to.listeners.get(one).copied();
            one.is_ipv4() == is_ipv4 && (at.is_none() || at == listener)
        });
        let addresses: Vec<String> = of_family.map(ToString::to_string).collect();
        if !addresses.is_empty() {
            let addresses = addresses.join(", ");
            let _ = writeln!(
                text,
                "\t\t{users}{family} daddr {{ {addresses} }} tcp dport {ports} {SYN} counter \
                 {verdict} comment \"{name} {what}\""
            );
        }
    }
    text
}

/// Rules for connections from the wire.
fn from_wire(to: &Addressed) -> String {
    let Redirect { name, ports, .. } = &to.redirect;
    let mut text = String::new();
    if let Some(plain) = &to.redirect.plain {
        // The end of the last day. The kernel compares it with its clock, so that no process has to
        // change the rules at that time.
        let end = plain.until.next_day().unwrap_or(plain.until);
        let end = end.with_time(Time::MIDNIGHT).assume_utc().unix_timestamp();
        let from: BTreeSet<&IpAddr> = plain.from.iter().collect();
        for address in from {
            let family = if address.is_ipv4() { "ip" } else { "ip6" };
            let _ = writeln!(
                text,
                "\t\t{family} saddr {address} tcp dport {ports} {SYN} meta time < {end} counter \
                 accept comment \"{name} plain {address}\""
            );
        }
    }
    let _ = writeln!(
        text,
        "\t\ttcp dport {ports} {SYN} counter {RESET} comment \"{name} rejected\""
    );
    text
}

/// A user in nft's syntax. A name is quoted, because it can contain characters with a meaning in
/// nft.
fn quoted(user: &str) -> String {
    match user.parse::<u32>() {
        Ok(_) => user.to_owned(),
        Err(_) => format!("\"{user}\""),
    }
}

#[cfg(test)]
mod tests;
