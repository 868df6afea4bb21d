//! A small virtual machine on KVM that really runs and really migrates.
//!
//! The guest (`guest/workload.S`) reads and checks every page before it writes to it, and keeps live
//! values in its vector registers: whatever a migration loses, the guest itself finds, and stops with
//! a code that says what. The VMM paces it, hears a beat from every vCPU each millisecond, pauses
//! it, logs what it writes, and saves and loads all of its state.
//!
//! On a host without /dev/kvm the machine's guest can be threads of the process that do the same
//! ([`GuestKind::Process`]); its writes are logged by write-protection.
//!
//! - [`Config`] says what the machine is like; [`VmDescription`] carries that to the destination, and
//!   [`check_description`] refuses there what this host cannot run.
//! - [`HostOptions`] is what each host decides for itself.
//! - [`Vm`] is the machine: created, filled, started, paused, throttled, watched.
//! - [`Vm::start_dirty_log`] and its siblings follow the writes; [`Vm::save`] and [`Vm::load`] move
//!   the rest.
//!
//! Inside: `layout` (what lies where in guest memory), `boot` (page tables, registers), `fill`
//! (first content), `pace` (when a vCPU may visit how many pages), `heart` (beats, gaps, downtime),
//! `control` (who runs and who is parked), `vcpu` (the thread), `process` (the thread of a process
//! guest), `common` (what the two share), `dirty`, `state`, `cpuid`, `wire`,
//! `cgroup` (how much memory the process may use), and `kvm`, the only module with `unsafe`.
#![deny(unsafe_code)]
#![cfg(target_arch = "x86_64")]

mod boot;
mod cgroup;
mod common;
mod config;
mod control;
mod cpuid;
mod describe;
mod dirty;
mod fill;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod heart;
#[allow(unsafe_code)]
mod kvm;
mod layout;
mod migrate;
mod pace;
mod process;
mod state;
mod vcpu;
mod vm;
mod wire;

pub use config::{Config, ConfigError, Fill, GuestKind, HostOptions, WORKLOAD_START, Workload};
pub use control::{ControlError, Stop, StopCode, VmState};
pub use describe::{DescribeError, VmDescription, check_description};
pub use dirty::DirtyError;
pub use dunlin_linux::mapping::{Backing, TrackedMemory};
pub use layout::{DEVICE_BYTES, DEVICE_START};
pub use migrate::{MachineBuilder, Movable};
pub use state::{LoadError, SaveError, Section};
pub use vm::{AccessError, CreateError, Stats, Vm};
pub use wire::{DecodeError, DecodeReason};
