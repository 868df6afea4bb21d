//! One run: its actions, and the conditions that must hold at its end.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use dunlin::engine::journal::Journal;
use dunlin_crash_tests::files::Files;
use dunlin_crash_tests::step;
use dunlin_test_base::Scratch;

use super::Credentials;
use super::party::Party;

/// How long both processes remain stopped, which is longer than their silence limits. The test
/// waits for a fixed time, because a stopped process cannot report that a limit has expired.
const BOTH_STOPPED: Duration = Duration::from_millis(1100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    Source,
    Destination,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    Kill,
    Stop,
}

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The step at which a process waits while the test acts, one of [`step::SOURCE`] or
    /// [`step::DESTINATION`].
    pub step: &'static str,
    pub victim: Victim,
    pub signal: Signal,
    /// Whether the source's VM is in a process other than the one that migrates it.
    pub elsewhere: bool,
    /// Whether a killed source is restarted while the destination still waits for it.
    pub at_once: bool,
    /// A number that distinguishes the addresses of the runs in one test process.
    pub number: usize,
}

/// Where the VM is at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It runs at the source.
    Source,
    /// It runs at the destination.
    Destination,
    /// The VM died with the source's process, and no journal contradicts that.
    DiedAtSource,
    /// The VM died with the destination's process, and the source has released the VM.
    DiedAtDestination,
    /// The VM died with the destination's process. The source was informed of the death, and an
    /// operator has resumed the source's copy.
    TakenBack,
    /// Like `TakenBack`, but the copy died with the source's process.
    DiedAtBoth,
}

impl Case {
    fn at_source(&self) -> bool {
        step::SOURCE.contains(&self.step)
    }

    fn hits_source(&self) -> bool {
        self.victim != Victim::Destination
    }

    fn hits_destination(&self) -> bool {
        self.victim != Victim::Source
    }

    /// A loopback address. Two runs of this process never have the same address, and runs of
    /// different processes almost never. Its port is below the ephemeral ports, so a restarted
    /// process can bind it again.
    fn address(&self) -> String {
        let process = std::process::id();
        format!(
            "127.{}.{}.{}:{}",
            1 + (process >> 8) % 250,
            process % 250,
            1 + self.number % 250,
            20_000 + self.number / 250
        )
    }
}

/// The processes of a run.
struct Cast {
    source: Party,
    destination: Party,
    _vm: Option<Party>,
}

/// Runs a case. An error says which condition does not hold.
pub fn run(case: &Case, credentials: &Credentials) -> Result<Ending, String> {
    let scratch = Scratch::in_memory();
    let files = Files::new(scratch.path());
    credentials.lend(files.directory());
    let directory = files.directory().to_str().unwrap().to_owned();
    let address = case.address();

    let vm = if case.elsewhere {
        let mut vm = Party::start(&["vm", &directory]);
        vm.until("ready")?;
        Some(vm)
    } else {
        None
    };
    let hold = |here: bool| if here { case.step } else { "" };
    let to_hold = hold(!case.at_source());
    // If the source must inquire while the destination waits, use a control limit that is longer
    // than all other limits.
    let control_limit_ms = if case.at_once { "60000" } else { "300" };
    let arguments = [
        "destination",
        &directory,
        &address,
        control_limit_ms,
        to_hold,
    ];
    let mut destination = Party::start(&arguments);
    destination.until("listening")?;
    let home = if case.elsewhere { "elsewhere" } else { "here" };
    let to_hold = hold(case.at_source());
    let source = Party::start(&["source", &directory, &address, home, to_hold]);
    let mut cast = Cast {
        source,
        destination,
        _vm: vm,
    };
    let step = format!("at {}", case.step);
    if case.at_source() {
        cast.source.reaches(&step, &mut cast.destination)?;
    } else {
        cast.destination.reaches(&step, &mut cast.source)?;
    }
    let ended = match case.signal {
        Signal::Kill => strike(case, &mut cast)?,
        Signal::Stop => freeze(case, &mut cast)?,
    };
    let location = settle(case, &mut cast, &files, &address, &ended)?;
    judge(case, &mut cast, &files, &location)
}

/// What the source reported at its end; `None` if the source was killed or has not ended.
struct Ended {
    source: Option<String>,
}

/// Kills the victims. A process that is not a victim continues and ends its migration.
fn strike(case: &Case, cast: &mut Cast) -> Result<Ended, String> {
    let mut ended = Ended { source: None };
    if case.hits_source() {
        cast.source.kill();
    }
    if case.hits_destination() {
        cast.destination.kill();
    }
    if !case.hits_source() {
        cast.source.tell("go");
        ended.source = Some(cast.source.until("ended")?);
    }
    if !case.hits_destination() {
        cast.destination.tell("go");
        if !case.at_once {
            cast.destination.until("ended")?;
        }
    }
    Ok(ended)
}

/// Stops the victims until the other process has ended its migration or, if both processes are
/// victims, for a fixed time. Then continues the victims, and waits until they have ended their
/// migrations.
fn freeze(case: &Case, cast: &mut Cast) -> Result<Ended, String> {
    if case.hits_source() {
        cast.source.stop();
    }
    if case.hits_destination() {
        cast.destination.stop();
    }
    // A stopped process reads this line when it continues.
    cast.source.tell("go");
    cast.destination.tell("go");
    let mut source = None;
    match case.victim {
        Victim::Source => drop(cast.destination.until("ended")?),
        Victim::Destination => source = Some(cast.source.until("ended")?),
        Victim::Both => thread::sleep(BOTH_STOPPED),
    }
    if case.hits_source() {
        cast.source.go_on();
        source = Some(cast.source.until("ended")?);
    }
    if case.hits_destination() {
        cast.destination.go_on();
        cast.destination.until("ended")?;
    }
    Ok(Ended { source })
}

