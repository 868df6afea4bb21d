//! A tunnel end without encryption. It measures the upper bound for every program that moves bytes
//! between two hypervisors through user space.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::str::FromStr;
use std::thread;

use anyhow::{Context, Result};
use clap::Args;

use super::ends::{LISTENING, Stream};

/// The number of bytes that a relay moves at once.
const PIECE_BYTES: usize = 512 << 10;

/// Addresses of the forwarder.
#[derive(Args, Debug)]
pub struct ForwardOptions {
    /// LISTEN and TARGET of each route, each of them unix:PATH or tcp:ADDRESS:PORT.
    #[arg(required = true, num_args = 2.., value_names = ["LISTEN", "TARGET"])]
    routes: Vec<Place>,
}

#[derive(Clone, Debug)]
enum Place {
    Unix(String),
    Tcp(String),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("unix", path)) => Ok(Self::Unix(path.to_owned())),
            Some(("tcp", address)) => Ok(Self::Tcp(address.to_owned())),
            _ => Err("neither unix:PATH nor tcp:ADDRESS:PORT".to_owned()),
        }
    }
}

impl Place {
    fn connect(&self) -> io::Result<Stream> {
        Ok(match self {
            Self::Unix(path) => Stream::Unix(UnixStream::connect(path)?),
            Self::Tcp(address) => Stream::Tcp(without_delay(TcpStream::connect(address)?)?),
        })
    }
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    fn bind(place: &Place) -> io::Result<Self> {
        Ok(match place {
            Place::Unix(path) => Self::Unix(UnixListener::bind(path)?),
            Place::Tcp(address) => Self::Tcp(TcpListener::bind(address)?),
        })
    }

    fn accept(&self) -> io::Result<Stream> {
        Ok(match self {
            Self::Unix(listener) => Stream::Unix(listener.accept()?.0),
            Self::Tcp(listener) => Stream::Tcp(without_delay(listener.accept()?.0)?),
        })
    }
}

/// Prints a line when it listens on every address, then serves without returning.
pub(super) fn run(options: &ForwardOptions) -> Result<()> {
    let mut routes = Vec::new();
    for route in options.routes.chunks_exact(2) {
        let [listen, target] = route else { continue };
        let bound = Listener::bind(listen).with_context(|| format!("{listen:?}"));
        routes.push((bound?, target));
    }
    println!("{LISTENING}");
    thread::scope(|scope| {
        for (listener, target) in &routes {
            scope.spawn(move || {
                loop {
                    match listener.accept() {
                        Ok(near) => carry(near, target),
                        Err(error) => eprintln!("a connection could not be accepted: {error}"),
                    }
                }
            });
        }
    });
    Ok(())
}

/// Moves bytes in both directions, each in a thread of its own. Drops the connection if the target
/// does not listen.
fn carry(near: Stream, target: &Place) {
    let target = target.clone();
    thread::spawn(move || {
        // An unreachable target or a reset ends only this connection; the measurement sees the
        // closed connection.
        let Ok(far) = target.connect() else { return };
        thread::scope(|scope| {
            scope.spawn(|| one_way(&near, &far));
            let _ = one_way(&far, &near);
        });
    });
}

fn one_way(mut from: &Stream, mut to: &Stream) -> io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let count = from.read(&mut piece)?;
        if count == 0 {
            return to.shutdown();
        }
        to.write_all(&piece[..count])?;
    }
}

fn without_delay(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    Ok(stream)
}
