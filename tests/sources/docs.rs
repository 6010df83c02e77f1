//! Checks that the documentation is complete and that the files, tests and commands it names exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const EXCLUDED: [&str; 4] = ["target", ".git", "corpus", "node_modules"];

const PLACES: [&str; 9] =
    ["src/", "crates/", "tests/", "testing/", "benches/", "examples/", "docs/", "scripts/", ".ci/"];

const CODE: [&str; 6] = ["src", "crates", "tests", "testing", "benches", "examples"];

#[test]
fn files_named_in_the_documentation_exist() {
    let mut missing = Vec::new();
    for page in pages() {
        let text = read(&page);
        let quoted = quotes(&text).into_iter();
        // The first word of a command is a file.
        let words = quoted.filter_map(|quote| quote.split(' ').next().map(str::to_owned));
        let named = words
            .filter(|word| PLACES.iter().any(|place| word.starts_with(place)))
            .map(PathBuf::from);
        missing.extend(
            named
                .filter(|path| !exists(path) && !exists(&beside(&page, path)))
                .map(|path| format!("{page}: {path:?}")),
        );
    }
    assert!(missing.is_empty(), "\n{}\n", missing.join("\n"));
}

// A name stands for any source file whose path ends with it.
#[test]
fn source_files_named_by_pages_and_module_documentation_exist() {
    let files = sources(&CODE);
    let mut named = Vec::new();
    for page in pages() {
        let quoted = quotes(&read(&page));
        named.extend(
            quoted
                .iter()
                .flat_map(|quote| source_names(quote))
                .map(|name| (page.clone(), name.to_owned())),
        );
    }
    for file in sources(&["src", "crates"]) {
        let text = fs::read_to_string(&file).expect("a source file");
        let docs = text.lines().filter_map(|line| line.trim_start().strip_prefix("//!"));
        named.extend(
            docs.flat_map(source_names).map(|name| (file.display().to_string(), name.to_owned())),
        );
    }
    assert!(named.len() > 100, "only {named:?}");
    let missing: BTreeSet<_> = named
        .iter()
        .filter(|(_, name)| !files.iter().any(|file| file.ends_with(name)))
        .map(|(place, name)| format!("{place}: {name}"))
        .collect();
    assert!(missing.is_empty(), "\n{}\n", missing.into_iter().collect::<Vec<_>>().join("\n"));
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let mut broken = Vec::new();
    let mut seen = 0;
    for page in pages() {
        for link in links(&read(&page)) {
            let (file, heading) = link.split_once('#').unwrap_or((&link, ""));
            let path = match file {
                "" => PathBuf::from(&page),
                _ => Path::new(&page).with_file_name("").join(file),
            };
            let there = match heading {
                "" => exists(&path),
                _ => path.to_str().is_some_and(|path| headings(&read(path)).contains(heading)),
            };
            seen += 1;
            if !there {
                broken.push(format!("{page}: {link}"));
            }
        }
    }
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
    assert!(seen > 40, "only {seen} links");
}

// A marker is a comment `// Shows S1.` above a function, or `//! Shows S1.` for a whole file.
#[test]
fn each_invariant_is_shown_by_a_marked_test() {
    let text = read("docs/safety.md");
    let invariants: BTreeSet<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("### ")?.split(' ').next().map(str::to_owned))
        .collect();
    assert_eq!(invariants.len(), 17);
    let (mut shown, mut wrong) = (BTreeSet::new(), Vec::new());
    for file in sources(&CODE) {
        let text = fs::read_to_string(&file).expect("a source file");
        let lines: Vec<_> = text.lines().map(str::trim).collect();
        for (at, line) in lines.iter().enumerate() {
            let above = line.strip_prefix("// Shows ");
            let Some(names) = above.or(line.strip_prefix("//! Shows ")) else { continue };
            if !names.chars().nth(1).is_some_and(|c| c.is_ascii_digit()) {
                continue;
            }
            let names: Vec<_> = names.trim_end_matches('.').split(", ").collect();
            let function = lines[at + 1..].iter().find(|line| !line.starts_with("#["));
            let marks = above.is_none() || function.is_some_and(|line| line.contains("fn "));
            if !marks || names.iter().any(|&name| !invariants.contains(name)) {
                wrong.push(format!("{}:{}: {line}", file.display(), at + 1));
            }
            shown.extend(names.into_iter().map(str::to_owned));
        }
    }
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    let missing: Vec<_> = invariants.difference(&shown).collect();
    assert!(missing.is_empty(), "no test shows {missing:?}");
}

