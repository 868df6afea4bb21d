//! The owner, group and mode of a route's unix sockets.

use dunlin_linux::accounts::{group_id, user_id};
use dunlin_tunnel::FileAccess;
use toml::Spanned;

use super::table::{Found, RouteTable, at};

/// Checks `socket_owner`, `socket_group` and `socket_mode` of a route. They apply to the socket of
/// `listen`, and to the sockets that `tunnel open` makes for the route.
pub(super) fn check(
    name: &str,
    table: &RouteTable,
    is_relay: bool,
    found: &mut Found<'_>,
) -> FileAccess {
    let makes_sockets = match &table.listen {
        Some(listen) => listen.get_ref().starts_with("unix:"),
        None => table.to.is_some() && !is_relay,
    };
    if !makes_sockets {
        let keys = [
            ("socket_owner", at(&table.socket_owner)),
            ("socket_group", at(&table.socket_group)),
            ("socket_mode", at(&table.socket_mode)),
        ];
        found.misplaced(name, "listen = \"unix:PATH\"", &keys);
    }
    let mut of = |value: &Option<Spanned<String>>, parse: fn(&str) -> Result<u32, String>| {
        found.or(value, None, |text| parse(text).map(Some))
    };
    FileAccess {
        owner: of(&table.socket_owner, parse_owner),
        group: of(&table.socket_group, parse_group),
        mode: of(&table.socket_mode, parse_mode),
    }
}

/// Parses the number or the name of a user, and returns the number.
pub(crate) fn parse_owner(text: &str) -> Result<u32, String> {
    parse_account("user", text, user_id)
}

/// Parses the number or the name of a group, and returns the number.
pub(crate) fn parse_group(text: &str) -> Result<u32, String> {
    parse_account("group", text, group_id)
}

fn parse_account(
    kind: &str,
    text: &str,
    find: fn(&str) -> std::io::Result<Option<u32>>,
) -> Result<u32, String> {
    if let Ok(number) = text.parse::<u32>() {
        // For chown(2), the largest number means "unchanged".
        return match number {
            u32::MAX => Err(format!(
                "{kind} number {text} out of range (0 to 4294967294)"
            )),
            number => Ok(number),
        };
    }
    match find(text) {
        Ok(Some(number)) => Ok(number),
        Ok(None) => Err(format!(
            "unknown {kind} {text:?}: write the name or the number of a {kind} of this host"
        )),
        Err(error) => Err(format!(
            "cannot look up {kind} {text:?}: {error}; write its number"
        )),
    }
}

/// Parses the mode of a socket, which is written in octal digits.
pub(crate) fn parse_mode(text: &str) -> Result<u32, String> {
    let is_octal = !text.is_empty() && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    let mode = is_octal
        .then(|| u32::from_str_radix(text, 8).ok())
        .flatten();
    mode.filter(|mode| *mode <= 0o777)
        .ok_or_else(|| format!("invalid mode {text:?}: write octal digits up to 0777, as in 0660"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_names_or_numbers_and_modes_are_octal() {
        assert_eq!(parse_owner("root"), Ok(0));
        assert_eq!(parse_group("107"), Ok(107));
        for bad in ["", "-1", "4294967295", "4294967296", "no such account"] {
            assert!(parse_owner(bad).is_err(), "{bad:?}");
            assert!(parse_group(bad).is_err(), "{bad:?}");
        }
        for (text, mode) in [("0660", 0o660), ("600", 0o600), ("0", 0), ("00777", 0o777)] {
            assert_eq!(parse_mode(text), Ok(mode), "{text}");
        }
        for bad in [
            "",
            "0680",
            "0o660",
            "+660",
            "u=rw",
            "1777",
            "07777777777777",
        ] {
            assert!(parse_mode(bad).is_err(), "{bad:?}");
        }
    }
}
