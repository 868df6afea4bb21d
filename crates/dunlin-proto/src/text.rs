//! Texts of errors, and escaping of text from a peer before it is displayed.

use std::error::Error;

/// Escapes `text` for a terminal or a line-based log: characters that control a
/// terminal, end a line or change the writing direction are replaced by their
/// escape sequence.
#[must_use]
pub fn harmless(text: &str) -> String {
    let mut harmless = String::with_capacity(text.len());
    for character in text.chars() {
        if is_harmful(character) {
            harmless.extend(character.escape_default());
        } else {
            harmless.push(character);
        }
    }
    harmless
}

/// Returns an error and its causes on one line; see [`with_causes`].
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    with_causes(error.to_string(), error.source())
}

/// Appends a cause and its own causes to `text`. If `text` already includes the text of a cause,
/// that text is not repeated.
#[must_use]
pub fn with_causes<'a>(mut text: String, cause: Option<&'a (dyn Error + 'a)>) -> String {
    let mut next = cause;
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !includes(&text, &cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// Whether `text` contains `cause` as a separate part, with punctuation or an end of the text on
/// both sides.
fn includes(text: &str, cause: &str) -> bool {
    text.match_indices(cause).any(|(at, _)| {
        let before = &text[..at];
        let after = &text[at + cause.len()..];
        let begins = before.is_empty() || before.ends_with(": ") || before.ends_with('(');
        let ends =
            after.is_empty() || after.starts_with([':', ';', ')']) || after.starts_with(" (");
        begins && ends
    })
}

/// Whether [`harmless`] escapes the character: control characters, including
/// the 8-bit ones (U+009B starts an escape sequence), Unicode's line and
/// paragraph separators, and everything that changes the writing direction (UAX
/// #9).
#[must_use]
pub fn is_harmful(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An error with a text and, if it has one, a cause. It displays only its own text.
    #[derive(Debug)]
    struct Failure(&'static str, Option<Box<Failure>>);

    impl std::fmt::Display for Failure {
        fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            formatter.write_str(self.0)
        }
    }

    impl Error for Failure {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn a_cause_is_appended_once() {
        let cause = || Some(Box::new(Failure("no such file", None)));
        assert_eq!(chain(&Failure("no key", cause())), "no key: no such file");
        let stated = Failure("key.pem: no such file; put it there", cause());
        let outer = Failure("no identity", Some(Box::new(stated)));
        assert_eq!(
            chain(&outer),
            "no identity: key.pem: no such file; put it there"
        );
        assert_eq!(
            with_causes("end".into(), Some(&outer)),
            format!("end: {}", chain(&outer))
        );
        let bracketed = Failure("unusable key (no such file): make one", cause());
        assert_eq!(chain(&bracketed), "unusable key (no such file): make one");
    }

    #[test]
    fn a_cause_that_is_only_part_of_other_words_is_appended() {
        for text in [
            "resettled: no peer",
            "peer reset: retry",
            "reset by peer",
            "cannot reset",
        ] {
            let failure = Failure(text, Some(Box::new(Failure("reset", None))));
            assert_eq!(chain(&failure), format!("{text}: reset"));
        }
    }

    #[test]
    fn i7_terminal_control_characters_are_escaped() {
        assert_eq!(harmless("no\x1b[2Jsocket\n"), "no\\u{1b}[2Jsocket\\n");
        assert_eq!(
            harmless("a\u{9b}b\u{202e}c\u{2028}"),
            "a\\u{9b}b\\u{202e}c\\u{2028}"
        );
        assert_eq!(harmless("vm \u{e4}\u{4e2d}"), "vm \u{e4}\u{4e2d}");
    }
}
