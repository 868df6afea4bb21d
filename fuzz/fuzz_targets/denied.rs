#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dunlin::fuzz::fuzz_denied(bytes));
