//! A small virtual machine on KVM that really runs and really migrates.
#![forbid(unsafe_code)]
