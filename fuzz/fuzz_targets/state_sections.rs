#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dunlin_microvm::fuzz::fuzz_state_sections(bytes));
