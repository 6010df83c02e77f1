//! Rules on the source that neither compiler nor lints enforce.
//!
//! - A module uses only modules of its own layer and of lower layers.
//! - Each `unsafe` names an invariant of docs/safety.md.
//! - Locks and events come from rdma-provider.
//! - A file has a maximum length.
//!
//! Manifests and lints enforce dependencies between crates and where `unsafe` is allowed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of this crate, from the lowest layer to the highest.
const LAYERS: [&[&str]; 10] = [
    &[
        "blocking",
        "clock",
        "contained",
        "coop",
        "error",
        "forked",
        "readable",
        "software",
        "sync",
        "types",
        "waiters",
    ],
    &["dispatch"],
    &["verbs"],
    &["memory"],
    &["engine"],
    &["op"],
    &["dc"],
    &["cm", "doctor"],
    &["connection", "raw"],
    &["peers", "stream"],
];

const LONGEST: usize = 900;

#[test]
fn modules_use_only_their_own_and_lower_layers() {
    let wrong = files("src")
        .iter()
        .flat_map(|file| names_above(&file.name, &file.text))
        .collect::<Vec<_>>();
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
fn each_unsafe_names_an_invariant() {
    let known = invariants(&read("docs/safety.md"));
    assert!(
        known.contains("S1") && known.contains("E2"),
        "docs/safety.md has no headings of invariants: {known:?}"
    );
    let unexplained =
        all_files().iter().flat_map(|file| without_invariant(file, &known)).collect::<Vec<_>>();
    assert!(unexplained.is_empty(), "\n{}\n", unexplained.join("\n"));
}

// With others, code of the program could run under a lock.
// Shows F2.
#[test]
fn locks_and_events_are_those_of_rdma_provider() {
    let wrong = all_files().iter().flat_map(foreign_locks_and_events).collect::<Vec<_>>();
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
fn files_are_within_the_line_limit() {
    let long = all_files()
        .into_iter()
        .filter(|file| file.text.lines().count() > LONGEST)
        .map(|file| file.name);
    assert_eq!(long.collect::<Vec<_>>(), [""; 0], "more than {LONGEST} lines");
}

fn names_above(file: &str, text: &str) -> Vec<String> {
    let path = file.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    let own: Vec<&str> = path.split('/').collect();
    let Some(layer) = layer_of(own[0]) else { return Vec::new() };
    let mut found = Vec::new();
    for (number, line) in code(text) {
        for module in rooted(line, own.len()) {
            match layer_of(module) {
                Some(named) if named <= layer => {}
                Some(_) => {
                    found.push(format!("{file}:{number}: uses `{module}` of a higher layer"))
                }
                None => found
                    .push(format!("{file}:{number}: uses `crate::{module}`, which has no layer")),
            }
        }
    }
    found
}

fn foreign_locks_and_events(file: &File) -> Vec<String> {
    let own = ["src/sync.rs", "src/engine/loom", "crates/rdma-provider/src/"];
    if own.iter().any(|own| file.name.starts_with(own)) {
        return Vec::new();
    }
    let foreign = |line: &str| {
        let locks = ["Mutex", "RwLock", "Condvar"].iter().any(|lock| line.contains(lock));
        let events = ["trace!", "debug!", "info!", "warn!", "error!", "event!"];
        line.contains("parking_lot")
            || line.contains("std::sync::") && locks
            || events.iter().any(|event| line.contains(&format!("tracing::{event}")))
    };
    let lines = code(&file.text).filter(|(_, line)| foreign(line));
    lines.map(|(number, line)| format!("{}:{number}: {line}", file.name)).collect()
}

fn layer_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// Returns the first names of paths that begin with `crate` or with `depth` times `super`.
fn rooted(line: &str, depth: usize) -> Vec<&str> {
    let mut found = Vec::new();
    for root in ["crate::".to_owned(), "super::".repeat(depth)] {
        for (at, _) in line.match_indices(&root) {
            if line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let rest = &line[at + root.len()..];
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            // A group gives an empty name, which has no layer and is refused.
            found.push(&rest[..end]);
        }
    }
    found
}

/// Returns numbered lines without comments and tests.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
    let lines = lines.take_while(|(_, line)| {
        !line.starts_with("#[cfg(test)]") && !line.starts_with("#[cfg(all(test")
    });
    lines.filter(|(_, line)| !line.starts_with("//"))
}

fn without_invariant(file: &File, known: &BTreeSet<String>) -> Vec<String> {
    let lines: Vec<&str> = file.text.lines().map(str::trim).collect();
    let mut found = Vec::new();
    let code = file.text.lines().take_while(|line| !line.starts_with("#[cfg(test)]")).count();
    for (at, _) in
        lines[..code].iter().enumerate().filter(|(_, line)| line.starts_with("// SAFETY:"))
    {
        let comment = lines[at..].iter().take_while(|line| line.starts_with("//"));
        let names = comment.flat_map(|line| line.split(|c: char| !c.is_ascii_alphanumeric()));
        if !names.into_iter().any(|word| known.contains(word)) {
            found.push(format!(
                "{}:{}: SAFETY comment names no invariant of docs/safety.md",
                file.name,
                at + 1
            ));
        }
    }
    found
}

fn invariants(text: &str) -> BTreeSet<String> {
    text.lines()
        .filter_map(|line| line.strip_prefix("### ")?.split_whitespace().next().map(str::to_owned))
        .collect()
}

struct File {
    name: String,
    text: String,
}

fn all_files() -> Vec<File> {
    [
        "src",
        "crates/rdma-message-proto/src",
        "crates/rdma-provider/src",
        "crates/rdma-soft/src",
        "crates/rdma-ibverbs/src",
    ]
    .into_iter()
    .flat_map(files)
    .collect()
}

fn files(directory: &str) -> Vec<File> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths = Vec::new();
    collect(&root.join(directory), &mut paths);
    assert!(!paths.is_empty(), "no file in {directory}");
    let name = |path: &Path| path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
    let files =
        paths.iter().map(|path| File { name: name(path), text: fs::read_to_string(path).unwrap() });
    files.filter(|file| !file.name.contains("tests")).collect()
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
}

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

