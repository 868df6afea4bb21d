//! Draws the model. Colours only repeat what marks and words say.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use time::OffsetDateTime;

use super::model::{Model, Over, Typed};
use super::rows::{Attention, Figures, Lane, Row, size, size_of};

/// Minimum width of the column of names. On a screen that is too narrow for this width, other
/// columns are left out.
const LEAST_NAME: usize = 22;
/// Width of the marks before a name.
const MARKS: usize = 3;
/// Maximum number of lines of a notice.
const NOTICE_LINES: usize = 3;
/// Width of the bar of a lane's share.
const BAR: usize = 20;

const KEYS: &str = "j/k select  Enter details  c cancel  r rate  p pause  ? help  q quit";

const HELP: &[&str] = &[
    "The most urgent row comes first. ! marks what is wrong, * what to note.",
    "",
    "  j, k, arrows, Page Up, Page Down, g, G   select a row, or scroll its details",
    "  Enter    details of the row, such as a migration's lanes; again or Esc: back",
    "  Esc      back; in the list: select the first row, whichever that becomes",
    "  c        cancel the migration, after a question",
    "  r        change the limit of the rate of a migration, a route or a peer",
    "  p        pause and resume reading",
    "  q        quit; migrations and tunnels continue",
    "",
    "SENT/s, RECV/s   bytes per second to and from the peer",
    "LIMIT            the limit of SENT/s",
    "LEFT             bytes that this iteration still has to send",
    "DIRTY/s          bytes per second that the guest wrote in the last iteration",
    "DOWNTIME         the predicted downtime",
    "K, M, G and T are powers of 1024.",
    "",
    "Any key closes this help.",
];

/// A column: its name, its width, its rank, and a function that returns the text of a cell. On a
/// screen that is too narrow for all columns, those with the lowest ranks are left out.
type Column = (&'static str, usize, u8, fn(&Figures) -> Option<String>);

const COLUMNS: [Column; 6] = [
    ("SENT/s", 6, 5, |of| of.sent.map(size)),
    ("RECV/s", 6, 2, |of| of.received.map(size)),
    ("LIMIT", 5, 1, |of| of.limit.map(size_of)),
    ("LEFT", 5, 4, |of| of.left.map(size_of)),
    ("DIRTY/s", 7, 0, |of| of.dirty.map(size)),
    ("DOWNTIME", 8, 3, |of| of.downtime_ms.map(time)),
];
const STATE_WIDTH: usize = 11;

/// Draws with or without colours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Painter {
    pub(super) colours: bool,
}

impl Painter {
    /// A painter that uses colours, unless NO_COLOR is set and not empty (no-color.org).
    pub(super) fn from_environment() -> Self {
        let none = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { colours: !none }
    }

    pub(super) fn draw(self, frame: &mut Frame<'_>, model: &mut Model) {
        let (area, buffer) = (frame.area(), frame.buffer_mut());
        let (width, height) = (usize::from(area.width), usize::from(area.height));
        let footer = self.footer(model, width);
        let footer = &footer[footer.len().saturating_sub(height.saturating_sub(1))..];
        put(buffer, area, 0, &title(model, width));
        let body = height.saturating_sub(1 + footer.len());
        let inner = Rect {
            y: area.y.saturating_add(1),
            height: u16::try_from(body).unwrap_or(u16::MAX),
            ..area
        };
        match model.over {
            Some(Over::Help) => {
                let lines = HELP.iter();
                let lines = lines.flat_map(|line| styled(line, width, Style::new()));
                page(buffer, inner, &lines.collect::<Vec<_>>(), 0);
            }
            _ if model.details => {
                let lines = model.row().map(|row| self.details(row, width));
                let lines = lines.unwrap_or_default();
                model.scroll = model.scroll.min(lines.len().saturating_sub(body));
                page(buffer, inner, &lines, model.scroll);
            }
            _ => self.list(buffer, inner, model),
        }
        for (number, line) in footer.iter().enumerate() {
            put(buffer, area, height - footer.len() + number, line);
        }
    }

