//! Migrations of Cloud Hypervisor in `cargo xtask bench whole`.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use dunlin_bench::process;
use dunlin_rig::cloud_hypervisor::{CloudHypervisor, program};
use dunlin_rig::guest::{Line, Workload, bare_image};
use dunlin_test_base::Scratch;
use serde_json::{Value, json};

use super::whole::{self, Moved};

/// Starts a guest and migrates it once. `content` is a file with the memory of a guest that writes
/// no pages.
pub(super) fn migrate(
    workload: &Workload,
    content: Option<&Path>,
    connections: u8,
    tls: Option<&Path>,
) -> Result<Moved> {
    let program = &program().context("set CLOUD_HYPERVISOR to the path of its binary")?;
    let scratch = Scratch::try_new().context("cannot create a scratch folder")?;
    let image = scratch.join("bare.elf");
    fs::write(&image, bare_image(workload)).context("cannot write the guest's image")?;
    let image = image.to_string_lossy();
    let memory = format!("size={}M", workload.memory_mib);
    let mut options = vec!["--kernel", &image, "--memory", &memory];
    options.extend(["--cpus", "boot=1", "--serial", "tty", "--console", "off"]);
    let content = content.map(Path::to_string_lossy);
    if let Some(content) = &content {
        options.extend(["--initramfs", content]);
    }
    let source = CloudHypervisor::start(program, None, &options)?;
    source.wait("ready guest", |line| {
        matches!(Line::parse(line), Some(Line::Ready { .. }))
    })?;
    let destination = CloudHypervisor::start(program, None, &[])?;
    let ids = [source.process(), destination.process()];
    let cpu = || {
        ids.iter()
            .map(|&id| process::cpu_s(id))
            .sum::<Result<f64>>()
    };
    // Another program may take this free port before Cloud Hypervisor listens there. Cloud
    // Hypervisor then reports that, and this turn fails.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let with_tls = |mut body: Value| {
        if let Some(folder) = tls {
            body["tls_dir"] = folder.to_string_lossy().into();
        }
        body
    };
    whole::touch(workload)?;
    let before = cpu()?;
    thread::scope(|scope| {
        let body = with_tls(json!({ "receiver_url": format!("tcp:127.0.0.1:{port}") }));
        // The answer arrives when the migration has ended.
        let api = destination.api();
        let received = scope.spawn(move || api.request("vm.receive-migration", &body));
        destination.wait_event("migration-receive-ready")?;
        let begin = Instant::now();
        // Use an address instead of a name. With some versions of glibc, Cloud Hypervisor's seccomp
        // filter kills the process when it looks up a name.
        let url = format!("tcp:127.0.0.1:{port}");
        let body = with_tls(json!({ "destination_url": url, "connections": connections }));
        source.api().request("vm.send-migration", &body)?;
        let paused = source.wait_event("pausing")?;
        let resumed = destination.wait_event("resumed")?;
        ensure!(
            matches!(received.join(), Ok(Ok(()))),
            "the destination reports a failure"
        );
        source.wait_end()?;
        Ok(Moved {
            total_s: (resumed - begin).as_secs_f64(),
            cpu_s: cpu()? - before,
            downtime_ms: (resumed - paused).as_secs_f64() * 1e3,
            iterations: None,
            destination_peak_mib: process::peak_bytes(destination.process())? as f64
                / f64::from(1 << 20),
        })
    })
}
