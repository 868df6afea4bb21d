//! The log of long-running commands: lines on standard error, as text or as JSON objects.
//!
//! A line has the time in UTC, the level, the message, and the fields of the event and of the spans
//! around it. [`LogFlags::start`] installs the subscriber, which writes lines and opens no files. A
//! command without a log prints only its own messages ([`say`]).

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use dunlin_proto::text::is_harmful;
use serde_json::{Map, Value};
use time::OffsetDateTime;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, Registry, SpanRef};

use crate::line::FailedLine;
use crate::output::is_writable;
use crate::progress;
use crate::text::{clean, plain};
use crate::timeline;

/// The format of the log, if this process writes one.
static FORMAT: OnceLock<Format> = OnceLock::new();

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Format {
    Text,
    Json,
}

/// A parser for log levels.
fn level() -> impl TypedValueParser<Value = Level> {
    PossibleValuesParser::new(["error", "warn", "info", "debug"]).try_map(|name| name.parse())
}

/// Flags of a command with a log.
#[derive(Clone, Debug, Args)]
pub(crate) struct LogFlags {
    /// Format of the log on standard error; `json` is one object per line [default: text; for a
    /// VM's process, no log].
    #[arg(long, value_enum, value_name = "FORMAT")]
    log: Option<Format>,
    /// The least severe level that the log contains.
    #[arg(long, value_name = "LEVEL", value_parser = level(), default_value = "info")]
    log_level: Level,
}

impl LogFlags {
    /// Starts the log, in the format of the flag or in `default`.
    pub(crate) fn start(&self, default: Option<Format>) {
        if let Some(format) = self.log.or(default) {
            // Cannot fail, because only this line sets the format, once in a process.
            let _ = FORMAT.set(format);
            install(self.log_level);
        }
    }
}

/// Installs the subscriber, unless one is installed. The subscriber writes the log, if the process
/// has one, and records timelines.
pub(crate) fn install(level: Level) {
    let subscriber = Registry::default().with(Log { level });
    // An error means that this process has already installed a subscriber, which is also a `Log`.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Whether a log is written.
pub(crate) fn is_started() -> bool {
    FORMAT.get().is_some()
}

/// Writes each warning as a line of the log, or to standard error if there is no log.
pub(crate) fn warn(warnings: impl IntoIterator<Item = String>) {
    for warning in warnings {
        if is_started() {
            tracing::warn!("{warning}");
        } else {
            say(&format!("warning: {warning}"));
        }
    }
}

/// Writes one line to the log, or to standard error if there is no log.
pub(crate) fn say(text: &str) {
    if is_started() {
        tracing::info!("{text}");
    } else {
        write(&format!("dunlin: {}", clean(text)));
    }
}

/// Writes the error with which the command ends. A JSON log stays JSON to its last line.
pub(crate) fn fail(failed: &FailedLine) {
    if let Some(Format::Json) = FORMAT.get() {
        // Write the line directly. A logged event would be lost if the reader of standard error
        // stalls. The process is ending, so its last line may wait for the reader.
        let mut fields = Fields::default();
        fields.0.insert("fault".into(), failed.fault.clone().into());
        let at_fault = failed.at_fault.clone().into();
        fields.0.insert("at_fault".into(), at_fault);
        fields.add_lost_lines();
        write(&fields.into_json(now(), "error".into(), failed.text.clone().into()));
    } else {
        write(&format!("dunlin: {}", failed.for_people()));
    }
}

/// Writes one line with a single call. A closed standard error is not an error.
fn write(line: &str) {
    progress::clear();
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// The number of lines that were lost since the last written line, because standard error stalled.
static LOST: AtomicU64 = AtomicU64::new(0);

struct Log {
    level: Level,
}

/// The fields of a span or an event. A later value replaces an earlier one.
#[derive(Default)]
pub(crate) struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value.into());
    }
}

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        self.0.insert(field.name().to_owned(), value);
    }

    /// Adds the number of lines that were lost before this one, if any.
    fn add_lost_lines(&mut self) {
        let lost = LOST.swap(0, Ordering::Relaxed);
        if lost > 0 {
            self.0.insert("lost_lines".into(), lost.into());
        }
    }

    fn into_json(mut self, time: String, level: String, message: Value) -> String {
        self.0.insert("time".into(), time.into());
        self.0.insert("level".into(), level.into());
        self.0.insert("message".into(), message);
        plain(Value::Object(self.0).to_string())
    }

    /// Formats the line so that a text from a peer or a file can imitate neither a field nor
    /// another line.
    fn into_text(self, time: &str, level: &str, message: &str) -> String {
        let mut line = format!("{time} {level:5} {}", quoted(message, &['=']));
        for (name, value) in &self.0 {
            let value = match value.as_str() {
                Some(text) => quoted(text, &[' ', '"', '=']),
                None => value.to_string(),
            };
            // Writing to a string cannot fail.
            let _ = write!(line, " {name}={value}");
        }
        line
    }
}

