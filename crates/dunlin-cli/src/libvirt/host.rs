//! What `dunlin libvirt enable` looks up on this host.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use dunlin::lane::peers::Peer;
use dunlin_ipsec::PortRange;
use dunlin_lane::identity::{Role, Summary};

pub(super) use crate::identity::SERVICES as GROUP;
use crate::identity::{Reading, load_identity};
use crate::text::chained;
use crate::tunnel::look_up;

/// Where certificates are searched for, in this order.
pub(crate) const IDENTITIES: [&str; 3] = ["/etc/dunlin", "/etc/pki/qemu", "/etc/pki"];
/// The users of QEMU in Debian and in Fedora.
const QEMU_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];
/// Programs that may listen on a toolstack's ports: QEMU during a migration, and libvirt.
const TOOLSTACK: [&str; 3] = ["qemu", "libvirtd", "virtqemud"];

/// A peer, as the operator named it.
#[derive(Clone, Debug)]
pub(super) struct NamedPeer {
    pub(super) host: String,
    /// A name in the peer's certificate.
    pub(super) identity: String,
    pub(super) addresses: Vec<IpAddr>,
}

/// Resolves `HOST` or `HOST=NAME`.
pub(super) fn peer(text: &str) -> Result<NamedPeer> {
    let (host, identity) = text.split_once('=').unwrap_or((text, text));
    identity
        .parse::<Peer>()
        .with_context(|| format!("invalid --peer {text}"))?;
    let mut addresses = look_up(host).with_context(|| {
        format!("cannot resolve {host}: correct --peer, or add the name to /etc/hosts")
    })?;
    addresses.sort_unstable();
    addresses.dedup();
    if let Some(own) = addresses.iter().find(|one| one.is_loopback()) {
        bail!(
            "{host} is {own}, which is this host: give the name or address of the other host as \
             the toolstack uses it (a line of /etc/hosts may be wrong)"
        );
    }
    Ok(NamedPeer {
        host: host.to_owned(),
        identity: identity.to_owned(),
        addresses,
    })
}

/// The directory with this host's certificates, and a summary of the identity in it.
pub(super) fn identity(given: Option<&Path>) -> Result<(PathBuf, Summary)> {
    let candidates: Vec<PathBuf> = match given {
        Some(path) => vec![path.to_owned()],
        None => IDENTITIES.map(PathBuf::from).to_vec(),
    };
    let mut reasons = Vec::new();
    for path in candidates {
        let load = |role| load_identity(&path, role, &Reading::default());
        match load(Role::Source).and_then(|one| load(Role::Destination).map(|_| one)) {
            Ok((identity, _)) => return Ok((path, identity.summary()?)),
            Err(error) => reasons.push(chained(&error)),
        }
    }
    bail!(
        "no usable certificates for this host: create them with `dunlin init` and give their directory with --install-identity, correct what is listed below, or name another directory with --identity\n{}",
        reasons.join("\n")
    )
}

/// The number of the group in which Dunlin's services run; `None` if this host does not have the
/// group.
pub(super) fn group() -> Option<u32> {
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    groups.lines().find_map(|line| {
        let line = line.strip_prefix(GROUP)?.strip_prefix(':')?;
        line.split(':').nth(1)?.parse().ok()
    })
}

/// The private keys in an identity's directory that Dunlin's services have no permission to read.
pub(super) fn unreadable_keys(identity: &Path) -> Vec<PathBuf> {
    let group = group();
    let is_readable = |path: &Path| {
        fs::metadata(path).is_ok_and(|found| {
            let mode = found.mode();
            mode & 0o004 != 0 || (Some(found.gid()) == group && mode & 0o040 != 0)
        })
    };
    // libvirt keeps its keys in a subdirectory.
    let directories = [identity.to_owned(), identity.join("libvirt/private")];
    let entries = directories
        .iter()
        .flat_map(fs::read_dir)
        .flatten()
        .flatten();
    let paths = entries.map(|entry| entry.path());
    let keys = paths.filter(|path| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().ends_with("key.pem")
    });
    keys.filter(|path| !is_readable(path)).collect()
}