#[test]
fn use_of_a_higher_layer_is_found() {
    let above = |file: &str, text: &str| names_above(file, text).len();
    assert_eq!(above("src/verbs/qp.rs", "use crate::op::QueuePair;"), 1);
    assert_eq!(above("src/verbs/mod.rs", "use super::engine::X;"), 1);
    assert_eq!(above("src/verbs/qp.rs", "use super::super::engine::X;"), 1);
    assert_eq!(above("src/memory/remote_region.rs", "fn f(x: crate::op::QueuePair) {}"), 1);
    assert_eq!(above("src/op/send.rs", "use crate::QueuePair;"), 1);
    assert_eq!(above("src/op/send.rs", "use crate::{error::E, memory};"), 1);
    assert_eq!(above("src/op/send.rs", "use crate::engine::X; use super::operation::Y;"), 0);
    assert_eq!(
        above(
            "src/verbs/qp.rs",
            "use super::Cq; pub(crate) struct A; pub(in crate::verbs) struct B;"
        ),
        0
    );
    assert_eq!(
        above(
            "src/verbs/qp.rs",
            "//! [`X`](crate::op::X)\n#[cfg(test)]\nmod tests { use crate::op::X; }"
        ),
        0
    );
    assert_eq!(above("src/lib.rs", "pub use crate::op::QueuePair;"), 0);
}

#[test]
fn lock_or_event_of_another_crate_is_found() {
    let found = |name: &str, text: &str| {
        foreign_locks_and_events(&File { name: name.into(), text: text.into() }).len()
    };
    assert_eq!(found("src/a.rs", "use parking_lot::Mutex;"), 1);
    assert_eq!(found("src/a.rs", "use std::sync::{Arc, Condvar};"), 1);
    assert_eq!(found("src/a.rs", "tracing::warn!(\"late\");"), 1);
    assert_eq!(found("src/a.rs", "rdma_provider::warn!(\"late\");"), 0);
    assert_eq!(found("src/sync.rs", "use std::sync::Mutex;"), 0);
}

#[test]
fn safety_comment_without_an_invariant_is_found() {
    let known = invariants("# Safety\n### S1 Memory stays\n### C2 No lost wake-up\n");
    let missing = |text: &str| {
        without_invariant(&File { name: "a.rs".into(), text: text.into() }, &known).len()
    };
    assert_eq!(missing("// SAFETY: S1: owned by the slot\nunsafe { g() }"), 0);
    assert_eq!(
        missing("// SAFETY: owned by the slot\n// as C2 says\nunsafe impl Send for A {}"),
        0
    );
    assert_eq!(missing("// SAFETY: the pointer is fine\nunsafe { g() }"), 1);
    assert_eq!(missing("// SAFETY: S9: no such thing\nunsafe { g() }"), 1);
}
