//! Debian's cloud kernels. They are small and have built-in drivers for virtual machines; in
//! bookworm these drivers are modules.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::apt::Apt;
use super::root::build;
use super::{DebianError, at};
use crate::cache;

/// The suite with the newest kernels. Trixie itself has the oldest supported kernel.
const SUITE: &str = "trixie-backports";

/// The oldest supported kernel series, which is trixie's own.
const OLDEST: &str = "6.12";

/// The previous release, and the series of its kernels.
const FORMER_SUITE: &str = "bookworm";
const FORMER: &str = "6.1";

/// How long the package lists are treated as current.
const LISTS_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// The suffix of every kernel's name.
const FLAVOUR: &str = "-cloud-amd64";

/// Selects a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// The newest kernel of trixie-backports.
    Newest,
    /// The newest kernel of trixie's own series, 6.12.
    Oldest,
    /// The newest kernel of bookworm's own series, 6.1, for tests of missing features.
    Former,
    /// A version as printed by `uname -r`, or a prefix of one.
    Version(String),
}

/// A kernel in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The version, as printed by `uname -r`.
    pub version: String,
    /// The bootable image.
    pub image: PathBuf,
    /// The kernel's modules (`*.ko.xz`, before trixie `*.ko`), without modules.dep.
    pub modules: PathBuf,
    /// Its configuration.
    pub config: PathBuf,
}

/// Returns a kernel, and fetches it if it is not in the cache. Queries the mirror for the newest
/// version at most once a day. If the mirror is unreachable, uses the newest matching version in
/// the cache and prints a message on standard error.
///
/// # Errors
/// No such kernel exists, or there is no network; see [`DebianError`].
pub fn kernel(which: &Which) -> Result<Kernel, DebianError> {
    let _turn = cache::lock("debian").map_err(at(cache::directory()))?;
    let cached = cached_kernels()?;
    if let Which::Version(_) = which
        && let Some(version) = pick(which, cached.iter().map(|kernel| kernel.version.as_str()))
    {
        return open(&version);
    }
    let suite = match which {
        Which::Former => FORMER_SUITE,
        _ => SUITE,
    };
    let names = match offered(suite) {
        Ok(names) => names,
        Err(error) => {
            let known = cached.iter().map(|kernel| kernel.version.as_str());
            let version = pick(which, known).ok_or(error)?;
            eprintln!("the mirror does not answer; using kernel {version} from the cache");
            return open(&version);
        }
    };
    let version = pick(which, names.iter().filter_map(|name| version_of(name)))
        .ok_or_else(|| DebianError::NoKernel(format!("{which:?}")))?;
    if let Ok(kernel) = open(&version) {
        return Ok(kernel);
    }
    // Up to 6.18, one package contains the image, modules and configuration. Later versions have
    // several packages.
    let parts: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| name.ends_with(&format!("-{version}")))
        .collect();
    let apt = Apt::new(suite)?;
    build(&folder(&version), |archives| {
        apt.download_only(&parts, archives)
    })?;
    open(&version)
}

/// The names of a suite's kernel packages; queries the mirror at most once a day.
fn offered(suite: &str) -> Result<Vec<String>, DebianError> {
    let list = cache::directory().join(format!("debian/kernels-offered-{suite}"));
    let age = fs::metadata(&list)
        .and_then(|data| data.modified())
        .map_or(LISTS_AGE, |time| time.elapsed().unwrap_or_default());
    if age < LISTS_AGE {
        let names = fs::read_to_string(&list).map_err(at(&list))?;
        return Ok(names.lines().map(str::to_owned).collect());
    }
    let apt = Apt::new(suite)?;
    apt.refresh()?;
    let names = apt.names(&format!(
        "^linux-(base|binary|image|modules)-[0-9].*{FLAVOUR}$"
    ))?;
    fs::write(&list, names.join("\n")).map_err(at(&list))?;
    Ok(names)
}

