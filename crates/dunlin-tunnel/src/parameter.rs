//! Parameters of channels, such as a VM's name, and their placeholders in targets.
//!
//! ```text
//!  tunnel open ram --param vm=web          target = "unix:/run/qemu/{vm}.sock"
//!            │                                              ▲
//!            └─ "vm=web" ═══ the wire ═══▶ checked ─────────┘ /run/qemu/web.sock
//! ```
//!
//! The value comes from a peer and becomes part of a path or of a program's arguments. It is
//! restricted to one file name (I7): it contains no separator and is not `.` or `..`, so it cannot
//! reach a path other than those that the configuration allows.

use dunlin_proto::text::harmless;
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::ports::PortRange;
use thiserror::Error;

use super::failure::Failure;
use super::route::Target;

/// The longest parameter name, in bytes. The operator chooses the name.
const MAX_KEY_BYTES: usize = 32;
/// The longest value, in bytes. Names and identifiers of VMs are shorter. Together with the
/// parameter's name, the value stays within the limit of a message (255 bytes).
const MAX_VALUE_BYTES: usize = 128;
/// The longest path of a unix socket, in bytes (`sun_path`, unix(7)).
const MAX_PATH_BYTES: usize = 107;

/// The parameter of [`Target::Ports`].
pub(super) const PORT_KEY: &str = "port";

/// A parameter of a channel: a name and a value, both checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    key: String,
    value: String,
}

/// Why a text is not a valid parameter.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadParameter {
    /// There is no `=`.
    #[error("parameter without \"=\" (expected NAME=VALUE, such as vm=web)")]
    NoValue,
    /// The name is invalid.
    #[error(
        "invalid parameter name (1–{MAX_KEY_BYTES} lower-case letters, digits and \
         underscores, starting with a letter)"
    )]
    Name,
    /// The value is invalid: a path could not use it as one file name, or a program could read it
    /// as an option.
    #[error(
        "invalid parameter value (1–{MAX_VALUE_BYTES} letters, digits, dots, underscores and \
         hyphens, not starting with a hyphen, not \".\" or \"..\")"
    )]
    Value,
}

impl FromStr for Parameter {
    type Err = BadParameter;

    fn from_str(text: &str) -> Result<Self, BadParameter> {
        let (key, value) = text.split_once('=').ok_or(BadParameter::NoValue)?;
        if !is_key(key) {
            return Err(BadParameter::Name);
        }
        if !is_value(value) {
            return Err(BadParameter::Value);
        }
        Ok(Self {
            key: key.to_owned(),
            value: value.to_owned(),
        })
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}={}", self.key, self.value)
    }
}

fn is_key(text: &str) -> bool {
    let each = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    text.len() <= MAX_KEY_BYTES
        && text.bytes().all(each)
        && text.starts_with(|first: char| first.is_ascii_lowercase())
}

fn is_value(text: &str) -> bool {
    let each = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=MAX_VALUE_BYTES).contains(&text.len())
        && text.bytes().all(each)
        // A program would parse a value with a leading hyphen as an option.
        && !text.starts_with('-')
        && !matches!(text, "." | "..")
}

/// Why the placeholders of a target are invalid. The configuration is at fault.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadParameterTarget {
    /// A brace that is not part of a placeholder.
    #[error("brace in {text:?} is not part of a placeholder such as {{vm}}")]
    Brace {
        /// The path or argument.
        text: String,
    },
    /// The target has placeholders for two parameters, but a channel has only one.
    #[error(
        "placeholders for two parameters, {{{one}}} and {{{other}}}: a channel has one parameter"
    )]
    Two {
        /// The first name.
        one: String,
        /// The other name.
        other: String,
    },
    /// A placeholder lets the peer choose the host, the port or the program.
    #[error(
        "a placeholder would let a peer choose the host, the port or the program; only a \
         socket's path and a program's arguments may have one"
    )]
    Chooses,
    /// The target of a relay has a placeholder. The clients of a relay send no parameter except a
    /// port.
    #[error(
        "a relay's target cannot have a placeholder, because a relay's clients can choose only a \
         port: remove the placeholder, or use stripe mode"
    )]
    Relay,
}

fn no_placeholder(text: &str) -> Result<Option<String>, BadParameterTarget> {
    if text.contains(['{', '}']) {
        return Err(BadParameterTarget::Chooses);
    }
    Ok(None)
}

fn one_placeholder<'a>(
    texts: impl Iterator<Item = &'a str>,
) -> Result<Option<String>, BadParameterTarget> {
    let mut found: Option<&str> = None;
    for text in texts {
        let brace = || BadParameterTarget::Brace {
            text: text.to_owned(),
        };
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            let behind = rest[at..].strip_prefix('{').ok_or_else(brace)?;
            let (key, behind) = behind.split_once('}').ok_or_else(brace)?;
            if !is_key(key) {
                return Err(brace());
            }
            match found {
                Some(one) if one != key => {
                    return Err(BadParameterTarget::Two {
                        one: one.to_owned(),
                        other: key.to_owned(),
                    });
                }
                _ => found = Some(key),
            }
            rest = behind;
        }
    }
    Ok(found.map(str::to_owned))
}

