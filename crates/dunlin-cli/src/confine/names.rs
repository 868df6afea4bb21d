//! Loads the modules of host name resolution (nsswitch.conf(5)), because a confined process cannot
//! load code.

use std::fs;

use dunlin_linux::libraries::load_name_service;

/// Loads every module that resolves host names. Otherwise the C library would load each module at
/// the first lookup that needs the module.
pub(super) fn load_modules() {
    let Ok(text) = fs::read_to_string("/etc/nsswitch.conf") else {
        return;
    };
    for service in services(&text) {
        // Ignore an error, because the C library ignores a missing module too. "files" and "dns"
        // have no module: they are parts of the C library.
        let _ = load_name_service(service);
    }
}

/// The services of the database `hosts`, without their actions in brackets.
fn services(text: &str) -> Vec<&str> {
    let lines = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or(""));
    let databases = lines.filter_map(|line| line.split_once(':'));
    let hosts = databases.filter(|(database, _)| database.trim() == "hosts");
    let parts = hosts.flat_map(|(_, list)| list.split('[').flat_map(after_action));
    parts.collect()
}

/// Returns the words of a part of the line. Text in front of a closing bracket is an action, and is
/// left out.
fn after_action(part: &str) -> impl Iterator<Item = &str> {
    let words = part.split_once(']').map_or(part, |(_, after)| after);
    words.split_whitespace()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_comments_and_other_databases_are_left_out() {
        let text = "passwd: files systemd\n# hosts: ldap\n\
                    hosts:\tfiles mymachines [!UNAVAIL=return NOTFOUND=continue] dns[SUCCESS=return]nis # end\n";
        assert_eq!(services(text), ["files", "mymachines", "dns", "nis"]);
        assert!(services("networks: files").is_empty());
    }
}
