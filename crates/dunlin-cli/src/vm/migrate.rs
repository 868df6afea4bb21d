//! `dunlin vm migrate`, `status` and `ask`: what is asked of a VM's process.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use super::client::Client;
use super::owner::Request;
use crate::display::Display;
use crate::line::{FailedLine, Line, MovedLine, StatusLine};
use crate::options::{Common, ControlPath, MigrateFlags};

#[derive(Debug, Args)]
pub(crate) struct Migrate {
    /// The VM's name.
    #[arg(long)]
    name: String,
    #[command(flatten)]
    flags: MigrateFlags,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    control: ControlPath,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Status {
    /// The VM's name.
    #[arg(long)]
    name: String,
    #[command(flatten)]
    control: ControlPath,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Ask {
    /// The VM's name.
    #[arg(long)]
    name: String,
    /// What it shall do.
    #[arg(value_enum)]
    what: What,
    #[command(flatten)]
    control: ControlPath,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    Pause,
    Resume,
    PowerOff,
}

/// How a migration ended.
pub(crate) enum Ended {
    Moved(Box<MovedLine>),
    Failed(FailedLine),
}

/// Asks for a migration and shows it until it ends.
pub(crate) fn follow(
    socket: &Path,
    identity: &Path,
    peers: &[String],
    flags: &MigrateFlags,
    display: &mut Display,
) -> Result<Ended> {
    let identity = identity
        .canonicalize()
        .with_context(|| format!("there is no identity in {}", identity.display()))?;
    let request = Request::Migrate {
        identity,
        peers: peers.to_vec(),
        flags: flags.clone(),
    };
    let mut client = Client::ask(socket, &request)?;
    let mut committing = false;
    while let Some(line) = client.next()? {
        display.show(&line);
        match line {
            Line::Committing => committing = true,
            Line::Moved(moved) => return Ok(Ended::Moved(moved)),
            Line::Failed(failed) => return Ok(Ended::Failed(failed)),
            _ => {}
        }
    }
    // It died, or the guest with it. Nobody here can tell how far it had come.
    let failed = if committing {
        FailedLine {
            fault: "internal".into(),
            at_fault: "this side".into(),
            vm: "in-doubt".into(),
            text: "the VM's process has gone after it let the destination run the VM: ask there"
                .into(),
            code: 3,
        }
    } else {
        FailedLine {
            fault: "internal".into(),
            at_fault: "this side".into(),
            vm: "gone".into(),
            text: "the VM's process has gone, and the VM with it".into(),
            code: 1,
        }
    };
    display.show(&Line::Failed(failed.clone()));
    Ok(Ended::Failed(failed))
}

impl Migrate {
    pub(crate) fn run(self) -> Result<i32> {
        let mut display = Display::new(self.json);
        let ended = follow(
            &self.control.socket(&self.name)?,
            &self.common.identity,
            &self.common.peers,
            &self.flags,
            &mut display,
        )?;
        Ok(match ended {
            Ended::Moved(_) => 0,
            Ended::Failed(failed) => failed.code,
        })
    }
}

impl Status {
    pub(crate) fn run(self) -> Result<i32> {
        let status = status(&self.control.socket(&self.name)?)?;
        if self.json {
            Line::Status(status).print();
            return Ok(0);
        }
        println!("{}: {} (process {})", status.name, status.state, status.pid);
        println!(
            "  {} pages checked by the guest, {} full passes, {} beats",
            status.pages_checked, status.full_passes, status.beats
        );
        println!("  longest silence {:.1} ms", status.largest_gap_ms);
        if let Some(downtime) = status.downtime_ms {
            println!("  downtime of its last move {downtime:.1} ms");
        }
        Ok(0)
    }
}

/// How the VM behind a control socket is.
pub(crate) fn status(socket: &Path) -> Result<StatusLine> {
    match Client::ask(socket, &Request::Status)?.next()? {
        Some(Line::Status(status)) => Ok(status),
        Some(Line::Failed(failed)) => bail!("{}", failed.text),
        other => bail!("the VM's process answered {other:?}"),
    }
}

impl Ask {
    pub(crate) fn run(self) -> Result<i32> {
        let request = match self.what {
            What::Pause => Request::Pause,
            What::Resume => Request::Resume,
            What::PowerOff => Request::PowerOff,
        };
        let mut client = Client::ask(&self.control.socket(&self.name)?, &request)?;
        match client.next()? {
            Some(Line::Done) => {
                if self.json {
                    Line::Done.print();
                }
                Ok(0)
            }
            Some(Line::Failed(failed)) => bail!("{}", failed.text),
            other => bail!("the VM's process answered {other:?}"),
        }
    }
}
