//! Loads the modules of host name resolution (nsswitch.conf(5)), because a confined process cannot
//! load code.

use std::fs;

use dunlin_linux::libraries::load_name_service;

/// Loads every module that resolves host names. The C library itself would load each at the first
/// lookup that needs it.
pub(super) fn load_modules() {
    let Ok(text) = fs::read_to_string("/etc/nsswitch.conf") else {
        return;
    };
    for service in services(&text) {
        // The C library ignores a missing module, too. "files" and "dns" are parts of it.
        let _ = load_name_service(service);
    }
}

/// The services of the database `hosts`, without their actions in brackets.
fn services(text: &str) -> Vec<&str> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or(""));
    let databases = lines.filter_map(|line| line.split_once(':'));
    let hosts = databases.filter(|(database, _)| database.trim() == "hosts");
    let parts = hosts.flat_map(|(_, list)| list.split('[').flat_map(after_action));
    parts.collect()
}

/// The words of a part that begins after an opening bracket, or has none.
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
