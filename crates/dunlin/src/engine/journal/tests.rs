#![allow(clippy::unwrap_used)]

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dunlin_lane::peers::{AuthorisedBy, PeerIdentity};
use dunlin_linux::socket::own_user;
use dunlin_proto::journal::JOURNAL_BYTES;
use dunlin_proto::limits::{MAX_ENDPOINT_BYTES, MAX_RECORDS_OF_A_PEER};
use dunlin_test_base::Scratch;
use dunlin_test_base::need::or_skip;

use super::files::file_name;
use super::*;

const PREPARED: State = State::Destination(DestinationRecord::Prepared);
const RUNNING: State = State::Destination(DestinationRecord::Running);
const ABORTED: State = State::Destination(DestinationRecord::Aborted);

/// A disk that fails the operations with the given numbers, counted from 0. When a sync fails, the
/// write before it has succeeded.
#[derive(Default)]
struct FailingDisk {
    writes: AtomicUsize,
    syncs: AtomicUsize,
    fail_writes: Vec<usize>,
    fail_syncs: Vec<usize>,
}

impl Disk for FailingDisk {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        if self
            .fail_writes
            .contains(&self.writes.fetch_add(1, Ordering::Relaxed))
        {
            // A full disk writes only a part of the data.
            file.write_all_at(&bytes[..bytes.len() / 2], offset)?;
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.write_all_at(bytes, offset)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        if self
            .fail_syncs
            .contains(&self.syncs.fetch_add(1, Ordering::Relaxed))
        {
            return Err(io::Error::other("the disk is failing"));
        }
        file.sync_data()
    }
}

fn record(state: State) -> Record {
    Record {
        state,
        session: [0xa5; 16],
        attempt: 1,
        epoch: 1,
        vm_uuid: [9; 16],
        vm_name: "web".into(),
        peer: "host-a.example".into(),
        owner: String::new(),
        started_ms: 5,
        written_ms: 0,
    }
}

/// A peer with this name, authorised by a certificate from an authority.
fn peer(name: &str) -> PeerIdentity {
    PeerIdentity::test(AuthorisedBy::Authority, 1, &[name])
}

fn state_of(journal: &Journal) -> State {
    let session = SessionJournal::take(journal, [0xa5; 16], Role::Destination).unwrap();
    session.record().state
}

#[test]
fn i2_a_record_survives_the_process_that_wrote_it() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    let journal = Journal::open(&directory).unwrap();
    let mut session = SessionJournal::create(&journal, record(PREPARED)).unwrap();
    for state in [PREPARED, RUNNING] {
        session.write(state).unwrap();
    }
    session.write_epoch(3).unwrap();
    drop(session);
    let session = SessionJournal::take(&journal, [0xa5; 16], Role::Destination).unwrap();
    assert_eq!(session.record().state, RUNNING);
    assert_eq!(session.record().epoch, 3);
    assert!(session.record().written_ms > 0);
    session.forget().unwrap();
    assert!(journal.list().unwrap().is_empty());
}

#[test]
fn i1_a_session_of_a_living_process_can_be_listed_but_not_taken() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    let journal = Journal::open(&directory).unwrap();
    let mut session = SessionJournal::create(&journal, record(PREPARED)).unwrap();
    session.write(PREPARED).unwrap();
    let listed = journal.list().unwrap();
    assert!(listed[0].lives);
    assert_eq!(listed[0].record.clone().unwrap().unwrap().state, PREPARED);
    let taken = SessionJournal::take(&journal, [0xa5; 16], Role::Destination);
    assert!(matches!(taken, Err(JournalError::Held { .. })));
    // A malicious peer starts a second session with the same identifier.
    let again = SessionJournal::create(&journal, record(PREPARED));
    assert!(matches!(again, Err(JournalError::Held { .. })));
    drop(session);
    assert!(!journal.list().unwrap()[0].lives);
    assert_eq!(state_of(&journal), PREPARED);
}

