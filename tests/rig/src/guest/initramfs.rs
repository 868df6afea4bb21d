//! An initramfs: the kernel's first file system, as an archive
//! (Documentation/driver-api/early-userspace/buffer-format.rst, "newc").

/// An archive under construction. Add a folder before its contents.
#[derive(Debug, Default)]
pub struct Initramfs {
    archive: Vec<u8>,
    entries: u32,
}

impl Initramfs {
    /// Adds a folder; paths have no leading slash.
    pub fn folder(&mut self, path: &str) {
        self.entry(path, 0o040_755, (0, 0), &[]);
    }

    /// Adds a file.
    ///
    /// # Panics
    /// The file is larger than 4 GiB.
    pub fn file(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entry(path, 0o100_000 | mode, (0, 0), content);
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.entry(path, 0o120_777, (0, 0), target.as_bytes());
    }

    /// Adds a character device.
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, 0o020_600, (major, minor), &[]);
    }

    /// Returns the archive.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.archive
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let length = |bytes: usize| u32::try_from(bytes).expect("at most 4 GiB");
        let header = [
            self.entries, // the inode
            mode,
            0, // owner
            0, // group
            1, // links
            0, // time
            length(content.len()),
            0, // the device that the file is on
            0,
            device.0,
            device.1,
            length(path.len() + 1),
            0, // no checksum in this format
        ];
        self.archive.extend_from_slice(b"070701");
        for number in header {
            self.archive
                .extend_from_slice(format!("{number:08x}").as_bytes());
        }
        self.archive.extend_from_slice(path.as_bytes());
        self.archive.push(0);
        self.pad();
        self.archive.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        let padded = self.archive.len().next_multiple_of(4);
        self.archive.resize(padded, 0);
    }
}