/// Whether a target's path equals `path` for at least one value of the parameter. Both paths are
/// normalised as text: empty components, `.` and `..` are resolved.
pub(super) fn may_be_path(target: &Path, path: &Path) -> bool {
    let (target, path) = (plain(target), plain(path));
    if target == path {
        return true;
    }
    let (Some(template), Some(path)) = (target.to_str(), path.to_str()) else {
        return false;
    };
    let Ok(Some(key)) = one_placeholder([template].into_iter()) else {
        return false;
    };
    let placeholder = format!("{{{key}}}");
    let count = template.matches(&placeholder).count();
    let fixed = template.len() - count * placeholder.len();
    let Some(before) = template.find(&placeholder) else {
        return false;
    };
    // Every placeholder is replaced by the same value, so the lengths of the path and of the target
    // determine the length of the value.
    let value = path
        .len()
        .checked_sub(fixed)
        .filter(|left| left % count == 0)
        .and_then(|left| path.get(before..before + left / count));
    value.is_some_and(|value| is_value(value) && template.replace(&placeholder, value) == path)
}

/// The path without empty components, `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

/// Returns the target of a channel: the route's target with the value of the peer's
/// parameter inserted.
///
/// # Errors
/// The peer's parameter is missing, is invalid, or does not fit the route's target.
pub(super) fn fill(route: &str, target: &Target, given: &str) -> Result<Target, Failure> {
    let refuse = |text: String| {
        let text = format!("route {route:?}: {text}");
        Err(Failure::new(FaultCode::ParameterRefused, text))
    };
    // The target is valid, because [`Routes`](crate::Routes) accepts only valid targets.
    let key = target.parameter().ok().flatten();
    let (key, parameter) = match (key, given) {
        (None, "") => return Ok(target.clone()),
        (None, _) => return refuse("the target takes no parameter".to_owned()),
        (Some(key), "") => return refuse(format!("the target needs a parameter {key}=VALUE")),
        (Some(key), given) => match given.parse::<Parameter>() {
            Ok(parameter) => (key, parameter),
            Err(error) => return refuse(format!("{:?}: {error}", harmless(given))),
        },
    };
    if parameter.key != key {
        let given = &parameter.key;
        return refuse(format!("the target needs a parameter {key}, not {given}"));
    }
    let placeholder = format!("{{{key}}}");
    let filled = |text: &str| text.replace(&placeholder, &parameter.value);
    Ok(match target {
        Target::Unix(path) => {
            let path = filled(path.to_str().unwrap_or_default());
            if path.len() > MAX_PATH_BYTES {
                let text = format!(
                    "the target's path with {parameter} is longer than {MAX_PATH_BYTES} bytes"
                );
                return refuse(text);
            }
            Target::Unix(path.into())
        }
        Target::Tcp(to) => Target::Tcp(to.clone()),
        Target::Exec(words) => {
            let words = words.iter().enumerate();
            let word = |(at, word): (usize, &String)| match at {
                0 => word.clone(),
                _ => filled(word),
            };
            Target::Exec(words.map(word).collect())
        }
        Target::Ports { addresses, ports } => match parse_port(&parameter.value) {
            Some(one) if ports.contains(one.first()) => Target::Ports {
                addresses: addresses.clone(),
                ports: one,
            },
            _ => return refuse(format!("{parameter} is not one of the ports {ports}")),
        },
    })
}

/// Parses a port. Only one spelling is accepted: decimal, without a sign or leading zeros.
pub(super) fn parse_port(text: &str) -> Option<PortRange> {
    let port = text.parse::<u16>().ok()?;
    let one = PortRange::new(port, port)?;
    (port.to_string() == text).then_some(one)
}

