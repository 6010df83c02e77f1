//! What the documentation names exists: files, tests, commands.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const PAGES: [&str; 24] = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/benchmarks.md",
    "docs/dc.md",
    "docs/dc-pool.md",
    "docs/design.md",
    "docs/labs/01-minimal.md",
    "docs/labs/02-one-sided.md",
    "docs/labs/03-immediate.md",
    "docs/labs/04-bulk.md",
    "docs/labs/05-modes.md",
    "docs/labs/06-all-reduce.md",
    "docs/labs/07-kv-transfer.md",
    "docs/labs/README.md",
    "docs/messages.md",
    "docs/pager.md",
    "docs/perf.md",
    "docs/safety.md",
    "docs/software-device.md",
    "docs/testing.md",
    "docs/troubleshooting.md",
    "docs/verbs.md",
    "examples/README.md",
];

/// Beginnings of paths of this repository.
const PLACES: [&str; 7] = ["src/", "tests/", "benches/", "examples/", "docs/", "scripts/", ".ci/"];

#[test]
fn files_named_in_the_documentation_exist() {
    let mut missing = Vec::new();
    for page in PAGES {
        let text = read(page);
        let quoted = quotes(&text).into_iter();
        let linked = links(&text).into_iter().map(|link| Path::new(page).with_file_name("").join(link));
        // Of a command the first word is a file.
        let words = quoted.filter_map(|quote| quote.split(' ').next().map(str::to_owned));
        let named = words.filter(|word| PLACES.iter().any(|place| word.starts_with(place))).map(PathBuf::from);
        missing.extend(named.chain(linked).filter(|path| !exists(path)).map(|path| format!("{page}: {path:?}")));
    }
    assert!(missing.is_empty(), "\n{}\n", missing.join("\n"));
}

#[test]
fn tests_named_by_the_invariants_exist() {
    let functions = functions();
    let text = read("docs/safety.md");
    let mut missing = Vec::new();
    let mut invariants = 0;
    for section in text.split("\n### ").skip(1) {
        let (_, shown) = section.split_once("- Shown by").unwrap_or_else(|| panic!("nothing shows {section}"));
        let named = quotes(shown.split("\n#").next().unwrap_or_default());
        let tests: Vec<_> = named.iter().filter(|name| name.chars().all(|c| c.is_alphanumeric() || c == '_')).collect();
        assert!(!tests.is_empty(), "nothing shows {section}");
        missing.extend(tests.into_iter().filter(|name| !functions.contains(*name)).cloned());
        invariants += 1;
    }
    assert_eq!(invariants, 12);
    assert!(missing.is_empty(), "no such function: {missing:?}");
}

#[test]
fn tests_benches_and_examples_named_in_commands_exist() {
    let mut missing = Vec::new();
    for page in PAGES {
        let text = read(page);
        for (option, directory) in [("--test ", "tests"), ("--bench ", "benches"), ("--example ", "examples")] {
            for (at, _) in text.match_indices(option) {
                let rest = &text[at + option.len()..];
                let name: String = rest.chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect();
                if !exists(Path::new(&format!("{directory}/{name}.rs"))) {
                    missing.push(format!("{page}: {option}{name}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "\n{}\n", missing.join("\n"));
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A packaged crate has no `.ci`.
fn exists(path: &Path) -> bool {
    root().join(path).exists() || path.starts_with(".ci") && !root().join(".git").exists()
}

fn read(page: &str) -> String {
    fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"))
}

/// What stands between backticks on one line.
fn quotes(text: &str) -> BTreeSet<String> {
    text.lines().flat_map(|line| line.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// Targets of links within the repository.
fn links(text: &str) -> BTreeSet<String> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://") && !target.starts_with('#')).map(str::to_owned).collect()
}

/// Names of all functions in source, tests and examples.
fn functions() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut directories: Vec<PathBuf> = ["src", "tests", "examples"].map(|name| root().join(name)).into();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a source file");
                let names = text.split("fn ").skip(1);
                found.extend(names.filter_map(|rest| rest.split(['(', '<']).next()).map(str::to_owned));
            }
        }
    }
    found
}
