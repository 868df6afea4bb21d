//! `dunlin cancel`: cancels a migration from another shell, on either side.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{ArgGroup, Args};

use crate::options::ControlPath;
use crate::progress::Waiting;
use crate::state::{StatePath, about, parse_session};
use crate::vm::request::Request;

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("target").required(true).args(["session", "vm"])))]
pub(crate) struct Cancel {
    /// The session's identifier, as `dunlin status` shows it, or a unique prefix of the identifier.
    #[arg(value_parser = parse_session)]
    session: Option<String>,
    /// Instead of the session: the VM's name, or its control socket.
    #[arg(long, value_name = "NAME|SOCKET")]
    vm: Option<String>,
    #[command(flatten)]
    control: ControlPath,
    #[command(flatten)]
    state: StatePath,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Cancel {
    pub(crate) fn run(&self) -> Result<i32> {
        let mut client = Request::Cancel.ask(&self.socket()?)?;
        let waiting = Waiting::new(self.json, "cancelling");
        let code = client.done(self.json)?;
        drop(waiting);
        if !self.json {
            println!("cancelled; the VM stays at the source");
        }
        Ok(code)
    }

    fn socket(&self) -> Result<PathBuf> {
        match (&self.session, &self.vm) {
            (Some(session), _) => {
                let (entry, record) = self.state.find(session)?;
                if !entry.lives {
                    bail!(
                        "nothing to cancel: the process of the session ({}) has died; its record \
                         says {}",
                        about(entry.role, &record),
                        record.state
                    );
                }
                if record.owner.is_empty() {
                    bail!("the session's process has no control socket: send it SIGINT");
                }
                Ok(record.owner.into())
            }
            (None, Some(socket)) if socket.contains('/') => Ok(socket.into()),
            (None, Some(name)) => self.control.socket(name),
            (None, None) => bail!("no session given"),
        }
    }
}