#[test]
fn i1_a_failed_write_keeps_the_previous_record() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    // Write 0 allocates the file, and write 1 records *prepared*. Both succeed.
    let disk = FailingDisk {
        fail_writes: vec![2, 3, 4, 5],
        ..FailingDisk::default()
    };
    let journal = Journal::open_on(&directory, Arc::new(disk)).unwrap();
    let mut session = SessionJournal::create(&journal, record(PREPARED)).unwrap();
    session.write(PREPARED).unwrap();
    for _ in 0..2 {
        let error = session.write(RUNNING).unwrap_err();
        assert!(error.to_string().contains("free space"), "{error}");
        assert_eq!(session.record().state, PREPARED);
    }
    assert!(session.write_epoch(7).is_err());
    drop(session);
    let mut session = SessionJournal::take(&journal, [0xa5; 16], Role::Destination).unwrap();
    assert_eq!(session.record().state, PREPARED);
    assert_eq!(session.record().epoch, 1);
    assert!(session.write_epoch(8).is_err());
    // The next record contains the epoch that could not be recorded.
    session.write(ABORTED).unwrap();
    drop(session);
    let session = SessionJournal::take(&journal, [0xa5; 16], Role::Destination).unwrap();
    assert_eq!(
        (session.record().state, session.record().epoch),
        (ABORTED, 8)
    );
}

/// A failed sync may nevertheless have written the record. The retry must not use the other slot:
/// that slot has the last record that was surely synced.
#[test]
fn i1_after_a_failed_sync_the_next_record_goes_to_the_same_slot() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    let disk = FailingDisk {
        fail_syncs: vec![2],
        fail_writes: vec![3],
        ..FailingDisk::default()
    };
    let journal = Journal::open_on(&directory, Arc::new(disk)).unwrap();
    let mut session = SessionJournal::create(&journal, record(PREPARED)).unwrap();
    session.write(PREPARED).unwrap();
    assert!(session.write(RUNNING).is_err());
    assert!(session.write(ABORTED).is_err());
    drop(session);
    assert_eq!(state_of(&journal), PREPARED);
}

#[test]
fn a_full_disk_is_found_when_the_session_starts_and_leaves_nothing() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    let disk = FailingDisk {
        fail_writes: vec![0],
        ..FailingDisk::default()
    };
    let journal = Journal::open_on(&directory, Arc::new(disk)).unwrap();
    let error = SessionJournal::create(&journal, record(PREPARED))
        .err()
        .unwrap();
    assert!(matches!(
        error,
        JournalError::Io {
            what: "allocated",
            ..
        }
    ));
    assert!(journal.list().unwrap().is_empty());
    SessionJournal::create(&journal, record(PREPARED)).unwrap();
}

#[test]
fn no_record_needs_more_space() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    let journal = Journal::open(&directory).unwrap();
    let mut session = SessionJournal::create(&journal, record(PREPARED)).unwrap();
    let path = directory.join(file_name([0xa5; 16], Role::Destination));
    let size = |path: &Path| {
        let metadata = path.metadata().unwrap();
        (metadata.len(), metadata.blocks(), metadata.mode() & 0o777)
    };
    let before = size(&path);
    assert_eq!((before.0, before.2), (JOURNAL_BYTES as u64, 0o600));
    for _ in 0..4 {
        session.write(PREPARED).unwrap();
    }
    assert_eq!(size(&path), before);
}

#[test]
fn i2_a_session_starts_again_only_after_its_last_attempt_has_ended() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    let journal = Journal::open(&directory).unwrap();
    let begin = |attempt| {
        SessionJournal::create(
            &journal,
            Record {
                attempt,
                ..record(PREPARED)
            },
        )
    };
    // A session without a record has never started, so the same attempt may begin again.
    drop(begin(1).unwrap());
    let mut session = begin(1).unwrap();
    for state in [PREPARED, RUNNING] {
        session.write(state).unwrap();
        drop(session);
        assert!(
            matches!(begin(2), Err(JournalError::Undecided { .. })),
            "{state}"
        );
        session = SessionJournal::take(&journal, [0xa5; 16], Role::Destination).unwrap();
    }
    session.write(ABORTED).unwrap();
    drop(session);
    assert!(matches!(begin(1), Err(JournalError::Undecided { .. })));
    let mut session = begin(2).unwrap();
    session.write(PREPARED).unwrap();
    drop(session);
    let session = SessionJournal::take(&journal, [0xa5; 16], Role::Destination).unwrap();
    assert_eq!(
        (session.record().state, session.record().attempt),
        (PREPARED, 2)
    );
}

