#![no_main]

use tokio_rdma::{QueuePairEndpoint, RemoteRegion};

// Bytes that decode as an endpoint or region encode to the same bytes.
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(endpoint) = QueuePairEndpoint::from_bytes(bytes) {
        assert_eq!(endpoint.to_bytes(), bytes);
    }
    if let Some(region) = RemoteRegion::from_bytes(bytes) {
        assert_eq!(region.to_bytes(), bytes);
        assert!(region.slice(..).is_ok());
    }
});