/// Restarts the killed processes and lets the source inquire. Returns where the VM is according to
/// the source.
fn settle(
    case: &Case,
    cast: &mut Cast,
    files: &Files,
    address: &str,
    ended: &Ended,
) -> Result<String, String> {
    let directory = files.directory().to_str().unwrap();
    let killed = case.signal == Signal::Kill;
    if killed && case.hits_destination() {
        cast.destination = Party::start(&["restarted-destination", directory, address]);
        cast.destination.until("listening")?;
    }
    match ended.source.as_deref() {
        None => {
            let home = if case.elsewhere { "elsewhere" } else { "died" };
            cast.source = Party::start(&["restarted-source", directory, home]);
            let location = cast.source.ask("ask", "asked")?;
            if case.at_once {
                cast.destination.until("ended")?;
            }
            Ok(location)
        }
        Some("in-doubt") => cast.source.ask("ask", "asked"),
        Some(other) => Ok(other.into()),
    }
}

fn judge(case: &Case, cast: &mut Cast, files: &Files, location: &str) -> Result<Ending, String> {
    let killed = case.signal == Signal::Kill;
    let source_died = killed && case.hits_source() && !case.elsewhere;
    let destination_died = killed && case.hits_destination();
    let at_source = if case.elsewhere {
        ask_vm(files)
    } else if source_died {
        "dead".into()
    } else {
        cast.source.ask("state", "state")?
    };
    let at_destination = if destination_died {
        "dead".into()
    } else {
        cast.destination.ask("state", "state")?
    };
    let notes = std::fs::read_to_string(files.notes()).unwrap_or_default();
    let journals = ["source", "destination"].map(|side| states(files, side));
    let wrong = |what: &str| {
        Err(format!(
            "{what}: the source says {location}, the VM is {at_source} at the source and \
             {at_destination} at the destination, the journals say {journals:?}; noted: {notes}\n\
             source: {:#?}\ndestination: {:#?}",
            cast.source.said, cast.destination.said
        ))
    };
    // The guest writes a note if it runs twice at the same time, has lost a write or went back in
    // time.
    if !notes.is_empty() {
        return wrong("the guest noted a violation");
    }
    let [of_source, of_destination] = &journals;
    let kept = |state: &str| of_destination.iter().any(|found| found == state);
    match (&*at_source, &*at_destination, location) {
        ("running", "none" | "destroyed" | "dead", "at-source" | "nothing") => {
            if !of_source.is_empty() || kept("running") {
                return wrong("the VM runs at the source, and a journal says otherwise");
            }
            Ok(Ending::Source)
        }
        ("destroyed" | "dead", "running", "at-destination" | "nothing") => {
            if !of_source.is_empty() || kept("aborted") {
                return wrong("the VM runs at the destination, and a journal says otherwise");
            }
            Ok(Ending::Destination)
        }
        ("dead", "none" | "destroyed" | "dead", "at-source") if source_died => {
            if !of_source.is_empty() || kept("running") {
                return wrong("the VM died at the source, and a journal says otherwise");
            }
            Ok(Ending::DiedAtSource)
        }
        ("destroyed" | "dead", "dead", "at-destination" | "nothing") if destination_died => {
            if !of_source.is_empty() || kept("aborted") {
                return wrong("the VM died at the destination, and a journal says otherwise");
            }
            Ok(Ending::DiedAtDestination)
        }
        ("paused", "dead", "ran-then-died") if destination_died => {
            if *of_source != ["ran, then died"] || !kept("running") {
                return wrong("the VM ran and died at the destination, and a journal denies it");
            }
            take_back(case, cast, files)?;
            Ok(Ending::TakenBack)
        }
        ("dead", "dead", "ran-then-died") if destination_died && source_died => {
            if *of_source != ["ran, then died"] || !kept("running") {
                return wrong("the VM ran and died at the destination, and a journal denies it");
            }
            Ok(Ending::DiedAtBoth)
        }
        _ => wrong("the VM's location is unknown, or the VM is not where the source says"),
    }
}

/// Acts as the operator: runs the paused copy at the source.
fn take_back(case: &Case, cast: &mut Cast, files: &Files) -> Result<(), String> {
    cast.source.ask("resolve", "resolved")?;
    let state = if case.elsewhere {
        ask_vm(files)
    } else {
        cast.source.ask("state", "state")?
    };
    if state == "running" || state == "broken" {
        // `broken` means that the guest has detected that it went back in time. That is correct
        // too, because the guest had already run at the destination.
        return Ok(());
    }
    Err(format!(
        "an operator took the VM back, and its state is {state}"
    ))
}

fn ask_vm(files: &Files) -> String {
    let mut connection = UnixStream::connect(files.socket()).unwrap();
    writeln!(connection, "state").unwrap();
    let mut answer = String::new();
    BufReader::new(connection).read_line(&mut answer).unwrap();
    answer.trim_end().into()
}

/// The states of the sessions in the journal of `side`.
fn states(files: &Files, side: &str) -> Vec<String> {
    let entries = Journal::open(&files.journal(side)).unwrap().list().unwrap();
    let records = entries
        .into_iter()
        .filter_map(|entry| entry.record.unwrap());
    records
        .map(|record| {
            let text = record.state.to_string();
            text.split_once(", ")
                .map_or(text.clone(), |(_, state)| state.to_owned())
        })
        .collect()
}
