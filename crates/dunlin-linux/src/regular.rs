//! Opens regular files in directories in which another user or process may have put files of other
//! types.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// Opens an existing regular file for reading, and for writing if `write`. Follows no symbolic link
/// as the last component of the path, and does not block on a FIFO.
///
/// # Errors
/// `InvalidInput`: the path names something other than a regular file. Otherwise an error from
/// open(2).
pub fn open(path: &Path, write: bool) -> io::Result<File> {
    let not_regular = || io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(flags.bits().cast_signed())
        .open(path);
    let file = opened.map_err(|error| match Errno::from_io_error(&error) {
        // The errors for a symbolic link, a socket, and a directory opened for writing.
        Some(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => not_regular(),
        _ => error,
    })?;
    if !file.metadata()?.is_file() {
        return Err(not_regular());
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use dunlin_test_base::Scratch;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_a_regular_file_opens_and_none_blocks() {
        let scratch = Scratch::new();
        let at = |name: &str| scratch.join(name);
        std::fs::write(at("file"), "x").unwrap();
        std::fs::create_dir(at("directory")).unwrap();
        symlink(at("file"), at("link")).unwrap();
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let _listener = UnixListener::bind(at("socket")).unwrap();
        for write in [false, true] {
            assert!(open(&at("file"), write).is_ok());
            for name in ["directory", "link", "fifo", "socket"] {
                let error = open(&at(name), write).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name}: {error}");
            }
            let error = open(&at("missing"), write).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound);
        }
    }
}