    fn style(self, attention: Attention) -> Style {
        match attention {
            Attention::Fine => Style::new(),
            Attention::Wrong if self.colours => Style::new().fg(Color::Red),
            Attention::Note if self.colours => Style::new().fg(Color::Yellow),
            Attention::Wrong => Style::new().add_modifier(Modifier::BOLD),
            Attention::Note => Style::new(),
        }
    }

    fn list(self, buffer: &mut Buffer, area: Rect, model: &Model) {
        let width = usize::from(area.width);
        if model.rows.is_empty() {
            let text = match model.taken {
                Some(_) => "no sessions and no tunnels here",
                None => "reading",
            };
            put(buffer, area, 0, &Line::from(text));
            return;
        }
        let columns = columns(width, &model.rows);
        put(buffer, area, 0, &header(&columns, width));
        let height = usize::from(area.height).saturating_sub(1);
        // Rows with a trouble have two lines. If the list is longer than the screen, scroll it so
        // that the selected row is in the middle of the screen.
        let lines = |rows: &[Row]| rows.iter().map(lines_of).sum::<usize>();
        let most = lines(&model.rows).saturating_sub(height);
        let first = lines(&model.rows[..model.at]);
        let first = first.saturating_sub(height / 2).min(most);
        let mut line = 0;
        for (number, row) in model.rows.iter().enumerate() {
            let own = line..line + lines_of(row);
            line = own.end;
            if own.end <= first || own.start >= first + height {
                continue;
            }
            let is_selected = number == model.at;
            let texts = [
                self.row(row, &columns, width, is_selected),
                self.trouble(row, width),
            ];
            for (at, text) in own.zip(texts) {
                if at < first || at >= first + height {
                    continue;
                }
                let y = at - first + 1;
                put(buffer, area, y, &text);
                if is_selected {
                    reverse(buffer, area, y);
                }
            }
        }
    }

