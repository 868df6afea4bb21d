//! `dunlin cancel`: what an operator does to a session from a third shell.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::options::ControlPath;
use crate::vm::{Request, obeyed};

#[derive(Debug, Args)]
pub(crate) struct Cancel {
    /// The VM's name, or its control socket.
    #[arg(long, value_name = "NAME|SOCKET")]
    vm: String,
    #[command(flatten)]
    control: ControlPath,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

impl Cancel {
    pub(crate) fn run(&self) -> Result<i32> {
        let socket = if self.vm.contains('/') {
            PathBuf::from(&self.vm)
        } else {
            self.control.socket(&self.vm)?
        };
        let code = obeyed(&socket, &Request::Cancel, self.json)?;
        if !self.json {
            println!("cancelled; the VM goes on at the source");
        }
        Ok(code)
    }
}