#[test]
fn i7_foreign_files_in_the_directory_are_skipped_or_reported_as_unreadable() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    let journal = Journal::open(&directory).unwrap();
    let name = file_name([0xa5; 16], Role::Destination);
    for other in ["notes", "A5.source", &name.to_uppercase(), &name[1..]] {
        std::fs::write(directory.join(other), b"x").unwrap();
    }
    assert!(journal.list().unwrap().is_empty());
    // A file that is shorter than a journal: the process crashed before it allocated the file.
    std::fs::write(directory.join(&name), []).unwrap();
    assert_eq!(journal.list().unwrap()[0].record, Ok(None));
    let missing = SessionJournal::take(&journal, [0xa5; 16], Role::Destination);
    assert!(matches!(missing, Err(JournalError::Missing { .. })));
    // A file that is larger than a journal and contains no record.
    let path = directory.join(&name);
    std::fs::write(&path, vec![0x5a; 1 << 20]).unwrap();
    let unreadable = || {
        assert_eq!(journal.list().unwrap()[0].record, Err(Unreadable::BothTorn));
        let taken = SessionJournal::take(&journal, [0xa5; 16], Role::Destination);
        assert!(matches!(taken, Err(JournalError::Unreadable { .. })));
    };
    unreadable();
    // The journal does not follow a link to a file elsewhere.
    let elsewhere = scratch.join("elsewhere");
    std::fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    unreadable();
}

#[test]
fn a_directory_readable_by_others_is_refused() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    DirBuilder::new().mode(0o755).create(&directory).unwrap();
    let error = Journal::open(&directory).err().unwrap();
    assert!(matches!(error, JournalError::Exposed { mode: 0o755, .. }));
}

#[test]
fn a_directory_of_another_user_is_refused() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    DirBuilder::new().mode(0o700).create(&directory).unwrap();
    let other = own_user() + 1;
    let given = std::os::unix::fs::chown(&directory, Some(other), None);
    if or_skip("root, to give a directory to another user", given).is_none() {
        return;
    }
    let error = Journal::open(&directory).err().unwrap();
    assert!(matches!(error, JournalError::Exposed { owner, .. } if owner == other));
}

#[test]
fn i2_without_a_journal_a_session_is_remembered_while_the_process_lives() {
    let journal = Journal::none();
    let mut session = SessionJournal::create(&journal, record(PREPARED)).unwrap();
    session.write(RUNNING).unwrap();
    assert_eq!(session.record().state, RUNNING);
    let clone = journal.clone();
    let entries = clone.list().unwrap();
    assert!(entries.len() == 1 && entries[0].lives);
    let taken = SessionJournal::take(&clone, [0xa5; 16], Role::Destination);
    assert!(matches!(taken, Err(JournalError::Held { .. })));
    drop(session);
    let session = SessionJournal::take(&clone, [0xa5; 16], Role::Destination).unwrap();
    assert_eq!(session.record().state, RUNNING);
    session.forget().unwrap();
    let taken = SessionJournal::take(&journal, [0xa5; 16], Role::Destination);
    assert!(matches!(taken, Err(JournalError::Missing { .. })));
    // A session without a record leaves nothing behind, and another journal has none of these
    // sessions.
    drop(SessionJournal::create(&journal, record(PREPARED)).unwrap());
    assert!(journal.list().unwrap().is_empty());
    let mut session = SessionJournal::create(&journal, record(PREPARED)).unwrap();
    session.write(PREPARED).unwrap();
    assert!(Journal::none().list().unwrap().is_empty());
}

/// Leaves a record of the same VM in session `number`, which was started with `peer`.
fn leave(journal: &Journal, number: u8, state: State, peer: &PeerIdentity) {
    let made = Record {
        session: [number; 16],
        ..record(state)
    };
    let mut session = SessionJournal::create(journal, made).unwrap();
    session.write_peer(&peer.principal()).unwrap();
    session.write(state).unwrap();
}

/// The numbers of the remaining sessions.
fn left(journal: &Journal) -> Vec<u8> {
    let entries = journal.list().unwrap().into_iter();
    entries.map(|entry| entry.session[0]).collect()
}