/// The text, as a JSON string if it contains a character of `special`, looks like a JSON string, or
/// would control a terminal.
fn quoted(text: &str, special: &[char]) -> String {
    if text.starts_with('"') || text.contains(special) || text.contains(is_harmful) {
        plain(Value::from(text).to_string())
    } else {
        text.to_owned()
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Log {
    fn max_level_hint(&self) -> Option<LevelFilter> {
        // Enable spans, which have level info, even if only errors are logged: error lines contain
        // the spans' fields.
        Some(self.level.max(Level::INFO).into())
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let mut fields = Fields::default();
            attributes.record(&mut fields);
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            span.extensions_mut().replace(Instant::now());
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        // This is a separate statement, so that the lock on the extensions is released before `add`
        // runs.
        let entered = span.extensions_mut().remove::<Instant>();
        if let (Some(entered), Some(root)) = (entered, span.scope().last()) {
            timeline::add(&root.id(), span.name(), entered, || lane_and_fields(&span));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let Some(format) = FORMAT.get() else { return };
        let level = event.metadata().level();
        if *level > self.level {
            return;
        }
        let mut fields = Fields::default();
        let scope = context.event_scope(event);
        for span in scope.into_iter().flat_map(|scope| scope.from_root()) {
            if let Some(more) = span.extensions().get::<Fields>() {
                fields.0.extend(more.0.clone());
            }
        }
        event.record(&mut fields);
        if !is_writable(&std::io::stderr(), &LOST) {
            return;
        }
        fields.add_lost_lines();
        let message = fields.0.remove("message").unwrap_or_default();
        let (time, level) = (now(), level.as_str().to_lowercase());
        write(&match format {
            Format::Json => fields.into_json(time, level, message),
            Format::Text => fields.into_text(&time, &level, message.as_str().unwrap_or_default()),
        });
    }
}

/// The lane of a span, or 0 outside any lane, and the span's own fields.
fn lane_and_fields<'a, S: LookupSpan<'a>>(span: &SpanRef<'a, S>) -> (u64, Map<String, Value>) {
    let lane = span.scope().find_map(|span| {
        let extensions = span.extensions();
        extensions.get::<Fields>()?.0.get("lane")?.as_u64()
    });
    let extensions = span.extensions();
    let fields = extensions.get::<Fields>().map(|fields| fields.0.clone());
    (lane.unwrap_or(0), fields.unwrap_or_default())
}

/// The time in UTC (RFC 3339). The local time is not used, because the time zone is in a file that
/// some confined processes cannot read.
fn now() -> String {
    let now = OffsetDateTime::now_utc();
    let (year, month, day) = now.to_calendar_date();
    let (h, min, s, us) = now.to_hms_micro();
    let month = u8::from(month);
    format!("{year}-{month:02}-{day:02}T{h:02}:{min:02}:{s:02}.{us:06}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i7_a_text_imitates_neither_a_field_nor_a_line() {
        let forged = "lost vm=web\n2026-11-25T00:00:00.000000Z info  moved\u{202e}";
        let in_json = r#""lost vm=web\n2026-11-25T00:00:00.000000Z info  moved\u202e""#;
        for (message, peer, expected) in [
            ("is open", "a:1", "T info  is open peer=a:1".to_owned()),
            ("is open", "DNS a", r#"T info  is open peer="DNS a""#.into()),
            ("is open", "a\tb", r#"T info  is open peer="a\tb""#.into()),
            ("a\nb", "a", r#"T info  "a\nb" peer=a"#.into()),
            (r#""a" b"#, "a", r#"T info  "\"a\" b" peer=a"#.into()),
            (forged, forged, format!("T info  {in_json} peer={in_json}")),
        ] {
            let mut fields = Fields::default();
            fields.0.insert("peer".into(), peer.into());
            assert_eq!(fields.into_text("T", "info", message), expected);
        }
    }
}
