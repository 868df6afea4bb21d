//! Runs the turns of a benchmark's variants, round after round.

use std::fmt::Display;

use anyhow::{Result, ensure};
use dunlin_bench::Results;

/// Runs every turn in each round. Each round begins with another turn, and every second one has the
/// opposite order, so that no turn is always the first or always follows the same one. After a
/// failure the other turns still run, so that the results of a long benchmark are not lost.
///
/// # Errors
/// Turns failed. The error names each with its round and its cause.
pub(super) fn rounds<T: Display>(
    count: usize,
    turns: &[T],
    results: &mut Results,
    mut run: impl FnMut(&T, &mut Results) -> Result<()>,
) -> Result<()> {
    let mut failed = Vec::new();
    for round in 1..=count {
        results.begin_round();
        let first = (round - 1) % turns.len().max(1);
        let (before, from) = turns.split_at(first);
        let mut order: Vec<_> = from.iter().chain(before).collect();
        if round % 2 == 0 && !order.is_empty() {
            order[1..].reverse();
        }
        for turn in order {
            if let Err(error) = run(turn, results) {
                let failure = format!("round {round}, {turn}: {error:#}");
                eprintln!("failed: {failure}");
                failed.push(failure);
            }
        }
    }
    ensure!(
        failed.is_empty(),
        "{} of {} turns failed and are not in the results:\n{}",
        failed.len(),
        count * turns.len(),
        failed.join("\n")
    );
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn a_failed_turn_is_named_and_the_others_keep_their_results() {
        let mut results = Results::default();
        let mut turns = 0;
        let done = rounds(
            2,
            &["first", "second"],
            &mut results,
            |&variant, results| {
                turns += 1;
                if turns == 1 {
                    bail!("the cause");
                }
                results.line("whole", variant).figure("total_s", 1.0).add();
                Ok(())
            },
        );
        let error = done.unwrap_err().to_string();
        assert_eq!(
            error,
            "1 of 4 turns failed and are not in the results:\nround 1, first: the cause"
        );
        let kept: Vec<_> = results
            .json()
            .iter()
            .map(|line| (line["variant"].clone(), line["rounds"].clone()))
            .collect();
        assert_eq!(
            kept,
            [("second".into(), 2.into()), ("first".into(), 1.into())]
        );
    }

    #[test]
    fn each_round_begins_with_another_turn_and_every_second_one_has_the_opposite_order() {
        let mut order = String::new();
        let done = rounds(4, &["a", "b", "c"], &mut Results::default(), |turn, _| {
            order += turn;
            Ok(())
        });
        assert!(done.is_ok());
        assert_eq!(order, "abcbaccabacb");
    }
}