/// The users that connect to peers: libvirt's daemon, and QEMU's user.
pub(super) fn users(qemu: Option<&str>) -> Vec<String> {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let exists = |user: &&&str| {
        let name = |line: &str| line.split(':').next() == Some(**user);
        passwd.lines().any(name)
    };
    let mut users = vec!["root".to_owned()];
    match qemu {
        Some("root" | "0") => {}
        Some(user) => users.push(user.to_owned()),
        None => users.extend(QEMU_USERS.iter().find(exists).map(ToString::to_string)),
    }
    users
}

/// Checks that only the toolstack listens on the ports, because the rules would reject the clients
/// of any other program.
pub(super) fn check_listeners(ports: PortRange) -> Result<()> {
    let mut foreign = Vec::new();
    let owners = owners();
    for file in ["/proc/net/tcp", "/proc/net/tcp6"] {
        // A kernel without IPv6 has no tcp6.
        let table = fs::read_to_string(file).unwrap_or_default();
        for (port, inode) in table.lines().skip(1).filter_map(listener) {
            let owner = owners.get(&inode).map_or("unknown", String::as_str);
            let is_ours = TOOLSTACK.iter().any(|one| owner.starts_with(one));
            if ports.contains(port) && !is_ours {
                foreign.push(format!("port {port}: {owner}"));
            }
        }
    }
    foreign.dedup();
    ensure!(
        foreign.is_empty(),
        "other programs listen on the toolstack's ports {ports}, and the rules would reject their \
         clients: {}. Change the range of one of them (libvirt: migration_port_min and \
         migration_port_max in qemu.conf, on all hosts)",
        foreign.join(", ")
    );
    Ok(())
}

/// The port and inode of a listening socket in a line of /proc/net/tcp (proc(5)).
fn listener(line: &str) -> Option<(u16, u64)> {
    const LISTEN: &str = "0A";
    let mut fields = line.split_whitespace();
    let (_, port) = fields.nth(1)?.rsplit_once(':')?;
    let state = fields.nth(1)?;
    let inode = fields.nth(5)?.parse().ok()?;
    let port = u16::from_str_radix(port, 16).ok()?;
    (state == LISTEN).then_some((port, inode))
}

/// For the inode of each socket, the name of a process that has the socket.
fn owners() -> BTreeMap<u64, String> {
    let mut owners = BTreeMap::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for process in processes {
        let Ok(name) = fs::read_to_string(process.path().join("comm")) else {
            continue;
        };
        let descriptors = fs::read_dir(process.path().join("fd"));
        for descriptor in descriptors.into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(descriptor.path()) else {
                continue;
            };
            let inode = target.to_str().and_then(|text| {
                let text = text.strip_prefix("socket:[")?.strip_suffix(']')?;
                text.parse().ok()
            });
            if let Some(inode) = inode {
                owners.insert(inode, name.trim().to_owned());
            }
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_foreign_listener_in_the_range_is_named() {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = held.local_addr().unwrap().port();
        let refused = check_listeners(format!("{port}-{port}").parse().unwrap());
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains(&format!("port {port}: ")), "{refused}");
        assert!(!refused.contains("unknown"), "{refused}");
        drop(held);
        check_listeners(format!("{port}-{port}").parse().unwrap()).unwrap();
    }

    #[test]
    fn a_name_of_this_host_is_no_peer() {
        assert!(peer("127.0.0.1").is_err());
        assert!(peer("localhost=b.example").is_err());
        let found = peer("192.0.2.7=b.example").unwrap();
        assert_eq!(found.addresses, ["192.0.2.7".parse::<IpAddr>().unwrap()]);
        assert_eq!(found.identity, "b.example");
    }

    #[test]
    fn qemus_user_of_the_configuration_comes_before_the_distributions() {
        assert_eq!(users(Some("64055")), ["root", "64055"]);
        assert_eq!(users(Some("root")), ["root"]);
    }
}
