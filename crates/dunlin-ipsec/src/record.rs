//! The records on disk of the objects that this host has installed. An object is recorded before it
//! is installed, so that a later process removes exactly what a dead process left.
//!
//! Each session has a text file with one line for each object ([`dunlin_proto::ipsec::object`]):
//!
//! ```text
//! dunlin ipsec 1 boot 0b5c… namespace 4:4026531840
//! about pid 1234 mode cpu ports 4444-4444 control 192.0.2.1:40000 192.0.2.2:7302 peer …
//! + policy out 192.0.2.1 192.0.2.2 ports 0/0x0000 4444/0xffff priority 103 block
//! + sa in …
//! - sa in …
//! heir
//! ended
//! ```
//!
//! A `+` line is synced before the kernel installs the object. A `-` line is written when the
//! object is removed or could not be installed. `heir` means that the session's policies replace
//! those of an earlier session that had protected the ports. `ended` means that the owner requested
//! the end of the session. `about` describes the owner ([`Owner`]). Only the last line can be
//! truncated. In that case its object is not installed. A record of an earlier boot is void,
//! because the kernel's tables are gone. A record of another network namespace is left to a process
//! in that namespace. The file is locked until its process ends or gives the session up.
//!
//! When most lines concern removed objects, the file is rewritten: the remaining lines go to a new
//! file under another name. The new file is locked, synced and renamed over the old one.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::own_user;
use dunlin_proto::ipsec::object::{NotAnObject, Object, Policy};
use dunlin_proto::negotiate::SessionId;

use super::error::IpsecError;

mod look;
mod owner;

pub(super) use look::Seen;
pub use owner::Owner;

const EXTENSION: &str = "ipsec";
/// The extension of a record that is being rewritten.
const NEW_EXTENSION: &str = "new";
/// The maximum size of a record, in bytes. Even a large record needs far less: it lists the SAs
/// before and after a rekey, and equally many removed objects.
const MOST_BYTES: u64 = 64 << 20;
/// A record is rewritten when its number of lines exceeds twice the number of its remaining objects
/// by more than this value.
const DEAD_LINES: usize = 64;
/// The interval between attempts to acquire the lock.
const BETWEEN_TRIES: Duration = Duration::from_millis(20);
const FORMAT: &str = "dunlin ipsec 1 boot ";
const ABOUT: &str = "about";
const HEIR: &str = "heir";
const ENDED: &str = "ended";

/// The directory of records.
#[derive(Clone, Debug)]
pub(super) struct RecordDirectory {
    directory: PathBuf,
}

