//! What a channel says of itself beside its route, such as a VM's name, and the
//! place that it has in a target.
//!
//! ```text
//!  tunnel open ram --param vm=web          target = "unix:/run/qemu/{vm}.sock"
//!            │                                              ▲
//!            └─ "vm=web" ═══ the wire ═══▶ checked ─────────┘ /run/qemu/web.sock
//! ```
//!
//! The value comes from a peer and enters a path or a program's arguments. It is
//! one name, which leads nowhere else than where the configuration has its place
//! (I7): no separator can be in it, and it is not a directory's own name.

use dunlin_proto::text::harmless;
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use dunlin_proto::fault::FaultCode;
use thiserror::Error;

use super::failure::Failure;
use super::route::Target;

/// The longest name of a parameter, in bytes. An operator chooses it.
const MAX_KEY_BYTES: usize = 32;
/// The longest value, in bytes: longer than VMs' names and identifiers are, and
/// with its name within what a message holds (255).
const MAX_VALUE_BYTES: usize = 128;
/// The longest path of a unix socket, in bytes (`sun_path`, unix(7)).
const MAX_PATH_BYTES: usize = 107;

/// A parameter: a name and a value that fits a target's place for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    key: String,
    value: String,
}

/// Why a text is no parameter. Whoever gives it is at fault.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadParameter {
    /// There is no `=`.
    #[error("a parameter is NAME=VALUE, such as vm=web")]
    NoValue,
    /// The name is none.
    #[error(
        "a parameter's name has 1 to {MAX_KEY_BYTES} small letters, digits and underscores and \
         begins with a letter"
    )]
    Name,
    /// The value is none that could stand for one file or one argument.
    #[error(
        "a parameter's value has 1 to {MAX_VALUE_BYTES} letters, digits, dots, underscores and \
         hyphens, begins with no hyphen, and is not \".\" or \"..\""
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
        // A program would take it for an option.
        && !text.starts_with('-')
        && !matches!(text, "." | "..")
}

/// Why a target's places for a parameter make no sense. The configuration is at
/// fault.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadParameterTarget {
    /// A brace that is no part of one.
    #[error("{text:?} has a brace that belongs to no parameter: write {{vm}} where one goes")]
    Brace {
        /// Where.
        text: String,
    },
    /// A channel has one parameter.
    #[error("it has places for {{{one}}} and {{{other}}}: a channel has one parameter")]
    Two {
        /// The first.
        one: String,
        /// The other.
        other: String,
    },
    /// The peer would choose what it reaches.
    #[error(
        "a peer would choose the host, the port or the program: only a socket's path and a \
         program's arguments may have a parameter"
    )]
    Chooses,
    /// Its peers are any programs.
    #[error("a relay's peers say no parameter: its target has no place for one")]
    Relay,
}

fn none_in(text: &str) -> Result<Option<String>, BadParameterTarget> {
    if text.contains(['{', '}']) {
        return Err(BadParameterTarget::Chooses);
    }
    Ok(None)
}

fn one_place<'a>(
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

/// Whether a target's path can be this one, with some parameter. Both are brought to one form as
/// they are written: no empty component, no `.`, no `..`.
pub(super) fn may_be_path(target: &Path, path: &Path) -> bool {
    let (target, path) = (plain(target), plain(path));
    if target == path {
        return true;
    }
    let (Some(template), Some(path)) = (target.to_str(), path.to_str()) else {
        return false;
    };
    let Ok(Some(key)) = one_place([template].into_iter()) else {
        return false;
    };
    let place = format!("{{{key}}}");
    let places = template.matches(&place).count();
    let fixed = template.len() - places * place.len();
    let Some(before) = template.find(&place) else {
        return false;
    };
    // Every place has the same value: its length follows, and so does the value.
    let value = path
        .len()
        .checked_sub(fixed)
        .filter(|left| left % places == 0)
        .and_then(|left| path.get(before..before + left / places));
    value.is_some_and(|value| is_value(value) && template.replace(&place, value) == path)
}

/// A path without components that change nothing.
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

/// The target of a channel: the route's, with what the peer gives in its place.
///
/// # Errors
/// What the peer gives is not what the route's target takes.
pub(super) fn fill(route: &str, target: &Target, given: &str) -> Result<Target, Failure> {
    let refuse = |text: String| {
        let text = format!("route {route:?}: {text}");
        Err(Failure::new(FaultCode::ParameterRefused, text))
    };
    // Routes were checked when they were made.
    let key = target.parameter().ok().flatten();
    let (key, parameter) = match (key, given) {
        (None, "") => return Ok(target.clone()),
        (None, _) => return refuse("its target takes no parameter".to_owned()),
        (Some(key), "") => return refuse(format!("its target needs a parameter {key}=VALUE")),
        (Some(key), given) => match given.parse::<Parameter>() {
            Ok(parameter) => (key, parameter),
            Err(error) => return refuse(format!("{:?}: {error}", harmless(given))),
        },
    };
    if parameter.key != key {
        let given = &parameter.key;
        return refuse(format!(
            "its target needs a parameter {key}, and not {given}"
        ));
    }
    let place = format!("{{{key}}}");
    let filled = |text: &str| text.replace(&place, &parameter.value);
    Ok(match target {
        Target::Unix(path) => {
            let path = filled(path.to_str().unwrap_or_default());
            if path.len() > MAX_PATH_BYTES {
                let text = format!(
                    "with {parameter} its target's path is longer than {MAX_PATH_BYTES} bytes"
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
    })
}

impl Target {
    /// The name of the parameter that it has a place for, if it has one.
    ///
    /// # Errors
    /// [`BadParameterTarget`]: its places cannot be.
    pub fn parameter(&self) -> Result<Option<String>, BadParameterTarget> {
        match self {
            // A path that is no text has no place.
            Self::Unix(path) => one_place(path.to_str().into_iter()),
            Self::Tcp(to) => none_in(to),
            Self::Exec(words) => match words.split_first() {
                Some((program, arguments)) => {
                    none_in(program)?;
                    one_place(arguments.iter().map(String::as_str))
                }
                None => Ok(None),
            },
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
    fn a_parameter_takes_its_place_and_nothing_else() {
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
    fn i7_a_place_is_one_parameter_in_a_path_or_an_argument() {
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