#[test]
fn obsolete_records_are_removed_when_the_vm_moves_again() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    for journal in [Journal::open(&directory).unwrap(), Journal::none()] {
        let ours = peer("host-a.example");
        leave(&journal, 1, PREPARED, &ours);
        leave(&journal, 2, ABORTED, &ours);
        // Session 9: the VM ran here and moved on. A peer that offers the VM again already has the
        // outcome of this session.
        let moved_on = State::Destination(DestinationRecord::MovedOn);
        leave(&journal, 9, moved_on, &ours);
        // Session 3: the VM ran here, and possibly the source has not learnt that.
        leave(&journal, 3, RUNNING, &ours);
        // Session 4: another peer's record. Session 8: the record of a peer with the same name and
        // a certificate of another authority. In both records the text of `Record::peer` is that of
        // `ours`.
        leave(&journal, 4, ABORTED, &peer("host-c.example"));
        let twin = PeerIdentity::test(AuthorisedBy::Authority, 2, &["host-a.example"]);
        leave(&journal, 8, ABORTED, &twin);
        // Session 5: a record of the other role. Session 6: a record of a living process.
        leave(&journal, 5, State::Source(SourceRecord::Kept), &ours);
        let living = Record {
            session: [6; 16],
            ..record(ABORTED)
        };
        let mut other = SessionJournal::create(&journal, living).unwrap();
        other.write(ABORTED).unwrap();
        let another_vm = Record {
            session: [7; 16],
            vm_uuid: [0xee; 16],
            ..record(ABORTED)
        };
        SessionJournal::create(&journal, another_vm)
            .unwrap()
            .write(ABORTED)
            .unwrap();
        let mut session = SessionJournal::begin(&journal, record(PREPARED), Some(&ours)).unwrap();
        session.write(PREPARED).unwrap();
        assert_eq!(left(&journal), [3, 4, 5, 6, 7, 8, 0xa5]);
    }
}

#[test]
fn i7_a_peer_that_offers_vm_after_vm_leaves_a_bounded_number_of_records() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    for journal in [Journal::open(&directory).unwrap(), Journal::none()] {
        let before = journal.list().unwrap().len();
        let begin = |number: usize, name: &str, state| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&number.to_le_bytes());
            let mut record = record(state);
            (record.session, record.vm_uuid) = (id, id);
            record.started_ms = number as u64;
            let peer = peer(name);
            let mut session = SessionJournal::begin(&journal, record, Some(&peer)).unwrap();
            session.write_peer(&peer.principal()).unwrap();
            session.write(state).unwrap();
        };
        // The record of a VM that ran here stays, and so does another peer's record.
        begin(1_000_000, "host-a", RUNNING);
        begin(1_000_001, "host-c", ABORTED);
        for number in 0..MAX_RECORDS_OF_A_PEER + 10 {
            begin(
                number,
                "host-a",
                if number % 2 == 0 { ABORTED } else { PREPARED },
            );
        }
        let left = journal.list().unwrap();
        assert_eq!(left.len() - before, MAX_RECORDS_OF_A_PEER + 2);
        let oldest = left[0].record.as_ref().unwrap().as_ref().unwrap();
        assert_eq!(oldest.started_ms, 10);
    }
}

#[test]
fn i1_a_vm_with_an_undecided_session_starts_no_other() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    for journal in [Journal::open(&directory).unwrap(), Journal::none()] {
        let over = [
            SourceRecord::Migrating,
            SourceRecord::Kept,
            SourceRecord::Released,
            SourceRecord::GivenUp,
        ];
        for (number, state) in (1..).zip(over) {
            leave(&journal, number, State::Source(state), &peer("host-b"));
        }
        let next = |journal: &Journal| {
            SessionJournal::begin(
                journal,
                record(State::Source(SourceRecord::Migrating)),
                None,
            )
        };
        drop(next(&journal).unwrap());
        let after = left(&journal);
        assert!(after == [0xa5] || after.is_empty(), "{after:?}");
        for state in [
            SourceRecord::Committing,
            SourceRecord::RanThenDied,
            SourceRecord::RunHere,
        ] {
            leave(&journal, 9, State::Source(state), &peer("host-b"));
            let error = next(&journal).err().unwrap();
            assert!(matches!(error, JournalError::Unresolved { .. }), "{error}");
            let session = SessionJournal::take(&journal, [9; 16], Role::Source).unwrap();
            session.forget().unwrap();
        }
    }
}

/// Records the disk operations in order. When a directory is synced, it also records
/// whether the session's file was in it.
#[derive(Clone, Default)]
struct WatchedDisk(Arc<std::sync::Mutex<Vec<&'static str>>>, PathBuf);

impl Disk for WatchedDisk {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.lock().unwrap().push("write");
        file.write_all_at(bytes, offset)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        self.0.lock().unwrap().push("sync");
        file.sync_data()
    }

    fn sync_directory(&self, directory: &File) -> io::Result<()> {
        let is_there = self.1.read_dir()?.next().is_some();
        let done = if is_there {
            "entry synced"
        } else {
            "removal synced"
        };
        self.0.lock().unwrap().push(done);
        directory.sync_all()
    }
}

