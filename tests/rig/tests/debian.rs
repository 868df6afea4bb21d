//! Debian's kernels and QEMU can be fetched and run.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs;

use dunlin_rig::debian::{self, Which};

#[test]
fn kernels_come_with_modules_and_configuration() {
    for which in [Which::Newest, Which::Oldest, Which::Former] {
        let kernel = debian::kernel(&which).unwrap();
        println!("{which:?}: {}", kernel.version);
        let image = fs::read(&kernel.image).unwrap();
        assert_eq!(&image[0x202..0x206], b"HdrS", "not a boot image");
        let config = fs::read_to_string(&kernel.config).unwrap();
        assert!(
            config.contains("CONFIG_TLS=m"),
            "the kernel has no kernel TLS"
        );
        let module = match which {
            Which::Former => "tls.ko",
            _ => "tls.ko.xz",
        };
        assert!(kernel.modules.join("kernel/net/tls").join(module).is_file());
    }
}

#[test]
fn qemu_is_not_the_machines_own() {
    let qemu = debian::qemu().unwrap();
    let version = qemu.version().unwrap();
    println!("QEMU {version}");
    assert!(version.starts_with("10."), "{version}");
}