impl RecordDirectory {
    /// Opens the directory; creates it with mode 0700 if it does not exist.
    pub(super) fn open(directory: &Path) -> Result<Self, IpsecError> {
        let failed = |what| io_error(what, directory);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(failed("created"))?;
        let found = directory.metadata().map_err(failed("read"))?;
        let (mode, owner) = (found.mode() & 0o777, found.uid());
        if mode & 0o022 != 0 || owner != own_user() {
            let path = directory.to_owned();
            return Err(IpsecError::Exposed { path, mode, owner });
        }
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    /// Acquires the lock under which sessions on this host search for free ports and allocate
    /// them. The lock is released when the returned file is dropped.
    ///
    /// # Errors
    /// Another process holds the lock for longer than `timeout`, or the file cannot be opened or
    /// locked.
    pub(super) fn lock(&self, timeout: Duration) -> Result<File, IpsecError> {
        let path = self.directory.join("lock");
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(io_error("opened", &path))?;
        let until = Instant::now() + timeout;
        loop {
            if is_locked(file.try_lock(), &path)? {
                return Ok(file);
            }
            if Instant::now() >= until {
                return Err(IpsecError::Locked { path });
            }
            thread::sleep(BETWEEN_TRIES);
        }
    }

    /// Creates the record of a session.
    pub(super) fn create(&self, session: &SessionId) -> Result<Record, IpsecError> {
        let name: String = session.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = self.directory.join(name).with_extension(EXTENSION);
        let file = make(&path, OpenOptions::new().create_new(true).append(true))?;
        let mut record = Record::new(file, path);
        record.write(&format!("{}\n", header()?))?;
        record.sync()?;
        sync_directory(&self.directory)?;
        Ok(record)
    }

    /// Takes over the records of dead processes in this namespace and returns them. Removes records
    /// of an earlier boot or with an incomplete header. An unreadable record is an `Err` entry of
    /// the result.
    pub(super) fn left(&self) -> Result<Vec<Result<Record, IpsecError>>, IpsecError> {
        let header = header()?;
        let mut left = Vec::new();
        for path in self.paths()? {
            let one = || {
                let Some(mut record) = Record::take(&path)? else {
                    return Ok(None);
                };
                match record.read(&header)? {
                    (Scope::Here, synced) => {
                        // Remove an incomplete last line, because the next line would be appended
                        // to it.
                        let cut = record.file.set_len(synced);
                        cut.map_err(io_error("written", &path))?;
                        Ok(Some(record))
                    }
                    (Scope::Elsewhere, _) => Ok(None),
                    (Scope::Nowhere, _) => record.forget().map(|()| None),
                }
            };
            left.extend(one().transpose());
        }
        Ok(left)
    }

    fn paths(&self) -> Result<Vec<PathBuf>, IpsecError> {
        let failed = io_error("read", &self.directory);
        let mut paths = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(&failed)? {
            let path = entry.map_err(&failed)?.path();
            if path.extension().is_some_and(|kind| kind == EXTENSION) {
                paths.push(path);
            }
        }
        Ok(paths)
    }
}

/// The tables that a record refers to.
enum Scope {
    /// The tables of this thread's network namespace.
    Here,
    /// The tables of another namespace.
    Elsewhere,
    /// The record belongs to no tables of this boot: the record is from an earlier boot, or
    /// its header is incomplete.
    Nowhere,
}

/// The record of a session, locked by this process.
#[derive(Debug)]
pub(super) struct Record {
    file: File,
    path: PathBuf,
    owner: Option<Owner>,
    objects: Vec<Object>,
    /// The number of lines after the header.
    lines: usize,
    is_heir: bool,
    has_ended: bool,
}

impl Record {
    fn new(file: File, path: PathBuf) -> Self {
        Self {
            file,
            path,
            owner: None,
            objects: Vec::new(),
            lines: 0,
            is_heir: false,
            has_ended: false,
        }
    }

    /// The owner; `None` if the record does not name it.
    pub(super) fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// Records the owner of the session. The owner is synced together with the first added
    /// objects.
    pub(super) fn set_owner(&mut self, owner: Owner) -> Result<(), IpsecError> {
        let line = format!("{ABOUT} {owner}\n");
        self.owner = Some(owner);
        self.write(&line)
    }

    /// The objects that are possibly installed.
    pub(super) fn objects(&self) -> &[Object] {
        &self.objects
    }

    /// Whether the policies of this session, or of a predecessor, have ever let packets out through
    /// an SA. If so, a connection that relies on the SA may exist. The record lists these policies
    /// even after blocking policies have replaced them.
    pub(super) fn has_protected(&self) -> bool {
        self.is_heir || self.policies().any(Policy::lets_out)
    }

    /// The policies among these objects.
    pub(super) fn policies(&self) -> impl Iterator<Item = &Policy> {
        self.objects.iter().filter_map(Object::policy)
    }

    /// Whether the ports may be freed as soon as no connection uses them. This requires that the
    /// owner has requested the session's end, or that the policies never let packets out through an
    /// SA.
    pub(super) fn is_free(&self) -> bool {
        self.has_ended || !self.has_protected()
    }

    /// Records that the session's policies replace those of an earlier session, which had protected
    /// the ports.
    pub(super) fn inherit(&mut self) -> Result<(), IpsecError> {
        self.is_heir = true;
        self.write(&format!("{HEIR}\n"))?;
        self.sync()
    }