#[test]
fn i1_creating_and_forgetting_a_record_survive_a_power_loss() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    let disk = WatchedDisk(Arc::default(), directory.clone());
    let journal = Journal::open_on(&directory, Arc::new(disk.clone())).unwrap();
    let take = || std::mem::take(&mut *disk.0.lock().unwrap());
    let mut session = SessionJournal::create(&journal, record(PREPARED)).unwrap();
    assert_eq!(take(), ["write", "sync", "entry synced"]);
    let ours = peer("host-a.example").principal();
    session.write_peer(&ours).unwrap();
    session.write(RUNNING).unwrap();
    assert_eq!(take(), ["write", "sync", "write", "sync"]);
    session.forget().unwrap();
    assert_eq!(take(), ["removal synced"]);
}

#[test]
fn i1_the_peer_of_a_session_survives_its_process() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    let (ours, other) = (peer("host-a.example"), peer("host-c.example"));
    for journal in [Journal::open(&directory).unwrap(), Journal::none()] {
        leave(&journal, 1, RUNNING, &ours);
        let session = SessionJournal::take(&journal, [1; 16], Role::Destination).unwrap();
        assert_eq!(*session.peer(), RecordedPeer::Known(ours.principal()));
        assert!(session.is_with(&ours) && !session.is_with(&other));
        // The peer is unknown until it is recorded.
        let made = Record {
            session: [2; 16],
            ..record(RUNNING)
        };
        let mut session = SessionJournal::create(&journal, made).unwrap();
        session.write(RUNNING).unwrap();
        assert!(!session.is_with(&ours));
        drop(session);
        let session = SessionJournal::take(&journal, [2; 16], Role::Destination).unwrap();
        assert_eq!(*session.peer(), RecordedPeer::Unknown);
        assert!(!session.is_with(&ours));
    }
}

/// Tests a file as commit ca8670a wrote it: two slots without a peer block.
#[test]
fn i1_a_record_without_a_peer_block_matches_names_vouched_for_by_an_authority() {
    let scratch = Scratch::new();
    let directory = scratch.join("journal");
    let journal = Journal::open(&directory).unwrap();
    let long = "n".repeat(MAX_ENDPOINT_BYTES);
    for (number, text, state) in [
        (1, "DNS host-a.example", RUNNING),
        (2, "", RUNNING),
        (3, &long[..], RUNNING),
        (4, "192.0.2.7:4444", State::Source(SourceRecord::Committing)),
    ] {
        let made = Record {
            session: [number; 16],
            peer: text.into(),
            ..record(state)
        };
        let mut session = SessionJournal::create(&journal, made).unwrap();
        session.write(state).unwrap();
        let path = directory.join(file_name([number; 16], Role::of(state)));
        File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(8192)
            .unwrap();
    }
    let role = |number| match number {
        4 => Role::Source,
        _ => Role::Destination,
    };
    let is_with = |number: u8, peer: &PeerIdentity| {
        let session = SessionJournal::take(&journal, [number; 16], role(number)).unwrap();
        assert_eq!(*session.peer(), RecordedPeer::BeforeBlocks);
        session.is_with(peer)
    };
    let ours = peer("host-a.example");
    assert!(is_with(1, &ours));
    assert!(!is_with(1, &peer("host-c.example")));
    let mut pinned = ours.clone();
    pinned.authority = None;
    assert!(!is_with(1, &pinned), "matches without an authority");
    let nameless = PeerIdentity::test(AuthorisedBy::Authority, 1, &[]);
    assert!(
        !is_with(2, &nameless),
        "matches although neither has a name"
    );
    let cut = peer(&long[4..]);
    assert!(!is_with(3, &cut), "matches a text that may be truncated");
    // An old record of a source does not name its peer, so every trusted peer matches.
    assert!(is_with(4, &ours));
    // A file that ends inside the peer block does not come from an old release, so no peer matches.
    for length in [8193, 9215] {
        let path = directory.join(file_name([4; 16], Role::Source));
        let file = File::options().write(true).open(path).unwrap();
        file.set_len(length).unwrap();
        let session = SessionJournal::take(&journal, [4; 16], Role::Source).unwrap();
        assert_eq!(*session.peer(), RecordedPeer::Unknown, "{length}");
        assert!(!session.is_with(&ours));
    }
    // A file without a peer block is still readable after a listing and a write, and neither adds
    // the block.
    assert_eq!(journal.list().unwrap().len(), 4);
    let mut session = SessionJournal::take(&journal, [1; 16], Role::Destination).unwrap();
    session.write(ABORTED).unwrap();
    drop(session);
    let session = SessionJournal::take(&journal, [1; 16], Role::Destination).unwrap();
    assert_eq!(session.record().state, ABORTED);
    assert!(session.is_with(&ours));
}
