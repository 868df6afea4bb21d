//! The guest's files: busybox, kernel modules, Debian packages, and the tests.
//!
//! Packages keep Debian's layout, and `/rig` holds the runner and the tests. Busybox's commands
//! come last in the path, so a test that needs `iproute2` gets the `ip` of that package.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use dunlin_rig::cache;
use dunlin_rig::debian::{self, Kernel};

use super::archive::Archive;
use super::program::{self, Program};

/// The Debian release of the guest's packages.
const SUITE: &str = "trixie";

/// Writes to `target` the initramfs that `programs` need under `kernel`.
///
/// # Errors
/// A download or a build fails, or `target` cannot be written.
pub fn write(kernel: &Kernel, programs: &[Program], target: &Path) -> Result<()> {
    let mut archive = Archive::default();
    let mut packages: Vec<&str> = Vec::new();
    for package in programs.iter().flat_map(|test| &test.needs.packages) {
        if !packages.contains(&package.as_str()) {
            packages.push(package);
        }
    }
    for package in packages {
        // Request each package on its own: the cache has a folder for each request, and tests need
        // many combinations of packages.
        let root = debian::packages(SUITE, &[package])?;
        archive.tree("", &root, &is_for_programs)?;
    }
    for part in ["bin", "sbin", "lib", "lib64"] {
        archive.folder(format!("usr/{part}"));
        archive.link(part, format!("usr/{part}"));
    }
    for part in ["dev", "proc", "sys", "tmp", "run", "root", "out", "etc"] {
        archive.folder(part);
    }

    let busybox = busybox()?;
    archive.program("rig/busybox", &busybox);
    let commands = Command::new(&busybox).arg("--list").output()?;
    for command in String::from_utf8_lossy(&commands.stdout).lines() {
        archive.link(format!("rig/bin/{command}"), "/rig/busybox");
    }
    for (path, command) in [("usr/bin/sh", "sh"), ("usr/sbin/modprobe", "modprobe")] {
        if !archive.holds(path) {
            archive.link(path, format!("/rig/bin/{command}"));
        }
    }

    let modules = modules(kernel, &busybox)?;
    archive.tree(
        format!("usr/lib/modules/{}", kernel.version),
        &modules,
        &is_for_a_virtual_machine,
    )?;

    archive.bytes("rig/init", include_str!("init.sh"), 0o755);
    let mut run = String::new();
    for test in programs {
        archive.program(format!("rig/tests/{}", test.name), &test.path);
        run += &format!("{} {}\n", test.name, test.needs.limit_seconds);
    }
    archive.bytes("rig/run", run, 0o644);
    if programs.iter().any(|test| test.needs.dunlin) {
        archive.program("usr/bin/dunlin", program::build_dunlin()?);
    }
    let stripped = target.with_extension("previous");
    if programs.iter().any(|test| test.needs.previous)
        && let Some(previous) = std::env::var_os("DUNLIN_PREVIOUS")
    {
        add_previous(&mut archive, Path::new(&previous), &stripped)?;
    }
    let named = |test: &Program| test.needs.library_tests.clone();
    for name in programs.iter().flat_map(named).collect::<BTreeSet<_>>() {
        let program = program::build_library_tests(&name)?;
        archive.program(format!("usr/bin/{name}"), program);
    }
    fs::write(target, archive.finish()?)
        .with_context(|| format!("cannot write {}", target.display()))?;
    if stripped.exists() {
        fs::remove_file(stripped)?;
    }
    Ok(())
}

/// Adds the command of an earlier commit as `dunlin-previous`. The command is linked with the
/// host's C library, and the guest's packages may contain another version. The archive therefore
/// contains the host's libraries, and a script runs the command through their loader (ld.so(8)).
/// `stripped` receives a copy without debug information. The debug information is two thirds of the
/// file. The copy must exist until the archive is written.
fn add_previous(archive: &mut Archive, previous: &Path, stripped: &Path) -> Result<()> {
    const FOLDER: &str = "rig/previous";
    let printed = |command: &mut Command| -> Result<String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let done = command
            .output()
            .with_context(|| format!("cannot start {name}"))?;
        if !done.status.success() {
            bail!(
                "{name} failed for DUNLIN_PREVIOUS={}: {}",
                previous.display(),
                String::from_utf8_lossy(&done.stderr)
            );
        }
        Ok(String::from_utf8_lossy(&done.stdout).into_owned())
    };
    let mut strip = Command::new("strip");
    printed(
        strip
            .args(["--strip-debug", "-o"])
            .arg(stripped)
            .arg(previous),
    )?;
    archive.program(format!("{FOLDER}/dunlin"), stripped);
    // ldd prints a library as "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)". The line of the
    // loader has no arrow, and that of the kernel's vDSO has no path.
    let listed = printed(Command::new("ldd").arg(previous))?;
    let mut loader = None;
    for line in listed.lines() {
        let Some(path) = line.split_whitespace().find(|word| word.starts_with('/')) else {
            continue;
        };
        let path = Path::new(path);
        let name = path
            .file_name()
            .context("ldd lists a path without a file name")?;
        let inside = Path::new(FOLDER).join(name);
        archive.program(&inside, path);
        if !line.contains("=>") {
            loader = Some(inside);
        }
    }
    let loader = loader.with_context(|| format!("ldd lists no loader: {listed}"))?;
    let script = format!(
        "#!/bin/sh\nexec /{} --library-path /{FOLDER} /{FOLDER}/dunlin \"$@\"\n",
        loader.display()
    );
    archive.bytes("usr/bin/dunlin-previous", script, 0o755);
    Ok(())
}

