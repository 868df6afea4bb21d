//! Tests the packages: their content, that two builds give the same bytes, and that dpkg installs,
//! upgrades and purges the package on a minimal Debian.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

#[path = "package/bare.rs"]
mod bare;
#[path = "package/upgrade.rs"]
mod upgrade;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use bare::Bare;
use dunlin_test_base::Scratch;
use xtask::package::archive::{self, Files, Tools};
use xtask::package::commit::{Version, workspace};
use xtask::package::content::Parts;
use xtask::package::{licences, make, pages, symbols};

/// The files from which the packages of these tests are made: the command, its pages and licences.
struct Ready {
    scratch: Scratch,
    licences: String,
}

/// Prepares the files once, from the command that this build has built.
fn ready() -> &'static Ready {
    static READY: OnceLock<Ready> = OnceLock::new();
    READY.get_or_init(|| {
        let scratch = Scratch::new();
        let program = env::current_exe().unwrap();
        let built = program.ancestors().nth(2).unwrap().join("dunlin");
        let is_there = built.is_file();
        assert!(
            is_there,
            "{} is missing: `cargo build -p dunlin-cli` builds it",
            built.display()
        );
        let mut strip = Command::new("strip");
        strip.arg("-o").arg(scratch.join("dunlin")).arg(built);
        assert!(strip.status().unwrap().success());
        pages::write(&scratch.join("pages")).unwrap();
        let licences = licences::of_the_command().unwrap();
        Ready { scratch, licences }
    })
}

/// A package of this build, uncompressed, in a directory of its own.
struct Package {
    scratch: Scratch,
    files: Files,
}

impl Package {
    fn new(version: &str) -> Self {
        Self::of(version, &ready().scratch.join("dunlin"))
    }

    /// A package with this command.
    fn of(version: &str, binary: &Path) -> Self {
        let ready = ready();
        let scratch = Scratch::new();
        let version = Version {
            text: version.to_owned(),
            epoch: 1_795_676_592,
            date: "Thu, 26 Nov 2026 07:03:12 +0000".to_owned(),
        };
        let parts = Parts {
            binary,
            source: workspace(),
            pages: &ready.scratch.join("pages"),
            licences: &ready.licences,
            version: &version,
        };
        let tree = scratch.join("tree");
        parts.lay_out(&tree).unwrap();
        let files = archive::write(&Tools::Machine, &tree, scratch.path(), &version).unwrap();
        Self { scratch, files }
    }

    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.scratch.join("tree").join(path)).unwrap()
    }

    fn dpkg_deb(&self, question: &str) -> String {
        let mut ask = Command::new("dpkg-deb");
        let done = ask.arg(question).arg(&self.files.package).output().unwrap();
        assert!(done.status.success(), "{done:?}");
        String::from_utf8(done.stdout).unwrap()
    }
}

/// The directory and the times of the files have no influence on the packages.
#[test]
fn the_same_files_give_the_same_packages() {
    let one = Package::new("1.0");
    // The files of the first package are older.
    let other = Package::new("1.0");
    for (one, other) in [
        (&one.files.package, &other.files.package),
        (&one.files.archive, &other.files.archive),
    ] {
        let (one, other) = (fs::read(one).unwrap(), fs::read(other).unwrap());
        assert!(one == other, "{} and {} bytes", one.len(), other.len());
    }
}

#[test]
fn the_package_has_its_files_with_their_owners_and_modes() {
    let package = Package::new("1.0");
    let listed = package.dpkg_deb("--contents");
    let mut paths = BTreeSet::new();
    for line in listed.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (mode, owner, path) = (words[0], words[1], *words.last().unwrap());
        assert_eq!(owner, "root/root", "{line}");
        let expected = match path {
            "./usr/bin/dunlin" => "-rwxr-xr-x",
            folder if folder.ends_with('/') => "drwxr-xr-x",
            _ => "-rw-r--r--",
        };
        assert_eq!(mode, expected, "{line}");
        paths.insert(path.trim_start_matches('.').to_owned());
    }
    for path in [
        "/etc/dunlin/accept.conf",
        "/etc/dunlin/tunnel.toml.example",
        "/usr/lib/systemd/system/dunlin-tunnel.service",
        "/usr/lib/systemd/system/dunlin-redirect.service",
        "/usr/lib/systemd/system/dunlin-status.service",
        "/usr/lib/sysusers.d/dunlin.conf",
        "/usr/lib/tmpfiles.d/dunlin.conf",
        "/usr/share/bash-completion/completions/dunlin",
        "/usr/share/doc/dunlin/changelog.Debian.gz",
        "/usr/share/doc/dunlin/copyright",
        "/usr/share/doc/dunlin/docs/hypervisors/libvirt.md",
        "/usr/share/doc/dunlin/examples/alerts.yaml",
        "/usr/share/doc/dunlin/examples/dunlin.json",
        "/usr/share/doc/dunlin/licences.gz",
        "/usr/share/fish/vendor_completions.d/dunlin.fish",
        "/usr/share/man/man1/dunlin-libvirt-enable.1.gz",
        "/usr/share/zsh/vendor-completions/_dunlin",
    ] {
        assert!(paths.contains(path), "{path} is missing in {listed}");
    }
    // If the package enabled a unit, it would contain a link in a .wants directory.
    assert!(!listed.contains(".wants"), "{listed}");
    // The archive has the same files.
    let mut tar = Command::new("tar");
    let done = tar
        .arg("--list")
        .arg("--file")
        .arg(&package.files.archive)
        .output()
        .unwrap();
    let archived = String::from_utf8(done.stdout).unwrap();
    let archived: BTreeSet<String> = archived
        .lines()
        .map(|path| path.trim_start_matches("dunlin_1.0_amd64").to_owned())
        .collect();
    assert_eq!(archived, paths);
}

