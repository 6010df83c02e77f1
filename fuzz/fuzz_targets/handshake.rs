#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tokio_rdma::fuzzing::handshake(bytes));
