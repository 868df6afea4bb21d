//! A VMM in a jail, which may neither connect nor listen: somebody outside does
//! both, and hands over the sockets. Here that is a broker on a thread of its
//! own; between processes it would pass them over a unix socket (SCM_RIGHTS).
//!
//! The source asks its [`Host`] for every connection, and gets one that the
//! broker made. The destination is given a listener that was opened before.
//!
//! `cargo run --example own_sockets`

#[allow(dead_code, reason = "its VM is the one that moves here")]
#[path = "smallest.rs"]
mod smallest;

use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin::engine::destination::{self, receive};
use dunlin::engine::source::{self, migrate};
use dunlin::engine::vmm::{RunState, SourceVm, VmmError};
use dunlin::engine::{Cancel, Event, Host, MigrateError, StandardHost, Wakeup};
use smallest::{Machines, Vm, certificates};

/// What is asked of the broker: a connection to an endpoint by a moment, and
/// where it goes.
type Request = (String, Instant, Sender<io::Result<OwnedFd>>);

/// The host of a VMM that has no right to open sockets.
struct Jailed {
    broker: Mutex<Sender<Request>>,
}

impl Host for Jailed {
    // This broker answers by the deadline, and cannot be interrupted before: a cancellation waits
    // for its answer.
    fn connect(&self, endpoint: &str, deadline: Instant, _: &Wakeup) -> io::Result<TcpStream> {
        let (reply, answer) = channel();
        let broker = self.broker.lock().map_err(|_| gone())?;
        broker
            .send((endpoint.to_owned(), deadline, reply))
            .map_err(|_| gone())?;
        drop(broker);
        let left = deadline.saturating_duration_since(Instant::now());
        let socket = answer.recv_timeout(left).map_err(|_| gone())??;
        // Whatever comes in as a descriptor: it must be a TCP connection.
        Ok(TcpStream::from(socket))
    }

    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        StandardHost.spawn(name, body)
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the broker does not answer")
}

fn connect(endpoint: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in endpoint.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        // Zero is refused, and too late in any case.
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Outside of the jail: connects, as often as it is asked to.
fn start_broker() -> (Sender<Request>, Arc<AtomicU32>) {
    let (sender, requests) = channel::<Request>();
    let made = Arc::<AtomicU32>::default();
    let count = Arc::clone(&made);
    thread::spawn(move || {
        for (endpoint, deadline, reply) in requests {
            // Here a broker decides who may be reached at all.
            let connection = connect(&endpoint, deadline).map(OwnedFd::from);
            count.fetch_add(1, SeqCst);
            // Who does not wait any more does not need it either.
            let _ = reply.send(connection);
        }
    });
    (sender, made)
}

fn main() -> Result<(), VmmError> {
    let (client, server) = certificates::two_hosts()?;

    // The destination's jailer listens, and hands the descriptor in.
    let inherited = OwnedFd::from(TcpListener::bind("127.0.0.1:0")?);
    let listener = TcpListener::from(inherited);
    let to = listener.local_addr()?.to_string();
    let destination = thread::spawn(move || {
        let host: Arc<dyn Host> = Arc::new(StandardHost);
        let (mut machines, seen) = (Machines::default(), |_: &_| ());
        let (options, cancel) = (destination::Options::default(), Cancel::new());
        receive(
            listener,
            &server,
            &options,
            &mut machines,
            &host,
            &seen,
            &cancel,
        )?;
        Ok::<_, MigrateError>(machines.0)
    });

    let (broker, made) = start_broker();
    let host: Arc<dyn Host> = Arc::new(Jailed {
        broker: Mutex::new(broker),
    });
    let vm = Vm::new()?;
    SourceVm::resume(&*vm)?;
    thread::sleep(Duration::from_millis(100));
    let (vm, seen): (Arc<dyn SourceVm>, _) = (vm, |_: &Event| ());
    let (options, cancel) = (source::Options::default(), Cancel::new());
    migrate(&vm, &to, &client, &options, &host, &seen, &cancel)?;

    let moved = destination.join().expect("it does not panic")?;
    let moved = moved.ok_or("no VM was built")?;
    // One for the control lane, and one for each data lane.
    println!("connections handed in: {}", made.load(SeqCst));
    println!("it runs there: {}", moved.run_state() == RunState::Running);
    println!("memory is whole: {}", moved.is_whole());
    Ok(())
}
