use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::model::Key;
use super::super::rows::{Cancel, Limited};
use super::*;

/// A migration that does not converge, a route that is idle, and a route without a socket.
fn model() -> Model {
    let mut vm = Row::new("1".into(), "VM web to b.example:4444".into(), "pre-copy 3");
    vm.active = true;
    vm.figures = Figures {
        sent: Some(812.0 * f64::from(1 << 20)),
        received: None,
        limit: Some(1 << 30),
        left: Some(35 << 20),
        dirty: Some(4096.0),
        downtime_ms: Some(210.4),
    };
    vm.troubles
        .push((Attention::Note, "does not converge".into()));
    vm.lanes = vec![
        Lane {
            number: 1,
            way: "sent",
            bytes: 3 << 30,
            share: 0.75,
            rate: Some(2048.0),
        },
        Lane {
            number: 2,
            way: "sent",
            bytes: 1 << 30,
            share: 0.25,
            rate: None,
        },
    ];
    vm.cancel = Ok(Cancel {
        socket: PathBuf::new(),
        what: "VM web to b.example:4444".into(),
        then: "VM web keeps running here".into(),
    });
    vm.limit = Ok(Limited::Session(PathBuf::new()));
    let mut lost = Row::new("2".into(), "route ram to 名前.example:18300".into(), "idle");
    lost.troubles
        .push((Attention::Wrong, "does not listen now: removed".into()));
    lost.troubles.push((Attention::Note, "another".into()));
    let mut idle = Row::new("3".into(), "route disk".into(), "idle");
    idle.figures.received = Some(0.0);
    let mut model = Model::default();
    model.read(vec![lost, vm, idle], UNIX_EPOCH);
    model
}

