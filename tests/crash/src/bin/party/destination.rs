//! The destination's process, and the process that is started in its place after a kill.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use dunlin::Incoming;
use dunlin::engine::VmIs;
use dunlin::engine::destination::{DestinationEvent, Options};
use dunlin::engine::journal::{DestinationRecord, Journal};
use dunlin::lane::policy::ServerTls;
use dunlin_crash_tests::files::Files;

use crate::moving::Arrivals;
use crate::stage::{ShownDisk, Stage};
use crate::{Failure, identity};

/// Receives the VM, and then executes the test's orders. `control_limit` is how long to wait for a
/// new control lane after the loss of one.
pub(crate) fn run(
    files: &Files,
    listen: &str,
    control_limit: Duration,
    stage: &Stage,
) -> Result<(), Failure> {
    let tls = tls(files)?;
    let disk = Arc::new(ShownDisk::new(stage));
    let journal = Journal::open_on(&files.journal("destination"), disk)?;
    let listener = TcpListener::bind(listen)?;
    stage.say("listening");
    let options = Options::builder()
        .silence_limit(Duration::from_millis(700))
        .control_limit(control_limit)
        .journal(journal.clone())
        .build()?;
    let mut arrivals = Arrivals::new(files, stage);
    let shown = stage.clone();
    let observe = move |event: &DestinationEvent| match event {
        DestinationEvent::Recorded(DestinationRecord::Running) => shown.at("running-recorded"),
        DestinationEvent::Ready => shown.at("ready"),
        DestinationEvent::Committed => shown.at("commit-come"),
        DestinationEvent::Notified(verdict) => {
            shown.at(&format!("{verdict:?}-unsent").to_lowercase())
        }
        DestinationEvent::Running { .. } => shown.at("running-sent"),
        DestinationEvent::Warning(text) => shown.say(&format!("warning: {text}")),
        _ => {}
    };
    let received = Incoming::builder(listener.try_clone()?, &tls)
        .options(options.clone())
        .observer(&observe)
        .run(&mut arrivals);
    // Keep the VM for the lifetime of this process, which answers inquiries about it.
    let _received = match received {
        Ok(received) => {
            stage.say("ended at-destination");
            Some(received)
        }
        Err(error) => {
            stage.say(&format!("because {error}"));
            let vm = match error.vm {
                VmIs::RanThenDied => "ran-then-died",
                VmIs::InDoubt => "in-doubt",
                _ => "at-source",
            };
            answer_on(listener, tls, journal);
            stage.say(&format!("ended {vm}"));
            None
        }
    };
    heed(stage, &|| arrivals.state())
}

/// Answers inquiries about the session of a process that has died.
pub(crate) fn restarted(files: &Files, listen: &str, stage: &Stage) -> Result<(), Failure> {
    let journal = Journal::open(&files.journal("destination"))?;
    answer_on(TcpListener::bind(listen)?, tls(files)?, journal);
    stage.say("listening");
    heed(stage, &|| "none")
}

fn answer_on(listener: TcpListener, tls: ServerTls, journal: Journal) {
    std::thread::spawn(move || {
        let options = Options::builder().journal(journal).build()?;
        Ok::<_, Failure>(
            Incoming::builder(listener, &tls)
                .options(options)
                .answer()?,
        )
    });
}

fn tls(files: &Files) -> Result<ServerTls, Failure> {
    let (identity, crypto) = identity(files, "destination")?;
    let names = std::iter::once("source.test".parse()?).collect();
    Ok(identity.server(&crypto, names)?)
}

fn heed(stage: &Stage, state: &dyn Fn() -> &'static str) -> Result<(), Failure> {
    loop {
        if stage.hear() == "state" {
            stage.say(&format!("state {}", state()));
        }
    }
}
