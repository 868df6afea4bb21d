#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dunlin_lane::fuzz::fuzz_handshake_records(bytes));
