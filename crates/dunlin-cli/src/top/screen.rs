//! The terminal and its keys. A [`Screen`] uses raw mode and the alternate screen, until it is
//! dropped or a thread panics.

use std::io::{self, IsTerminal, Stdout, stdin, stdout};
use std::panic;
use std::process::exit;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

use super::draw::Painter;
use super::model::{Key, Model};

/// The exit code of Rust programs that panic.
const PANICKED: i32 = 101;

/// The terminal of this process while it shows `dunlin top`.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    painter: Painter,
}

/// Whether this process has a terminal for a screen and keys.
pub(super) fn has_terminal() -> bool {
    stdin().is_terminal() && stdout().is_terminal()
}

impl Screen {
    /// Takes over the terminal. It is restored when the value is dropped, and before a panic of any
    /// thread is printed. After a panic the process ends.
    pub(super) fn enter() -> io::Result<Self> {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |why| {
            leave();
            print(why);
            exit(PANICKED);
        }));
        let terminal = Terminal::new(CrosstermBackend::new(stdout()))?;
        let screen = Self {
            terminal,
            painter: Painter::from_environment(),
        };
        enable_raw_mode()?;
        execute!(stdout(), EnterAlternateScreen, Hide)?;
        Ok(screen)
    }

    pub(super) fn draw(&mut self, model: &mut Model) -> io::Result<()> {
        let painter = self.painter;
        self.terminal.draw(|frame| painter.draw(frame, model))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        leave();
    }
}

/// Restores the terminal. Errors are ignored: the terminal may be closed.
pub(super) fn leave() {
    let _ = disable_raw_mode();
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
}

/// Waits for the next event; returns the key, if it is one that the screen uses.
pub(super) fn next() -> io::Result<Option<Key>> {
    Ok(match event::read()? {
        Event::Key(key) if key.kind != KeyEventKind::Release => key_of(&key),
        _ => None,
    })
}

fn key_of(key: &KeyEvent) -> Option<Key> {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return (key.code == KeyCode::Char('c')).then_some(Key::Interrupt);
    }
    Some(match key.code {
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Char(character) => Key::Char(character),
        _ => return None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The environment variable that is set in the process that panics.
    const PANICS: &str = "DUNLIN_TEST_PANICS";
    const NAME: &str = "top::screen::tests::a_panic_of_a_thread_restores_the_terminal_first";

    #[test]
    fn a_panic_of_a_thread_restores_the_terminal_first() {
        if std::env::var_os(PANICS).is_some() {
            let _screen = Screen::enter().unwrap();
            let panicked = std::thread::spawn(|| panic!("planted")).join();
            unreachable!("the process goes on after {panicked:?}");
        }
        let test = std::env::current_exe().unwrap();
        let line = format!(
            "{PANICS}=1 {} --exact {NAME} --nocapture; echo \"code $?\"; stty -a",
            test.display()
        );
        // script(1) runs the line in a terminal, and copies what it prints.
        let mut script = Command::new("script");
        let done = script.args(["-qec", &line, "/dev/null"]).output().unwrap();
        let out = String::from_utf8_lossy(&done.stdout);
        let (_, rest) = out
            .split_once("\x1b[?1049h")
            .unwrap_or_else(|| panic!("{done:?}"));
        let (drawn, rest) = rest.split_once("\x1b[?1049l").unwrap();
        assert!(!drawn.contains("planted"), "{out}");
        for part in ["\x1b[?25h", "planted", "code 101", " icanon", " echo "] {
            assert!(rest.contains(part), "no {part:?} in {rest}");
        }
    }
}
