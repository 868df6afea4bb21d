//! A VMM in a jail that may neither connect nor listen: a broker outside opens the
//! sockets and passes them in. Here the broker is a thread; between processes it would
//! pass descriptors over a Unix socket (SCM_RIGHTS).
//!
//! The source asks its [`Host`] for every connection, and gets one that the broker
//! opened. The destination inherits a listening socket.
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

use dunlin::engine::vmm::{Built, Offered, RunState, SourceVm, VmmError};
use dunlin::engine::{Connector, Host, StandardHost, Wakeup};
use dunlin::{Incoming, Migration};
use smallest::{Vm, certificates};

/// A request to the broker: endpoint, deadline, and the channel for the connection.
type Request = (String, Instant, Sender<io::Result<OwnedFd>>);

/// The host of a VMM that may not open sockets.
struct Jailed {
    broker: Mutex<Sender<Request>>,
}

impl Connector for Jailed {
    // This broker answers by the deadline, but it cannot be interrupted, so a
    // cancellation waits for the answer.
    fn connect(&self, endpoint: &str, deadline: Instant, _: &Wakeup) -> io::Result<TcpStream> {
        let (reply, answer) = channel();
        let broker = self.broker.lock().map_err(|_| no_answer())?;
        broker
            .send((endpoint.to_owned(), deadline, reply))
            .map_err(|_| no_answer())?;
        drop(broker);
        let left = deadline.saturating_duration_since(Instant::now());
        let socket = answer.recv_timeout(left).map_err(|_| no_answer())??;
        // The descriptor must be a TCP connection.
        Ok(TcpStream::from(socket))
    }
}

impl Host for Jailed {
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        StandardHost.spawn(name, body)
    }
}

fn no_answer() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer from the broker")
}

fn connect(endpoint: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in endpoint.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        // After the deadline, the timeout is zero, so `connect_timeout` fails.
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The broker outside the jail: opens each requested connection.
fn start_broker() -> (Sender<Request>, Arc<AtomicU32>) {
    let (sender, requests) = channel::<Request>();
    let made = Arc::<AtomicU32>::default();
    let count = Arc::clone(&made);
    thread::spawn(move || {
        for (endpoint, deadline, reply) in requests {
            // A real broker would check here which endpoints may be reached.
            let connection = connect(&endpoint, deadline).map(OwnedFd::from);
            count.fetch_add(1, SeqCst);
            // Sending fails if the requester has stopped waiting.
            let _ = reply.send(connection);
        }
    });
    (sender, made)
}

fn main() -> Result<(), VmmError> {
    let (client, server) = certificates::two_hosts()?;

    // The destination's jailer listens and passes the descriptor in.
    let inherited = OwnedFd::from(TcpListener::bind("127.0.0.1:0")?);
    let listener = TcpListener::from(inherited);
    let to = listener.local_addr()?.to_string();
    let there = Vm::new()?;
    let incoming = Incoming::builder(listener, &server);

    let (broker, made) = start_broker();
    let host = Arc::new(Jailed {
        broker: Mutex::new(broker),
    });
    let vm = Vm::new()?;
    SourceVm::resume(&*vm)?;
    thread::sleep(Duration::from_millis(100));
    thread::scope(|hosts| {
        hosts.spawn(|| incoming.run(&mut |_: &Offered| -> Built { Ok(there.clone()) }));
        Migration::builder(vm, to, &client).host(host).run()
    })?;
    // The broker opened one connection for the control lane and one for each data lane.
    println!("connections handed in: {}", made.load(SeqCst));
    println!("it runs there: {}", there.run_state() == RunState::Running);
    println!("memory is whole: {}", there.is_whole());
    Ok(())
}