#[test]
fn the_package_describes_itself() {
    let package = Package::new("1.0");
    let fields = package.dpkg_deb("--field");
    let field = |name: &str| {
        let line = fields
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.unwrap_or_else(|| panic!("no {name} in {fields}"))
    };
    assert_eq!((field("Version"), field("Architecture")), ("1.0", "amd64"));
    assert!(field("Depends").contains("libc6 (>= 2."), "{fields}");
    assert!(field("Installed-Size").parse::<u32>().unwrap() > 1024);
    let conffiles = package.text("DEBIAN/conffiles");
    assert_eq!(
        conffiles,
        "/etc/dunlin/accept.conf\n/etc/dunlin/tunnel.toml.example\n"
    );
    let sums = package.text("DEBIAN/md5sums");
    assert!(
        sums.contains("  usr/bin/dunlin\n") && !sums.contains("etc/"),
        "{sums}"
    );
    let licences = &ready().licences;
    for linked in ["\nring 0.", "\nrustls 0.", "\naws-lc-sys 0.", "\nclap 4."] {
        assert!(
            licences.contains(linked),
            "{linked:?} is missing in {licences}"
        );
    }
    // Crates that only tests use are not linked.
    assert!(!licences.contains("\nclap_mangen") && !licences.contains("\nnix 0."));
    for script in ["postinst", "prerm", "postrm"] {
        let file = package.scratch.join("tree/DEBIAN").join(script);
        let checked = Command::new("sh").arg("-n").arg(&file).status().unwrap();
        assert!(checked.success(), "{script}");
        assert_eq!(
            fs::metadata(file).unwrap().permissions().mode() & 0o777,
            0o755
        );
    }
}

/// An upgrade restarts no service, a removal keeps configuration and state, and a purge leaves only
/// the users and the records of sessions.
#[test]
fn a_bare_debian_installs_upgrades_and_purges_the_package() {
    let Some(bare) = Bare::new() else { return };
    let [old, new] = [Package::new("0.1~1"), Package::new("0.1~2")];
    for (package, name) in [(&old, "old.deb"), (&new, "new.deb")] {
        fs::copy(&package.files.package, bare.shared.join(name)).unwrap();
    }
    let before = bare.files();
    install(&bare);
    upgrade(&bare);
    remove(&bare);
    purge(&bare);
    let left: Vec<_> = bare
        .files()
        .symmetric_difference(&before)
        .cloned()
        .collect();
    assert_eq!(left, Vec::<String>::new());
}

fn install(bare: &Bare) {
    bare.run("dpkg --install /shared/old.deb");
    bare.run("dpkg --verify dunlin && dpkg --audit");
    let version = bare.run("dunlin --version");
    assert_eq!(
        version.trim(),
        concat!("dunlin ", env!("CARGO_PKG_VERSION"))
    );
    // In images of containers, dpkg omits the pages of the manual. In this Debian it installs them.
    let page = bare.run("man --warnings --pager=cat dunlin-libvirt-enable 2>&1");
    assert!(page.contains("--install-identity"), "{page}");
    assert!(!page.contains("warning:"), "{page}");
    bare.run("systemd-analyze verify --man=no /usr/lib/systemd/system/dunlin-*.service");
    assert_eq!(
        bare.run("stat -c '%a %U %G' /etc/dunlin").trim(),
        "750 root dunlin"
    );
    assert_eq!(
        bare.run("stat -c '%a %U %G' /run/dunlin").trim(),
        "775 root dunlin"
    );
    bare.run("id dunlin-tunnel");

    // Create the files that an operator, `dunlin libvirt enable` and systemctl create on a host.
    bare.run("dunlin init a.example b.example --out /root/hosts");
    bare.run("install -m 640 -g dunlin -t /etc/dunlin /root/hosts/a.example/*");
    bare.run("dunlin tunnel check --config /etc/dunlin/tunnel.toml");
    bare.run("echo '#mine' >> /etc/dunlin/accept.conf; chmod 700 /etc/dunlin");
    bare.run("mkdir -m 700 /var/lib/dunlin; echo x > /var/lib/dunlin/libvirt.json");
    bare.run("mkdir -p /etc/systemd/system/multi-user.target.wants");
}

