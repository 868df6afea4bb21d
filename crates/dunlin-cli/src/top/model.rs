//! The state of the screen. A key or a new reading changes the state, and a key can request an
//! action. This module does no input or output.

use std::time::SystemTime;

use super::rows::{Attention, Cancel, Limited, Row};

/// Maximum number of characters of a rate that is being typed.
const MAX_TYPED: usize = 16;
/// Number of rows or lines by which Page Up and Page Down move.
const PAGE: usize = 10;

/// A key that the screen uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Escape,
    Backspace,
    /// Ctrl-C.
    Interrupt,
    Char(char),
}

/// What a key requests of the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Quit,
    Send(Order),
}

/// A request to a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Cancel(Cancel),
    /// Change the limit of the row with this name; `None` removes the limit.
    Limit(Limited, String, Option<u64>),
}

/// What covers the list or the details.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Over {
    Help,
    /// The question whether to cancel a migration.
    Confirm(Cancel),
    Limit(Typed),
}

/// A rate that is being typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Typed {
    pub(super) of: Limited,
    pub(super) what: String,
    /// The limit in force.
    pub(super) now: Option<u64>,
    pub(super) text: String,
    /// Why the text is not a rate.
    pub(super) error: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) rows: Vec<Row>,
    /// When the rows were read; `None` before the first reading.
    pub(super) taken: Option<SystemTime>,
    /// The key of the selected row; `None` selects the first row, whichever that is.
    selected: Option<String>,
    /// The selected row's number in `rows`.
    pub(super) at: usize,
    /// Whether the details of the selected row are shown instead of the list.
    pub(super) details: bool,
    /// The first line of the details that is shown.
    pub(super) scroll: usize,
    pub(super) over: Option<Over>,
    /// The result of the last action, until the next key.
    pub(super) notice: Option<String>,
    pub(super) paused: bool,
}

impl Model {
    /// Takes the rows of a new reading. The same row stays selected, if it is still there.
    pub(super) fn read(&mut self, rows: Vec<Row>, taken: SystemTime) {
        let before = self.rows.get(self.at).map(|row| row.what.clone());
        self.rows = rows;
        self.taken = Some(taken);
        let Some(key) = &self.selected else {
            self.at = 0;
            return;
        };
        match self.rows.iter().position(|row| row.key == *key) {
            Some(at) => self.at = at,
            None => {
                if let (true, Some(what)) = (self.details, before) {
                    // The result of an action stays, because it says more than this notice.
                    self.notice
                        .get_or_insert_with(|| format!("{what} has ended or moved"));
                }
                self.details = false;
                self.select(self.at);
            }
        }
    }

    pub(super) fn done(&mut self, result: String) {
        self.notice = Some(result);
    }

    /// The selected row; `None` if there are no rows.
    pub(super) fn row(&self) -> Option<&Row> {
        self.rows.get(self.at)
    }

    /// The number of rows that need this attention.
    pub(super) fn count(&self, attention: Attention) -> usize {
        let rows = self.rows.iter();
        rows.filter(|row| row.attention() == attention).count()
    }

    pub(super) fn key(&mut self, key: Key) -> Option<Action> {
        self.notice = None;
        match (key, self.over.take()) {
            (Key::Interrupt, _) => Some(Action::Quit),
            (_, Some(Over::Help)) => None,
            (Key::Char('y'), Some(Over::Confirm(cancel))) => {
                self.notice = Some(format!("cancelling the migration: {}", cancel.what));
                Some(Action::Send(Order::Cancel(cancel)))
            }
            (_, Some(Over::Confirm(_))) => {
                self.notice = Some("nothing was cancelled".to_owned());
                None
            }
            (key, Some(Over::Limit(typed))) => self.type_limit(key, typed),
            (key, None) => self.command(key),
        }
    }