#[test]
fn every_called_c_function_is_in_the_table_of_verbs() {
    const LIBRARIES: [&str; 3] = ["ibv_", "rdma_", "mlx5dv_"];
    let table = read("docs/verbs.md");
    let listed: BTreeSet<_> = words(&table).collect();
    let mut missing = BTreeSet::new();
    let mut called = 0;
    // The declarations contain functions that only tests call.
    let is_declared = |file: &PathBuf| file.components().any(|part| part.as_os_str() == "ffi");
    let files = sources(&["crates/rdma-ibverbs/src"]);
    for file in files.into_iter().filter(|file| !is_declared(file)) {
        let text = fs::read_to_string(&file).expect("a source file");
        let calls = text.match_indices('(').map(|(at, _)| &text[..at]);
        for before in calls {
            let name = words(before).next_back().unwrap_or_default();
            if before.ends_with(name) && LIBRARIES.iter().any(|library| name.starts_with(library)) {
                called += 1;
                if !listed.contains(name) {
                    missing.insert(name.to_owned());
                }
            }
        }
    }
    assert!(called > 50, "only {called} calls");
    assert!(missing.is_empty(), "not in docs/verbs.md: {missing:?}");
}

#[test]
fn every_page_with_a_program_is_compiled_with_the_documentation() {
    let root = read("src/lib.rs");
    let with = |page: &String| {
        page.starts_with("docs/") && read(page).lines().any(|line| line.starts_with("```rust"))
    };
    let pages: Vec<_> = pages().into_iter().filter(with).collect();
    assert!(pages.len() >= 3, "only {pages:?}");
    let forgotten: Vec<_> = pages
        .iter()
        .filter(|page| !root.contains(&format!("include_str!(\"../{page}\")")))
        .collect();
    assert!(
        forgotten.is_empty(),
        "no program of {forgotten:?} is compiled: see `pages` in src/lib.rs"
    );
}

#[test]
fn programs_print_the_text_of_an_error_instead_of_returning_it_from_main() {
    // The program of a build script is read by Cargo.
    let is_program = |path: &PathBuf| !path.ends_with("build.rs");
    let files = sources(&["examples"]).into_iter().filter(is_program);
    let files: Vec<_> = files.chain([root().join("README.md")]).collect();
    let mut mains = 0;
    for file in files {
        for line in fs::read_to_string(&file).expect("a source file").lines() {
            if line.starts_with("fn main(") || line.starts_with("async fn main(") {
                mains += 1;
                assert!(!line.contains("Result<"), "{}: {line}", file.display());
            }
        }
    }
    assert!(mains > 10, "only {mains}");
}

// A section of a type holds for all its methods, which then describe only what differs.
#[test]
fn public_functions_document_errors_and_cancel_safety() {
    let (mut incomplete, mut functions) = (Vec::new(), 0);
    let files = sources(&["src", "crates/rdma-provider/src/types", "crates/rdma-soft/src"]);
    let [fallible, cancellable] =
        ["# Errors", "# Cancel safety"].map(|section| types_with(section, &files));
    for file in files {
        let text = fs::read_to_string(&file).expect("a source file");
        // Tests are at the end of a file.
        let code = text.split("\nmod tests {").next().unwrap_or_default();
        for (at, _) in code.match_indices("pub ") {
            let line = code[..at].rfind('\n').map_or(0, |end| end + 1);
            let declaration = code[at..].split(['{', ';']).next().unwrap_or_default();
            let Some((words, signature)) = declaration.split_once("fn ") else { continue };
            let plain = words
                .split_whitespace()
                .all(|word| ["pub", "async", "const", "unsafe"].contains(&word));
            if !plain || !code[line..at].trim().is_empty() {
                continue;
            }
            functions += 1;
            let doc = doc_above(&code[..line]);
            let owner = code[..line].rfind("\nimpl").map_or("", |at| self_type(&code[at + 1..]));
            let result = signature.split_once("->").map_or("", |(_, result)| result.trim_start());
            let fails = result.starts_with("Result<") || result.starts_with("io::Result<");
            // The next test checks the documentation of named futures.
            let waits = words.contains("async")
                || result.contains("impl Future")
                || result.contains("dyn Future");
            let has =
                |section, types: &BTreeSet<String>| doc.contains(section) || types.contains(owner);
            if fails && !has("# Errors", &fallible)
                || waits && !has("# Cancel safety", &cancellable)
            {
                incomplete.push(format!("{}: {}", file.display(), name_of(signature)));
            }
        }
    }
    assert!(functions > 300, "only {functions} functions");
    assert!(incomplete.is_empty(), "\n{}\n", incomplete.join("\n"));
}

