//! The features of a network device, as `ethtool --show-features` prints them (ioctl
//! `SIOCETHTOOL`).

use std::ffi::CStr;
use std::io;
use std::os::fd::AsFd;

use rustix::ioctl::{Opcode, Updater, ioctl};

/// The ioctl, its commands, and the string set of the features (include/uapi/linux/ethtool.h).
const SIOCETHTOOL: Opcode = 0x8946;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETH_SS_FEATURES: u32 = 4;
/// Length of a feature's name, in 32-bit words.
const NAME_WORDS: usize = 8;
/// Number of words of `struct ethtool_get_features_block`: available, requested, active and never
/// changed. Each word has one bit for each of 32 features.
const BLOCK_WORDS: usize = 4;
/// Upper bound of the number of features; no kernel has that many.
const FEATURES_LIMIT: u32 = 1024;

/// A feature of a network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// The name in ethtool(8).
    pub name: String,
    /// Whether the feature is active.
    pub is_on: bool,
    /// Whether the device lets an administrator turn the feature on and off.
    pub can_change: bool,
}

/// All features of a device. `socket` is any socket in the device's network namespace.
///
/// # Errors
/// `InvalidInput` if the device's name is too long, `InvalidData` if the kernel has more than 1024
/// features; otherwise an error from ioctl(2), such as `ENODEV`.
pub fn features(socket: impl AsFd, device: &str) -> io::Result<Vec<Feature>> {
    // Query the number of features: `sset_mask` takes two words, and the result follows.
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
        let block = &states[2 + BLOCK_WORDS * (number / 32)..];
        let has = |word: u32| word >> (number % 32) & 1 == 1;
        Some(Feature {
            name: name.to_string_lossy().into_owned(),
            is_on: has(block[2]),
            can_change: has(block[0]) && !has(block[3]),
        })
    };
    let names = names[3..].chunks_exact(NAME_WORDS).enumerate();
    Ok(names.filter_map(of).collect())
}

/// Executes the command in `words`. The kernel writes the result to `words`.
fn ethtool(socket: &impl AsFd, device: &str, words: &mut [u32]) -> io::Result<()> {
    // SAFETY: `ifreq` consists of integers and pointers, all of which may be zero.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = words.as_mut_ptr().cast();
    // SAFETY: `request` and `words` live through the call and are borrowed exclusively. Each
    // command of `features` has room for its result (net/ethtool/ioctl.c): ETHTOOL_GSSET_INFO
    // writes one word for the one set in the mask. ETHTOOL_GSTRINGS writes as many names as the
    // kernel has features, if that is at most the requested count (`__ethtool_get_strings`); the
    // count came from the same kernel, where it is constant. ETHTOOL_GFEATURES writes at most as
    // many blocks as the second word states (`ethtool_get_features`).
    Ok(unsafe { ioctl(socket, Updater::<SIOCETHTOOL, _>::new(&mut request)) }?)
}