    fn command(&mut self, key: Key) -> Option<Action> {
        match key {
            Key::Char('q') => return Some(Action::Quit),
            Key::Char('?' | 'h') => self.over = Some(Over::Help),
            Key::Char('p') => self.paused = !self.paused,
            Key::Char('c') => match self.row().map(|row| row.cancel.clone()) {
                Some(Ok(cancel)) => self.over = Some(Over::Confirm(cancel)),
                Some(Err(why)) => self.notice = Some(why),
                None => {}
            },
            Key::Char('r') => match self.row().map(|row| (row, row.limit.clone())) {
                Some((row, Ok(of))) => {
                    self.over = Some(Over::Limit(Typed {
                        of,
                        what: row.what.clone(),
                        now: row.figures.limit,
                        text: String::new(),
                        error: None,
                    }));
                }
                Some((_, Err(why))) => self.notice = Some(why),
                None => {}
            },
            Key::Enter => {
                self.details = !self.details && !self.rows.is_empty();
                self.scroll = 0;
                // From now on the row stays selected, wherever it moves.
                self.select(self.at);
            }
            Key::Escape => {
                if !self.details {
                    self.selected = None;
                    self.at = 0;
                }
                self.details = false;
            }
            key => self.go(key),
        }
        None
    }

    /// Moves the selection, or scrolls the details.
    fn go(&mut self, key: Key) {
        let from = if self.details { self.scroll } else { self.at };
        let to = match key {
            Key::Up | Key::Char('k') => from.saturating_sub(1),
            Key::Down | Key::Char('j') => from + 1,
            Key::PageUp => from.saturating_sub(PAGE),
            Key::PageDown => from + PAGE,
            Key::Home | Key::Char('g') => 0,
            Key::End | Key::Char('G') => usize::MAX,
            _ => return,
        };
        match self.details {
            // The drawing code limits this value to the number of lines.
            true => self.scroll = to,
            false => self.select(to),
        }
    }

    /// Selects the row with this number, or the last one.
    fn select(&mut self, at: usize) {
        self.at = at.min(self.rows.len().saturating_sub(1));
        self.selected = self.row().map(|row| row.key.clone());
    }

