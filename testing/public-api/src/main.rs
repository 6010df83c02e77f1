//! Compares the public interface of each crate with its list in `docs/api`, for review.
//!
//! `cargo run -p public-api-files` fails if they differ, or if an interface contains types of other
//! crates than allowed. `-- --write` updates the lists, which equal `cargo public-api -sss`.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Marks the process that Cargo starts as rustdoc.
const AS_RUSTDOC: &str = "PUBLIC_API_AS_RUSTDOC";

struct Listed {
    package: &'static str,
    /// Crates besides the standard library whose types the interface may contain. Their major
    /// versions are major versions of this crate.
    foreign: &'static [&'static str],
}

const LISTED: [Listed; 5] = [
    Listed { package: "rdma-message-proto", foreign: &[] },
    Listed {
        package: "rdma-provider",
        // Implementations by its macro for `Flags`.
        foreign: &["bitflags", "serde_core"],
    },
    Listed { package: "rdma-soft", foreign: &["rdma_provider"] },
    Listed { package: "rdma-ibverbs", foreign: &["libc", "rdma_provider"] },
    Listed {
        package: "tokio-rdma",
        foreign: &[
            "bytes",
            "futures_core",
            "futures_sink",
            // The macro's `Unpin` of `Drive`.
            "pin_project",
            "rdma_ibverbs",
            "rdma_message_proto",
            "rdma_provider",
            "rdma_soft",
            "serde_core",
            "tokio",
        ],
    },
];

fn main() -> ExitCode {
    if std::env::var_os(AS_RUSTDOC).is_some() {
        return run_rustdoc();
    }
    let write = std::env::args().any(|argument| argument == "--write");
    match document().and_then(|()| {
        LISTED
            .iter()
            .try_fold(true, |good, listed| Ok::<_, Box<dyn Error>>(check(listed, write)? && good))
    }) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("to accept the change, run: cargo run -p public-api-files -- --write");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns true if the interface equals its list, or `write` updates the list, and no other crates
/// occur.
fn check(listed: &Listed, write: bool) -> Result<bool, Box<dyn Error>> {
    let items = interface(listed)?;
    let path = root().join("docs/api").join(format!("{}.txt", listed.package));
    if write {
        fs::write(&path, &items)?;
    }
    let known =
        fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let (before, after): (BTreeSet<_>, BTreeSet<_>) =
        (known.lines().collect(), items.lines().collect());
    before.difference(&after).for_each(|item| println!("{}: - {item}", listed.package));
    after.difference(&before).for_each(|item| println!("{}: + {item}", listed.package));
    let own = listed.package.replace('-', "_");
    let allowed = [own.as_str(), "alloc", "core", "std"];
    let foreign: BTreeSet<_> = items
        .lines()
        .flat_map(crates)
        .filter(|name| !allowed.contains(name) && !listed.foreign.contains(name))
        .collect();
    foreign
        .iter()
        .for_each(|name| println!("{}: unexpected crate {name} in the interface", listed.package));
    Ok(before == after && foreign.is_empty())
}

/// Documents all packages as JSON, from the same builds as `cargo doc --features mlx5,serde`.
///
/// The format is unstable, so rustdoc must believe to be a nightly. An environment variable does
/// that, but set for Cargo it would run build scripts again. So this program stands in for rustdoc
/// and sets it.
fn document() -> Result<(), Box<dyn Error>> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root()).args(["doc", "--no-deps", "--features", "mlx5,serde"]);
    LISTED.iter().for_each(|listed| {
        cargo.args(["--package", listed.package]);
    });
    cargo
        .env(AS_RUSTDOC, "1")
        .env("RUSTDOC", std::env::current_exe()?)
        .env("RUSTDOCFLAGS", "-Z unstable-options --output-format json --cap-lints allow");
    if !cargo.status()?.success() {
        return Err("cargo doc failed".into());
    }
    Ok(())
}

/// Runs rustdoc with the arguments of this process.
fn run_rustdoc() -> ExitCode {
    let status = Command::new("rustdoc")
        .args(std::env::args_os().skip(1))
        .env("RUSTC_BOOTSTRAP", "1")
        .status();
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("rustdoc: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the items of the package's JSON, a line each.
fn interface(listed: &Listed) -> Result<String, Box<dyn Error>> {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root().join("target"), |directory| root().join(directory));
    let json = target.join("doc").join(format!("{}.json", listed.package.replace('-', "_")));
    let api = public_api::Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()?;
    let mut items = String::new();
    for item in api.items() {
        writeln!(items, "{item}")?;
    }
    Ok(items)
}

/// Returns the crate names in an item's paths: the parts before a first `::`.
fn crates(item: &str) -> impl Iterator<Item = &str> {
    item.split(|character: char| {
        !(character.is_alphanumeric() || character == '_' || character == ':')
    })
    .filter_map(|path| path.split_once("::"))
    .map(|(first, _)| first)
    .filter(|first| first.starts_with(|character: char| character.is_lowercase()))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