    /// Records that the owner of the session requested its end.
    pub(super) fn end(&mut self) -> Result<(), IpsecError> {
        self.has_ended = true;
        self.write(&format!("{ENDED}\n"))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Records these objects, and syncs the file.
    pub(super) fn add(&mut self, objects: &[Object]) -> Result<(), IpsecError> {
        let new = |object: &&Object| !self.objects.contains(object);
        let new: Vec<Object> = objects.iter().filter(new).copied().collect();
        if new.is_empty() {
            return Ok(());
        }
        let lines: String = new.iter().map(|object| format!("+ {object}\n")).collect();
        // Extend `objects` before the write: `compact` writes all objects in this list, and after a
        // failed write or sync, the file may hold some of the new objects.
        self.objects.extend(new);
        if self.lines > 2 * self.objects.len() + DEAD_LINES && self.compact().is_ok() {
            return Ok(());
        }
        self.write(&lines)?;
        self.sync()
    }

    /// Rewrites the file with the remaining objects. A process that opened the old file detects the
    /// replacement after it has locked that file.
    fn compact(&mut self) -> Result<(), IpsecError> {
        let path = self.path.with_extension(NEW_EXTENSION);
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).write(true);
        let file = make(&path, &mut options)?;
        let flags = [(self.is_heir, HEIR), (self.has_ended, ENDED)];
        let flags = flags.iter().filter(|(is, _)| *is);
        let flags = flags.map(|(_, word)| format!("{word}\n"));
        let owner = self.owner.iter().map(|owner| format!("{ABOUT} {owner}\n"));
        let objects = self.objects.iter().map(|object| format!("+ {object}\n"));
        let lines: Vec<String> = owner.chain(flags).chain(objects).collect();
        let text = format!("{}\n{}", header()?, lines.concat());
        let written = (&file).write_all(text.as_bytes());
        let written = written.and_then(|()| file.sync_all());
        if let Err(error) = written.and_then(|()| fs::rename(&path, &self.path)) {
            let _ = fs::remove_file(&path);
            return Err(io_error("written", &path)(error));
        }
        self.file = file;
        self.lines = lines.len();
        let directory = self.path.parent().unwrap_or(&self.path);
        sync_directory(directory)
    }

    /// Records that an object was removed or never installed.
    pub(super) fn gone(&mut self, object: &Object) -> Result<(), IpsecError> {
        let before = self.objects.len();
        self.objects.retain(|one| one != object);
        if self.objects.len() == before {
            return Ok(());
        }
        self.write(&format!("- {object}\n"))
    }

    /// Records the removal of the policies that `is_gone` selects.
    pub(super) fn policies_gone(
        &mut self,
        is_gone: impl Fn(&Policy) -> bool,
    ) -> Result<(), IpsecError> {
        let gone = self.policies().filter(|policy| is_gone(policy)).copied();
        let gone: Vec<Object> = gone.map(Object::Policy).collect();
        gone.iter().try_for_each(|object| self.gone(object))
    }

    /// Removes the file. The caller must ensure that none of the record's objects is installed.
    pub(super) fn forget(self) -> Result<(), IpsecError> {
        fs::remove_file(&self.path).map_err(io_error("removed", &self.path))
    }

    /// Takes over the record of a dead process; `None` if the process lives or the file is gone.
    fn take(path: &Path) -> Result<Option<Self>, IpsecError> {
        let opened = OpenOptions::new().read(true).append(true).open(path);
        let Some(file) = unless_gone(opened, path)? else {
            return Ok(None);
        };
        if !is_locked(file.try_lock(), path)? {
            return Ok(None);
        }
        // The process may have removed or replaced the file in the meantime.
        let links = file.metadata().map_err(io_error("read", path))?.nlink();
        Ok((links > 0).then(|| Self::new(file, path.to_owned())))
    }

