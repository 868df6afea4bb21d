//! Text for terminals and logs.

use dunlin_proto::text::is_harmful;

/// Text that a peer may have sent, made safe for one line on a terminal.
pub(crate) use dunlin_proto::text::harmless as clean;

/// An error and its causes. Each text is printed once, although some errors include the text of
/// their cause.
pub(crate) fn chained(error: &anyhow::Error) -> String {
    dunlin_proto::text::chain(error.as_ref())
}

/// A number and what it counts: `0 lanes`, `1 lane`, `2 lanes`.
pub(crate) fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Like [`clean`], but for a text of several lines, each of which may contain text from a peer. All
/// but the first are indented, so that none looks like a line of the log.
pub(crate) fn clean_lines(text: &str) -> String {
    let lines = text.split('\n').map(|line| clean(line.trim_start()));
    lines.collect::<Vec<_>>().join("\n  ")
}

/// Escapes the characters that control terminals. JSON allows them only inside strings, where
/// `\uXXXX` is equivalent. The code points of these characters have at most four hexadecimal
/// digits.
pub(crate) fn plain(json: String) -> String {
    if !json.contains(is_harmful) {
        return json;
    }
    let mut plain = String::with_capacity(json.len());
    for character in json.chars() {
        if is_harmful(character) {
            plain.push_str(&format!("\\u{:04x}", u32::from(character)));
        } else {
            plain.push(character);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_cause_is_printed_once() {
        let cause = anyhow!("no such file");
        assert_eq!(
            chained(
                &cause
                    .context("key.pem: no such file; create it")
                    .context("no identity")
            ),
            "no identity: key.pem: no such file; create it"
        );
        assert_eq!(chained(&anyhow!("b").context("a")), "a: b");
    }

    #[test]
    fn a_noun_is_in_the_plural_unless_it_counts_one() {
        let texts = [0, 1, 2].map(|number| count(number, "lane"));
        assert_eq!(texts, ["0 lanes", "1 lane", "2 lanes"]);
    }

    #[test]
    fn i7_only_the_first_line_of_an_error_is_not_indented() {
        let error = "lost\n  because b\n2026-11-25T00:00:00.000000Z info  moved\x1b[2J";
        assert_eq!(
            clean_lines(error),
            "lost\n  because b\n  2026-11-25T00:00:00.000000Z info  moved\\u{1b}[2J"
        );
    }
}
