//! Fuzz entries of what a source sends from VMM to VMM. Compiled for tests and
//! with the feature `fuzzing` only; `fuzz/driver.rs` runs them in the tests.

pub use crate::describe::fuzz::fuzz_description;
pub use crate::state::fuzz::fuzz_state_sections;

/// An entry by the name of its seeds' folder.
pub type Target = (&'static str, fn(&[u8]));

/// Every entry of this crate.
pub const TARGETS: &[Target] = &[
    ("description", fuzz_description),
    ("state_sections", fuzz_state_sections),
];

#[cfg(test)]
#[path = "../../../fuzz/driver.rs"]
mod driver;

#[cfg(test)]
mod tests {
    use super::driver::check;
    use super::*;

    #[test]
    fn i7_what_a_source_says_of_its_machine_stands_seeds_and_mutations() {
        check(TARGETS, |target| {
            let made = match target {
                "description" => crate::describe::fuzz::seeds(),
                _ => crate::state::fuzz::seeds(),
            };
            made.into_iter()
                .map(|(name, bytes)| (name.to_owned(), bytes))
                .collect()
        });
    }
}
