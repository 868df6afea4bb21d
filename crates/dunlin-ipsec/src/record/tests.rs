#![allow(clippy::unwrap_used)]

use std::thread;
use std::time::{Duration, Instant};

use dunlin_test_base::Scratch;

use super::*;

/// A directory that is removed at the end of the test.
struct Directory(Scratch);

impl Directory {
    fn new() -> Self {
        Self(Scratch::new())
    }

    fn path(&self) -> PathBuf {
        self.0.join("records")
    }

    fn records(&self) -> RecordDirectory {
        RecordDirectory::open(&self.path()).unwrap()
    }
}

fn left(directory: &Directory) -> Vec<Record> {
    let left = directory.records().left().unwrap();
    left.into_iter().map(Result::unwrap).collect()
}

/// Waits for the record that the test has just dropped. A process that another test forks keeps the
/// record's lock until it executes its program.
fn left_one(directory: &Directory) -> Record {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(record) = left(directory).pop() {
            return record;
        }
        assert!(Instant::now() < until, "the record is still locked");
        thread::sleep(Duration::from_millis(1));
    }
}

fn objects() -> [Object; 3] {
    [
        "policy out 192.0.2.1 192.0.2.2 ports 0/0x0000 4444/0xffff priority 103 block",
        "sa in 192.0.2.2 192.0.2.1 spi 0x00001002 reqid 65536 epoch 1 index 0 fallback",
        "sa out 192.0.2.1 192.0.2.2 spi 0x00001001 reqid 65537 epoch 1 index 2 cpu 3",
    ]
    .map(|line| line.parse().unwrap())
}

#[test]
fn the_record_of_a_dead_process_lists_what_it_left() {
    let directory = Directory::new();
    let [policy, inbound, outbound] = objects();
    let mut record = directory.records().create(&[7; 16]).unwrap();
    record.add(&[policy, inbound]).unwrap();
    record.add(&[inbound, outbound]).unwrap();
    record.gone(&inbound).unwrap();
    record.gone(&inbound).unwrap();
    assert!(left(&directory).is_empty(), "took over a live record");
    drop(record);
    let taken = left(&directory);
    assert_eq!(taken.len(), 1);
    assert_eq!(taken[0].objects(), [policy, outbound]);
    assert!(left(&directory).is_empty(), "took over a record twice");
    taken.into_iter().for_each(|one| one.forget().unwrap());
    assert!(left(&directory).is_empty());
}

#[test]
fn a_truncated_line_was_never_installed() {
    let directory = Directory::new();
    let [policy, inbound, _] = objects();
    let mut record = directory.records().create(&[7; 16]).unwrap();
    record.add(&[policy]).unwrap();
    let path = record.path().to_owned();
    drop(record);
    let whole = fs::read(&path).unwrap();
    let line = format!("+ {inbound}");
    for cut in 0..line.len() {
        fs::write(&path, [&whole, &line.as_bytes()[..cut]].concat()).unwrap();
        let mut record = left_one(&directory);
        assert_eq!(record.objects(), [policy]);
        // The next write starts on a new line.
        record.add(&[inbound]).unwrap();
        drop(record);
        assert_eq!(left(&directory)[0].objects(), [policy, inbound]);
    }
}

/// Claim K8 of docs/security.
#[test]
fn a_malformed_line_is_reported_and_nothing_removed() {
    let directory = Directory::new();
    directory.records().create(&[8; 16]).unwrap();
    let record = directory.records().create(&[7; 16]).unwrap();
    let path = record.path().to_owned();
    drop(record);
    let mut text = fs::read_to_string(&path).unwrap();
    text.push_str("+ everything\n");
    fs::write(&path, text).unwrap();
    let (good, bad): (Vec<_>, Vec<_>) = directory
        .records()
        .left()
        .unwrap()
        .into_iter()
        .partition(Result::is_ok);
    assert_eq!((good.len(), bad.len()), (1, 1), "the other record is lost");
    let error = bad.into_iter().find_map(Result::err).unwrap();
    assert!(
        matches!(error, IpsecError::Unreadable { line: 2, .. }),
        "{error}"
    );
    assert!(path.exists());
}

#[test]
fn a_record_of_another_boot_is_removed_and_one_of_another_namespace_stays() {
    let directory = Directory::new();
    let record = directory.records().create(&[7; 16]).unwrap();
    let path = record.path().to_owned();
    drop(record);
    let text = fs::read_to_string(&path).unwrap();
    let (before, _) = text.split_once(" namespace ").unwrap();
    fs::write(&path, format!("{before} namespace 4:1\n")).unwrap();
    assert!(left(&directory).is_empty());
    assert!(path.exists(), "removed a record of another namespace");
    fs::write(&path, text.replace(" boot ", " boot 0")).unwrap();
    assert!(left(&directory).is_empty());
    assert!(!path.exists(), "kept a record of another boot");
}

