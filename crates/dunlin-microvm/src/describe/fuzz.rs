//! The fuzz entry of machine descriptions.

use super::VmDescription;

/// Decodes arbitrary bytes as a description. If decoding succeeds, the configuration must be valid,
/// and encoding and decoding again must return the same description.
pub fn fuzz_description(bytes: &[u8]) {
    let Ok(description) = VmDescription::decode(bytes) else {
        return;
    };
    assert!(description.config.validate().is_ok());
    let again = VmDescription::decode(&description.encode());
    assert_eq!(again.ok(), Some(description));
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    use crate::config::{Config, Workload};
    use crate::wire::Reader;

    let described = |config| VmDescription {
        config,
        tsc_khz: 2_000_000,
        cpuid: super::Table::decode(&mut Reader::new(&[0, 0])).expect("the table is empty"),
    };
    let hot = Config {
        name: "sandpiper".to_owned(),
        workload: Workload::HotSet { share_percent: 90 },
        ..Config::default()
    };
    vec![
        ("default", described(Config::default()).encode()),
        ("hot-set", described(hot).encode()),
    ]
}
