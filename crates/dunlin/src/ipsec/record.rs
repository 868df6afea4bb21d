//! What this host has installed, on disk before it is installed: so that a later
//! process removes exactly what a dead one has left.
//!
//! A session has a file, text, one line an object ([`dunlin_proto::ipsec::object`]):
//!
//! ```text
//! dunlin ipsec 1 boot 0b5c… namespace 4:4026531840
//! + policy out 192.0.2.1 192.0.2.2 ports 0/0x0000 4444/0xffff priority 103 block
//! + sa in …
//! - sa in …
//! ```
//!
//! `+` is synced before the kernel is told, `-` is written after it has been. Only the
//! last line can be cut short, and then nothing was installed for it. A record of an
//! earlier boot means nothing, since the kernel's tables went with it; one of another
//! network namespace is left for a process there. The file is locked while its process
//! lives.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dunlin_proto::ipsec::object::{Action, Direction, Object};
use dunlin_proto::negotiate::SessionId;

use super::error::IpsecError;

const EXTENSION: &str = "ipsec";
/// Far more than the objects of two epochs.
const MOST_BYTES: u64 = 64 << 20;

/// The directory of records.
#[derive(Clone, Debug)]
pub(super) struct Shelf {
    directory: PathBuf,
}

impl Shelf {
    /// Opens the directory, made (mode 0700) if it is not there.
    pub(super) fn open(directory: &Path) -> Result<Self, IpsecError> {
        let failed = |what| io_error(what, directory);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(failed("made"))?;
        let mode = directory.metadata().map_err(failed("read"))?.mode() & 0o777;
        if mode & 0o022 != 0 {
            let path = directory.to_owned();
            return Err(IpsecError::Exposed { path, mode });
        }
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    /// Nobody else on this host looks for free ports and takes them until the lock is
    /// dropped.
    pub(super) fn lock(&self) -> Result<File, IpsecError> {
        let path = self.directory.join("lock");
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(io_error("opened", &path))?;
        file.lock().map_err(io_error("locked", &path))?;
        Ok(file)
    }

    /// Makes a session's record.
    pub(super) fn create(&self, session: &SessionId) -> Result<Record, IpsecError> {
        let name: String = session.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = self.directory.join(name).with_extension(EXTENSION);
        let file = OpenOptions::new()
            .create_new(true)
            .read(true)
            .append(true)
            .mode(0o600)
            .open(&path)
            .map_err(io_error("made", &path))?;
        file.try_lock()
            .map_err(io::Error::from)
            .map_err(io_error("locked", &path))?;
        let mut record = Record {
            file,
            path,
            objects: Vec::new(),
        };
        record.write(&format!("{}\n", header()?))?;
        record.sync()?;
        self.sync()?;
        Ok(record)
    }

    /// The records in this namespace whose processes have died; they are taken over.
    /// Those of an earlier boot are removed. One that cannot be read is an error of its
    /// own, and the others are there all the same.
    pub(super) fn left(&self) -> Result<Vec<Result<Record, IpsecError>>, IpsecError> {
        let header = header()?;
        let boot = |header: &str| header.split(" namespace ").next().map(str::to_owned);
        let mut left = Vec::new();
        let entries = fs::read_dir(&self.directory).map_err(io_error("read", &self.directory))?;
        for entry in entries {
            let path = entry.map_err(io_error("read", &self.directory))?.path();
            if path
                .extension()
                .is_none_or(|extension| extension != EXTENSION)
            {
                continue;
            }
            let one = || {
                let Some(mut record) = Record::take(&path)? else {
                    return Ok(None);
                };
                match record.read()? {
                    Some(found) if found == header => Ok(Some(record)),
                    Some(found) if boot(&found) == boot(&header) => Ok(None),
                    // No header: its process died before it had installed anything.
                    _ => record.forget().map(|()| None),
                }
            };
            left.extend(one().transpose());
        }
        Ok(left)
    }

    fn sync(&self) -> Result<(), IpsecError> {
        let synced = File::open(&self.directory).and_then(|directory| directory.sync_all());
        synced.map_err(io_error("synced", &self.directory))
    }
}

/// One session's record, held by this process.
#[derive(Debug)]
pub(super) struct Record {
    file: File,
    path: PathBuf,
    objects: Vec<Object>,
}

impl Record {
    /// What may be installed.
    pub(super) fn objects(&self) -> &[Object] {
        &self.objects
    }

    /// Whether packets have ever been let through by an SA, so that a connection may have
    /// begun that relies on it. Until the policies go, the record has those that did that.
    pub(super) fn has_protected(&self) -> bool {
        self.objects.iter().any(|object| {
            matches!(object, Object::Policy(policy)
                if policy.direction == Direction::Out && policy.action != Action::Block)
        })
    }

