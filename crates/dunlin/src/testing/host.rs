//! The process around the engine: sockets, threads, and the journal's disk.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::poll::waker;

use super::{Violation, broken};
use crate::engine::Host;
use crate::engine::journal::Disk;

/// How late after its deadline a call may return.
const GRACE: Duration = Duration::from_secs(2);

/// Tests connections, by a listener on `127.0.0.1`, and threads. A host that
/// reaches its peers in another way is given the name by which it reaches this
/// listener: `endpoint` makes it from the port.
///
/// # Errors
/// The first [`Violation`].
pub fn check_host(host: &dyn Host, endpoint: &dyn Fn(u16) -> String) -> Result<(), Violation> {
    const CONNECT: &str = "Host::connect";
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    let deadline = Instant::now() + Duration::from_secs(5);
    let (waker, stop) = waker()?;
    let connected = host.connect(&endpoint(port), deadline, &stop);
    let mut near = connected.map_err(|error| {
        let promise = "it connects to whoever listens";
        broken(CONNECT, promise, format!("it does not: {error}"))
    })?;
    let mut far = listener.accept()?.0;
    let (sender, receiver) = channel();
    let reader = thread::spawn(move || {
        let mut byte = [0];
        // What comes of it is compared.
        let _ = sender.send(near.read_exact(&mut byte).map(|()| byte[0]));
    });
    // Long enough that a socket that does not block fails meanwhile.
    thread::sleep(Duration::from_millis(20));
    far.write_all(&[7])?;
    let byte = receiver.recv_timeout(GRACE);
    if !matches!(byte, Ok(Ok(7))) {
        return Err(broken(
            CONNECT,
            "its sockets block until there is something to read",
            format!("what was sent came as {byte:?}"),
        ));
    }
    drop(reader.join());

    drop(listener);
    let began = Instant::now();
    let limit = Duration::from_millis(200);
    let nobody = host.connect(&endpoint(port), began + limit, &stop);
    drop(waker);
    if nobody.is_ok() || began.elapsed() > limit + GRACE {
        return Err(broken(
            CONNECT,
            "it fails by the deadline where nobody listens",
            format!("it returned {nobody:?} after {:?}", began.elapsed()),
        ));
    }

    let (sender, receiver) = channel();
    let body = move || {
        // The thread that waits is this one.
        let _ = sender.send(thread::current().id());
    };
    let spawned = host.spawn("dunlin-testing".into(), Box::new(body))?;
    let ran = receiver.recv_timeout(GRACE);
    if ran.is_err() || ran == Ok(thread::current().id()) || spawned.join().is_err() {
        return Err(broken(
            "Host::spawn",
            "the body runs on a thread of its own, which can be joined",
            format!("it ran on {ran:?}"),
        ));
    }
    Ok(())
}

/// Tests that a disk writes what it is told, where it is told, in a file that it
/// makes in `directory` and removes again. Whether what was synced survives a
/// loss of power only a test with a loss of power can tell.
///
/// # Errors
/// The first [`Violation`].
pub fn check_disk(disk: &dyn Disk, directory: &Path) -> Result<(), Violation> {
    let path = directory.join(format!("dunlin-testing-{}", std::process::id()));
    let result = write_and_read(disk, &path);
    fs::remove_file(&path)?;
    result
}

fn write_and_read(disk: &dyn Disk, path: &Path) -> Result<(), Violation> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    file.write_all_at(&[0xaa; 8192], 0)?;
    file.sync_all()?;
    let mut expected = vec![0xaa; 8192];
    for (offset, byte, length) in [(4096, 1, 512), (0, 2, 512), (4096, 3, 4096), (512, 4, 1)] {
        let bytes = vec![byte; length];
        disk.write(&file, &bytes, offset as u64)?;
        disk.sync(&file)?;
        expected[offset..offset + length].copy_from_slice(&bytes);
        // By another descriptor: nothing may wait inside the process.
        if fs::read(path)? != expected {
            return Err(broken(
                "Disk::write",
                "when it and Disk::sync have returned, the file holds the bytes at their offset \
                 and is otherwise as it was",
                format!("it does not after {length} bytes at {offset}"),
            ));
        }
    }
    // What cannot be written must not count as written.
    let read_only = fs::File::open(path)?;
    if disk.write(&read_only, &[9], 0).is_ok() && disk.sync(&read_only).is_ok() {
        return Err(broken(
            "Disk::write",
            "it fails, or Disk::sync does, where nothing was written",
            "it succeeds on a file that cannot be written",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::File;
    use std::io;
    use std::net::TcpStream;
    use std::thread::JoinHandle;

    use super::*;
    use crate::engine::journal::StandardDisk;
    use crate::engine::{StandardHost, Wakeup};

    /// What a broken one does.
    enum Fault {
        /// Sockets do not block.
        NonBlocking,
        /// It runs the body at once, here.
        SameThread,
        /// It waits far beyond the deadline.
        Late,
    }

    impl Host for Fault {
        fn connect(
            &self,
            endpoint: &str,
            deadline: Instant,
            stop: &Wakeup,
        ) -> io::Result<TcpStream> {
            let stream = StandardHost.connect(endpoint, deadline, stop);
            match self {
                Self::NonBlocking => stream.inspect(|stream| stream.set_nonblocking(true).unwrap()),
                Self::Late => {
                    if stream.is_err() {
                        thread::sleep(GRACE + Duration::from_millis(300));
                    }
                    stream
                }
                Self::SameThread => stream,
            }
        }

        fn spawn(
            &self,
            name: String,
            body: Box<dyn FnOnce() + Send>,
        ) -> io::Result<JoinHandle<()>> {
            match self {
                Self::SameThread => {
                    body();
                    StandardHost.spawn(name, Box::new(|| ()))
                }
                _ => StandardHost.spawn(name, body),
            }
        }
    }

    #[test]
    fn hosts_are_told_apart() {
        let endpoint = |port| format!("127.0.0.1:{port}");
        check_host(&StandardHost, &endpoint).unwrap();
        for (fault, sentence) in [
            (
                Fault::NonBlocking,
                "Host::connect promises that its sockets",
            ),
            (Fault::SameThread, "Host::spawn promises that the body"),
            (Fault::Late, "Host::connect promises that it fails by"),
        ] {
            let text = check_host(&fault, &endpoint).unwrap_err().to_string();
            assert!(text.starts_with(sentence), "{text}");
        }
    }

    /// Writes everything at the beginning.
    struct Misplaced;

    impl Disk for Misplaced {
        fn write(&self, file: &File, bytes: &[u8], _: u64) -> io::Result<()> {
            file.write_all_at(bytes, 0)
        }
    }

    /// Forgets what it could not write.
    struct Careless;

    impl Disk for Careless {
        fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
            let _ = file.write_all_at(bytes, offset);
            Ok(())
        }
    }

    #[test]
    fn disks_are_told_apart() {
        let directory = std::env::temp_dir();
        check_disk(&StandardDisk, &directory).unwrap();
        let text = check_disk(&Misplaced, &directory).unwrap_err().to_string();
        assert!(text.starts_with("Disk::write promises that when"), "{text}");
        let text = check_disk(&Careless, &directory).unwrap_err().to_string();
        assert!(
            text.starts_with("Disk::write promises that it fails"),
            "{text}"
        );
    }
}