    fn row(self, row: &Row, columns: &[Column], width: usize, is_selected: bool) -> Line<'static> {
        let name = name_width(columns, width);
        let mut text = format!(
            "{}{} {}",
            if is_selected { '>' } else { ' ' },
            mark(row.attention()),
            fit(&row.what, name)
        );
        text.push_str(&format!(" {}", fit(&row.state, STATE_WIDTH)));
        for (_, width, _, cell) in columns {
            let cell = cell(&row.figures).unwrap_or_default();
            text.push_str(&format!(" {cell:>width$}"));
        }
        Line::styled(text, self.style(row.attention()))
    }

    /// The worst trouble of a row, in one line.
    fn trouble(self, row: &Row, width: usize) -> Line<'static> {
        let Some((_, text)) = row.troubles.first() else {
            return Line::default();
        };
        let more = match row.troubles.len() {
            1 => String::new(),
            all => format!(" (and {} more)", all - 1),
        };
        let room = width.saturating_sub(MARKS + 2 + more.len());
        let text = format!(
            "{:width$}{}{more}",
            "",
            fit(text, room).trim_end(),
            width = MARKS + 2
        );
        Line::styled(text, self.style(row.attention()))
    }

    fn details(self, row: &Row, width: usize) -> Vec<Line<'static>> {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let mut lines = vec![Line::styled(format!("{}: {}", row.what, row.state), bold)];
        for (attention, text) in &row.troubles {
            let text = format!("{} {text}", mark(*attention));
            lines.extend(styled(&text, width, self.style(*attention)));
        }
        lines.push(Line::default());
        let figures = &row.figures;
        let rate = |rate: f64| format!("{}/s", size(rate));
        let known = [
            ("sent", figures.sent.map(rate)),
            ("received", figures.received.map(rate)),
            ("limit", figures.limit.map(|limit| rate(limit as f64))),
            ("left to send", figures.left.map(size_of)),
            ("dirtied", figures.dirty.map(rate)),
            (
                "downtime",
                figures
                    .downtime_ms
                    .map(|ms| format!("{} predicted", time(ms))),
            ),
        ];
        let known = known
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)));
        for (name, value) in known.chain(row.facts.clone()) {
            let value = wrap(&value, width.saturating_sub(23));
            for (number, part) in value.into_iter().enumerate() {
                let name = if number == 0 { &name } else { "" };
                lines.push(Line::from(format!("  {name:<20} {part}")));
            }
        }
        if !row.lanes.is_empty() {
            lines.push(Line::default());
            let head = format!("  LANE            {:<BAR$}  SHARE  RATE/s  BYTES", "");
            lines.push(Line::styled(head, bold));
            lines.extend(row.lanes.iter().map(lane));
        }
        lines
    }

    /// The lines at the bottom: a question, or a notice and the keys.
    fn footer(self, model: &Model, width: usize) -> Vec<Line<'static>> {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let mut lines = Vec::new();
        let mut add = |text: &str, style| lines.extend(styled(text, width, style));
        match &model.over {
            Some(Over::Confirm(cancel)) => {
                add(&format!("Cancel the migration: {}?", cancel.what), bold);
                add(&cancel.then, Style::new());
                add("y cancels it; any other key does not", bold);
            }
            Some(Over::Limit(typed)) => {
                let Typed {
                    what,
                    now,
                    text,
                    error,
                    ..
                } = typed;
                let now = now.map_or("none".to_owned(), |now| format!("{}/s", size_of(now)));
                add(&format!("Limit of {what}, now {now}"), bold);
                if let Some(error) = error {
                    add(error, self.style(Attention::Wrong));
                }
                add(
                    "Bytes per second, such as 500M, or none. Enter sets it; Esc keeps the old one.",
                    Style::new(),
                );
                add(&format!("> {text}_"), bold);
            }
            Some(Over::Help) => {}
            None => {
                if let Some(notice) = &model.notice {
                    lines.extend(styled(notice, width, bold).take(NOTICE_LINES));
                }
                lines.push(Line::from(KEYS));
            }
        }
        lines
    }
}

fn title(model: &Model, width: usize) -> Line<'static> {
    let [wrong, notes] = [Attention::Wrong, Attention::Note].map(|one| model.count(one));
    let active = model.rows.iter().filter(|row| row.active).count();
    let left = format!(
        "dunlin top   ! {wrong} wrong   * {notes} to note   {active} of {} active",
        model.rows.len()
    );
    let taken = model.taken.map_or(String::new(), |taken| {
        let (hours, minutes, seconds) = OffsetDateTime::from(taken).to_hms();
        format!("{hours:02}:{minutes:02}:{seconds:02} UTC")
    });
    let right = format!("{}{taken}", if model.paused { "PAUSED  " } else { "" });
    let space = width.saturating_sub(left.len() + right.len()).max(1);
    let text = format!("{left}{:space$}{right}", "");
    Line::styled(text, Style::new().add_modifier(Modifier::BOLD))
}

fn header(columns: &[Column], width: usize) -> Line<'static> {
    let name = MARKS + name_width(columns, width);
    let mut text = format!("{:name$} {:STATE_WIDTH$}", "   WHAT", "STATE");
    for (name, width, ..) in columns {
        text.push_str(&format!(" {name:>width$}"));
    }
    Line::styled(text, Style::new().add_modifier(Modifier::UNDERLINED))
}

/// The columns that have a value in any row, as far as a screen of this width has room for them.
fn columns(width: usize, rows: &[Row]) -> Vec<Column> {
    let is_used = |one: &Column| rows.iter().any(|row| (one.3)(&row.figures).is_some());
    let used: Vec<Column> = COLUMNS.into_iter().filter(is_used).collect();
    let fitting = (0..=6).map(|least| used.iter().copied().filter(move |one| one.2 >= least));
    let mut fitting = fitting.map(Iterator::collect::<Vec<_>>);
    let fits = |columns: &Vec<_>| name_width(columns, width) >= LEAST_NAME;
    fitting.find(fits).unwrap_or_default()
}

