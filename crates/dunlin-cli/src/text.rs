//! Text for terminals and logs.

/// Text that may be a peer's, fit for a line on a terminal.
pub(crate) use dunlin::engine::harmless as clean;

/// An error with its causes, each of which is said once: some name theirs themselves.
pub(crate) fn chained(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// The same for a text of ours that has several lines, each with something of a
/// peer's in it: how a migration has failed.
pub(crate) fn clean_lines(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(clean).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let cause = anyhow!("no such file");
        assert_eq!(
            chained(
                &cause
                    .context("key.pem: no such file; put it there")
                    .context("no identity")
            ),
            "no identity: key.pem: no such file; put it there"
        );
        assert_eq!(chained(&anyhow!("b").context("a")), "a: b");
    }
}
