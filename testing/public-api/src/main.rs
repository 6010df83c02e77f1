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

/// A nightly whose rustdoc JSON `public-api` understands.
const NIGHTLY: &str = "nightly-2026-05-20";

struct Listed {
    package: &'static str,
    features: &'static str,
    /// Crates besides the standard library whose types the interface may contain. Their major
    /// versions are major versions of this crate.
    foreign: &'static [&'static str],
}

const LISTED: [Listed; 4] = [
    Listed {
        package: "rdma-provider",
        features: "serde",
        // Implementations by its macro for `Flags`.
        foreign: &["bitflags", "serde_core"],
    },
    Listed { package: "rdma-soft", features: "", foreign: &["rdma_provider"] },
    Listed {
        package: "rdma-ibverbs",
        features: "mlx5",
        foreign: &["rdma_provider", "rdma_mummy_sys"],
    },
    Listed {
        package: "tokio-rdma",
        features: "mlx5,serde",
        foreign: &[
            "bytes",
            "futures_core",
            "futures_sink",
            // The macro's `Unpin` of `Drive`.
            "pin_project",
            "rdma_mummy_sys",
            "rdma_provider",
            "rdma_soft",
            "serde_core",
            "tokio",
        ],
    },
];

fn main() -> ExitCode {
    let write = std::env::args().any(|argument| argument == "--write");
    match LISTED
        .iter()
        .try_fold(true, |good, listed| Ok::<_, Box<dyn Error>>(check(listed, write)? && good))
    {
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

fn interface(listed: &Listed) -> Result<String, Box<dyn Error>> {
    let target = root().join("target/public-api");
    let mut rustdoc = Command::new("rustup");
    rustdoc.current_dir(root()).args([
        "run",
        NIGHTLY,
        "cargo",
        "rustdoc",
        "--lib",
        "--package",
        listed.package,
    ]);
    rustdoc.args(["--features", listed.features, "--target-dir"]).arg(&target);
    rustdoc.args([
        "--",
        "-Z",
        "unstable-options",
        "--output-format",
        "json",
        "--cap-lints",
        "allow",
    ]);
    rustdoc
        .env_remove("CARGO")
        .env_remove("RUSTC")
        .env_remove("RUSTDOC")
        .env_remove("RUSTUP_TOOLCHAIN");
    if !rustdoc.status()?.success() {
        return Err(format!(
            "rustdoc failed for {}; install the toolchain {NIGHTLY} if it is missing",
            listed.package
        )
        .into());
    }
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
