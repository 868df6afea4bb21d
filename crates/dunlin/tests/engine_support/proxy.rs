//! Something in the network between the two sides: it records, holds back
//! and cuts connections.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Forwards connections; the first one is the control lane.
pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    refuse: AtomicBool,
    record: AtomicBool,
    recorded: Mutex<Vec<u8>>,
    /// The connection to hold back, and after how many bytes towards the
    /// destination.
    hold: Mutex<Option<(usize, usize)>>,
    streams: Mutex<Vec<(TcpStream, TcpStream)>>,
    pumps: Mutex<Vec<JoinHandle<()>>>,
    count: AtomicUsize,
}

impl Proxy {
    pub fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            for near in listener.incoming() {
                if own.stop.load(Ordering::SeqCst) {
                    return;
                }
                let near = near.unwrap();
                if own.refuse.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(far) = TcpStream::connect(to) else {
                    continue;
                };
                let number = own.count.fetch_add(1, Ordering::SeqCst);
                let copies = (near.try_clone().unwrap(), far.try_clone().unwrap());
                own.streams.lock().unwrap().push(copies);
                let there = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let (one, two) = (Arc::clone(&own), Arc::clone(&own));
                let mut pumps = own.pumps.lock().unwrap();
                pumps.push(thread::spawn(move || {
                    pump(&one, there.0, there.1, Some(number))
                }));
                pumps.push(thread::spawn(move || pump(&two, far, near, None)));
            }
        });
        Self {
            address,
            shared,
            thread: Some(thread),
        }
    }

    /// Keeps what goes towards the destination from now on.
    pub fn record(&self) {
        self.shared.record.store(true, Ordering::SeqCst);
    }

    pub fn recorded(&self) -> Vec<u8> {
        self.shared.recorded.lock().unwrap().clone()
    }

    /// Forwards no more than `bytes` of a connection to the destination.
    pub fn hold(&self, connection: usize, bytes: usize) {
        *self.shared.hold.lock().unwrap() = Some((connection, bytes));
    }

    /// Takes no further connection.
    pub fn refuse(&self) {
        self.shared.refuse.store(true, Ordering::SeqCst);
    }

    /// Cuts a connection on both sides.
    pub fn cut(&self, connection: usize) {
        let streams = self.shared.streams.lock().unwrap();
        let (near, far) = &streams[connection];
        let _ = near.shutdown(Shutdown::Both);
        let _ = far.shutdown(Shutdown::Both);
    }

    pub fn connections(&self) -> usize {
        self.shared.count.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let connections = self.shared.streams.lock().unwrap().len();
        for connection in 0..connections {
            self.cut(connection);
        }
        let pumps = std::mem::take(&mut *self.shared.pumps.lock().unwrap());
        for pump in pumps {
            let _ = pump.join();
        }
    }
}

fn pump(shared: &Shared, mut from: TcpStream, mut to: TcpStream, number: Option<usize>) {
    let mut buffer = vec![0; 64 << 10];
    let mut forwarded = 0;
    from.set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    while !shared.stop.load(Ordering::SeqCst) {
        let mut room = buffer.len();
        if let (Some(number), Some((held, bytes))) = (number, *shared.hold.lock().unwrap())
            && number == held
        {
            room = room.min(bytes.saturating_sub(forwarded));
        }
        if room == 0 {
            // Held: looks whether the connection has been cut meanwhile.
            thread::sleep(Duration::from_millis(5));
            match from.peek(&mut [0]) {
                Ok(0) => break,
                Err(error) if error.raw_os_error() != Some(11) => break,
                _ => continue,
            }
        }
        match from.read(&mut buffer[..room]) {
            Ok(0) => break,
            Ok(count) => {
                forwarded += count;
                if number.is_some() && shared.record.load(Ordering::SeqCst) {
                    shared
                        .recorded
                        .lock()
                        .unwrap()
                        .extend_from_slice(&buffer[..count]);
                }
                if to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
