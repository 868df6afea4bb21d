//! `dunlin top`: the sessions and tunnels of this host on a terminal, and keys to cancel a
//! migration and to limit rates.
//!
//! ```text
//!  reader: watch::Snapshot ─▶ rows ─┐            ┌─▶ screen: draw
//!  keys, signals ───────────────────┼─▶ model ───┤
//!  results of requests ─────────────┘            └─▶ requests to processes, next reading
//! ```
//!
//! Threads wait for keys, signals and processes, and send to one channel. The main thread changes
//! the model and draws it.

mod draw;
mod model;
mod rows;
mod screen;

use std::process::exit;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use clap::Args;
use dunlin_linux::signals::{EndSignals, HangUps};
use dunlin_proto::fault::AtFault;

use self::model::{Action, Key, Model, Order};
use self::rows::{Limited, Row, rows, size_of};
use self::screen::{Screen, has_terminal};
use crate::code::{DONE, SIGNAL, USAGE};
use crate::line::FailedLine;
use crate::options::{ControlPath, parse_limit};
use crate::service::start;
use crate::state::StatePath;
use crate::text::{chained, clean};
use crate::tunnel;
use crate::vm::request::Request;
use crate::watch::{LIVE_LIMIT, Rates, Snapshot};

#[derive(Debug, Args)]
pub(crate) struct Top {
    /// Time between two readings.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_limit)]
    interval: Duration,
    #[command(flatten)]
    control: ControlPath,
    #[command(flatten)]
    state: StatePath,
}

/// What the main thread waits for.
enum Input {
    /// A key; `None` for another event of the terminal, such as a change of its size.
    Key(Option<Key>),
    /// The rows of a reading, and its time.
    Read(Vec<Row>, SystemTime),
    /// The result of a request.
    Done(String),
    /// A signal, or the end of the terminal.
    End(Result<()>),
}

impl Top {
    pub(crate) fn run(&self) -> Result<i32> {
        if !has_terminal() {
            let text = "`dunlin top` needs a terminal for its screen and its keys; in scripts, use \
                        `dunlin status --json`";
            return Err(FailedLine {
                fault: "usage".to_owned(),
                at_fault: AtFault::Configuration.to_string(),
                vm: String::new(),
                text: text.to_owned(),
                code: USAGE,
            }
            .into());
        }
        let (ends, hang_ups) = (EndSignals::block()?, HangUps::block()?);
        let (sender, inputs) = channel();
        let mut screen = Screen::enter().context("cannot use the terminal")?;
        watch_signals(&sender, ends, hang_ups)?;
        watch_keys(&sender)?;
        let reader = self.start_reader(&sender)?;
        self.show(&mut screen, &sender, &inputs, &reader)?;
        Ok(DONE)
    }

    /// Shows the screen until a key or a signal ends it.
    fn show(
        &self,
        screen: &mut Screen,
        sender: &Sender<Input>,
        inputs: &Receiver<Input>,
        reader: &Sender<()>,
    ) -> Result<()> {
        let mut model = Model::default();
        // When to read next; `None` while a reading is under way.
        let mut next = Some(Instant::now());
        loop {
            screen.draw(&mut model)?;
            let due = next.filter(|_| !model.paused);
            let wait = due.map(|due| due.saturating_duration_since(Instant::now()));
            let input = match wait {
                Some(wait) => inputs.recv_timeout(wait),
                None => inputs.recv().map_err(RecvTimeoutError::from),
            };
            match input {
                Ok(Input::Key(key)) => match key.and_then(|key| model.key(key)) {
                    Some(Action::Quit) => return Ok(()),
                    Some(Action::Send(order)) => carry_out(order, sender)?,
                    None => {}
                },
                Ok(Input::Read(rows, taken)) => {
                    model.read(rows, taken);
                    next = Some(Instant::now() + self.interval);
                }
                Ok(Input::Done(result)) => {
                    model.done(result);
                    next = next.map(|_| Instant::now());
                }
                Ok(Input::End(why)) => return why,
                Err(RecvTimeoutError::Timeout) => {
                    next = None;
                    // This cannot fail: the reader ends only with this loop, or with the process.
                    let _ = reader.send(());
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Starts the thread that takes a snapshot for each message to the returned channel.
    fn start_reader(&self, sender: &Sender<Input>) -> Result<Sender<()>> {
        let (ask, asked) = channel::<()>();
        let (state, control, sender) = (self.state.clone(), self.control.clone(), sender.clone());
        start("reader", move || {
            let mut before: Option<Snapshot> = None;
            for () in asked {
                let now = Snapshot::take(&state, &control, LIVE_LIMIT);
                let rates = before.as_ref().map(|before| Rates::between(before, &now));
                let read = Input::Read(rows(&now, rates.as_ref()), now.taken);
                if sender.send(read).is_err() {
                    return;
                }
                before = Some(now);
            }
        })?;
        Ok(ask)
    }
}

fn watch_keys(sender: &Sender<Input>) -> Result<()> {
    let sender = sender.clone();
    start("keys", move || {
        loop {
            let key = screen::next().context("cannot read keys from the terminal");
            let is_last = key.is_err();
            let input = key.map_or_else(|error| Input::End(Err(error)), Input::Key);
            if sender.send(input).is_err() || is_last {
                return;
            }
        }
    })?;
    Ok(())
}

/// Ends the screen at SIGINT, SIGTERM and SIGHUP. At a second SIGINT or SIGTERM, restores the
/// terminal and ends the process immediately.
fn watch_signals(sender: &Sender<Input>, ends: EndSignals, hang_ups: HangUps) -> Result<()> {
    let hung_up = sender.clone();
    start("hang-ups", move || {
        let _ = hang_ups.wait();
        let _ = hung_up.send(Input::End(Ok(())));
    })?;
    let ended = sender.clone();
    start("signals", move || {
        let _ = ends.wait();
        let _ = ended.send(Input::End(Ok(())));
        if let Ok(signal) = ends.wait() {
            screen::leave();
            exit(SIGNAL + signal.number());
        }
    })?;
    Ok(())
}

/// Sends a request to a process, on a thread of its own, because the process may answer late.
fn carry_out(order: Order, sender: &Sender<Input>) -> Result<()> {
    let sender = sender.clone();
    start("request", move || {
        let result = ask(order);
        let result = result.unwrap_or_else(|error| format!("failed: {}", chained(&error)));
        let result = clean(&result.replace('\n', " "));
        // The screen may have ended.
        let _ = sender.send(Input::Done(result));
    })?;
    Ok(())
}

/// Sends the request, and returns the text that the screen shows about its result.
fn ask(order: Order) -> Result<String> {
    let (of, what, rate) = match order {
        Order::Cancel(cancel) => {
            Request::Cancel.ask(&cancel.socket)?.done(false)?;
            return Ok(format!("cancelled. {}", cancel.then));
        }
        Order::Limit(of, what, rate) => (of, what, rate),
    };
    match of {
        Limited::Session(socket) => Request::Set { rate }.ask(&socket)?.done(false)?,
        Limited::Route(socket, route) => tunnel::set_rate(&socket, Some(route), None, rate, false)?,
        Limited::Peer(socket, peer) => tunnel::set_rate(&socket, None, Some(peer), rate, false)?,
    };
    let rate = rate.map_or("none".to_owned(), |rate| format!("{}/s", size_of(rate)));
    Ok(format!("limit of {what}: {rate}"))
}