// Functions that are not `async` return named futures.
#[test]
fn public_futures_streams_and_sinks_document_cancel_safety() {
    let texts: Vec<_> = sources(&["src"])
        .iter()
        .map(|file| fs::read_to_string(file).expect("a source file"))
        .collect();
    let mut asynchronous = BTreeSet::new();
    for line in texts.iter().flat_map(|text| text.lines()).filter(|line| line.starts_with("impl")) {
        let Some((before, of)) = line.split_once(" for ") else { continue };
        let what = name_of(before.rsplit(' ').next().unwrap_or_default());
        if ["Future", "Stream", "Sink"].contains(&what.as_str()) {
            asynchronous.insert(name_of(of));
        }
    }
    let (mut incomplete, mut seen) = (Vec::new(), Vec::new());
    for text in &texts {
        for (at, _) in text.match_indices("\npub ") {
            let Some((kind, rest)) = text[at + 5..].split_once(' ') else { continue };
            let named = name_of(rest);
            let another = rest
                .lines()
                .next()
                .and_then(|line| line.split_once(" = "))
                .map(|(_, of)| name_of(of));
            let doc = doc_above(&text[..=at]);
            // A type alias may link to the future instead.
            let documented = match (kind, &another) {
                ("struct", _) if asynchronous.contains(&named) => doc.contains("# Cancel safety"),
                ("type", Some(of)) if asynchronous.contains(of) => {
                    doc.contains("# Cancel safety") || doc.contains(&format!("[`{of}`]"))
                }
                _ => continue,
            };
            if !documented {
                incomplete.push(named.clone());
            }
            seen.push(named);
        }
    }
    assert!(seen.len() > 12, "only {seen:?}");
    assert!(
        incomplete.is_empty(),
        "neither a cancel safety section nor a link to a type with one: {incomplete:?}"
    );
}

