//! A minimal tunnel end: it moves bytes between two hypervisors through user space. Without
//! encryption, its rate is the upper bound in the benchmark. If it also encrypts the connection to
//! the other end ([`super::records`]), its costs are the floor in the benchmark.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::str::FromStr;
use std::thread;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use dunlin_linux::aligned::{AlignedBytes, LINE_BYTES};

use super::ends::Stream;
use super::pair::LISTENING;
use super::records::{self, PIECE_BYTES};

/// Arguments of the forwarder.
#[derive(Args, Debug)]
pub struct ForwardOptions {
    /// The side on which the bytes are in sealed records; by default neither side.
    #[arg(long)]
    sealed: Option<Side>,
    /// LISTEN and TARGET of each route, each of them unix:PATH or tcp:ADDRESS:PORT.
    #[arg(required = true, num_args = 2.., value_names = ["LISTEN", "TARGET"])]
    routes: Vec<Place>,
}

/// A side of the forwarder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Side {
    /// The connections that it accepts.
    Listen,
    /// The connections that it opens.
    Target,
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

/// Prints a line when the process listens on every address, then serves connections without
/// returning.
pub(super) fn run(options: &ForwardOptions) -> Result<()> {
    let mut routes = Vec::new();
    for route in options.routes.chunks_exact(2) {
        let [listen, target] = route else { continue };
        let bound = Listener::bind(listen).with_context(|| format!("cannot listen on {listen:?}"));
        routes.push((bound?, target));
    }
    if options.sealed.is_some() {
        // Choose the provider now. The choice takes time, which must not be measured with the first
        // connection.
        records::provider();
    }
    println!("{LISTENING}");
    thread::scope(|scope| {
        for (listener, target) in &routes {
            scope.spawn(move || {
                loop {
                    match listener.accept() {
                        Ok(near) => carry(near, target, options.sealed),
                        Err(error) => eprintln!("cannot accept a connection: {error}"),
                    }
                }
            });
        }
    });
    Ok(())
}

/// Moves bytes in both directions, each on its own thread. Drops the connection if the target
/// does not listen.
fn carry(near: Stream, target: &Place, sealed: Option<Side>) {
    let target = target.clone();
    let (to_target, to_listener): (Move, Move) = match sealed {
        None => (one_way, one_way),
        Some(Side::Listen) => (records::open, records::seal),
        Some(Side::Target) => (records::seal, records::open),
    };
    thread::spawn(move || {
        // An unreachable target or a reset ends only this connection; the measurement sees the
        // closed connection.
        let Ok(far) = target.connect() else { return };
        thread::scope(|scope| {
            scope.spawn(|| to_target(&near, &far));
            let _ = to_listener(&far, &near);
        });
    });
}

/// Moves all bytes from the first stream to the second, and then ends the second.
type Move = fn(&Stream, &Stream) -> Result<()>;

fn one_way(mut from: &Stream, mut to: &Stream) -> Result<()> {
    let mut piece = AlignedBytes::zeroed(PIECE_BYTES, LINE_BYTES);
    loop {
        let count = from.read(&mut piece)?;
        if count == 0 {
            return Ok(to.shutdown()?);
        }
        to.write_all(&piece[..count])?;
    }
}

fn without_delay(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    Ok(stream)
}
