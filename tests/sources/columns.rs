//! Lines have at most 100 columns, also comments, which rustfmt leaves as they are.

use super::docs::{read, root, sources};

const COLUMNS: usize = 100;

const CODE: [&str; 7] = ["src", "crates", "tests", "testing", "benches", "examples", "fuzz"];

#[test]
fn lines_have_at_most_100_columns() {
    let rust = rust_files().into_iter().map(|file| (file, false));
    // A command of a script may be longer.
    let scripts = scripts().into_iter().map(|file| (file, true));
    let mut long = Vec::new();
    for (file, only_comments) in rust.chain(scripts) {
        for (at, line) in read(&file).lines().enumerate() {
            let columns = line.chars().count();
            let exempt = only_comments && !line.trim_start().starts_with('#');
            if columns > COLUMNS && !exempt {
                long.push(format!("{file}:{}: {columns} columns", at + 1));
            }
        }
    }
    assert!(long.is_empty(), "{} lines\n{}\n", long.len(), long.join("\n"));
}

/// Returns the Rust files.
fn rust_files() -> Vec<String> {
    let files = sources(&CODE).into_iter();
    let names = files.map(|file| file.to_str().expect("a name in UTF-8").to_owned());
    let relative = |name: String| {
        let root = format!("{}/", root().display());
        name.strip_prefix(&root).unwrap_or(&name).to_owned()
    };
    names.map(relative).collect()
}

/// Returns the scripts of `scripts/` and `.ci/`. A packaged crate has none.
fn scripts() -> Vec<String> {
    let mut found = Vec::new();
    for directory in ["scripts", ".ci"] {
        let Ok(entries) = std::fs::read_dir(root().join(directory)) else { continue };
        for entry in entries.map(|entry| entry.expect("an entry").path()) {
            if std::fs::read_to_string(&entry).is_ok_and(|text| text.starts_with("#!")) {
                let name = entry.file_name().expect("a name").to_str().expect("UTF-8").to_owned();
                found.push(format!("{directory}/{name}"));
            }
        }
    }
    found
}
