//! The table of verdicts that `dunlin doctor` must reach, `tests/kernel/doctor/expected.txt`.

const TABLE: &str = include_str!("../../kernel/doctor/expected.txt");
/// The column for kernels without a column of their own.
const OTHERS: &str = "*";

/// What a check must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The check.
    pub check: &'static str,
    /// The check's state; `None` if it is not compared.
    pub state: Option<&'static str>,
    /// The check's value; `None` if it is not compared.
    pub value: Option<&'static str>,
}

/// The column of the kernel with this release, or the column `*` if the kernel has none of its own.
///
/// # Panics
/// The table is malformed.
#[must_use]
pub fn of_kernel(release: &str) -> Vec<Expected> {
    let number = column(release).unwrap_or(header().len() - 1);
    let rows = rows().skip(1).map(|cells| {
        let (check, cell) = (cells[0], cells[number]);
        let (state, value) = match cell.split_once('=') {
            Some((state, value)) => (state, Some(value)),
            None => (cell, None),
        };
        Expected {
            check,
            state: (state != "-").then_some(state),
            value,
        }
    });
    rows.collect()
}

/// Whether a column of the table names this kernel.
#[must_use]
pub fn names_kernel(release: &str) -> bool {
    column(release).is_some()
}

fn column(release: &str) -> Option<usize> {
    let is_named = |cell: &&str| *cell != OTHERS && release.starts_with(cell);
    header().iter().skip(1).position(is_named).map(|at| at + 1)
}

fn header() -> Vec<&'static str> {
    rows().next().expect("the table has a header")
}

fn rows() -> impl Iterator<Item = Vec<&'static str>> {
    let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 5, "{line}");
        cells
    })
}
