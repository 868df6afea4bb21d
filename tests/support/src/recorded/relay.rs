//! A relay that records the traffic between both sides of a session. Both sides trust the relay's
//! certificates.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use dunlin_lane::control::{self, ControlStream};
use dunlin_lane::policy::{ClientTls, ServerTls};

use super::{Entry, Side, Stage, read};
use crate::lane::soon;

pub struct Relay {
    pub address: SocketAddr,
    log: Arc<Mutex<Vec<Entry>>>,
}

impl Relay {
    /// Starts a relay to `to`. The relay runs until the test's process ends.
    pub fn start(to: SocketAddr, as_destination: ServerTls, as_source: ClientTls) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let log = Arc::<Mutex<Vec<Entry>>>::default();
        let shared = Arc::clone(&log);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let near = control::server(stream.unwrap(), &as_destination, soon()).unwrap();
                let there = TcpStream::connect(to).unwrap();
                let far = control::client(there, &as_source, soon()).unwrap();
                let log = Arc::clone(&shared);
                thread::spawn(move || pass(Arc::new(near), Arc::new(far), &log));
            }
        });
        Self { address, log }
    }

    /// The messages that have been relayed.
    pub fn entries(&self) -> Vec<Entry> {
        self.log.lock().unwrap().clone()
    }
}

fn pass(near: Arc<ControlStream>, far: Arc<ControlStream>, log: &Arc<Mutex<Vec<Entry>>>) {
    let (kind, bytes) = read(&near, Stage::Opening).unwrap();
    // In *lane open*, the lane's number follows the session's identifier.
    let (lane, stage) = match &*kind {
        "offer" => (0, Stage::Control),
        "lane-open" => (u16::from_le_bytes([bytes[32], bytes[33]]), Stage::Data),
        other => panic!("{other}"),
    };
    let write = move |log: &Mutex<Vec<Entry>>, from, kind, bytes: &[u8], to: &ControlStream| {
        log.lock().unwrap().push(Entry {
            lane,
            from,
            kind,
            bytes: bytes.to_vec(),
        });
        // Ignore an error: sending fails after the receiver has closed the connection.
        let _ = to.send(bytes);
    };
    write(log, Side::Source, kind, &bytes, &far);
    let (near_again, far_again) = (Arc::clone(&near), Arc::clone(&far));
    let back_log = Arc::clone(log);
    let back = thread::spawn(move || {
        if stage == Stage::Control {
            let mut at = Stage::Opening;
            while let Some((kind, bytes)) = read(&far_again, at) {
                write(&back_log, Side::Destination, kind, &bytes, &near_again);
                at = Stage::Control;
            }
        } else {
            // In this direction, a data lane carries nothing; only its end is read.
            let _ = far_again.receive(&mut [0], soon());
        }
        let _ = near_again.close();
    });
    while let Some((kind, bytes)) = read(&near, stage) {
        write(log, Side::Source, kind, &bytes, &far);
    }
    let _ = far.close();
    let _ = back.join();
}
