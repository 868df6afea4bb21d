//! Where a VM is after its migration has ended, by what both hosts say.

/// A VM on one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Where {
    /// The host does not have the VM.
    Absent,
    /// The VM does not run, but the host has its definition. The value is libvirt's reason.
    Off(String),
    Running,
    /// libvirt's reason.
    Paused(String),
    /// The host did not answer, for this reason.
    Unknown(String),
}

impl Where {
    /// Reads the output of `virsh domstate --reason`.
    pub(super) fn parse(text: &str) -> Self {
        let text = text.trim();
        let (state, reason) = text.split_once(" (").unwrap_or((text, ""));
        let reason = reason.trim_end_matches(')').to_owned();
        match state {
            "running" | "idle" | "in shutdown" | "pmsuspended" => Self::Running,
            "paused" => Self::Paused(reason),
            "shut off" | "crashed" => Self::Off(reason),
            _ => Self::Unknown(format!("unknown state {text:?}")),
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Absent => "it is not there".into(),
            Self::Off(reason) => format!("it is off ({reason})"),
            Self::Running => "it runs".into(),
            Self::Paused(reason) => format!("it is paused ({reason})"),
            Self::Unknown(why) => format!("no answer ({why})"),
        }
    }
}

/// The conclusion about where a VM is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// At the destination, and no longer active at the source.
    Moved,
    /// At the source, as before, and not active at the destination.
    Stayed,
    /// Only at the source, but paused.
    StayedPaused,
    /// No longer active: its guest powered off, or another program stopped it at the source.
    Off,
    /// Any other combination of states. If it lasts, an operator has to decide.
    Doubt(String),
}

/// Concludes where the VM is from what both hosts say. If `was_paused`, the VM was paused before
/// its migration, so it is also paused afterwards.
pub(super) fn judge(source: &Where, destination: &Where, was_paused: bool) -> Verdict {
    use Where::{Absent, Off, Paused, Running};
    match (source, destination) {
        (Absent | Off(_), Running) => Verdict::Moved,
        (Absent | Off(_), Paused(_)) if was_paused => Verdict::Moved,
        (Running, Absent | Off(_)) => Verdict::Stayed,
        (Paused(_), Absent | Off(_)) if was_paused => Verdict::Stayed,
        (Paused(_), Absent | Off(_)) => Verdict::StayedPaused,
        // These reasons show that no migration turned the VM off. After a migration, libvirt's
        // reason is `migrated`.
        (Off(reason), Absent | Off(_)) if reason == "shutdown" || reason == "destroyed" => {
            Verdict::Off
        }
        _ => Verdict::Doubt(format!(
            "at the source {}, at the destination {}",
            source.text(),
            destination.text()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_states_of_virsh_are_read() {
        assert_eq!(Where::parse("running (booted)\n"), Where::Running);
        assert_eq!(
            Where::parse("paused (migrating)"),
            Where::Paused("migrating".into())
        );
        assert_eq!(
            Where::parse("shut off (migrated)\n\n"),
            Where::Off("migrated".into())
        );
        assert!(matches!(Where::parse("no state (x)"), Where::Unknown(_)));
        assert!(matches!(Where::parse(""), Where::Unknown(_)));
    }

    /// Every pair of states, with the VM running before its migration.
    #[test]
    fn i1_i2_only_one_active_copy_is_moved_or_stayed() {
        let all = [
            Where::Absent,
            Where::Off("migrated".into()),
            Where::Off("shutdown".into()),
            Where::Running,
            Where::Paused("migrating".into()),
            Where::Unknown("down".into()),
        ];
        let mut table = String::new();
        for source in &all {
            for destination in &all {
                table.push(match judge(source, destination, false) {
                    Verdict::Moved => 'm',
                    Verdict::Stayed => 's',
                    Verdict::StayedPaused => 'p',
                    Verdict::Off => 'o',
                    Verdict::Doubt(_) => '?',
                });
            }
            table.push(' ');
        }
        assert_eq!(table, "???m?? ???m?? ooom?? sss??? ppp??? ?????? ");
        let paused = Where::Paused("user".into());
        assert_eq!(judge(&Where::Absent, &paused, true), Verdict::Moved);
        assert_eq!(judge(&paused, &Where::Absent, true), Verdict::Stayed);
    }
}
