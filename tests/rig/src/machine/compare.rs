//! Compares the memories of two guests through their hypervisors.

use std::fs::{self, File};

use serde_json::json;

use super::{Machine, MachineError, QmpError, at, read_full};

/// The size of the pieces in which memory is compared. It limits the size of the temporary files.
const PIECE_BYTES: u64 = 32 << 20;

pub(super) fn first_difference(
    one: &mut Machine,
    other: &mut Machine,
) -> Result<Option<u64>, MachineError> {
    for machine in [&mut *one, &mut *other] {
        if machine.runs()? {
            let refusal =
                "a guest runs, and memory can be compared only while both guests are paused";
            return Err(
                QmpError::Refused("first_difference".to_owned(), refusal.to_owned()).into(),
            );
        }
    }
    let mut start = 0;
    while start < one.memory_bytes {
        let bytes = PIECE_BYTES.min(one.memory_bytes - start);
        let pieces = [save(one, start, bytes)?, save(other, start, bytes)?];
        if let Some(place) = compare(pieces)? {
            return Ok(Some(start + place));
        }
        start += bytes;
    }
    Ok(None)
}

/// Saves a piece of memory to a file. The file has no name, so it exists only while it is open.
fn save(machine: &mut Machine, start: u64, bytes: u64) -> Result<File, MachineError> {
    let path = machine.scratch.join("memory");
    machine.qmp().execute(
        "pmemsave",
        json!({"val": start, "size": bytes, "filename": path}),
    )?;
    let file = File::open(&path).map_err(at(&path))?;
    fs::remove_file(&path).map_err(at(&path))?;
    Ok(file)
}

fn compare(mut files: [File; 2]) -> Result<Option<u64>, MachineError> {
    const BLOCK: usize = 1 << 20;
    let mut blocks = [vec![0; BLOCK], vec![0; BLOCK]];
    let mut place = 0;
    loop {
        let mut lengths = [0; 2];
        for ((file, block), length) in files.iter_mut().zip(&mut blocks).zip(&mut lengths) {
            *length = read_full(file, block).map_err(at("saved memory"))?;
        }
        let [one, other] = &blocks;
        let common = lengths[0].min(lengths[1]);
        if let Some(offset) = (0..common).find(|&index| one[index] != other[index]) {
            return Ok(Some(place + offset as u64));
        }
        if lengths[0] != lengths[1] {
            return Ok(Some(place + common as u64));
        }
        if common == 0 {
            return Ok(None);
        }
        place += common as u64;
    }
}
