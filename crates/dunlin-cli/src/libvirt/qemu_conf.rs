//! The settings of libvirt's `qemu.conf` that concern migrations.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use dunlin_ipsec::PortRange;

/// The port range that libvirt uses if qemu.conf sets none.
const PORTS: (u16, u16) = (49152, 49215);

/// The settings of a host's libvirt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QemuConf {
    /// `migration_port_min` and `migration_port_max`.
    pub(crate) ports: PortRange,
    /// `migration_address`: where QEMU listens for a migration.
    pub(crate) address: Option<String>,
    /// `migration_host`: the host name or address that the destination gives to the source.
    pub(crate) host: Option<String>,
    /// `user`: the user of QEMU.
    pub(crate) user: Option<String>,
}

impl QemuConf {
    /// Reads a file. If the file does not exist, returns the defaults.
    ///
    /// # Errors
    /// The file cannot be read, or a setting is invalid.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            other => other.with_context(|| format!("cannot read {}", path.display()))?,
        };
        Self::parse(&text).with_context(|| format!("cannot use {}", path.display()))
    }

    /// The address at which QEMU listens; `None` for all addresses.
    ///
    /// # Errors
    /// `migration_address` is not an IP address.
    pub(crate) fn listens_at(&self) -> Result<Option<IpAddr>> {
        let address = self.address.as_deref().map(|text| {
            text.parse::<IpAddr>().map_err(|_| {
                anyhow!(
                    "migration_address = {text:?} in qemu.conf is not an address: write the \
                     address at which QEMU listens, or give it with --local"
                )
            })
        });
        Ok(address.transpose()?.filter(|one| !one.is_unspecified()))
    }

    fn parse(text: &str) -> Result<Self> {
        let set = settings(text);
        let port = |key: &str, usual: u16| match set.get(key) {
            Some(text) => text
                .parse::<u16>()
                .map_err(|_| anyhow!("{key} = {text} is not a port: correct it")),
            None => Ok(usual),
        };
        let (first, last) = (
            port("migration_port_min", PORTS.0)?,
            port("migration_port_max", PORTS.1)?,
        );
        ensure!(
            first <= last,
            "migration_port_min = {first} is above migration_port_max = {last}: correct them"
        );
        Ok(Self {
            ports: format!("{first}-{last}").parse()?,
            address: set.get("migration_address").cloned(),
            host: set.get("migration_host").cloned(),
            user: set
                .get("user")
                .map(|user| user.trim_start_matches('+').to_owned()),
        })
    }
}

/// The settings `key = value` and `key = "value"`. If several lines have the same key, the last one
/// applies. Lines in other forms, such as lists, set none of the keys that this module reads.
fn settings(text: &str) -> BTreeMap<&str, String> {
    let mut settings = BTreeMap::new();
    for line in text.lines() {
        let line = line.trim();
        let Some((key, value)) = line.split_once('=') else {
            continue;
        };
        if line.starts_with('#') {
            continue;
        }
        let value = value.trim();
        let value = match value.strip_prefix('"') {
            Some(rest) => rest.split('"').next().unwrap_or_default(),
            None => value.split('#').next().unwrap_or_default().trim(),
        };
        settings.insert(key.trim(), value.to_owned());
    }
    settings
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn settings_are_read_and_comments_are_not() {
        let text = "# migration_port_min = 1\nmigration_port_min = 50000 # a comment\n\
                    migration_port_max=50010\nmigration_address = \"10.77.0.1\"\n\
                    user = \"+64055\"\n#user = \"root\"\ncgroup_controllers = [ \"cpu\" ]\n";
        let conf = QemuConf::parse(text).unwrap();
        assert_eq!(conf.ports, "50000-50010".parse().unwrap());
        assert_eq!(conf.listens_at().unwrap(), "10.77.0.1".parse().ok());
        assert_eq!(conf.user.as_deref(), Some("64055"));
        assert_eq!(conf.host, None);
    }

    #[test]
    fn an_empty_file_has_libvirts_defaults() {
        let conf = QemuConf::parse("").unwrap();
        assert_eq!(conf.ports, "49152-49215".parse().unwrap());
        assert_eq!(conf.listens_at().unwrap(), None);
        let any = QemuConf::parse("migration_address = \"::\"").unwrap();
        assert_eq!(any.listens_at().unwrap(), None);
    }

    #[test]
    fn a_range_that_libvirt_cannot_use_is_refused() {
        for text in [
            "migration_port_min = 70000",
            "migration_port_min = many",
            "migration_port_min = 50000\nmigration_port_max = 49999",
        ] {
            assert!(QemuConf::parse(text).is_err(), "{text}");
        }
    }
}
