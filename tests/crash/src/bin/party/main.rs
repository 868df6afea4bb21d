//! `party ROLE DIRECTORY …`: one process of a run. The crate's documentation describes the
//! processes.
#![forbid(unsafe_code)]

mod destination;
mod moving;
mod source;
mod stage;

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dunlin::lane::identity::{Identity, LoadOptions};
use dunlin::lane::provider::{Crypto, Provider};
use dunlin_crash_tests::files::Files;
use dunlin_crash_tests::guest::Guest;

use stage::Stage;

/// Any error of this process. It is printed on standard error, which the test shows.
type Failure = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [role, directory, rest @ ..] = &*arguments else {
        return Err("usage: party ROLE DIRECTORY …".into());
    };
    let files = Files::new(Path::new(directory));
    match (*role, rest) {
        ("vm", []) => have_vm(&files),
        ("source", [to, vm, hold]) => source::run(&files, to, vm, &Stage::new(hold)),
        ("restarted-source", [vm]) => source::restarted(&files, vm, &Stage::new("")),
        ("destination", [listen, control_limit_ms, hold]) => {
            let control_limit = Duration::from_millis(control_limit_ms.parse()?);
            destination::run(&files, listen, control_limit, &Stage::new(hold))
        }
        ("restarted-destination", [listen]) => {
            destination::restarted(&files, listen, &Stage::new(""))
        }
        _ => Err("unknown role".into()),
    }
}

/// Runs the process that contains the VM, and executes the request of each connection.
fn have_vm(files: &Files) -> Result<(), Failure> {
    let guest = Arc::new(Guest::new(files, "source")?);
    guest.create()?;
    guest.resume()?;
    let listener = UnixListener::bind(files.socket())?;
    // The stage ends this process when the test ends.
    let stage = Stage::new("");
    stage.say("ready");
    for connection in listener.incoming() {
        let (mut connection, guest) = (connection?, Arc::clone(&guest));
        // Use a thread for each connection, because the requesting process may be stopped before it
        // has sent its request.
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(&connection).read_line(&mut line);
            if read.is_ok_and(|bytes| bytes > 0) {
                let _ = writeln!(connection, "{}", guest.obey(line.trim_end()));
            }
        });
    }
    Ok(())
}

fn identity(files: &Files, side: &str) -> Result<(Identity, Crypto), Failure> {
    let directory = files.directory().join(side);
    let (identity, _) = Identity::load(&directory, LoadOptions::default())?;
    Ok((identity, Crypto::with(Provider::built_in()[0])))
}