/// The width that is left for names.
fn name_width(columns: &[Column], width: usize) -> usize {
    let others: usize = columns.iter().map(|column| column.1 + 1).sum();
    width.saturating_sub(MARKS + 1 + STATE_WIDTH + others)
}

fn lines_of(row: &Row) -> usize {
    if row.troubles.is_empty() { 1 } else { 2 }
}

fn mark(attention: Attention) -> char {
    match attention {
        Attention::Fine => ' ',
        Attention::Note => '*',
        Attention::Wrong => '!',
    }
}

fn lane(lane: &Lane) -> Line<'static> {
    let bar = "#".repeat((lane.share * BAR as f64).round() as usize);
    let rate = lane.rate.map(size).unwrap_or_default();
    Line::from(format!(
        "  {:>4}  {:<8}  {bar:<BAR$}  {:>3.0} %  {rate:>6}  {:>5}",
        lane.number,
        lane.way,
        lane.share * 100.0,
        size_of(lane.bytes)
    ))
}

fn time(ms: f64) -> String {
    match ms {
        short if short < 9999.5 => format!("{short:.0} ms"),
        long => format!("{:.0} s", long / 1000.0),
    }
}

/// The width of a text on the terminal.
fn width_of(text: &str) -> usize {
    Span::raw(text).width()
}

/// A text of exactly this width: filled with spaces, or cut.
fn fit(text: &str, width: usize) -> String {
    let own = width_of(text);
    if own <= width {
        return format!("{text}{:rest$}", "", rest = width - own);
    }
    let (mut cut, mut used) = (String::new(), 0);
    for character in text.chars() {
        let more = width_of(character.encode_utf8(&mut [0; 4]));
        if used + more >= width {
            break;
        }
        cut.push(character);
        used += more;
    }
    let end = if width > 0 { "…" } else { "" };
    format!(
        "{cut}{end}{:rest$}",
        "",
        rest = width.saturating_sub(used + 1)
    )
}

/// Breaks a text at spaces into lines of at most this width. A longer word is a line of its own.
fn wrap(text: &str, width: usize) -> Vec<String> {
    if width_of(text) <= width {
        return vec![text.to_owned()];
    }
    let indent = &text[..text.len() - text.trim_start().len()];
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if width_of(line) + 1 + width_of(word) <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(format!("{indent}{word}")),
        }
    }
    lines
}

/// A text broken into lines of one style.
fn styled(text: &str, width: usize, style: Style) -> impl Iterator<Item = Line<'static>> {
    let lines = wrap(text, width).into_iter();
    lines.map(move |line| Line::styled(line, style))
}

/// Draws the lines, starting with line number `first`.
fn page(buffer: &mut Buffer, area: Rect, lines: &[Line<'_>], first: usize) {
    for (y, line) in lines.iter().skip(first).enumerate() {
        put(buffer, area, y, line);
    }
}

/// Draws a line, unless it is below the area.
fn put(buffer: &mut Buffer, area: Rect, y: usize, line: &Line<'_>) {
    if let Some(row) = row_of(area, y) {
        buffer.set_line(row.x, row.y, line, row.width);
    }
}

fn reverse(buffer: &mut Buffer, area: Rect, y: usize) {
    if let Some(row) = row_of(area, y) {
        buffer.set_style(row, Style::new().add_modifier(Modifier::REVERSED));
    }
}

fn row_of(area: Rect, y: usize) -> Option<Rect> {
    let y = u16::try_from(y).ok().filter(|y| *y < area.height)?;
    Some(Rect {
        y: area.y + y,
        height: 1,
        ..area
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