    /// Whether it is about packets to this host.
    pub(super) fn concerns(&self, peer: IpAddr) -> bool {
        self.objects.iter().any(|object| match object {
            Object::Policy(policy) => {
                policy.selector.destination == peer || policy.selector.source == peer
            }
            Object::Association(one) => one.destination == peer || one.source == peer,
            Object::Listener(_) => false,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Remembers these, synced when it returns.
    pub(super) fn add(&mut self, objects: &[Object]) -> Result<(), IpsecError> {
        let new = |object: &&Object| !self.objects.contains(object);
        let new: Vec<Object> = objects.iter().filter(new).copied().collect();
        if new.is_empty() {
            return Ok(());
        }
        let lines: String = new.iter().map(|object| format!("+ {object}\n")).collect();
        // Before it is tried: a part of it may be there after a failure.
        self.objects.extend(new);
        self.write(&lines)?;
        self.sync()
    }

    /// This is gone, or was never there.
    pub(super) fn gone(&mut self, object: &Object) -> Result<(), IpsecError> {
        let before = self.objects.len();
        self.objects.retain(|one| one != object);
        if self.objects.len() == before {
            return Ok(());
        }
        self.write(&format!("- {object}\n"))
    }

    /// Nothing is left: the file goes.
    pub(super) fn forget(self) -> Result<(), IpsecError> {
        fs::remove_file(&self.path).map_err(io_error("removed", &self.path))
    }

    /// Takes a record whose process has died; none where it lives, or the file has gone.
    fn take(path: &Path) -> Result<Option<Self>, IpsecError> {
        let opened = OpenOptions::new().read(true).append(true).open(path);
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error("opened", path)(error)),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(io_error("locked", path)(error)),
        }
        // Its process may have removed it just now.
        let links = file.metadata().map_err(io_error("read", path))?.nlink();
        Ok((links > 0).then(|| Self {
            file,
            path: path.to_owned(),
            objects: Vec::new(),
        }))
    }

    /// Reads its text; returns its header, and cuts off what was never synced.
    fn read(&mut self) -> Result<Option<String>, IpsecError> {
        let mut text = String::new();
        let read = self.file.seek(SeekFrom::Start(0)).and_then(|_| {
            let mut whole = (&self.file).take(MOST_BYTES);
            whole.read_to_string(&mut text)
        });
        read.map_err(io_error("read", &self.path))?;
        // What follows the last line's end was never synced. The next line must not
        // begin behind it.
        let end = text.rfind('\n').map_or(0, |at| at + 1);
        let bytes = u64::try_from(text.len()).unwrap_or(MOST_BYTES);
        if bytes < MOST_BYTES && end < text.len() {
            let cut = self.file.set_len(end as u64);
            cut.map_err(io_error("written", &self.path))?;
        }
        let mut lines = (1..).zip(text[..end].lines());
        let header = lines.next().map(|(_, header)| header.to_owned());
        for (line, text) in lines {
            let parsed = text.get(2..).unwrap_or_default().parse();
            let object: Object = parsed.map_err(|source| IpsecError::Unreadable {
                path: self.path.clone(),
                line,
                source,
            })?;
            self.objects.retain(|one| *one != object);
            if text.starts_with("+ ") {
                self.objects.push(object);
            }
        }
        Ok(header)
    }

    /// Writes whole lines, or none of them.
    fn write(&mut self, text: &str) -> Result<(), IpsecError> {
        let failed = io_error("written", &self.path);
        let before = self.file.metadata().map_err(&failed)?.len();
        self.file.write_all(text.as_bytes()).map_err(|error| {
            // A full disk may have taken a part of it.
            let _ = self.file.set_len(before);
            failed(error)
        })
    }

    fn sync(&self) -> Result<(), IpsecError> {
        self.file
            .sync_data()
            .map_err(io_error("synced", &self.path))
    }
}

/// What the kernel's tables are those of: this boot, and this thread's namespace.
fn header() -> Result<String, IpsecError> {
    const BOOT: &str = "/proc/sys/kernel/random/boot_id";
    const NAMESPACE: &str = "/proc/thread-self/ns/net";
    let system = |path| move |source| IpsecError::System { path, source };
    let boot = fs::read_to_string(BOOT).map_err(system(BOOT))?;
    let namespace = fs::metadata(NAMESPACE).map_err(system(NAMESPACE))?;
    Ok(format!(
        "dunlin ipsec 1 boot {} namespace {}:{}",
        boot.trim_end(),
        namespace.dev(),
        namespace.ino()
    ))
}

fn io_error(what: &'static str, path: &Path) -> impl Fn(io::Error) -> IpsecError + use<> {
    let path = path.to_owned();
    move |source| IpsecError::Record {
        what,
        path: path.clone(),
        source,
    }
}

#[cfg(test)]
mod tests;
