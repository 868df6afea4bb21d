//! Connections between two hosts, made and used on given CPUs, and the SAs that the connections
//! use.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::{set_reset_on_close, wait_readable};
use dunlin_linux::tcp::set_traffic_class;
use dunlin_test_base::pattern;

use super::{Family, Host, Hosts, LANES, SaSet, on_cpu};

/// The time limit for every expected event.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A listener for lanes on a host.
#[derive(Debug)]
pub struct Acceptor {
    listener: TcpListener,
    /// The address of the listener.
    pub address: SocketAddr,
}

impl Acceptor {
    /// Opens a listener. Its port is the first port of lanes plus `further`.
    ///
    /// # Panics
    /// The port is in use.
    #[must_use]
    pub fn open(host: &Host, family: Family, further: u16) -> Self {
        let address = SocketAddr::new(host.address(family), LANES.port + further);
        let listener = host
            .run(|| TcpListener::bind(address))
            .expect("the port is free");
        Self { listener, address }
    }

    /// Accepts the next connection.
    ///
    /// # Panics
    /// No connection arrives.
    #[must_use]
    pub fn accept(&self) -> TcpStream {
        let until = Instant::now() + LIMIT;
        assert!(
            wait_readable(&self.listener, until).expect("the socket can be polled"),
            "no connection arrives"
        );
        self.listener.accept().expect("a connection is pending").0
    }
}

/// A lane, that is, both ends of one connection.
#[derive(Debug)]
pub struct Lane {
    /// The end of the connecting side.
    pub near: TcpStream,
    /// The end of the accepting side.
    pub far: TcpStream,
}

impl Lane {
    /// Connects from `host`, on the given CPU.
    ///
    /// # Panics
    /// The lane does not connect.
    #[must_use]
    pub fn connect(host: &Host, cpu: u32, listener: &Acceptor) -> Self {
        let near = host.on_cpu(cpu, || TcpStream::connect_timeout(&listener.address, LIMIT));
        let near = near.unwrap_or_else(|error| panic!("from CPU {cpu}: {error}"));
        let far = listener.accept();
        for end in [&near, &far] {
            end.set_nodelay(true).expect("the socket is connected");
            // Without a reset, a closed connection could exist for minutes if its SA or its link is
            // removed first.
            set_reset_on_close(end).expect("the socket is connected");
        }
        Self { near, far }
    }

    /// Sends bytes from the near end, on the given CPU. Waits until the far end has received and
    /// acknowledged them.
    ///
    /// # Panics
    /// The bytes do not arrive.
    pub fn send(&self, cpu: u32, bytes: usize) {
        send(&self.near, &self.far, cpu, bytes);
    }

    /// Like [`Lane::send`], in the opposite direction.
    ///
    /// # Panics
    /// The bytes do not arrive.
    pub fn send_back(&self, cpu: u32, bytes: usize) {
        send(&self.far, &self.near, cpu, bytes);
    }
}

/// Tells the threads of a lane to stop. If the test has failed, also shuts the lane down, because
/// the threads would otherwise wait for each other until the test's time limit.
#[derive(Debug)]
pub struct Ending<'a> {
    /// A flag that the threads check between two steps.
    pub done: &'a AtomicBool,
    /// The lane on which the threads wait.
    pub lane: &'a Lane,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        if thread::panicking() {
            let _ = self.lane.near.shutdown(Shutdown::Both);
            let _ = self.lane.far.shutdown(Shutdown::Both);
        }
    }
}

