//! The source's migrating process, and the process that is started in its place after a kill.

use std::sync::Arc;
use std::time::Duration;

use dunlin::Migration;
use dunlin::engine::journal::{Journal, Role, SourceRecord};
use dunlin::engine::source::{self, Doubt, Resolution, VmLocation};
use dunlin::engine::vmm::SourceVm;
use dunlin::engine::{Event, Host, StandardHost, VmIs};
use dunlin::lane::policy::ClientTls;
use dunlin_crash_tests::files::Files;
use dunlin_crash_tests::guest::Guest;

use crate::moving::{Home, Leaving};
use crate::stage::{ShownDisk, Stage};
use crate::{Failure, identity};

/// The doubt limit of the last inquiry of a run. The destination always answers this inquiry. The
/// limit is long, because a busy host can delay the answer.
const ANSWERED: Duration = Duration::from_secs(30);

/// Limits short enough for a test.
fn options(journal: Journal) -> source::Options {
    source::Options::builder()
        .lanes(1)
        .verify(true)
        .throttle(false)
        .connect_limit(Duration::from_secs(5))
        .silence_limit(Duration::from_millis(700))
        .control_limit(Duration::from_millis(300))
        .doubt_limit(Duration::from_millis(700))
        .journal(journal)
        .build()
        .expect("the options are valid")
}

/// Migrates the VM, and then executes the test's orders.
pub(crate) fn run(files: &Files, to: &str, vm: &str, stage: &Stage) -> Result<(), Failure> {
    let disk = Arc::new(ShownDisk::new(stage));
    let journal = Journal::open_on(&files.journal("source"), disk)?;
    let home = if vm == "here" {
        let guest = Guest::new(files, "source")?;
        guest.create()?;
        guest.resume()?;
        Home::Here(guest)
    } else {
        Home::Elsewhere(files.clone())
    };
    let leaving = Arc::new(Leaving::new(home, files, stage)?);
    let vm: Arc<dyn SourceVm> = Arc::clone(&leaving) as _;
    let host: Arc<dyn Host> = Arc::new(StandardHost);
    let (tls, options) = (tls(files)?, options(journal));
    let shown = stage.clone();
    let observe = move |event: &Event| match event {
        Event::Recorded(record @ (SourceRecord::Committing | SourceRecord::Released)) => {
            shown.at(&format!("{}-recorded", record.name()));
        }
        Event::Paused => shown.at("paused"),
        Event::Committing => shown.at("commit-unsent"),
        Event::Committed => shown.at("commit-sent"),
        Event::InDoubt { why } => shown.say(&format!("in doubt: {why}")),
        Event::Warning(text) => shown.say(&format!("warning: {text}")),
        _ => {}
    };
    let result = Migration::builder(Arc::clone(&vm), to, &tls)
        .options(options.clone())
        .observer(&observe)
        .run();
    let doubt = match result {
        Ok(_) => {
            stage.say("ended at-destination");
            None
        }
        Err(error) => {
            stage.say(&format!("because {error}"));
            stage.say(&format!(
                "ended {}",
                match error.vm {
                    VmIs::AtSource => "at-source",
                    VmIs::StuckAtSource => "stuck",
                    VmIs::InDoubt => "in-doubt",
                    VmIs::RanThenDied => "ran-then-died",
                    VmIs::Gone => "gone",
                }
            ));
            error.doubt.map(|doubt| *doubt)
        }
    };
    let patient = options.to_builder().doubt_limit(ANSWERED).build()?;
    heed(stage, doubt, Some(&*leaving), &|doubt| {
        Ok(doubt.ask(Some(&*vm), &tls, &patient, &host)?)
    })
}

/// Takes over the session of a process that has died.
pub(crate) fn restarted(files: &Files, vm: &str, stage: &Stage) -> Result<(), Failure> {
    let journal = Journal::open(&files.journal("source"))?;
    let leaving = match vm {
        "elsewhere" => Some(Leaving::new(Home::Elsewhere(files.clone()), files, stage)?),
        _ => None,
    };
    let vm = leaving.as_ref().map(|vm| vm as &dyn SourceVm);
    let host: Arc<dyn Host> = Arc::new(StandardHost);
    let tls = tls(files)?;
    let patient = options(journal.clone())
        .to_builder()
        .doubt_limit(ANSWERED)
        .build()?;
    let entries = journal.list()?.into_iter();
    let left = entries
        .filter(|entry| entry.role == Role::Source && matches!(entry.record, Ok(Some(_))))
        .map(|entry| entry.session)
        .next();
    let doubt = match left {
        Some(session) => Some(Doubt::taken_over(&journal, session, false)?),
        None => None,
    };
    if let Some(doubt) = &doubt {
        stage.say(&format!("found {}", doubt.record().state));
    }
    heed(stage, doubt, leaving.as_ref(), &|doubt| {
        Ok(doubt.ask(vm, &tls, &patient, &host)?)
    })
}

fn tls(files: &Files) -> Result<ClientTls, Failure> {
    let (identity, crypto) = identity(files, "source")?;
    let names = std::iter::once("destination.test".parse()?).collect();
    Ok(identity.client(&crypto, names)?)
}

type Asks<'a> = &'a dyn Fn(&mut Doubt) -> Result<VmLocation, Failure>;

/// Executes the test's orders until standard input ends.
fn heed(
    stage: &Stage,
    mut doubt: Option<Doubt>,
    vm: Option<&Leaving>,
    ask: Asks<'_>,
) -> Result<(), Failure> {
    loop {
        match &*stage.hear() {
            "ask" => {
                let Some(held) = &mut doubt else {
                    stage.say("asked nothing");
                    continue;
                };
                let location = ask(held)?;
                let over = match &location {
                    VmLocation::AtSource => "at-source",
                    VmLocation::AtDestination => "at-destination",
                    VmLocation::RanThenDied => "ran-then-died",
                    VmLocation::InDoubt(why) => {
                        stage.say(&format!("because {why}"));
                        "in-doubt"
                    }
                };
                if matches!(location, VmLocation::AtSource | VmLocation::AtDestination)
                    && let Some(doubt) = doubt.take()
                {
                    doubt.forget()?;
                }
                stage.say(&format!("asked {over}"));
            }
            "resolve" => {
                if let (Some(doubt), Some(vm)) = (&mut doubt, vm) {
                    doubt.resolve(vm, Resolution::RunHere)?;
                }
                stage.say("resolved");
            }
            "state" => {
                let state = vm.map_or_else(|| Ok("none".into()), Leaving::state)?;
                stage.say(&format!("state {state}"));
            }
            _ => {}
        }
    }
}
