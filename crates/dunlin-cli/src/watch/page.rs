//! The page, and what a browser may do with it.

use sha2::{Digest, Sha256};

const HTML: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");

/// The page as one file.
pub(super) fn html() -> String {
    HTML.replace("/*style*/", STYLE)
        .replace("/*script*/", SCRIPT)
}

/// The content security policy of the page: its own style and script and no others, and requests to
/// this process only.
pub(super) fn policy() -> String {
    format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
         require-trusted-types-for 'script'",
        base64(&Sha256::digest(STYLE)),
        base64(&Sha256::digest(SCRIPT)),
    )
}

/// Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            text.push(match digit <= group.len() {
                true => DIGITS[(bits >> (18 - 6 * digit) & 63) as usize].into(),
                false => '=',
            });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_has_the_vectors_of_the_rfc() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    /// Names from peers are inserted as text.
    #[test]
    fn i7_the_page_loads_nothing_and_inserts_no_markup() {
        let page = html();
        for forbidden in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "DOMParser",
            "eval(",
            "new Function",
            "http://",
            "https://",
            " src=",
            "@import",
            "url(",
            " style=",
        ] {
            let found = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!found.contains(forbidden), "{forbidden}");
        }
    }
}
