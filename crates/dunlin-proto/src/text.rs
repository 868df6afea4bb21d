//! Escapes text from a peer before it is displayed.

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
