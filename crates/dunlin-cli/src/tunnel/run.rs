//! `dunlin tunnel run`: the tunnel as a service.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::exit;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use dunlin::lane::identity::Role;
use dunlin::lane::provider::Crypto;
use dunlin::tunnel::{Identities, Tunnel};
use dunlin_sys::signals::{EndSignal, EndSignals, HangUps};

use super::config::Config;
use crate::code::{DONE, FAILED, SIGNAL};
use crate::display::clean;
use crate::identity::load_identity;

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The configuration, a TOML file; docs/tunnel.md describes it.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Check {
    /// The configuration, a TOML file; docs/tunnel.md describes it.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

impl Check {
    pub(crate) fn run(&self) -> Result<i32> {
        read(&self.config)?;
        println!("{}: nothing is wrong with it", self.config.display());
        Ok(DONE)
    }
}

/// What the main thread waits for.
enum Told {
    Again,
    End(EndSignal),
}

impl Run {
    pub(crate) fn run(&self) -> Result<i32> {
        let (told, events) = channel();
        let (ends, hang_ups) = (EndSignals::block()?, HangUps::block()?);
        let (config, identities) = read(&self.config)?;
        let listener = TcpListener::bind(config.listen)
            .map_err(|error| anyhow!("cannot listen on {}: {error}", config.listen))?;
        let observer = |event| say(&format!("{event}"));
        let tunnel = Tunnel::start(
            listener,
            identities,
            &config.routes,
            config.limits,
            observer,
        )?;
        println!("listening on {}", tunnel.address());
        for (route, listen) in tunnel.entrances() {
            println!("route {} listens on {listen}", clean(&route));
        }
        for (route, address) in tunnel.relay_ports() {
            println!("route {} takes TLS clients on {address}", clean(&route));
        }
        let drain = Arc::new(Mutex::new(config.drain));
        wait_for(told, ends, hang_ups)?;
        for event in events {
            match event {
                Told::Again => match again(&self.config, &tunnel) {
                    Ok(limit) => {
                        *drain.lock().unwrap_or_else(PoisonError::into_inner) = limit;
                        say("the configuration was read anew");
                    }
                    Err(error) => say(&format!("everything stays as it was: {error:#}")),
                },
                Told::End(signal) => {
                    let limit = *drain.lock().unwrap_or_else(PoisonError::into_inner);
                    return Ok(end(tunnel, signal, limit));
                }
            }
        }
        Ok(FAILED)
    }
}

/// Reads the file again. Returns how long a drain may take now.
fn again(file: &Path, tunnel: &Tunnel) -> Result<Duration> {
    let (config, identities) = read(file)?;
    if config.listen.port() != 0 && config.listen != tunnel.address() {
        say("the peers' address stays as it was until the tunnel is started anew");
    }
    tunnel.replace(identities, &config.routes)?;
    Ok(config.drain)
}

/// Drains, and ends.
fn end(tunnel: Tunnel, signal: EndSignal, limit: Duration) -> i32 {
    say(&format!(
        "{}: no more connections are taken, and channels have {} s to end",
        signal.name(),
        limit.as_secs()
    ));
    match tunnel.drain(limit) {
        0 => DONE,
        cut => {
            say(&format!("{cut} channels were cut off"));
            FAILED
        }
    }
}

/// Tells of signals. A second one to end waits for nobody.
fn wait_for(told: Sender<Told>, ends: EndSignals, hang_ups: HangUps) -> Result<()> {
    let again = told.clone();
    thread::Builder::new()
        .name("dunlin-hang-ups".to_owned())
        .spawn(
            move || {
                while hang_ups.wait().is_ok() && again.send(Told::Again).is_ok() {}
            },
        )?;
    thread::Builder::new()
        .name("dunlin-signals".to_owned())
        .spawn(move || {
            if let Ok(signal) = ends.wait() {
                // The main thread is there until the process ends.
                let _ = told.send(Told::End(signal));
            }
            if let Ok(signal) = ends.wait() {
                exit(SIGNAL + signal.number());
            }
        })?;
    Ok(())
}

/// A configuration, and the certificates that it names.
fn read(file: &Path) -> Result<(Config, Identities)> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("the configuration {} cannot be read", file.display()))?;
    let config = Config::parse(file, &text)?;
    let load = |role| {
        let (identity, warnings) = load_identity(&config.identity, role, &config.reading)?;
        Ok::<_, anyhow::Error>((Arc::new(identity), warnings))
    };
    let (connecting, warnings) = load(Role::Source)?;
    let (accepting, more) = load(Role::Destination)?;
    let fresh = more.into_iter().filter(|one| !warnings.contains(one));
    for warning in warnings.iter().cloned().chain(fresh) {
        say(&format!("warning: {warning}"));
    }
    let identities = Identities {
        connecting,
        accepting,
        crypto: Crypto::auto(),
    };
    Ok((config, identities))
}

/// One line of the log. Nobody may read it.
fn say(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "dunlin: {}", clean(text));
}
