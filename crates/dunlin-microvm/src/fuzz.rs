//! Fuzz entries for data that one VMM sends to another. They are compiled only for tests and with
//! the feature `fuzzing`. `fuzz/driver.rs` runs them in the tests.

pub use crate::describe::fuzz::fuzz_description;
pub use crate::state::fuzz::fuzz_state_sections;

/// The name of a seed directory, and the fuzz entry that reads its seeds.
pub type Target = (&'static str, fn(&[u8]));

/// Every fuzz entry of this crate.
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
    fn i7_descriptions_and_sections_survive_seeds_and_mutations() {
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
