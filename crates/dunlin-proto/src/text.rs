//! Text that a peer has sent, made safe to show.

/// A text of a peer's, fit for a terminal and for a log of lines: characters that
/// would steer one, end a line or turn the direction of writing are spelled out.
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

/// Whether [`harmless`] spells this out: the control characters, those of eight
/// bits too (U+009B begins an escape sequence), both separators of Unicode's, and
/// what changes the direction of writing (UAX #9).
#[must_use]
pub fn is_harmful(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}' | '\u{61c}'
        )
        || matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i7_what_would_steer_a_terminal_is_spelled_out() {
        assert_eq!(harmless("no\x1b[2Jsocket\n"), "no\\u{1b}[2Jsocket\\n");
        assert_eq!(
            harmless("a\u{9b}b\u{202e}c\u{2028}"),
            "a\\u{9b}b\\u{202e}c\\u{2028}"
        );
        assert_eq!(harmless("vm \u{e4}\u{4e2d}"), "vm \u{e4}\u{4e2d}");
    }
}
