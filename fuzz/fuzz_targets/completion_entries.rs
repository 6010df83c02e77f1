#![no_main]

use rdma_ibverbs::mlx5::direct::fuzzing;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzing::completion_entries(bytes));