    fn type_limit(&mut self, key: Key, mut typed: Typed) -> Option<Action> {
        match key {
            Key::Escape => return None,
            Key::Enter => match typed.of.parse(&typed.text) {
                Ok(rate) => {
                    self.notice = Some(format!("changing the limit of {}", typed.what));
                    return Some(Action::Send(Order::Limit(typed.of, typed.what, rate)));
                }
                Err(why) => typed.error = Some(why),
            },
            Key::Backspace => {
                typed.text.pop();
            }
            Key::Char(character) if character.is_ascii_alphanumeric() => {
                typed.error = None;
                if typed.text.len() < MAX_TYPED {
                    typed.text.push(character);
                }
            }
            _ => {}
        }
        self.over = Some(Over::Limit(typed));
        None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::PathBuf;
    use std::time::UNIX_EPOCH;

    use super::*;

    fn cancel() -> Cancel {
        Cancel {
            socket: PathBuf::from("/run/vm.sock"),
            what: "VM a to b".to_owned(),
            then: "VM a keeps running here".to_owned(),
        }
    }

    fn model(keys: &[&str]) -> Model {
        let mut model = Model::default();
        read(&mut model, keys);
        model
    }

    /// A reading with these rows; `vm` can be cancelled, and `route` has a limit.
    fn read(model: &mut Model, keys: &[&str]) {
        let row = |key: &&str| {
            let mut row = Row::new((*key).to_owned(), (*key).to_owned(), "");
            match *key {
                "vm" => row.cancel = Ok(cancel()),
                "route" => row.limit = Ok(route()),
                _ => {}
            }
            row
        };
        model.read(keys.iter().map(row).collect(), UNIX_EPOCH);
    }

    fn route() -> Limited {
        Limited::Route(PathBuf::from("/run/t.sock"), "ram".to_owned())
    }

    fn press(model: &mut Model, keys: &str) -> Vec<Action> {
        let key = |one| match one {
            '\n' => Key::Enter,
            '\x1b' => Key::Escape,
            '\x08' => Key::Backspace,
            character => Key::Char(character),
        };
        keys.chars().filter_map(|one| model.key(key(one))).collect()
    }

    #[test]
    fn a_selected_row_stays_selected_and_otherwise_the_first_one_is() {
        let mut model = model(&["a", "b", "c"]);
        read(&mut model, &["c", "a", "b"]);
        assert_eq!(model.row().unwrap().key, "c");
        press(&mut model, "jj");
        read(&mut model, &["b", "c", "a"]);
        assert_eq!(model.row().unwrap().key, "b");
        press(&mut model, "\x1b");
        read(&mut model, &["a", "b"]);
        assert_eq!(model.row().unwrap().key, "a");
        press(&mut model, "Gk");
        assert_eq!(model.at, 0);
        press(&mut model, "jjjj");
        read(&mut model, &["a"]);
        assert_eq!(model.at, 0);
        read(&mut model, &[]);
        assert!(model.row().is_none());
        press(&mut model, "jkgG\ncr");
        assert!(model.row().is_none() && model.over.is_none() && !model.details);
    }

    #[test]
    fn only_y_cancels_and_only_after_the_question() {
        let mut model = model(&["vm", "route"]);
        assert_eq!(press(&mut model, "y"), []);
        for other in "ncY\n\x1b".chars() {
            assert_eq!(press(&mut model, &format!("c{other}")), []);
            assert_eq!(model.over, None);
        }
        assert_eq!(press(&mut model, "c"), []);
        assert_eq!(model.over, Some(Over::Confirm(cancel())));
        // The question stays about the VM that was selected when the question appeared.
        read(&mut model, &["route"]);
        assert_eq!(
            press(&mut model, "y"),
            [Action::Send(Order::Cancel(cancel()))]
        );
        assert_eq!(press(&mut model, "cy"), []);
        assert!(model.over.is_none());
    }

    #[test]
    fn a_typed_rate_is_checked_before_it_is_sent() {
        let mut model = model(&["route", "vm"]);
        let limit = |rate| {
            vec![Action::Send(Order::Limit(
                route(),
                "route".to_owned(),
                rate,
            ))]
        };
        assert_eq!(press(&mut model, "r16M\n"), limit(Some(16 << 20)));
        assert_eq!(press(&mut model, "rnone\n"), limit(None));
        for bad in ["", "0", "fast", "1K", "99999999999999T"] {
            assert_eq!(press(&mut model, &format!("r{bad}\n")), [], "{bad}");
            let Some(Over::Limit(typed)) = &model.over else {
                panic!("{bad}: {model:?}")
            };
            assert!(typed.error.is_some(), "{bad}");
            assert_eq!(press(&mut model, "\x1b"), []);
            assert_eq!(model.over, None);
        }
        assert_eq!(press(&mut model, "r9\x088M\n"), limit(Some(8 << 20)));
        press(&mut model, &format!("r{}", "9".repeat(99)));
        let Some(Over::Limit(typed)) = &model.over else {
            panic!("{model:?}")
        };
        assert_eq!(typed.text.len(), MAX_TYPED);
        press(&mut model, "\x1b");
        // While a limit is being typed, the keys that otherwise act on the list are entered as
        // text.
        assert_eq!(press(&mut model, "rqcpM\x1b"), []);
        assert!(!model.paused);
        assert_eq!(press(&mut model, "jr"), []);
        assert_eq!(model.over, None);
        assert!(model.notice.is_some());
    }

    #[test]
    fn details_follow_their_row_and_close_when_it_ends() {
        let mut model = model(&["a", "b"]);
        press(&mut model, "\njj");
        assert_eq!((model.details, model.scroll, model.at), (true, 2, 0));
        read(&mut model, &["b", "a"]);
        assert_eq!((model.details, model.at), (true, 1));
        read(&mut model, &["b"]);
        assert_eq!((model.details, model.at), (false, 0));
        assert!(model.notice.unwrap().starts_with("a "));
    }

    #[test]
    fn q_quits_and_ctrl_c_quits_from_everywhere() {
        let mut model = model(&["vm"]);
        assert_eq!(press(&mut model, "?q"), []);
        assert_eq!(press(&mut model, "p\nq"), [Action::Quit]);
        assert!(model.paused);
        for before in ["", "?", "c", "r"] {
            press(&mut model, before);
            assert_eq!(model.key(Key::Interrupt), Some(Action::Quit), "{before}");
        }
    }
}
