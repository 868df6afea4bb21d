//! Migrations of Cloud Hypervisor in `cargo xtask bench whole` and `cargo xtask bench tunnel`.

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

use super::vcpu;
use super::whole::{self, Moved};

/// How a migration gets from the source to the destination.
pub(super) struct Way<'a> {
    /// Where the source connects, and where the destination listens, as Cloud Hypervisor's URLs.
    pub(super) urls: [String; 2],
    pub(super) connections: u8,
    /// The folder with the files of Cloud Hypervisor's own TLS.
    pub(super) tls: Option<&'a Path>,
}

impl<'a> Way<'a> {
    /// Over TCP, without a tunnel.
    pub(super) fn direct(connections: u8, tls: Option<&'a Path>) -> Result<Self> {
        // Another program may take this free port before Cloud Hypervisor listens there. Cloud
        // Hypervisor then reports that, and this turn fails. Use an address instead of a name: with
        // some versions of glibc, Cloud Hypervisor's seccomp filter kills the process when it looks
        // up a name.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let url = format!("tcp:127.0.0.1:{port}");
        Ok(Self {
            urls: [url.clone(), url],
            connections,
            tls,
        })
    }
}

/// Starts a guest and migrates it once. If the guest writes no pages itself, `content` is the file
/// that fills its memory.
pub(super) fn migrate(workload: &Workload, content: Option<&Path>, way: &Way<'_>) -> Result<Moved> {
    let program =
        &program().context("the variable CLOUD_HYPERVISOR (path of the binary) is not set")?;
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
    vcpu::limit_cloud_hypervisor(&source, workload)?;
    let destination = CloudHypervisor::start(program, None, &[])?;
    let ids = [source.process(), destination.process()];
    let cpu = || {
        ids.iter()
            .map(|&id| process::cpu_s(id))
            .sum::<Result<f64>>()
    };
    let with_tls = |mut body: Value| {
        if let Some(folder) = way.tls {
            body["tls_dir"] = folder.to_string_lossy().into();
        }
        body
    };
    whole::touch(workload)?;
    let (before, stolen_before) = (cpu()?, process::stolen_s()?);
    thread::scope(|scope| {
        let [to, at] = &way.urls;
        let body = with_tls(json!({ "receiver_url": at }));
        // The answer arrives when the migration has ended.
        let api = destination.api();
        let received = scope.spawn(move || api.request("vm.receive-migration", &body));
        destination.wait_event("migration-receive-ready")?;
        let begin = Instant::now();
        let body = with_tls(json!({ "destination_url": to, "connections": way.connections }));
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
            stolen_s: process::stolen_s()? - stolen_before,
        })
    })
}