impl Target {
    /// The name of the parameter for which the target has a placeholder, if it has one.
    ///
    /// # Errors
    /// [`BadParameterTarget`]: the placeholders are invalid.
    pub fn parameter(&self) -> Result<Option<String>, BadParameterTarget> {
        match self {
            // A path that is not UTF-8 has no placeholder.
            Self::Unix(path) => one_placeholder(path.to_str().into_iter()),
            Self::Tcp(to) => no_placeholder(to),
            Self::Exec(words) => match words.split_first() {
                Some((program, arguments)) => {
                    no_placeholder(program)?;
                    one_placeholder(arguments.iter().map(String::as_str))
                }
                None => Ok(None),
            },
            Self::Ports { .. } => Ok(Some(PORT_KEY.to_owned())),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn unix() -> Target {
        Target::Unix("/run/qemu/{vm}/{vm}.sock".into())
    }

    fn exec() -> Target {
        let words = ["/bin/x", "--vm={vm}", "{vm}", "-x"];
        Target::Exec(words.map(str::to_owned).to_vec())
    }

    #[test]
    fn a_parameter_fills_its_placeholders_and_nothing_else() {
        assert_eq!(
            fill("ram", &unix(), "vm=web-1.a_B").unwrap(),
            Target::Unix("/run/qemu/web-1.a_B/web-1.a_B.sock".into())
        );
        let Target::Exec(words) = fill("ram", &exec(), "vm=web").unwrap() else {
            panic!()
        };
        assert_eq!(words, ["/bin/x", "--vm=web", "web", "-x"]);
        let plain = Target::Unix("/run/qemu/in.sock".into());
        assert_eq!(fill("ram", &plain, "").unwrap(), plain);
    }

    #[test]
    fn i7_a_hostile_parameter_reaches_no_path_and_no_program() {
        let long = format!("vm={}", "a".repeat(MAX_VALUE_BYTES + 1));
        let too_long_a_path = format!("vm={}", "a".repeat(60));
        let long_key = format!("{}=a", "v".repeat(MAX_KEY_BYTES + 1));
        for given in [
            "",
            "web",
            "=",
            "vm=",
            "=web",
            "vm=.",
            "vm=..",
            "vm=../x",
            "vm=a/b",
            "vm=/etc/passwd",
            "vm=a\0b",
            "vm=\0",
            "vm=a b",
            "vm=a\n",
            "vm=-rf",
            "vm=ä",
            "vm={vm}",
            "vm=a=b",
            "wm=web",
            "VM=web",
            "vm =web",
            "vm= web",
            "1vm=web",
            &long,
            &long_key,
        ] {
            for target in [unix(), exec()] {
                let refused = fill("ram", &target, given).unwrap_err();
                assert_eq!(refused.code(), FaultCode::ParameterRefused, "{given:?}");
                assert!(!refused.text().contains(char::is_control), "{refused}");
            }
        }
        assert!(fill("ram", &exec(), &too_long_a_path).is_ok());
        let refused = fill("ram", &unix(), &too_long_a_path).unwrap_err();
        assert!(refused.text().contains("107 bytes"), "{refused}");
        for target in [
            Target::Unix("/run/x".into()),
            Target::Tcp("host:1".to_owned()),
            Target::Exec(vec!["/bin/cat".to_owned()]),
        ] {
            let refused = fill("ram", &target, "vm=web").unwrap_err();
            assert!(refused.text().contains("takes no parameter"), "{refused}");
        }
    }

    #[test]
    fn i7_a_peer_names_only_a_port_of_the_configured_range() {
        let addresses = vec!["127.0.0.1".parse().unwrap()];
        let target = |first, last| Target::Ports {
            addresses: addresses.clone(),
            ports: PortRange::new(first, last).unwrap(),
        };
        let range = target(49152, 49215);
        for port in [49152, 49200, 49215] {
            let filled = fill("ram", &range, &format!("port={port}")).unwrap();
            assert_eq!(filled, target(port, port));
        }
        for given in [
            "",
            "port=",
            "port=49151",
            "port=49216",
            "port=22",
            "port=0",
            "port=049152",
            "port=+49152",
            "port=114688",
            "port=4294967296",
            "port=10.77.0.2",
            "port=49152.",
            "vm=49152",
        ] {
            let refused = fill("ram", &range, given).unwrap_err();
            assert_eq!(refused.code(), FaultCode::ParameterRefused, "{given:?}");
        }
    }

    #[test]
    fn i7_placeholders_are_of_one_parameter_in_a_path_or_an_argument() {
        assert_eq!(unix().parameter(), Ok(Some("vm".to_owned())));
        assert_eq!(exec().parameter(), Ok(Some("vm".to_owned())));
        for path in [
            "/run/{",
            "/run/}",
            "/run/{}",
            "/run/{VM}",
            "/run/{a/b}",
            "/{vm",
        ] {
            let bad = Target::Unix(path.into()).parameter();
            assert!(
                matches!(bad, Err(BadParameterTarget::Brace { .. })),
                "{path}: {bad:?}"
            );
        }
        let two = Target::Unix("/run/{vm}/{disk}".into()).parameter();
        assert!(
            matches!(two, Err(BadParameterTarget::Two { .. })),
            "{two:?}"
        );
        let host = Target::Tcp("{vm}.example:1".to_owned()).parameter();
        assert_eq!(host, Err(BadParameterTarget::Chooses));
        let program = Target::Exec(vec!["/bin/{vm}".to_owned()]).parameter();
        assert_eq!(program, Err(BadParameterTarget::Chooses));
    }
}
