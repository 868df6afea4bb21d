//! The certificates in /etc/dunlin: puts them there, and lets the tunnel's service read them.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use dunlin_lane::identity::{AUTHORITIES_FILE, CERTIFICATE_FILE, Files, KEY_FILE, Layout, Role};

use super::host::group;
use super::programs::Report;
use crate::identity::{Reading, load_identity};

/// The directory of the services' certificates.
pub(super) const PLACE: &str = "/etc/dunlin";
/// Access of the owner and of the group `dunlin`.
const DIRECTORY_MODE: u32 = 0o750;
const FILE_MODE: u32 = 0o640;

/// Copies the identity in `from` to [`PLACE`]. Files that already exist there must have the same
/// content.
///
/// # Errors
/// `from` has no valid identity, another identity is in place, or a file cannot be read or written.
pub(super) fn install(from: &Path, report: &Report) -> Result<()> {
    load_identity(from, Role::Source, &Reading::default())?;
    let place = Path::new(PLACE);
    let mut copies = Vec::new();
    for file in [AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE] {
        let path = from.join(file);
        let read = fs::read(&path);
        let content = read.with_context(|| {
            format!(
                "cannot read {}: --install-identity needs the files of `dunlin init` or `dunlin pki`",
                path.display()
            )
        })?;
        let to = place.join(file);
        match fs::read(&to) {
            Ok(there) => ensure!(
                there == content,
                "{0} exists and differs from {1}, so nothing was copied: to replace this host's \
                 identity, delete {0} first",
                to.display(),
                path.display()
            ),
            Err(error) if error.kind() == ErrorKind::NotFound => copies.push((to, content)),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", to.display()));
            }
        }
    }
    fs::create_dir_all(place).with_context(|| format!("cannot create {PLACE}"))?;
    for (to, content) in &copies {
        write(to, content).with_context(|| format!("cannot write {}", to.display()))?;
    }
    let what = format!(
        "{PLACE}: copied from {0}; {0} can be deleted now",
        from.display()
    );
    report.step("installed", &what);
    Ok(())
}

/// Writes a file that only its owner may read until the group is set.
fn write(to: &Path, content: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(to)?;
    file.write_all(content)
}

/// Lets the services' group read the identity in [`PLACE`]. Changes nothing if the host does not
/// have the group, or if the identity is elsewhere, where other programs may use it.
pub(super) fn let_services_read(identity: &Path) -> Result<()> {
    let Some(group) = group().filter(|_| identity == Path::new(PLACE)) else {
        return Ok(());
    };
    let files = Files::in_directory(identity, Some(Layout::Dunlin), Some(Role::Source))?;
    let mut paths = vec![(identity, DIRECTORY_MODE)];
    let read = [
        files.authorities.as_deref(),
        files.revocations.as_deref(),
        Some(&*files.certificate),
        Some(&*files.key),
        files.denied.as_deref(),
    ];
    paths.extend(read.into_iter().flatten().map(|path| (path, FILE_MODE)));
    for (path, mode) in paths {
        let Ok(found) = fs::metadata(path) else {
            continue;
        };
        let (of_group, of_others) = (mode & 0o070, (mode & 0o070) >> 3);
        let has = |bits: u32| found.mode() & bits == bits;
        if has(of_others) || (found.gid() == group && has(of_group)) {
            continue;
        }
        // Set the group before the mode. Otherwise the previous group could read the key for a
        // moment.
        chown(path, None, Some(group))
            .and_then(|()| {
                let mode = (found.mode() & 0o7777) | of_group;
                fs::set_permissions(path, Permissions::from_mode(mode))
            })
            .with_context(|| format!("cannot let the group dunlin read {}", path.display()))?;
    }
    Ok(())
}
