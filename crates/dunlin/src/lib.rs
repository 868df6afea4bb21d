#![doc = include_str!("../README.md")]
//!
//! # What a VMM implements
//!
//! | trait | side | what it does |
//! | --- | --- | --- |
//! | [`SourceVm`] | source | describes, pauses, saves, resumes and finally destroys the VM |
//! | [`DirtyLog`] | source | reports which pages were written since the last call |
//! | [`GuestMemory`] | both | regions of guest memory, read and written in place |
//! | [`Builder`] | destination | builds the VM that the source describes, or refuses; closures are builders |
//! | [`DestinationVm`] | destination | loads the state, and starts the VM or discards it |
//!
//! [`MappedMemory`] implements [`GuestMemory`] over vm-memory. There are two ready dirty logs:
//! [`OwnWrites`] for what the VMM writes itself, and [`WriteProtectLog`] for the writes of every
//! thread. A VMM on KVM may implement a third over KVM's bitmap or ring. Every writer needs a log:
//! vCPUs, emulated devices, vhost back ends, direct I/O.
//!
//! Methods with a default body serve VMMs with disks, a throttle or a toolstack:
//! [`SourceVm::throttle`], [`SourceVm::deactivate`] and [`SourceVm::reactivate`],
//! [`SourceVm::hold`], [`DestinationVm::acquire`], [`DestinationVm::announce`],
//! [`DestinationVm::discard`]. If the VM has disk locks or devices that only one host may hold,
//! implement `deactivate`, `reactivate`, `acquire` and `discard` together. [`engine::vmm`] shows in
//! which order the engine calls them. [`testing::check_vmm`] tests an implementation.
//!
//! # Who may connect
//!
//! [`Identity`] loads a host's certificate, key and authority. Each side names the peers that it
//! accepts, by name or by [`Pin`]. [`Peers::AnyFromAuthority`] accepts every peer with a
//! certificate from the host's authority. An empty list of peers accepts none.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use dunlin::lane::{Crypto, Identity, LoadOptions};
//!
//! let (identity, warnings) = Identity::load(Path::new("/etc/my-vmm/pki"), LoadOptions::default())?;
//! let peers = ["host-b.example".parse()?].into_iter().collect();
//! let source_tls = identity.client(&Crypto::auto(), peers)?; // for `Migration`
//! let peers = ["host-a.example".parse()?].into_iter().collect();
//! let destination_tls = identity.server(&Crypto::auto(), peers)?; // for `Incoming`
//! # drop((warnings, source_tls, destination_tls));
//! # Ok::<(), dunlin::engine::vmm::VmmError>(())
//! ```
//!
//! The directory has the files `ca-cert.pem` (the authority), `cert.pem` and `key.pem`. A key file
//! that every user can read is refused; [`Identity::load`] has the details. If all peers are
//! pinned, no authority is needed, as `examples/page.rs` shows.
//!
//! # Migrate and receive
//!
//! [`Migration::run`] and [`Incoming::run`] block the calling thread until the outcome is certain,
//! or, at a source, until [`doubt_limit`] after an unanswered *commit*. Everything but the VM, the
//! address and the TLS settings has a default:
//!
//! - **Options** come from a builder that checks them: [`engine::source::Options`],
//!   [`engine::destination::Options`]. Give both sides a [`Journal`]; without one, a
//!   process that dies after *commit* leaves it to an operator to find the VM.
//! - **Events** go to an [`Observer`], which may be a closure.
//! - **Stopping**: [`Cancel`] stops a run from another thread. After *commit* it is too late.
//!   `Incoming` waits for a source without a limit; only `Cancel` ends this wait.
//!   [`Tune`] changes the rate cap of a running migration.
//! - **Threads and connections** come from a [`Host`], by default [`StandardHost`].
//!
//! # When a connection is lost
//!
//! If a data lane is lost, the destination stops it, its unconfirmed pages are sent again, and
//! another lane replaces it; the observer gets [`LaneLost`]. While the guest runs, a lost control
//! lane is replaced too. If that fails before *commit*, the VM continues at the source. After
//! *commit* the source asks the destination for the outcome, until [`doubt_limit`].
//!
//! # Where the VM is after an error
//!
//! A failed run returns a [`MigrateError`]: a stable [`code`](engine::MigrateError::code), [who has
//! to act](engine::MigrateError::at_fault), and where the VM is ([`VmIs`]). At the source:
//!
//! | [`MigrateError::vm`] | the engine has | the VMM |
//! | --- | --- | --- |
//! | [`AtSource`] | undone everything; the guest runs, or is paused if its owner had paused it | reports the error, and may retry |
//! | [`StuckAtSource`] | called `reactivate` or `resume`, which failed | repairs the cause and resumes the guest |
//! | [`InDoubt`] | sent *commit* and got no usable answer; the guest is paused | keeps it paused, and asks again with [`MigrateError::doubt`] |
//! | [`RanThenDied`] | received the answer that the VM was started at the destination and no longer runs | keeps it paused until an operator decides: [`Doubt::resolve`] |
//! | [`Gone`] | ended the migration, because the guest powered off or stopped | frees the VM |
//!
//! At the destination the VM does not run after an error, and the engine has called
//! [`DestinationVm::discard`] on what was built. What the engine calls when a
//! step fails:
//!
//! | what fails | calls at the source | at the destination |
//! | --- | --- | --- |
//! | `describe` | none | |
//! | `build`, or its regions differ | none: the guest was never paused | `discard`, if something was built |
//! | a dirty log | `stop` | `discard` |
//! | `pause` | `resume`, `stop` | `discard` |
//! | `deactivate`, `save`, `load`, `hold` | `reactivate`, `resume`, `stop` | `discard` |
//! | `acquire` | `reactivate`, `resume`, `stop` | `discard` |
//! | the destination's `resume` | `stop`; the guest stays paused: `RanThenDied` | `discard` |
//! | `reactivate`, or the source's `resume` | `stop`: `StuckAtSource` | `discard` |
//!
//! # Modules
//!
//! - [`engine`]: the migration, its events, errors and journal, and the traits of a VMM.
//! - [`lane`]: identities, the peers that a host accepts, and TLS settings.
//! - [`testing`]: conformance tests for a VMM's implementation of the traits.
//!
//! The feature `unstable-internals` makes items public that other crates of this workspace use,
//! without any promise: each of them may change or disappear in any release.
//!
//! `docs/integrating.md` in the repository is a guide to a first migration. `examples/two_logs.rs`
//! has two regions, two dirty logs and a throttle; `examples/own_sockets.rs` is a VMM that may open
//! no socket; `examples/page.rs` has a dirty bitmap of its own, refuses VMs, pins its peers and
//! keeps journals.
//!
//! [`SourceVm`]: engine::vmm::SourceVm
//! [`SourceVm::throttle`]: engine::vmm::SourceVm::throttle
//! [`SourceVm::deactivate`]: engine::vmm::SourceVm::deactivate
//! [`SourceVm::reactivate`]: engine::vmm::SourceVm::reactivate
//! [`SourceVm::hold`]: engine::vmm::SourceVm::hold
//! [`DirtyLog`]: engine::vmm::DirtyLog
//! [`GuestMemory`]: engine::vmm::GuestMemory
//! [`Builder`]: engine::vmm::Builder
//! [`DestinationVm`]: engine::vmm::DestinationVm
//! [`DestinationVm::acquire`]: engine::vmm::DestinationVm::acquire
//! [`DestinationVm::announce`]: engine::vmm::DestinationVm::announce
//! [`DestinationVm::discard`]: engine::vmm::DestinationVm::discard
//! [`MappedMemory`]: engine::memory::MappedMemory
//! [`OwnWrites`]: engine::memory::OwnWrites
//! [`WriteProtectLog`]: engine::dirty::WriteProtectLog
//! [`Identity`]: lane::Identity
//! [`Identity::load`]: lane::Identity::load
//! [`Pin`]: lane::Pin
//! [`Peers`]: lane::Peers
//! [`Peers::OneOf`]: lane::Peers::OneOf
//! [`Peers::AnyFromAuthority`]: lane::Peers::AnyFromAuthority
//! [`Journal`]: engine::journal::Journal
//! [`Observer`]: engine::Observer
//! [`Cancel`]: engine::Cancel
//! [`Tune`]: engine::Tune
//! [`Host`]: engine::Host
//! [`StandardHost`]: engine::StandardHost
//! [`MigrateError`]: engine::MigrateError
//! [`MigrateError::vm`]: engine::MigrateError::vm
//! [`MigrateError::doubt`]: engine::MigrateError::doubt
//! [`Doubt::resolve`]: engine::source::Doubt::resolve
//! [`LaneLost`]: engine::Event::LaneLost
//! [`doubt_limit`]: engine::source::OptionsBuilder::doubt_limit
//! [`VmIs`]: engine::VmIs
//! [`AtSource`]: engine::VmIs::AtSource
//! [`StuckAtSource`]: engine::VmIs::StuckAtSource
//! [`InDoubt`]: engine::VmIs::InDoubt
//! [`RanThenDied`]: engine::VmIs::RanThenDied
//! [`Gone`]: engine::VmIs::Gone
#![forbid(unsafe_code)]
// Without the feature, items that are public only for the other crates of the workspace would be
// reported as dead code. Those crates enable the feature. Builds with the feature still report
// other dead code.
#![cfg_attr(
    not(feature = "unstable-internals"),
    allow(dead_code, unreachable_pub, unused_imports)
)]

pub mod engine;
pub mod testing;

pub use engine::destination::Incoming;
pub use engine::source::Migration;

#[cfg(feature = "unstable-internals")]
pub use dunlin_lane as lane;

/// Identities, the peers that a host accepts, and TLS settings: the part of `dunlin-lane` that a
/// VMM needs.
///
/// A VMM that implements its own lanes, or that chooses cipher suites, kernel TLS or the layout of
/// an identity's directory, depends on `dunlin-lane` too. The types are the same.
#[cfg(not(feature = "unstable-internals"))]
pub mod lane {
    pub use dunlin_lane::{
        ClientTls, Crypto, Identity, IdentityError, LoadOptions, Peer, PeerName, Peers, Pin,
        Provider, SealedLanes, ServerTls, SettingsError,
    };
}

/// The version of vm-memory used in the traits of [`engine::vmm`].
pub use vm_memory;

/// Compiles the code blocks of the integration guide and its pages.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/integrating.md")]
#[doc = include_str!("../../../docs/integrating/test.md")]
#[doc = include_str!("../../../docs/integrating/migrate.md")]
#[doc = include_str!("../../../docs/integrating/doubt.md")]
#[doc = include_str!("../../../docs/integrating/jail.md")]
pub struct Integrating;