/// The lines of a screen of this size.
fn screen(model: &mut Model, width: u16, height: u16, colours: bool) -> (Vec<String>, Buffer) {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let painter = Painter { colours };
    terminal.draw(|frame| painter.draw(frame, model)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let cells = buffer.content().chunks(usize::from(width.max(1)));
    let line = |cells: &[ratatui::buffer::Cell]| cells.iter().map(|cell| cell.symbol()).collect();
    (cells.map(line).collect(), buffer)
}

fn lines(model: &mut Model) -> Vec<String> {
    screen(model, 80, 24, true).0
}

#[test]
fn the_list_has_a_line_for_each_row_and_one_for_its_worst_trouble() {
    let lines = lines(&mut model());
    let words = |line: usize| lines[line].split_whitespace().collect::<Vec<_>>();
    assert_eq!(words(0)[..4], ["dunlin", "top", "!", "1"]);
    assert!(lines[0].ends_with("00:00:00 UTC"), "{lines:?}");
    assert_eq!(
        words(1),
        [
            "WHAT", "STATE", "SENT/s", "RECV/s", "LIMIT", "LEFT", "DIRTY/s", "DOWNTIME"
        ]
    );
    assert!(lines[2].starts_with(">! route ram to "), "{lines:?}");
    assert_eq!(
        lines[3].trim_end(),
        "     does not listen now: removed (and 1 more)"
    );
    assert!(lines[4].starts_with(" * VM web to b.example"), "{lines:?}");
    let figures = ["pre-copy", "3", "812M", "1.0G", "35M", "4.0K", "210", "ms"];
    assert!(words(4).ends_with(&figures), "{lines:?}");
    assert_eq!(words(6), ["route", "disk", "idle", "0"]);
    assert_eq!(lines[23].trim_end(), KEYS);
    // The name of a column ends above the last character of its figures.
    let end = |line: &str, word: &str| {
        let (before, _) = line.split_once(word).unwrap();
        before.chars().count() + word.len()
    };
    assert_eq!(end(&lines[1], "SENT/s"), end(&lines[4], "812M"));
    assert_eq!(end(&lines[1], "DIRTY/s"), end(&lines[4], "4.0K"));
}

#[test]
fn without_colours_marks_and_words_are_the_same() {
    let (with, coloured) = screen(&mut model(), 80, 24, true);
    let (without, plain) = screen(&mut model(), 80, 24, false);
    assert_eq!(with, without);
    let colours = |buffer: &Buffer| {
        let cells = buffer.content().iter();
        cells
            .filter(|cell| (cell.fg, cell.bg) != (Color::Reset, Color::Reset))
            .count()
    };
    assert!(colours(&coloured) > 0);
    assert_eq!(colours(&plain), 0);
}

#[test]
fn details_show_the_shares_of_lanes() {
    let mut model = model();
    model.key(Key::Down);
    model.key(Key::Enter);
    let lines = lines(&mut model);
    assert!(
        lines[1].starts_with("VM web to b.example:4444: pre-copy 3"),
        "{lines:?}"
    );
    assert!(lines[2].starts_with("* does not converge"), "{lines:?}");
    let lane = |number: &str| {
        let mut found = lines
            .iter()
            .filter(|line| line.trim_start().starts_with(number));
        let words = found.next().unwrap().split_whitespace();
        words.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        lane("1 "),
        ["1", "sent", &"#".repeat(15), "75", "%", "2.0K", "3.0G"]
    );
    assert_eq!(lane("2 "), ["2", "sent", &"#".repeat(5), "25", "%", "1.0G"]);
}

#[test]
fn questions_say_what_happens_and_keep_the_list_visible() {
    let mut model = model();
    model.key(Key::Down);
    model.key(Key::Char('c'));
    let shown = lines(&mut model);
    assert!(shown[4].starts_with(">* VM web"), "{shown:?}");
    assert_eq!(
        shown[21].trim_end(),
        "Cancel the migration: VM web to b.example:4444?"
    );
    assert_eq!(shown[22].trim_end(), "VM web keeps running here");
    assert!(shown[23].starts_with("y cancels it"), "{shown:?}");
    model.key(Key::Escape);
    for key in ['r', '5', '0', 'M'] {
        model.key(Key::Char(key));
    }
    let shown = lines(&mut model);
    assert!(shown[21].contains("now 1.0G/s"), "{shown:?}");
    assert_eq!(shown[23].trim_end(), "> 50M_");
}

#[test]
fn a_long_list_shows_the_selected_row() {
    let mut model = Model::default();
    let row = |number: usize| {
        let mut row = Row::new(format!("{number:04}"), format!("VM {number}"), "");
        if number.is_multiple_of(3) {
            row.troubles.push((Attention::Note, "slow".into()));
        }
        row
    };
    model.read((0..1000).map(row).collect(), UNIX_EPOCH);
    for (key, number) in [
        (Key::Home, 0),
        (Key::PageDown, 10),
        (Key::End, 999),
        (Key::Up, 998),
    ] {
        model.key(key);
        let shown = lines(&mut model);
        let mut selected = shown.iter().filter(|line| line.starts_with('>'));
        let selected = selected.next().unwrap();
        assert!(selected.contains(&format!("VM {number} ")), "{shown:?}");
    }
}

#[test]
fn no_size_and_no_state_breaks_the_screen() {
    for keys in ["", "?", "\n", "c", "jc", "jr", "j\n", "jrx\n", "jjj"] {
        for width in (0..100).step_by(3) {
            for height in 0..12 {
                let mut model = model();
                for key in keys.chars() {
                    model.key(match key {
                        '\n' => Key::Enter,
                        key => Key::Char(key),
                    });
                }
                let (lines, _) = screen(&mut model, width, height, true);
                if width >= 24 && height >= 4 && keys.is_empty() {
                    assert!(
                        lines[2].starts_with(">! route"),
                        "{width} {height} {lines:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn texts_are_cut_and_broken_by_their_width_on_the_terminal() {
    for (text, width, cut) in [
        ("abc", 5, "abc  "),
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("名前名", 5, "名前…"),
        ("名前名", 4, "名… "),
        ("abc", 0, ""),
    ] {
        assert_eq!(fit(text, width), cut);
    }
    assert_eq!(wrap("a bb ccc dddddd e", 6), ["a bb", "ccc", "dddddd", "e"]);
    assert_eq!(wrap("", 6), [""]);
    assert_eq!(wrap("  a  b", 80), ["  a  b"]);
}

#[test]
fn a_column_without_a_value_gives_its_room_to_names() {
    let mut model = Model::default();
    let mut row = Row::new(
        "1".into(),
        "VM with-a-name-of-40-characters-0123456".into(),
        "idle",
    );
    row.figures.sent = Some(1.0);
    model.read(vec![row.clone()], UNIX_EPOCH);
    let shown = lines(&mut model);
    let words: Vec<&str> = shown[1].split_whitespace().collect();
    assert_eq!(words, ["WHAT", "STATE", "SENT/s"]);
    assert!(shown[2].contains(&row.what), "{shown:?}");
}
