//! An upgrade of the package on a host with two tunnels, a trunk between them, and a channel that
//! carries bytes: nothing is interrupted. Each tunnel is restarted later, as docs/install.md
//! describes. After the first tunnel has restarted, it works with the second tunnel, which still
//! runs the earlier version.

use std::env;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_test_base::sockets::accepted;
use serde_json::Value;

use super::bare::{Bare, Shell};
use super::{Package, ready};

/// A time limit that is longer than anything for which this test waits.
const LIMIT: Duration = Duration::from_secs(60);

/// Bytes that a channel carries to the target and back as evidence that it works.
const SOME: u64 = 1 << 20;

/// The commands of the earlier and the newer package. In the soak test, the earlier command is that
/// of an earlier commit (docs/testing/versions.md). The newer command has additional bytes at its
/// end, so that the files differ and dpkg replaces the earlier one.
fn commands() -> [PathBuf; 2] {
    let scratch = &ready().scratch;
    let newer = scratch.join("newer");
    let mut bytes = fs::read(scratch.join("dunlin")).unwrap();
    bytes.extend(b"newer");
    fs::write(&newer, bytes).unwrap();
    fs::set_permissions(
        &newer,
        fs::metadata(scratch.join("dunlin")).unwrap().permissions(),
    )
    .unwrap();
    let earlier = env::var_os("DUNLIN_PREVIOUS").map(PathBuf::from);
    [earlier.unwrap_or_else(|| scratch.join("dunlin")), newer]
}

#[test]
fn an_upgrade_interrupts_no_channel_and_a_restart_waits_for_its_end() {
    let Some(bare) = Bare::new() else { return };
    for (name, command) in ["old", "new"].iter().zip(commands()) {
        let package = Package::of(&format!("0.1~{name}"), &command);
        fs::copy(
            package.files.package,
            bare.shared.join(format!("{name}.deb")),
        )
        .unwrap();
    }
    fs::copy(&commands()[1], bare.shared.join("newer")).unwrap();
    identities(&bare.shared);
    bare.run("dpkg --install /shared/old.deb");
    bare.fake_systemd(&["dunlin-tunnel.service"]);
    let target = UnixListener::bind(bare.shared.join("out")).unwrap();
    let mut shell = bare.shell();
    let (far, port) = start_far(&bare, &mut shell, 0);
    let near = start_near(&bare, &mut shell, port);
    let channel = Channel::open(&bare, &target);
    channel.carries();

    let before = channel.back();
    let said = shell.run("dpkg --install /shared/new.deb");
    assert!(
        said.contains("  systemctl restart dunlin-tunnel\n"),
        "{said}"
    );
    assert_eq!(
        fs::read_to_string(bare.run_file("calls")).unwrap(),
        "daemon-reload\n"
    );
    assert!(channel.back() > before, "nothing moved during the upgrade");
    channel.carries();
    shell.run("cmp /usr/bin/dunlin /shared/newer");
    for pid in [near, far] {
        let program = shell.run(&format!("readlink /proc/{pid}/exe"));
        assert_eq!(program.trim(), "/usr/bin/dunlin (deleted)");
    }
    // The new command queries processes that run the old command.
    let status = shell.run("dunlin status --json");
    let mut tunnels = status
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    let near_status: Value = tunnels.find(|one: &Value| one["name"] == "near").unwrap();
    assert_eq!(near_status["routes"][0]["channels"], 1, "{status}");

    // Restart one tunnel. It does not end before its channel ends, and the channel still works.
    shell.run(&format!("kill -TERM {near}"));
    wait_for(&bare.shared.join("near.log"), "no new connections");
    channel.carries();
    channel.end();
    assert_eq!(shell.wait(near), 0);
    let near = start_near(&bare, &mut shell, port);
    runs_installed(&mut shell, near);
    // The two tunnels run different versions.
    let channel = Channel::open(&bare, &target);
    channel.carries();
    channel.end();

    // Restart the other tunnel at the same address. The first tunnel opens a new trunk to it.
    shell.run(&format!("kill -TERM {far}"));
    assert_eq!(shell.wait(far), 0);
    wait_for(&bare.shared.join("near.log"), " ended: ");
    let (far, _) = start_far(&bare, &mut shell, port);
    runs_installed(&mut shell, far);
    let channel = Channel::open(&bare, &target);
    channel.carries();
    channel.end();
    for pid in [near, far] {
        shell.run(&format!("kill -TERM {pid}"));
        assert_eq!(shell.wait(pid), 0);
    }
}

/// Checks that a process runs the command that is installed now.
fn runs_installed(shell: &mut Shell, pid: u32) {
    let program = shell.run(&format!("readlink /proc/{pid}/exe"));
    assert_eq!(program.trim(), "/usr/bin/dunlin");
}