/// An upgrade reloads systemd's units, and prints the commands that restart the services. It
/// restarts none itself.
fn upgrade(bare: &Bare) {
    bare.fake_systemd(&["dunlin-tunnel.service", "dunlin-redirect.service"]);
    let said = bare.run("dpkg --install /shared/new.deb");
    let command = "  systemctl reload dunlin-redirect; systemctl restart dunlin-tunnel\n";
    assert!(said.contains(command), "{said}");
    assert_eq!(bare.systemctl_calls(), ["daemon-reload"]);
    assert_eq!(
        bare.run("tail -n 1 /etc/dunlin/accept.conf").trim(),
        "#mine"
    );
    assert_eq!(bare.run("stat -c %a /etc/dunlin").trim(), "700");
    // The same version can be installed again.
    bare.run("dpkg --install /shared/new.deb");
}

/// A removal stops the services, and keeps configuration and state.
fn remove(bare: &Bare) {
    let said = bare.run("dpkg --remove dunlin");
    let calls = bare.systemctl_calls().join("\n");
    assert!(
        calls.contains("stop ") && calls.contains("dunlin-tunnel.service"),
        "{calls}"
    );
    assert!(!said.contains("nft"), "{said}");
    bare.run("test -f /etc/dunlin/tunnel.toml -a -f /var/lib/dunlin/libvirt.json");
    bare.run("dpkg --install /shared/new.deb && dpkg --remove dunlin");
}

/// A purge keeps the record of a session, and reports that.
fn purge(bare: &Bare) {
    let record = "/var/lib/dunlin/0123456789abcdef0123456789abcdef.destination";
    bare.run(&format!("touch {record}"));
    bare.run(
        "ln -s /usr/lib/systemd/system/dunlin-tunnel.service /etc/systemd/system/multi-user.target.wants/",
    );
    let said = bare.run("dpkg --purge dunlin");
    assert!(said.contains("/var/lib/dunlin (files: 1)"), "{said}");
    bare.run(&format!(
        "test -f {record} && rm -r /var/lib/dunlin /root/hosts"
    ));
    bare.no_systemd();
}

/// Two builds in different directories give the same bytes, and the command runs on Debian 12.
#[test]
fn two_builds_from_two_directories_are_the_same() {
    if env::var_os("DUNLIN_SOAK").is_none_or(|soak| soak != "1") {
        println!("only the soak runs this test, which builds the command twice, from nothing");
        return;
    }
    let scratch = Scratch::new();
    let made = ["one", "another/directory"].map(|name| {
        // Write the manual's pages and the completions for each build, too.
        let out = scratch.join(name);
        let pages = out.join("pages");
        pages::write(&pages).unwrap();
        make(&out, &pages).unwrap()
    });
    let [one, other] = &made;
    for (one, other) in [
        (&one.package, &other.package),
        (&one.archive, &other.archive),
    ] {
        assert!(
            fs::read(one).unwrap() == fs::read(other).unwrap(),
            "{}",
            one.display()
        );
    }
    let binary = scratch.join("one/tree/usr/bin/dunlin");
    symbols::check(&binary).unwrap();
    let bytes = fs::read(&binary).unwrap();
    let home = env::var("HOME").unwrap_or_default();
    let has = |text: &str| {
        bytes
            .windows(text.len())
            .any(|window| window == text.as_bytes())
    };
    for path in [
        "/build/",
        "/target/release",
        "/opt/rust",
        scratch.path().to_str().unwrap(),
    ] {
        assert!(!has(path), "the command contains {path}");
    }
    assert!(home.len() < 2 || !has(&home), "the command contains {home}");
    let Some(bare) = Bare::new() else { return };
    fs::copy(&one.package, bare.shared.join("dunlin.deb")).unwrap();
    bare.run("dpkg --install /shared/dunlin.deb && dunlin demo --guest process --memory 64M");
}