fn busybox() -> Result<PathBuf> {
    let root = debian::packages(SUITE, &["busybox-static"])?;
    Ok(root.join("usr/bin/busybox"))
}

/// Excludes documentation, translations, and files used only to install packages.
fn is_for_programs(path: &Path) -> bool {
    let share = ["doc", "man", "locale", "info", "lintian", "bug", "perl5"];
    let libraries = ["gconv", "perl-base"];
    let within = |folder: &str, parts: &[&str]| {
        parts
            .iter()
            .any(|part| path == Path::new(folder).join(part))
    };
    !within("usr/share", &share) && !within("usr/lib/x86_64-linux-gnu", &libraries)
}

/// Excludes modules that neither the machine nor the tests use. They are three quarters of all
/// modules, and an emulated CPU would take seconds to unpack them.
fn is_for_a_virtual_machine(path: &Path) -> bool {
    let within = |folder: &str, wanted: &[&str]| {
        path.strip_prefix(Path::new("kernel").join(folder))
            .is_ok_and(|below| {
                below.iter().next().is_some_and(|part| {
                    let part = part.to_string_lossy();
                    !part.ends_with(".ko") && !wanted.contains(&&*part)
                })
            })
    };
    let drivers = ["net", "vhost", "virtio", "block", "char", "crypto"];
    let networks = [
        "ovpn",
        "wireguard",
        "ipvlan",
        "vxlan",
        "netdevsim",
        "bonding",
    ];
    let file_systems = ["fuse", "overlayfs", "9p", "netfs"];
    let large = [
        "kernel/arch/x86/kvm",
        "kernel/net/ceph",
        "kernel/net/openvswitch",
        "kernel/net/rds",
        "kernel/net/sctp",
        "kernel/net/sunrpc",
        "kernel/net/tipc",
    ];
    !large.iter().any(|folder| path == Path::new(folder))
        && !within("drivers", &drivers)
        && !within("drivers/net", &networks)
        && !within("fs", &file_systems)
}

/// Unpacks all of the kernel's modules, once for each kernel. Creates the indexes with which
/// modprobe answers the kernel's module requests, as on an installed system.
fn modules(kernel: &Kernel, busybox: &Path) -> Result<PathBuf> {
    let _turn = cache::lock("modules")?;
    let folder = cache::directory().join("modules");
    let whole = folder.join(&kernel.version);
    if whole.is_dir() {
        return Ok(whole);
    }
    let aside = folder.join("unfinished");
    match fs::remove_dir_all(&aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    // depmod expects the directory layout of an installed system.
    let tree = aside.join("lib/modules").join(&kernel.version);
    unpack(&kernel.modules, &tree, busybox)?;
    let made = Command::new(busybox)
        .arg("depmod")
        .arg("-b")
        .arg(&aside)
        .arg(&kernel.version)
        .output()?;
    if !made.status.success() {
        bail!(
            "depmod failed for {}: {}",
            kernel.version,
            String::from_utf8_lossy(&made.stderr)
        );
    }
    fs::rename(&tree, &whole)?;
    fs::remove_dir_all(&aside)?;
    Ok(whole)
}

/// Copies a folder of modules and decompresses them.
fn unpack(from: &Path, to: &Path, busybox: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type()?.is_dir() {
            unpack(&path, &to.join(&name), busybox)?;
        } else if path.extension().is_some_and(|kind| kind == "xz") {
            let status = Command::new(busybox)
                .args(["xz", "-d", "-c"])
                .stdin(File::open(&path)?)
                .stdout(File::create(to.join(Path::new(&name).with_extension("")))?)
                .stderr(Stdio::inherit())
                .status()?;
            if !status.success() {
                bail!("cannot decompress {}", path.display());
            }
        } else if path.extension().is_some_and(|kind| kind == "ko")
            || name.to_string_lossy().starts_with("modules.")
        {
            fs::copy(&path, to.join(&name))?;
        }
    }
    Ok(())
}
