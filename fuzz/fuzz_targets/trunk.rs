#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dunlin_proto::fuzz::fuzz_trunk(bytes));
