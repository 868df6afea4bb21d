//! The kernel interfaces that Dunlin touches, one file each. The only crate with `unsafe` in it.