#[test]
fn tests_benches_and_examples_named_in_commands_exist() {
    let mut missing = Vec::new();
    for page in pages() {
        let text = read(&page);
        for (option, directory) in
            [("--test ", "tests"), ("--bench ", "benches"), ("--example ", "examples")]
        {
            for (at, _) in text.match_indices(option) {
                let rest = &text[at + option.len()..];
                let name: String =
                    rest.chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect();
                let files =
                    [format!("{directory}/{name}.rs"), format!("{directory}/{name}/main.rs")];
                let of_package = |file: &Path| {
                    package(&text[..at]).is_some_and(|package| exists(&package.join(file)))
                };
                let known =
                    |file: &Path| exists(file) || exists(&beside(&page, file)) || of_package(file);
                if !files.iter().map(Path::new).any(known) {
                    missing.push(format!("{page}: {option}{name}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "\n{}\n", missing.join("\n"));
}

/// Returns the directory of the package that `-p` names in the last line.
fn package(text: &str) -> Option<PathBuf> {
    let name =
        text.lines().next_back()?.rsplit('`').next()?.split_once("-p ")?.1.split(' ').next()?;
    ["crates", "examples", "testing"]
        .map(|group| Path::new(group).join(name))
        .into_iter()
        .find(|path| exists(path))
}

/// Returns a path relative to a page, which may belong to another package.
fn beside(page: &str, path: &Path) -> PathBuf {
    Path::new(page).with_file_name("").join(path)
}

/// Returns the public types whose documentation has `section`.
fn types_with(section: &str, files: &[PathBuf]) -> BTreeSet<String> {
    let mut types = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(file).expect("a source file");
        for (at, declaration) in text.match_indices("\npub struct ") {
            if doc_above(&text[..=at]).contains(section) {
                types.extend(words(&text[at + declaration.len()..]).next().map(str::to_owned));
            }
        }
    }
    types
}

/// Returns the name of the type that `text`, which begins with `impl`, implements.
fn self_type(text: &str) -> &str {
    let header = text.split(['{', ';']).next().unwrap_or_default().trim_start_matches("impl");
    let header = header.rsplit_once(" for ").map_or(header, |(_, of)| of);
    // Generics of the implementation come before the type.
    let depth = |at: usize| {
        let before = header[..at].replace("->", "");
        before.matches('<').count() - before.matches('>').count()
    };
    let start = header.char_indices().find(|&(at, c)| c.is_alphabetic() && depth(at) == 0);
    start.and_then(|(at, _)| words(&header[at..]).next()).unwrap_or_default()
}

/// Returns the documentation at the end of `text`.
fn doc_above(text: &str) -> String {
    let about =
        |line: &&str| line.starts_with("///") || line.starts_with("#[") || line.ends_with(")]");
    text.lines().rev().map(str::trim).take_while(about).collect::<Vec<_>>().join("\n")
}

fn name_of(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

pub(super) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns whether a file exists; a packaged crate has no `.ci`.
fn exists(path: &Path) -> bool {
    root().join(path).exists() || path.starts_with(".ci") && !root().join(".git").exists()
}

pub(super) fn read(page: &str) -> String {
    fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"))
}

fn quotes(text: &str) -> BTreeSet<String> {
    text.lines().flat_map(|line| line.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// Returns the names of source files in a text, without patterns such as `ibv_*.rs`.
fn source_names(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && !"_-./*".contains(c));
    words
        .map(|word| word.trim_end_matches('.'))
        .filter(|word| word.ends_with(".rs") && !word.contains('*'))
}

fn links(text: &str) -> BTreeSet<String> {
    let prose = prose(text);
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://")).map(str::to_owned).collect()
}

/// Returns the anchors of a page's headings.
fn headings(text: &str) -> BTreeSet<String> {
    let prose = prose(text);
    let titles = prose
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| line.trim_start_matches('#').trim());
    titles.map(|title| title.chars().filter_map(anchor).collect()).collect()
}

fn anchor(c: char) -> Option<char> {
    match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c => c.is_alphanumeric().then(|| c.to_ascii_lowercase()),
    }
}

fn prose(text: &str) -> String {
    let mut inside = false;
    let outside = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        inside ^= fence;
        !fence && !inside
    });
    outside.collect::<Vec<_>>().join("\n")
}

fn pages() -> Vec<String> {
    let relative = |path: PathBuf| {
        let path = path.strip_prefix(root()).expect("a path within");
        path.to_str().expect("a name in UTF-8").to_owned()
    };
    let mut found: Vec<_> =
        files("md", vec![root().to_owned()]).into_iter().map(relative).collect();
    assert!(found.len() > 20, "only {found:?}");
    found.sort();
    found
}

pub(super) fn sources(directories: &[&str]) -> Vec<PathBuf> {
    files("rs", directories.iter().map(|name| root().join(name)).collect())
}

/// Returns the files in these directories that have the extension and that no build has made.
fn files(extension: &str, mut directories: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).expect("a directory") {
            let entry = entry.expect("an entry");
            let (path, name) = (entry.path(), entry.file_name());
            // A symbolic link to a directory may leave the repository, so it is not followed.
            if entry.file_type().expect("its type").is_dir() {
                if !EXCLUDED.iter().any(|other| name == *other) {
                    directories.push(path);
                }
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    found
}

fn words(text: &str) -> impl DoubleEndedIterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}