    /// Reads the file, and applies its lines if it has this header. Returns the scope of the record
    /// and the length of all complete lines: anything after them was never synced or is still being
    /// written.
    fn read(&mut self, header: &str) -> Result<(Scope, u64), IpsecError> {
        /// Every header is shorter than this, in bytes.
        const LONG: usize = 256;
        let mut text = Vec::new();
        let read = self.file.seek(SeekFrom::Start(0));
        let read = read.and_then(|_| (&self.file).take(MOST_BYTES + 1).read_to_end(&mut text));
        read.map_err(io_error("read", &self.path))?;
        let last = text.iter().rposition(|byte| *byte == b'\n');
        if last.is_none() && text.len() < LONG {
            return Ok((Scope::Nowhere, 0));
        }
        let synced = last.map_or(0, |at| at + 1);
        let whole = String::from_utf8_lossy(&text[..synced]);
        let mut lines = (1..).zip(whole.lines());
        let found = lines.next().map_or("", |(_, found)| found);
        let boot = |header: &str| header.split(" namespace ").next().map(str::to_owned);
        if !found.starts_with(FORMAT) {
            return Err(self.unreadable(1));
        }
        if found != header {
            let scope = match boot(found) == boot(header) {
                true => Scope::Elsewhere,
                false => Scope::Nowhere,
            };
            return Ok((scope, synced as u64));
        }
        if text.len() as u64 > MOST_BYTES {
            let path = self.path.clone();
            return Err(IpsecError::TooLarge { path });
        }
        for (line, text) in lines.filter(|(_, text)| !text.is_empty()) {
            self.apply_line(text).map_err(|_| self.unreadable(line))?;
            self.lines += 1;
        }
        Ok((Scope::Here, synced as u64))
    }

    fn unreadable(&self, line: usize) -> IpsecError {
        IpsecError::Unreadable {
            path: self.path.clone(),
            line,
            source: NotAnObject,
        }
    }

    /// Applies one line.
    fn apply_line(&mut self, line: &str) -> Result<(), NotAnObject> {
        match line.split_once(' ') {
            Some(("+", object)) => {
                let object: Object = object.parse()?;
                self.objects.retain(|one| *one != object);
                self.objects.push(object);
            }
            Some(("-", object)) => {
                let object: Object = object.parse()?;
                self.objects.retain(|one| *one != object);
            }
            Some((ABOUT, owner)) => self.owner = Some(owner.parse()?),
            None if line == HEIR => self.is_heir = true,
            None if line == ENDED => self.has_ended = true,
            _ => return Err(NotAnObject),
        }
        Ok(())
    }

    /// Appends complete lines, or nothing.
    fn write(&mut self, text: &str) -> Result<(), IpsecError> {
        let failed = io_error("written", &self.path);
        let before = self.file.metadata().map_err(&failed)?.len();
        // A larger file could not be read back.
        if before + text.len() as u64 > MOST_BYTES {
            let path = self.path.clone();
            return Err(IpsecError::TooLarge { path });
        }
        // A read or a rewrite may have moved the file position.
        let end = self.file.seek(SeekFrom::Start(before));
        let written = end.and_then(|_| self.file.write_all(text.as_bytes()));
        written.map_err(|error| {
            // On a full disk, part of the text may have been written.
            let _ = self.file.set_len(before);
            failed(error)
        })?;
        self.lines += text.lines().count();
        Ok(())
    }

    fn sync(&self) -> Result<(), IpsecError> {
        self.file
            .sync_data()
            .map_err(io_error("synced", &self.path))
    }
}

/// The header: it identifies this boot and this thread's network namespace.
fn header() -> Result<String, IpsecError> {
    const BOOT: &str = "/proc/sys/kernel/random/boot_id";
    const NAMESPACE: &str = "/proc/thread-self/ns/net";
    let system = |path| move |source| IpsecError::System { path, source };
    let boot = fs::read_to_string(BOOT).map_err(system(BOOT))?;
    let namespace = fs::metadata(NAMESPACE).map_err(system(NAMESPACE))?;
    Ok(format!(
        "{FORMAT}{} namespace {}:{}",
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

/// Creates and locks the file of a record.
fn make(path: &Path, options: &mut OpenOptions) -> Result<File, IpsecError> {
    let file = options.read(true).mode(0o600).open(path);
    let file = file.map_err(io_error("created", path))?;
    let locked = file.try_lock().map_err(io::Error::from);
    locked.map_err(io_error("locked", path))?;
    Ok(file)
}

fn sync_directory(directory: &Path) -> Result<(), IpsecError> {
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(io_error("synced", directory))
}

/// Returns the file; `None` if it does not exist.
fn unless_gone(opened: io::Result<File>, path: &Path) -> Result<Option<File>, IpsecError> {
    match opened {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("opened", path)(error)),
    }
}

/// Returns whether this call acquired the lock.
fn is_locked(tried: Result<(), TryLockError>, path: &Path) -> Result<bool, IpsecError> {
    match tried {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(io_error("locked", path)(error)),
    }
}

#[cfg(test)]
mod tests;
