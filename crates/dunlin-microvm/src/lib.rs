//! A small virtual machine on KVM that can be run and migrated.
//!
//! The guest (`guest/workload.S`) reads and checks every page before it writes to it, and keeps
//! known values in its vector registers. If a migration loses a write to these pages or a value of
//! these registers, the guest itself detects the loss and stops with a code for the kind of error.
//! The VMM paces the guest, pauses it, logs its writes, and saves and loads all of its state. Every
//! vCPU sends a *beat* to the VMM about every millisecond.
//!
//! On a host without /dev/kvm, threads of the process can act as the guest
//! ([`GuestKind::Process`]). Write-protection logs their writes.
//!
//! - [`Config`] is the configuration of a machine. [`VmDescription`] carries it to the destination,
//!   where [`check_description`] checks whether the host can run the machine.
//! - [`HostOptions`] are options that each host sets for itself.
//! - [`Vm`] is the machine: create, fill, start, pause, throttle, observe.
//! - The logs of [`Vm::dirty_logs`] record writes; [`Vm::save`] and [`Vm::load`] transfer all state
//!   except the memory.
//!
//! Modules: `layout` (guest memory map), `boot` (page tables, registers), `fill` (initial content),
//! `pace` (rate of page visits), `heart` (beats, gaps, downtime), `control` (running and parked
//! vCPUs), `vcpu` (a vCPU's thread), `process` (a process guest), `common` (shared by both kinds of
//! guest), `dirty` (KVM's dirty log), `digests` (of memory by page), `state` (saving and loading),
//! `migrate` (the engine's traits), `cpuid`, `wire` (encoding), `cgroup` (memory limits of the
//! process), `support` (what KVM offers here), and `kvm`, the only module with `unsafe`. With the
//! feature `measuring`, `entries` measures entries into a guest.
#![deny(unsafe_code)]
#![cfg(target_arch = "x86_64")]

mod boot;
mod cgroup;
mod common;
mod config;
mod control;
mod cpuid;
mod describe;
mod digests;
mod dirty;
#[cfg(feature = "measuring")]
pub mod entries;
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
mod support;
mod vcpu;
mod vm;
mod wire;

pub use config::{Config, ConfigError, Fill, GuestKind, HostOptions, WORKLOAD_START, Workload};
pub use control::{ControlError, Stop, StopCode, VmState};
pub use describe::{DescribeError, VmDescription, check_description, query_host};
pub use dunlin_linux::mapping::{Backing, TrackedMemory};
pub use layout::DEVICE_START;
pub use migrate::{MachineBuilder, Movable};
pub use state::{LoadError, SaveError, Section};
pub use support::{KvmSupport, kvm_support};
pub use vm::{CreateError, Stats, Vm};
pub use wire::{DecodeError, DecodeReason};
