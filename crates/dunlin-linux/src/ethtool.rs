//! The features of a network device, as `ethtool --show-features` has them (ioctl `SIOCETHTOOL`).

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The ioctl, what it is asked, and the set of strings (include/uapi/linux/ethtool.h).
const SIOCETHTOOL: libc::Ioctl = 0x8946;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETH_SS_FEATURES: u32 = 4;
/// A feature's name, in words.
const NAME_WORDS: usize = 8;
/// Of each 32 features: which there are, are wanted, are in force, never change; in words.
const BLOCK_WORDS: usize = 4;
/// More than any kernel has.
const FEATURES_LIMIT: u32 = 1024;

/// All features of a device by their names, and whether each is in force. `socket` is any socket of
/// the device's network namespace.
///
/// # Errors
/// What ioctl(2) says, such as `ENODEV`.
pub fn features(socket: impl AsFd, device: &str) -> io::Result<Vec<(String, bool)>> {
    // How many: a bit for the set, in two words, then the answer.
    let mut set = [ETHTOOL_GSSET_INFO, 0, 1 << ETH_SS_FEATURES, 0, 0];
    ethtool(&socket, device, &mut set)?;
    let count = set[4];
    if count > FEATURES_LIMIT {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut names = vec![0; 3 + NAME_WORDS * count as usize];
    names[..3].copy_from_slice(&[ETHTOOL_GSTRINGS, ETH_SS_FEATURES, count]);
    ethtool(&socket, device, &mut names)?;
    let blocks = count.div_ceil(32);
    let mut states = vec![0; 2 + BLOCK_WORDS * blocks as usize];
    states[..2].copy_from_slice(&[ETHTOOL_GFEATURES, blocks]);
    ethtool(&socket, device, &mut states)?;
    let of = |(number, words): (usize, &[u32])| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let name = CStr::from_bytes_until_nul(&bytes).ok()?;
        let active = states[2 + BLOCK_WORDS * (number / 32) + 2];
        let is_on = active >> (number % 32) & 1 == 1;
        Some((name.to_string_lossy().into_owned(), is_on))
    };
    let names = names[3..].chunks_exact(NAME_WORDS).enumerate();
    Ok(names.filter_map(of).collect())
}

/// One question, whose answer takes the place of its words.
fn ethtool(socket: &impl AsFd, device: &str, words: &mut [u32]) -> io::Result<()> {
    // SAFETY: `ifreq` consists of integers and pointers, for all of which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = words.as_mut_ptr().cast();
    // SAFETY: `request` and `words` live through the call and are borrowed exclusively. Each question
    // above has room for the answer that it asks for: the kernel writes one word for the one set
    // that is marked, as many names as there are features where as many were asked for or more
    // (`__ethtool_get_strings`), and no more blocks than the second word allows
    // (`ethtool_get_features`, net/ethtool/ioctl.c). A kernel's number of features does not change.
    let status = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    match status {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