fn send(from: &TcpStream, to: &TcpStream, cpu: u32, bytes: usize) {
    let data = pattern(bytes, 1);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut all = vec![0; bytes];
            read_all(to, &mut all);
            assert!(all == data, "the received data differs");
        });
        on_cpu(cpu, || write_all(from, &data));
        reader
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    let until = Instant::now() + LIMIT;
    while dunlin_linux::tcp::unacknowledged_bytes(from).expect("the socket is open") > 0 {
        assert!(Instant::now() < until, "nothing is acknowledged");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Reads until the buffer is full. An interrupted read is repeated.
///
/// # Panics
/// The connection ends or stalls.
pub fn read_all(mut from: &TcpStream, mut to: &mut [u8]) {
    from.set_read_timeout(Some(LIMIT))
        .expect("the socket is open");
    while !to.is_empty() {
        match from.read(to) {
            Ok(0) => panic!("the connection ended"),
            Ok(count) => to = &mut to[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Writes all of the data.
///
/// # Panics
/// The connection ends or stalls.
pub fn write_all(mut to: &TcpStream, data: &[u8]) {
    to.set_write_timeout(Some(LIMIT))
        .expect("the socket is open");
    to.write_all(data).expect("the data is written");
}

/// Returns the SAs of one direction that carried packets while `task` ran, each with its number of
/// packets at the sender. `None` is the fallback SA.
pub fn used(way: &SaSet, from: &Host, to: &Host, task: impl FnOnce()) -> Vec<(Option<u32>, u64)> {
    let before = way.packets(from, to);
    task();
    let after = way.packets(from, to);
    let grown = before
        .iter()
        .zip(after)
        .map(|(before, after)| after - before);
    way.all()
        .zip(grown)
        .filter(|(_, grown)| *grown > 0)
        .map(|(sa, grown)| (sa.cpu, grown))
        .collect()
}

/// Like [`used`], but returns only the CPUs. Ignores an SA that carried a single packet, because
/// another lane may retransmit a packet at any moment.
pub fn users(way: &SaSet, from: &Host, to: &Host, task: impl FnOnce()) -> Vec<Option<u32>> {
    let used = used(way, from, to, task);
    if used.len() != 1 {
        println!("packets by CPU: {used:?}");
    }
    used.into_iter()
        .filter(|(_, packets)| *packets > 1)
        .map(|(cpu, _)| cpu)
        .collect()
}

/// Makes the connection look up its SA again on `cpu`. Changes the traffic class, sends `first`,
/// changes the class back and sends `first` again. Each of the two sends looks up the SA. Nagle's
/// algorithm must be off. Otherwise the second send would wait for an acknowledgement and take
/// place on the CPU that receives the acknowledgement.
///
/// # Panics
/// The socket is not connected.
pub fn look_again(stream: &TcpStream, cpu: u32, first: &[u8]) {
    on_cpu(cpu, || {
        for class in [8, 0] {
            set_traffic_class(stream, class).expect("the socket is connected");
            write_all(stream, first);
        }
    });
}

/// Two hosts with SAs for CPUs in both directions, policies for the lanes of one address family,
/// and a listener.
#[derive(Debug)]
pub struct Scene {
    /// The hosts.
    pub hosts: Hosts,
    /// The SAs from the first host to the second.
    pub there: SaSet,
    /// The SAs in the opposite direction.
    pub back: SaSet,
    /// The listener for lanes.
    pub listener: Acceptor,
}

impl Scene {
    /// Sets up the hosts, SAs, policies and the listener. `cpus` is the number of CPUs with SAs,
    /// for each host.
    ///
    /// # Panics
    /// A step of the setup fails.
    #[must_use]
    pub fn new(guest: &crate::Guest, family: Family, cpus: [u32; 2]) -> Self {
        let hosts = Hosts::new(guest);
        let there = SaSet::new(0x1000, cpus[0], family);
        let back = SaSet::new(0x2000, cpus[1], family);
        there.add(&hosts.a, &hosts.b);
        back.add(&hosts.b, &hosts.a);
        let _ = super::protect(&hosts, family, dunlin_ipsec::xfrm::Protocol::TCP);
        let listener = Acceptor::open(&hosts.b, family, 0);
        Self {
            hosts,
            there,
            back,
            listener,
        }
    }

    /// Opens a lane from one CPU of the first host.
    ///
    /// # Panics
    /// The lane does not connect.
    #[must_use]
    pub fn lane(&self, cpu: u32) -> Lane {
        Lane::connect(&self.hosts.a, cpu, &self.listener)
    }

    /// Calls [`users`] for the SAs from the first host to the second.
    pub fn there(&self, task: impl FnOnce()) -> Vec<Option<u32>> {
        users(&self.there, &self.hosts.a, &self.hosts.b, task)
    }

    /// Calls [`users`] for the SAs of the opposite direction.
    pub fn back(&self, task: impl FnOnce()) -> Vec<Option<u32>> {
        users(&self.back, &self.hosts.b, &self.hosts.a, task)
    }
}