#[test]
fn a_directory_writable_by_others_is_rejected() {
    use std::os::unix::fs::PermissionsExt;
    let directory = Directory::new();
    directory.records();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o770)).unwrap();
    let error = RecordDirectory::open(&directory.path()).unwrap_err();
    assert!(
        matches!(error, IpsecError::Exposed { mode: 0o770, .. }),
        "{error}"
    );
}

#[test]
fn a_record_tells_whether_traffic_was_protected() {
    let directory = Directory::new();
    let [blocks, inbound, outbound] = objects();
    let mut record = directory.records().create(&[7; 16]).unwrap();
    record.add(&[blocks, inbound, outbound]).unwrap();
    assert!(!record.has_protected());
    let line = blocks.to_string().replace("block", "protect 65537");
    record.add(&[line.parse().unwrap()]).unwrap();
    assert!(record.has_protected());
}

#[test]
fn the_heir_and_ended_flags_survive_the_death_of_the_process() {
    let directory = Directory::new();
    let [blocks, ..] = objects();
    let mut record = directory.records().create(&[7; 16]).unwrap();
    record.add(&[blocks]).unwrap();
    assert!(!record.has_protected() && !record.has_ended);
    record.inherit().unwrap();
    drop(record);
    let mut record = left_one(&directory);
    assert!(record.has_protected() && !record.has_ended);
    record.end().unwrap();
    drop(record);
    let record = left_one(&directory);
    assert!(record.has_protected() && record.has_ended);
    assert_eq!(record.objects(), [blocks]);
}

fn association(spi: u32) -> Object {
    let line =
        format!("sa in 192.0.2.2 192.0.2.1 spi {spi:#010x} reqid 65536 epoch 1 index 0 fallback");
    line.parse().unwrap()
}

#[test]
fn a_record_does_not_grow_with_removed_objects() {
    let directory = Directory::new();
    let [policy, ..] = objects();
    let mut record = directory.records().create(&[7; 16]).unwrap();
    let path = record.path().to_owned();
    record.add(&[policy]).unwrap();
    record.inherit().unwrap();
    let line = association(0x1000).to_string().len();
    for spi in 0x1000..0x1000 + 1000 {
        record.add(&[association(spi)]).unwrap();
        if spi > 0x1000 {
            record.gone(&association(spi - 1)).unwrap();
        }
        assert!(
            left(&directory).is_empty(),
            "the rewritten record is not locked"
        );
        let bytes = fs::metadata(&path).unwrap().len();
        assert!(bytes < 100 * (line as u64 + 3), "{bytes} bytes");
    }
    drop(record);
    let record = left_one(&directory);
    assert_eq!(record.objects(), [policy, association(0x1000 + 999)]);
    assert!(record.has_protected(), "the rewrite lost the heir flag");
    let names = fs::read_dir(directory.path()).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().path()).collect();
    assert!(
        !names
            .iter()
            .any(|name| name.extension() == Some("new".as_ref())),
        "{names:?}"
    );
}

/// A rewrite is incomplete if the process died, or the disk was full, before the new file replaced
/// the old one.
#[test]
fn an_incomplete_rewrite_is_ignored() {
    let directory = Directory::new();
    let [policy, ..] = objects();
    let mut record = directory.records().create(&[7; 16]).unwrap();
    record.add(&[policy]).unwrap();
    let half = record.path().with_extension("new");
    fs::write(&half, "dunlin ipsec 1 boot").unwrap();
    drop(record);
    let mut record = left_one(&directory);
    assert_eq!(record.objects(), [policy]);
    for spi in 0x1000..0x1100 {
        record.add(&[association(spi)]).unwrap();
        record.gone(&association(spi)).unwrap();
    }
    assert!(!half.exists());
}

