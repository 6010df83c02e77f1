//! `scripts/miri` selects tests by their full names, so each of them must exist.

use super::docs::{read, sources};

#[test]
fn tests_that_the_script_for_miri_names_exist() {
    let script = read("scripts/miri");
    let is_name = |line: &&str| line.contains("::tests::") && !line.contains(' ');
    let names: Vec<&str> = script.lines().map(str::trim).filter(is_name).collect();
    assert!(names.len() > 100, "{names:?}");
    let texts: Vec<String> = sources(&["src", "crates"])
        .iter()
        .map(|file| std::fs::read_to_string(file).expect("a source in UTF-8"))
        .collect();
    let is_missing = |name: &&&str| {
        let function = format!("fn {}(", name.rsplit("::").next().unwrap_or(name));
        !texts.iter().any(|text| text.contains(&function))
    };
    let missing: Vec<_> = names.iter().filter(is_missing).collect();
    assert!(missing.is_empty(), "scripts/miri names tests that are gone: {missing:#?}");
}