/// The kernels in the cache, oldest first.
///
/// # Errors
/// The cache cannot be read.
pub fn cached_kernels() -> Result<Vec<Kernel>, DebianError> {
    let kernels = cache::directory().join("debian/kernels");
    let entries = match fs::read_dir(&kernels) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(DebianError::Cache(kernels, error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(at(&kernels))?.file_name();
        found.extend(open(&name.to_string_lossy()));
    }
    found.sort_by_cached_key(|kernel| numbers(&kernel.version));
    Ok(found)
}

fn folder(version: &str) -> PathBuf {
    cache::directory().join("debian/kernels").join(version)
}

fn open(version: &str) -> Result<Kernel, DebianError> {
    let root = folder(version);
    let modules = root.join("usr/lib/modules").join(version);
    let find = |candidates: [PathBuf; 2]| {
        candidates
            .into_iter()
            .find(|path| path.is_file())
            .ok_or_else(|| DebianError::Missing(format!("kernel {version}"), root.clone()))
    };
    let beside = |name: &str| [modules.join(name), boot(&root, name, version)];
    Ok(Kernel {
        version: version.to_owned(),
        image: find(beside("vmlinuz"))?,
        config: find(beside("config"))?,
        modules,
    })
}

fn boot(root: &Path, name: &str, version: &str) -> PathBuf {
    root.join("boot").join(format!("{name}-{version}"))
}

/// The version in a package's name, unless the package is a debugging or unsigned variant.
fn version_of(package: &str) -> Option<&str> {
    let rest = package
        .strip_prefix("linux-binary-")
        .or_else(|| package.strip_prefix("linux-image-"))?;
    let version = rest.strip_suffix(FLAVOUR).map(|_| rest)?;
    version
        .starts_with(|first: char| first.is_ascii_digit())
        .then_some(version)
}

/// The newest version that matches `which`.
fn pick<'a>(which: &Which, versions: impl Iterator<Item = &'a str>) -> Option<String> {
    let beginning = match which {
        Which::Newest => "",
        Which::Oldest => OLDEST,
        Which::Former => FORMER,
        Which::Version(wanted) => wanted,
    };
    let admitted = |version: &&str| {
        version.strip_prefix(beginning).is_some_and(|rest| {
            beginning.is_empty() || !rest.starts_with(|next: char| next.is_ascii_digit())
        })
    };
    versions
        .filter(admitted)
        .max_by_key(|version| numbers(version))
        .map(str::to_owned)
}

/// A sort key: 7.3.4+deb13 gives 7, 3, 4, 13.
fn numbers(version: &str) -> Vec<u32> {
    version
        .split(|mark: char| !mark.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number_and_packages_of_other_kinds_left_out() {
        let names = [
            "linux-image-6.12.94+deb13-cloud-amd64",
            "linux-image-6.12.107+deb13-cloud-amd64",
            "linux-binary-7.3.4+deb13-cloud-amd64",
            "linux-image-7.10.1+deb13-cloud-amd64",
            "linux-binary-unsigned-7.11.0+deb13-cloud-amd64",
            "linux-image-cloud-amd64",
            "linux-image-9.0.0+deb13-cloud-amd64-dbg",
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-44-cloud-amd64",
        ];
        let versions = || names.iter().filter_map(|name| version_of(name));
        let picked = |which| pick(&which, versions());
        let version = |number: &str| Some(format!("{number}+deb13-cloud-amd64"));
        assert_eq!(picked(Which::Newest), version("7.10.1"));
        assert_eq!(picked(Which::Oldest), version("6.12.107"));
        let former = picked(Which::Former);
        assert_eq!(former.as_deref(), Some("6.1.0-44-cloud-amd64"));
        assert_eq!(picked(Which::Version("7.3".to_owned())), version("7.3.4"));
        assert_eq!(picked(Which::Version("6.12.9".to_owned())), None);
    }
}
