//! A socket uses the implementation of gcm(aes) with the highest priority.
//! If the module for the CPU's instructions is not loaded, this implementation is a generic one.

use std::fs;
use std::io::{Read, Write};
use std::process::{Command, ExitCode};

use dunlin::lane::kernel::{Refused, choose};

use dunlin::lane::offload::Offload;
use dunlin::lane::provider::CipherSuite;
use dunlin_kernel_tests::tls::{Keys, connected, kernels, set};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::ktls::{Direction, attach};
use nix::errno::Errno;

/// The module that implements AES-GCM with this processor's instructions.
const MODULE: &str = "aesni_intel";

/// The modules from which the kernel builds gcm(aes) without [`MODULE`]. A kernel may have some of
/// them built in.
const PARTS: [&str; 4] = ["gcm", "ctr", "ghash-generic", "aes-generic"];

fn main() -> ExitCode {
    run(&Needs::NOTHING, |guest| {
        // An installed system loads this module by itself, through its alias for the CPU feature.
        guest.command("modprobe", &[MODULE]);
        let accelerated = chosen();
        assert_eq!(accelerated.module, MODULE, "{accelerated:?}");
        // Check the driver's name too, because a generic driver may also belong to this module.
        assert!(
            accelerated.driver.starts_with("generic-gcm-aesni"),
            "{accelerated:?}"
        );
        assert!(accelerated.priority >= 400, "{accelerated:?}");

        let unloaded = guest.without_module(MODULE);
        let unasked = guest.without_loader();
        let left = drivers();
        println!("without {MODULE}: {left:#?}");
        if left.is_empty() {
            // A kernel that attaches TLS to the socket may still lack the cipher.
            let (near, _far) = connected();
            attach(&near).expect("the kernel has TLS");
            let refused = set(&near, Direction::Sending, &Keys::new(1));
            assert_eq!(refused, Err(Errno::ENOENT));
            a_missing_cipher_differs_from_a_kernel_without_tls();
            for module in PARTS {
                let _ = Command::new("modprobe").args(["-q", module]).status();
            }
        }
        let plain = chosen();
        println!(
            "driver and priority with the module: {} {}, without it: {} {}",
            accelerated.driver, accelerated.priority, plain.driver, plain.priority
        );
        assert!(plain.is_template() || plain.is_library(), "{plain:?}");
        assert!(plain.priority < accelerated.priority, "{plain:?}");
        drop((unasked, unloaded));
        // After the module is loaded again, the next socket uses it.
        assert_eq!(chosen().driver, accelerated.driver);
    })
}

fn a_missing_cipher_differs_from_a_kernel_without_tls() {
    let suite = CipherSuite::Aes256Gcm;
    let refused = choose(Offload::Kernel, suite).expect_err("the kernel lacks the cipher");
    assert!(matches!(refused, Refused::Cipher { .. }), "{refused:?}");
    let auto = choose(Offload::Auto, suite).expect("auto always chooses");
    assert!(!auto.is_kernel);
    assert!(
        auto.reason.contains(&refused.to_string()),
        "{}",
        auto.reason
    );
}

/// One implementation of gcm(aes).
#[derive(Clone, Debug)]
struct Driver {
    driver: String,
    module: String,
    priority: u32,
    users: u32,
}

impl Driver {
    /// Whether this is a template of a counter mode and a hash, such as
    /// "gcm_base(ctr(aes-lib),ghash-lib)".
    fn is_template(&self) -> bool {
        self.driver.contains('(')
    }

    /// Whether this is the implementation in the kernel's library, which needs no module. In
    /// `tls_table` it takes four times as many instructions as the one in [`MODULE`].
    fn is_library(&self) -> bool {
        self.driver.ends_with("-lib") && !self.is_template()
    }
}

/// Returns the implementation that two sockets with keys in the kernel use: it is the one with a
/// reference count that has grown. Also checks that the sockets work.
fn chosen() -> Driver {
    let before = drivers();
    let (mut near, mut far) = kernels();
    near.write_all(b"sealed").expect("the data is sent");
    let mut got = [0; 6];
    far.read_exact(&mut got).expect("the record is authentic");
    assert_eq!(&got, b"sealed");
    let known = drivers();
    println!("{known:#?}");
    let users = |driver: &Driver| {
        let before = before.iter().find(|other| other.driver == driver.driver);
        driver.users - before.map_or(1, |before| before.users)
    };
    let used: Vec<&Driver> = known.iter().filter(|driver| users(driver) >= 4).collect();
    assert_eq!(
        used.len(),
        1,
        "not exactly one driver serves both sockets: {used:?}"
    );
    let best = known.iter().map(|driver| driver.priority).max();
    assert_eq!(
        Some(used[0].priority),
        best,
        "the driver in use does not have the highest priority"
    );
    used[0].clone()
}

fn drivers() -> Vec<Driver> {
    let text = fs::read_to_string("/proc/crypto").expect("proc is mounted");
    let entries = text.split("\n\n").map(|entry| {
        move |name: &str| {
            let line = entry.lines().find(|line| line.starts_with(name))?;
            line.split_once(": ").map(|(_, value)| value.to_owned())
        }
    });
    entries
        .filter(|field| field("name").as_deref() == Some("gcm(aes)"))
        .map(|field| {
            let field = |name| field(name).unwrap_or_default();
            Driver {
                driver: field("driver"),
                module: field("module"),
                priority: field("priority").parse().expect("the text is a number"),
                users: field("refcnt").parse().expect("the text is a number"),
            }
        })
        .collect()
}
