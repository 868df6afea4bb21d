//! `dunlin vm receive`: waits for a VM, then owns it.

use std::net::TcpListener;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use dunlin::engine::destination::{DestinationEvent, Options, receive};
use dunlin::engine::vmm::{Builder, DestinationVm, FaultCode, Offered, Refusal};
use dunlin::engine::{Cancel, Host, StandardHost, VmIs};
use dunlin::lane::provider::Crypto;
use dunlin_microvm::{MachineBuilder, Movable};

use super::owner::{Parent, Socket, serve};
use crate::line::{FailedLine, Line, millis};
use crate::options::{Common, ControlPath, load_identity, peer_names};

#[derive(Debug, Args)]
pub(crate) struct Receive {
    /// Address to listen on, such as 0.0.0.0:4444; port 0 takes any.
    #[arg(long, value_name = "ADDR")]
    listen: String,
    /// Allow data lanes without security when the source asks for them.
    #[arg(long)]
    allow_plain: bool,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    control: ControlPath,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    parent: Parent,
}

impl Receive {
    pub(crate) fn run(self) -> Result<i32> {
        let identity = load_identity(&self.common.identity)?;
        let tls = identity.server(&Crypto::auto(), peer_names(&self.common.peers)?)?;
        let listener = TcpListener::bind(&self.listen)
            .with_context(|| format!("cannot listen on {}", self.listen))?;
        let address = listener.local_addr()?.to_string();
        self.say(&Line::Listening {
            address: address.clone(),
        });
        let host: Arc<dyn Host> = Arc::new(StandardHost);
        let options = Options {
            allow_plain: self.allow_plain,
            ..Options::default()
        };
        self.parent.watch()?;
        let mut builder = Takes {
            machines: MachineBuilder::default(),
            control: &self.control,
            socket: None,
        };
        let observe = |event: &DestinationEvent| self.observe(event);
        let received = loop {
            let attempt = receive(
                listener.try_clone()?,
                &tls,
                &options,
                &mut builder,
                &host,
                &observe,
                &Cancel::new(),
            );
            match attempt {
                Ok(received) => break received,
                // The VM goes on at the source, which may try again.
                Err(error) if error.vm == VmIs::AtSource => {
                    let FailedLine { text, .. } = (&error).into();
                    self.say(&Line::Rejected { text });
                    drop(builder.take());
                }
                Err(error) => {
                    let failed: FailedLine = (&error).into();
                    let code = failed.code;
                    self.say(&Line::Failed(failed));
                    return Ok(code);
                }
            }
        };
        drop(listener);
        let (vm, socket) = builder
            .take()
            .context("a VM arrived that was never built")?;
        let name = received.offered.vm.name.clone();
        self.say(&Line::Received {
            name,
            pid: std::process::id(),
            control: socket.path().display().to_string(),
            runs: received.runs,
            downtime_ms: received.guest_downtime.map(millis),
            cpu_s: received.cpu.as_secs_f64(),
        });
        serve(vm, socket, self.json)
    }

    fn observe(&self, event: &DestinationEvent) {
        let text = match event {
            DestinationEvent::Rejected { reason } => {
                return self.say(&Line::Rejected {
                    text: reason.clone(),
                });
            }
            DestinationEvent::Warning(text) => text.clone(),
            DestinationEvent::Connected { peer } => {
                return self.say(&Line::Accepted { peer: peer.clone() });
            }
            DestinationEvent::LaneUp { lane } => return self.say(&Line::LaneUp { lane: *lane }),
            _ => return,
        };
        self.say(&Line::Warning { text });
    }

    fn say(&self, line: &Line) {
        if self.json {
            line.print();
            return;
        }
        match line {
            Line::Listening { address } => println!("waiting for a VM on {address}"),
            Line::Accepted { peer } => println!("{peer} has connected"),
            Line::Rejected { text } => println!("turned away: {text}"),
            Line::Warning { text } => println!("warning: {text}"),
            Line::Failed(failed) => println!("{}", failed.text),
            Line::Received {
                name,
                control,
                runs,
                downtime_ms,
                ..
            } => {
                let how = if *runs {
                    "runs here"
                } else {
                    "is here, paused"
                };
                let downtime = downtime_ms.map_or(String::new(), |ms| {
                    format!(", downtime {ms:.1} ms as the guest saw it")
                });
                println!("{name} {how}{downtime}; control socket {control}");
            }
            _ => {}
        }
    }
}

/// Builds machines, each with its control socket: a VM whose socket cannot be
/// had is refused while it still runs at the source.
struct Takes<'a> {
    machines: MachineBuilder,
    control: &'a ControlPath,
    socket: Option<Socket>,
}

impl Takes<'_> {
    /// What was built last.
    fn take(&mut self) -> Option<(Arc<Movable>, Socket)> {
        let socket = self.socket.take();
        self.machines.take().zip(socket)
    }
}

impl Builder for Takes<'_> {
    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        // That of an attempt that failed may have the same path.
        self.socket = None;
        let socket = self
            .control
            .socket(&offered.vm.name)
            .and_then(|path| Socket::bind(&path))
            .map_err(|error| Refusal {
                fault: FaultCode::DescriptionRefused,
                text: format!("{error:#}"),
            })?;
        self.socket = Some(socket);
        self.machines.build(offered)
    }
}