/// Claim K6 of docs/security.
#[test]
fn a_damaged_record_is_reported_and_kept() {
    let directory = Directory::new();
    let [policy, inbound, _] = objects();
    let mut record = directory.records().create(&[7; 16]).unwrap();
    record.add(&[policy, inbound]).unwrap();
    let path = record.path().to_owned();
    drop(record);
    let whole = fs::read(&path).unwrap();
    let lines: Vec<usize> = (0..whole.len()).filter(|at| whole[*at] == b'\n').collect();
    let first = |from: usize, to: usize| {
        let mut torn = whole.clone();
        torn[from..to].fill(0);
        fs::write(&path, torn).unwrap();
        let error = directory.records().left().unwrap().remove(0).unwrap_err();
        assert!(path.exists(), "{error}");
        match error {
            IpsecError::Unreadable { line, .. } => line,
            other => panic!("{other}"),
        }
    };
    // Overwrite bytes with zeros in the header, within a line, and across the end of a line. Then
    // replace a `+` by an unknown character.
    assert_eq!(first(0, 8), 1);
    assert_eq!(first(lines[0] + 1, lines[0] + 3), 2);
    assert_eq!(first(lines[1] - 2, lines[1] + 4), 2);
    fs::write(
        &path,
        String::from_utf8_lossy(&whole).replace("+ sa", "! sa"),
    )
    .unwrap();
    let error = directory.records().left().unwrap().remove(0).unwrap_err();
    assert!(
        matches!(error, IpsecError::Unreadable { line: 3, .. }),
        "{error}"
    );
    // A file without a line break, longer than any header.
    fs::write(&path, [b'x'; 300]).unwrap();
    let error = directory.records().left().unwrap().remove(0).unwrap_err();
    assert!(
        matches!(error, IpsecError::Unreadable { line: 1, .. }),
        "{error}"
    );
    assert!(path.exists());
}

#[test]
fn an_oversized_record_is_rejected_and_never_written() {
    let directory = Directory::new();
    let [policy, inbound, _] = objects();
    let mut record = directory.records().create(&[7; 16]).unwrap();
    record.add(&[policy]).unwrap();
    let path = record.path().to_owned();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(MOST_BYTES - 10).unwrap();
    let error = record.add(&[inbound]).unwrap_err();
    assert!(matches!(error, IpsecError::TooLarge { .. }), "{error}");
    drop(record);
    file.set_len(MOST_BYTES + 1).unwrap();
    let error = directory.records().left().unwrap().remove(0).unwrap_err();
    assert!(matches!(error, IpsecError::TooLarge { .. }), "{error}");
    assert!(path.exists());
}

#[test]
fn a_lock_that_is_held_too_long_is_an_error() {
    let directory = Directory::new();
    let timeout = Duration::from_millis(60);
    let held = directory.records().lock(timeout).unwrap();
    let began = Instant::now();
    let error = directory.records().lock(timeout).unwrap_err();
    assert!(matches!(error, IpsecError::Locked { .. }), "{error}");
    assert!(began.elapsed() >= timeout);
    drop(held);
    directory.records().lock(timeout).unwrap();
}

fn owner() -> Owner {
    let line = "pid 7 mode cpu ports 4444 control 192.0.2.1:40000 192.0.2.2:7302 peer host b";
    line.parse().unwrap()
}

/// Reads the only record in the directory: objects, owner, and whether a process has locked it.
fn seen(directory: &Directory) -> (Vec<Object>, Option<Owner>, bool) {
    let records = directory.records();
    let _lock = records.lock(Duration::from_secs(5)).unwrap();
    let (record, is_kept) = records.all().unwrap().remove(0).unwrap();
    (record.objects().to_vec(), record.owner().cloned(), is_kept)
}

#[test]
fn a_record_is_readable_while_its_process_lives_and_after_its_death() {
    let directory = Directory::new();
    let [policy, inbound, outbound] = objects();
    let mut record = directory.records().create(&[7; 16]).unwrap();
    record.set_owner(owner()).unwrap();
    record.add(&[policy, inbound]).unwrap();
    assert_eq!(
        seen(&directory),
        (vec![policy, inbound], Some(owner()), true),
        "the record was misread or taken over"
    );
    record.gone(&inbound).unwrap();
    // An incomplete line is ignored.
    let path = record.path().to_owned();
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(format!("+ {outbound}").as_bytes()).unwrap();
    assert_eq!(seen(&directory).0, [policy]);
    drop(record);
    assert_eq!(seen(&directory), (vec![policy], Some(owner()), false));
    let before = fs::read(&path).unwrap();
    assert_eq!(seen(&directory).0, [policy]);
    assert_eq!(
        fs::read(&path).unwrap(),
        before,
        "reading truncated the file"
    );
    assert_eq!(left(&directory)[0].owner(), Some(&owner()));
}

#[test]
fn a_rewritten_record_keeps_its_owner() {
    let directory = Directory::new();
    let [policy, ..] = objects();
    let mut record = directory.records().create(&[7; 16]).unwrap();
    record.set_owner(owner()).unwrap();
    for _ in 0..=2 * DEAD_LINES {
        record.add(&[policy]).unwrap();
        record.gone(&policy).unwrap();
    }
    record.add(&[policy]).unwrap();
    let text = fs::read_to_string(record.path()).unwrap();
    assert!(
        text.lines().count() < 2 * DEAD_LINES,
        "the record was not rewritten"
    );
    assert_eq!(seen(&directory), (vec![policy], Some(owner()), true));
}
