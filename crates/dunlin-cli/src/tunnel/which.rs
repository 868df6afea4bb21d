//! Which tunnel of this host is meant.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

use super::control_service::{Request, name_of};
use crate::control::Client;
use crate::options::ControlPath;

#[derive(Clone, Debug, Args)]
pub(crate) struct Which {
    /// The tunnel of this configuration [default: the only one that runs].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    control: ControlPath,
}

impl Which {
    /// Asks the tunnel that is meant.
    pub(super) fn ask(&self, request: &Request) -> Result<Client> {
        request.ask(&self.socket()?, None)
    }

    /// The control socket of the tunnel that is meant.
    fn socket(&self) -> Result<PathBuf> {
        if let Some(config) = &self.config {
            return Ok(self.control.tunnel(&name_of(config)?));
        }
        let mut running = self.control.tunnels();
        running.retain(|path| UnixStream::connect(path).is_ok());
        match &running[..] {
            [one] => Ok(one.clone()),
            [] => bail!("no tunnel runs here: is `dunlin tunnel run` up, and --control the same?"),
            several => {
                let names = several.iter().map(|path| path.display().to_string());
                let names: Vec<String> = names.collect();
                bail!(
                    "several tunnels run here, say which with --config or --control: {}",
                    names.join(", ")
                )
            }
        }
    }
}