/// Makes the identities of both tunnels in the directory `/shared` of the Debian system.
fn identities(shared: &Path) {
    let dunlin = |words: &[&str], directory: &str| {
        let mut command = Command::new(ready().scratch.join("dunlin"));
        let done = command
            .args(words)
            .arg(directory)
            .current_dir(shared)
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    dunlin(&["pki", "init"], "ca");
    for host in ["a", "b"] {
        dunlin(
            &[
                "pki",
                "issue",
                "--ca",
                "ca",
                "--name",
                &format!("{host}.test"),
            ],
            host,
        );
    }
}

/// Starts the tunnel that peers connect to; returns its process and its port.
fn start_far(bare: &Bare, shell: &mut Shell, port: u16) -> (u32, u16) {
    let config = format!(
        "listen = \"127.0.0.1:{port}\"\nidentity = \"/shared/b\"\n\
         [route.ram]\ntarget = \"unix:/shared/out\"\nallow = [\"a.test\"]\n"
    );
    let pid = start(bare, shell, "far", &config);
    let line = wait_for(&bare.shared.join("far.log"), "listening on ");
    (pid, line.rsplit_once(':').unwrap().1.parse().unwrap())
}

/// Starts the tunnel with the entrance of the route.
fn start_near(bare: &Bare, shell: &mut Shell, port: u16) -> u32 {
    let config = format!(
        "listen = \"127.0.0.1:0\"\nidentity = \"/shared/a\"\n\
         [route.ram]\nlisten = \"unix:/shared/in\"\nto = \"127.0.0.1:{port}\"\npeers = [\"b.test\"]\n"
    );
    let pid = start(bare, shell, "near", &config);
    wait_for(&bare.shared.join("near.log"), "route ram listens on ");
    pid
}

fn start(bare: &Bare, shell: &mut Shell, name: &str, config: &str) -> u32 {
    fs::write(bare.shared.join(format!("{name}.toml")), config).unwrap();
    shell.start(
        name,
        &format!("dunlin tunnel run --config /shared/{name}.toml"),
    )
}

/// Waits for a line that contains `text` in a log. Returns what follows `text` in that line.
fn wait_for(log: &Path, text: &str) -> String {
    let until = Instant::now() + LIMIT;
    loop {
        let lines = fs::read_to_string(log).unwrap_or_default();
        let line = lines.lines().find_map(|line| line.split_once(text));
        if let Some((_, rest)) = line {
            return rest.to_owned();
        }
        assert!(Instant::now() < until, "no {text:?} in {lines}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A channel that sends numbers, which the target returns.
struct Channel {
    near: UnixStream,
    /// The bytes that have returned.
    back: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Channel {
    fn open(bare: &Bare, target: &UnixListener) -> Self {
        let near = UnixStream::connect(bare.shared.join("in")).unwrap();
        near.set_read_timeout(Some(LIMIT)).unwrap();
        let (mut sends, mut receives) = (near.try_clone().unwrap(), near.try_clone().unwrap());
        let back = Arc::<AtomicU64>::default();
        let counted = Arc::clone(&back);
        let send = thread::spawn(move || {
            let mut next = 0_u64;
            loop {
                let bytes: Vec<u8> = (next..next + 1024).flat_map(u64::to_le_bytes).collect();
                // An error means that the test has ended the stream.
                if sends.write_all(&bytes).is_err() {
                    return;
                }
                next += 1024;
                // Leave the CPU to dpkg.
                thread::sleep(Duration::from_millis(1));
            }
        });
        let receive = thread::spawn(move || {
            let mut bytes = [0; 8192];
            // The last piece may be incomplete.
            while receives.read_exact(&mut bytes).is_ok() {
                let next = counted.load(Ordering::Relaxed) / 8;
                let expected = (next..next + 1024).flat_map(u64::to_le_bytes);
                assert!(bytes.iter().copied().eq(expected), "other bytes at {next}");
                counted.fetch_add(8192, Ordering::Relaxed);
            }
        });
        let mut far = accepted(target);
        let answer = thread::spawn(move || {
            let mut answers = far.try_clone().unwrap();
            let _ = std::io::copy(&mut far, &mut answers);
            let _ = answers.shutdown(Shutdown::Write);
        });
        Self {
            near,
            back,
            threads: vec![send, receive, answer],
        }
    }

    fn back(&self) -> u64 {
        self.back.load(Ordering::Relaxed)
    }

    /// Waits until [`SOME`] bytes more than before this call have returned.
    fn carries(&self) {
        let enough = self.back() + SOME;
        let until = Instant::now() + LIMIT;
        while self.back() < enough {
            assert!(Instant::now() < until, "{} of {enough} bytes", self.back());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends the channel in both directions.
    fn end(self) {
        self.near.shutdown(Shutdown::Write).unwrap();
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}
