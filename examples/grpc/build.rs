//! Compiles the protocol, without a `protoc`.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["words.proto"], ["proto"])?;
    // For reflection.
    let file = PathBuf::from(std::env::var("OUT_DIR")?).join("words.bin");
    std::fs::write(file, descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
