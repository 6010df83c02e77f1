//! Who may name whom, where `unsafe` lives, and what does not belong in `src`: held by scanning the source.
//!
//! `cargo test --test layering`. Code that only tests use (`#[cfg(test)]`) is left out.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Layers from the bottom; who names one above its own breaks the rule. `contained`, `error`, `host` and `sync` stand beside `types`.
const LAYERS: [(&str, u32); 13] = [
    ("cm", 6),
    ("contained", 0),
    ("doctor", 6),
    ("error", 0),
    ("host", 0),
    ("sync", 0),
    ("types", 0),
    ("mem", 1),
    ("provider", 2),
    ("verbs", 3),
    ("completion", 4),
    ("op", 5),
    ("transport", 7),
];

/// Files that may hold `unsafe`. To add one is a decision: docs/safety.md must say what it upholds.
const UNSAFE: [&str; 36] = [
    "completion/slot.rs",
    "completion/batch.rs",
    // Lends the bare completion queue.
    "completion/queue.rs",
    "completion/work_queue.rs",
    "mem/host.rs",
    "mem/shared.rs",
    "mem/storage.rs",
    "provider/contract.rs",
    "provider/dispatch.rs",
    "provider/ibverbs/ah.rs",
    "provider/ibverbs/channel.rs",
    "provider/ibverbs/cm/event.rs",
    "provider/ibverbs/cm/id.rs",
    "provider/ibverbs/cm/mod.rs",
    "provider/ibverbs/context.rs",
    "provider/ibverbs/convert.rs",
    "provider/ibverbs/cq.rs",
    "provider/ibverbs/dc.rs",
    "provider/ibverbs/memory.rs",
    "provider/ibverbs/owned.rs",
    "provider/ibverbs/post.rs",
    "provider/ibverbs/qp.rs",
    "provider/ibverbs/srq.rs",
    "provider/soft/device/context.rs",
    "provider/soft/dma.rs",
    // Feeds the responder for a fuzzer, and registers what it may reach.
    "provider/soft/hostile.rs",
    "provider/soft/qp.rs",
    "provider/soft/srq.rs",
    "provider/soft/udp/socket.rs",
    "verbs/buf.rs",
    "verbs/exposed.rs",
    "verbs/qp.rs",
    "verbs/read_only.rs",
    "verbs/registration.rs",
    "verbs/srq.rs",
    // Lets the tests of the software device, and nothing else, hold some.
    "provider/soft/mod.rs",
];

/// Files that name the software device; besides, only its own do.
const NAMES_SOFT: [&str; 4] = ["lib.rs", "provider/dispatch.rs", "provider/mod.rs", "verbs/device.rs"];

/// Where Tokio is named; besides, in all of `completion`.
const NAMES_TOKIO: [&str; 11] = [
    "cm/connector.rs",
    "cm/disposer.rs",
    "cm/keepalive.rs",
    "cm/listener.rs",
    "cm/reactor.rs",
    "cm/router.rs",
    "doctor/trial.rs",
    "transport/connection.rs",
    "transport/driver.rs",
    "transport/listener.rs",
    "verbs/pool.rs",
];

/// Lines of a file: past the first it wants splitting by concept, past the second it must be.
const LONG: usize = 600;
const TOO_LONG: usize = 900;

/// Lines between a `// SAFETY:` and its `unsafe`; clippy demands that nothing but the statement's start is between.
const SAFETY_REACH: usize = 12;

// The rules on this crate's source.

#[test]
fn imports_go_downwards_only() {
    expect_none(violations(imports));
}

#[test]
fn software_device_is_named_by_dispatch_and_device_only() {
    expect_none(violations(|file| outsiders(file, &["soft", "Soft"], "provider/soft/", &NAMES_SOFT)));
}

#[test]
fn c_library_is_named_by_its_provider_only() {
    expect_none(violations(|file| outsiders(file, &["rdma_sys"], "provider/ibverbs/", &[])));
    expect_none(violations(|file| outsiders(file, &["rustix"], "provider/", &[])));
}

#[test]
fn tokio_is_named_where_something_waits_only() {
    expect_none(violations(|file| outsiders(file, &["tokio"], "completion/", &NAMES_TOKIO)));
}

#[test]
fn unsafe_lives_in_the_files_of_the_list_only() {
    expect_none(violations(|file| unsafe_outside(file, &UNSAFE)));
    let files = source();
    for name in UNSAFE {
        let file = files.iter().find(|file| file.name == name);
        assert!(file.is_some_and(|file| file.text.contains("unsafe")), "{name} has no unsafe: take it off the list");
    }
}

#[test]
fn every_unsafe_names_an_invariant() {
    let known = invariants(&read("docs/safety.md"));
    assert!(known.contains("S1") && known.contains("E2"), "docs/safety.md lost its headings: {known:?}");
    expect_none(violations(|file| unexplained(file, &known)));
}

#[test]
fn no_file_is_too_long() {
    for file in source().iter().filter(|file| file.lines() > LONG) {
        println!("warning: src/{} has {} lines", file.name, file.lines());
    }
    expect_none(violations(too_long));
}

#[test]
fn nothing_unfinished_and_nothing_unwrapped() {
    expect_none(violations(unfinished));
}

// The rules on text.

fn imports(file: &File) -> Vec<String> {
    let own = file.module();
    let Some(own_layer) = layer(own.first().map_or("", String::as_str)) else { return Vec::new() };
    let mut found = Vec::new();
    for (line, module) in file.named_modules(&own) {
        match layer(&module) {
            Some(named) if named <= own_layer => {}
            Some(_) => found.push(format!("src/{}:{line}: names `{module}`, which is above it", file.name)),
            None => found.push(format!("src/{}:{line}: names `crate::{module}`, which is no layer", file.name)),
        }
    }
    found
}

fn layer(module: &str) -> Option<u32> {
    LAYERS.iter().find(|(name, _)| *name == module).map(|(_, number)| *number)
}

fn outsiders(file: &File, words: &[&str], inside: &str, allowed: &[&str]) -> Vec<String> {
    if file.name.starts_with(inside) || allowed.contains(&file.name.as_str()) {
        return Vec::new();
    }
    let found = file.words().filter(|(_, word)| words.contains(word));
    found.map(|(line, word)| format!("src/{}:{line}: names `{word}`", file.name)).collect()
}

fn unsafe_outside(file: &File, allowed: &[&str]) -> Vec<String> {
    if allowed.contains(&file.name.as_str()) {
        return Vec::new();
    }
    let found = file.words().filter(|(_, word)| *word == "unsafe" || *word == "unsafe_code");
    // `forbid(unsafe_code)` is welcome anywhere.
    let found = found.filter(|(line, _)| !file.code_line(*line).contains("forbid(unsafe_code)"));
    found.map(|(line, word)| format!("src/{}:{line}: `{word}` in a file that is not on the list", file.name)).collect()
}

fn unexplained(file: &File, known: &BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    for (line, comment) in file.safety_comments() {
        let names = comment.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| known.contains(word));
        if !names && !file.is_test(line) {
            found.push(format!("src/{}:{line}: SAFETY without an invariant of docs/safety.md", file.name));
        }
    }
    let explained: BTreeSet<usize> = file.safety_comments().iter().map(|(line, _)| *line).collect();
    for line in file.unsafe_blocks_and_impls() {
        if explained.range(line.saturating_sub(SAFETY_REACH)..=line).next().is_none() {
            found.push(format!("src/{}:{line}: unsafe without a SAFETY comment", file.name));
        }
    }
    found
}

fn too_long(file: &File) -> Vec<String> {
    let lines = file.lines();
    if lines > TOO_LONG { vec![format!("src/{}: {lines} lines, {TOO_LONG} allowed", file.name)] } else { Vec::new() }
}

fn unfinished(file: &File) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in file.code.lines().enumerate() {
        for bad in ["todo!", "unimplemented!", "dbg!", ".unwrap()", ".expect(", ".unwrap_err()", ".expect_err("] {
            let starts_word = |at: usize| !bad.starts_with('.') && line[..at].ends_with(is_word);
            if line.match_indices(bad).any(|(at, _)| !starts_word(at)) {
                found.push(format!("src/{}:{}: {bad}", file.name, number + 1));
            }
        }
    }
    found
}

/// Ids that docs/safety.md has a heading for.
fn invariants(text: &str) -> BTreeSet<String> {
    text.lines().filter_map(|line| line.strip_prefix("### ")?.split_whitespace().next().map(str::to_owned)).collect()
}

// What is scanned.

/// A source file: as written, and its code alone.
struct File {
    /// Path below `src`.
    name: String,
    text: String,
    /// Comments, literals and what only tests use are blank; lines are where they were.
    code: String,
}

impl File {
    fn new(name: &str, text: &str) -> Self {
        Self { name: name.to_owned(), text: text.to_owned(), code: without_tests(&without_comments(text)) }
    }

    fn lines(&self) -> usize {
        self.text.lines().count()
    }

    fn code_line(&self, number: usize) -> &str {
        self.code.lines().nth(number - 1).unwrap_or_default()
    }

    /// True if the first code after this line is of a test.
    fn is_test(&self, number: usize) -> bool {
        without_comments(&self.text)
            .lines()
            .skip(number)
            .zip(self.code.lines().skip(number))
            .find_map(|(all, code)| if all.trim().is_empty() { None } else { Some(code.trim().is_empty()) })
            == Some(true)
    }

    /// Words of the code with their lines.
    fn words(&self) -> impl Iterator<Item = (usize, &str)> {
        self.code.lines().enumerate().flat_map(|(number, line)| {
            line.split(|c| !is_word(c)).filter(|word| !word.is_empty()).map(move |word| (number + 1, word))
        })
    }

    /// Where it is in the tree of modules.
    fn module(&self) -> Vec<String> {
        let path = self.name.trim_end_matches(".rs");
        let mut parts: Vec<String> = path.split('/').map(str::to_owned).collect();
        if parts.last().is_some_and(|last| last == "mod" || last == "lib") {
            parts.pop();
        }
        parts
    }

    /// First module of every path that starts at `crate` or climbs there by `super`, with its line.
    fn named_modules(&self, own: &[String]) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for (at, root) in roots(&self.code) {
            let line = self.code[..at].matches('\n').count() + 1;
            let (climbed, rest) = climb(root, &self.code[at..]);
            // From module a::b::c, `super` is a::b; what it names there is of layer `a`, unless it reaches the root.
            let base = if root == "crate" { 0 } else { own.len().saturating_sub(climbed) };
            if base > 0 {
                continue;
            }
            found.extend(first_names(rest).into_iter().map(|name| (line, name)));
        }
        found
    }

    /// Line of each `// SAFETY:` with all of its comment.
    fn safety_comments(&self) -> Vec<(usize, String)> {
        let lines: Vec<&str> = self.text.lines().map(str::trim).collect();
        let starts = lines.iter().enumerate().filter(|(_, line)| line.starts_with("// SAFETY:"));
        starts
            .map(|(at, _)| {
                let comment: Vec<_> = lines[at..].iter().take_while(|line| line.starts_with("//")).copied().collect();
                (at + 1, comment.join(" "))
            })
            .collect()
    }

    /// Line of each `unsafe {` and `unsafe impl`.
    fn unsafe_blocks_and_impls(&self) -> Vec<usize> {
        let mut found = Vec::new();
        for (at, _) in self.code.match_indices("unsafe") {
            let (before, after) = (&self.code[..at], self.code[at + 6..].trim_start());
            if !before.ends_with(is_word) && (after.starts_with('{') || after.starts_with("impl")) {
                found.push(before.matches('\n').count() + 1);
            }
        }
        found
    }
}

/// Every `crate::` and every first `super::` of a path.
fn roots(code: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for root in ["crate", "super"] {
        for (at, _) in code.match_indices(root) {
            let before = &code[..at];
            let in_path = before.ends_with(is_word) || before.ends_with("::");
            if !in_path && code[at + root.len()..].trim_start().starts_with("::") {
                found.push((at, root));
            }
        }
    }
    found
}

/// How many `super` there are, and what follows the last `::`.
fn climb<'a>(root: &str, path: &'a str) -> (usize, &'a str) {
    let (mut climbed, mut rest) = (0, path);
    while let Some(next) = rest.trim_start().strip_prefix(root) {
        climbed += 1;
        rest = next.trim_start().trim_start_matches("::");
    }
    (climbed, rest)
}

/// The first word of what follows, or the first of each branch of `{…}`.
fn first_names(rest: &str) -> Vec<String> {
    let rest = rest.trim_start();
    let Some(group) = rest.strip_prefix('{') else {
        let name: String = rest.chars().take_while(|&c| is_word(c)).collect();
        return if name.is_empty() { Vec::new() } else { vec![name] };
    };
    let (mut depth, mut branch, mut names) = (0, String::new(), Vec::new());
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => names.extend(first_names(&std::mem::take(&mut branch))),
            _ if depth == 0 => branch.push(c),
            _ => {}
        }
    }
    names.extend(first_names(&branch));
    names
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The text with comments and literals blanked.
fn without_comments(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(first) = rest.chars().next() {
        let word = out.ends_with(is_word);
        let blank = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if !word && let Some(length) = raw_string(rest) {
            length
        } else if first == '"' {
            quoted(rest, '"')
        } else if first == '\'' {
            char_literal(rest)
        } else {
            0
        };
        if blank == 0 {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            out.extend(rest[..blank].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
            rest = &rest[blank..];
        }
    }
    out
}

/// Length of a comment that may hold others.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text[at..];
        let step = if rest.starts_with("/*") {
            depth += 1;
            2
        } else if rest.starts_with("*/") {
            depth -= 1;
            2
        } else {
            rest.chars().next().map_or(1, char::len_utf8)
        };
        at += step;
        if depth == 0 {
            break;
        }
    }
    at
}

/// Length of `r"…"`, `br#"…"#` and the like.
fn raw_string(text: &str) -> Option<usize> {
    let after = text.strip_prefix("br").or_else(|| text.strip_prefix("cr")).or_else(|| text.strip_prefix('r'))?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    let body = after[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let start = text.len() - body.len();
    Some(start + body.find(&end)? + end.len())
}

/// Length up to and including the next quote that is not escaped.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of `'x'`; 0 for a lifetime.
fn char_literal(text: &str) -> usize {
    let mut chars = text.chars().skip(1);
    match (chars.next(), chars.next()) {
        (Some('\\'), _) | (_, Some('\'')) => quoted(text, '\''),
        _ => 0,
    }
}

/// The code with items under `#[cfg(test)]` and the like blanked.
fn without_tests(code: &str) -> String {
    let mut out = code.to_owned();
    while let Some((start, end)) = test_item(&out) {
        let blank: String = out[start..end].chars().map(|c| if c == '\n' { '\n' } else { ' ' }).collect();
        out.replace_range(start..end, &blank);
    }
    out
}

/// First item that is there for tests only, from its attribute to its end.
fn test_item(code: &str) -> Option<(usize, usize)> {
    for (at, _) in code.match_indices("#[cfg(") {
        let attribute = &code[at..at + code[at..].find(']')? + 1];
        let words: Vec<&str> = attribute.split(|c| !is_word(c)).collect();
        if words.contains(&"test") && !words.contains(&"any") && !attribute.contains("not(test)") {
            return Some((at, at + item_end(&code[at..])));
        }
    }
    None
}

/// Where the item ends that starts with attributes here: at its `;`, or at the brace that closes its first.
fn item_end(code: &str) -> usize {
    let (mut depth, mut brackets) = (0, 0);
    for (at, c) in code.char_indices() {
        match c {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets -= 1,
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            ';' if depth == 0 && brackets == 0 => return at + 1,
            _ => {}
        }
    }
    code.len()
}

/// All files of `src` but those of modules that are there for tests only.
fn source() -> Vec<File> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    collect(&root, &mut paths);
    let files: Vec<File> = paths.iter().map(|path| File::new(&name(&root, path), &read_path(path))).collect();
    assert!(files.len() > 40, "only {} files found", files.len());
    let tests: Vec<String> = files.iter().flat_map(test_modules).collect();
    let of_tests = |name: &str| tests.iter().any(|module| within(name, module));
    files.into_iter().filter(|file| !of_tests(&file.name)).collect()
}

/// Modules in files of their own that a file declares for tests only, as paths.
fn test_modules(file: &File) -> Vec<String> {
    let all = without_comments(&file.text);
    let (mut found, mut code) = (Vec::new(), all.as_str());
    while let Some((start, end)) = test_item(code) {
        let item = code[start..end].trim_end_matches(';');
        if let Some((_, name)) = item.rsplit_once("mod ").filter(|(_, name)| name.chars().all(is_word)) {
            let mut path = file.module();
            path.push(name.to_owned());
            found.push(path.join("/"));
        }
        code = &code[end..];
    }
    found
}

fn within(file: &str, module: &str) -> bool {
    file.strip_prefix(module).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("a directory of the source") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
}

fn name(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).expect("below the root").to_string_lossy().replace('\\', "/")
}

fn read(path: &str) -> String {
    read_path(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
}

fn read_path(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn violations(rule: impl Fn(&File) -> Vec<String>) -> Vec<String> {
    source().iter().flat_map(rule).collect()
}

fn expect_none(found: Vec<String>) {
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

// The scanner itself.

mod scanner {
    use super::*;

    #[track_caller]
    fn caught(rule: impl Fn(&File) -> Vec<String>, name: &str, text: &str, times: usize) {
        let found = rule(&File::new(name, text));
        assert_eq!(found.len(), times, "{found:?}");
    }

    #[test]
    fn upward_import_is_caught_in_every_spelling() {
        caught(imports, "verbs/qp.rs", "use crate::op::QueuePair;", 1);
        caught(imports, "verbs/qp.rs", "use crate::{error::E, completion::{A, B}, types};", 1);
        caught(imports, "verbs/mod.rs", "use super::completion::X;", 1);
        caught(imports, "verbs/qp.rs", "use super::super::completion::X;", 1);
        caught(imports, "mem/remote.rs", "fn f(x: crate::verbs::Qp) {}", 1);
        caught(imports, "op/send.rs", "use crate::QueuePair;", 1);
    }

    #[test]
    fn downward_and_own_imports_pass() {
        caught(imports, "op/send.rs", "use crate::completion::X; use super::future::Y; use crate::error::E;", 0);
        caught(imports, "verbs/qp.rs", "use super::Cq; pub(crate) struct A; pub(in crate::verbs) struct B;", 0);
        caught(imports, "lib.rs", "pub use crate::op::QueuePair;", 0);
    }

    #[test]
    fn comments_literals_and_tests_do_not_count() {
        let text = r##"
            //! [`X`](crate::op::X)
            /* crate::op /* nested */ crate::op */
            const A: &str = "crate::op::X \" unsafe";
            const B: &str = r#"crate::op::X"#;
            const C: char = '"'; fn f<'a>(_: &'a str) {}
            #[cfg(test)]
            mod tests { use crate::op::X; fn g() { Some(1).unwrap(); } }
            #[cfg(all(test, not(loom)))]
            use crate::op::Y;
        "##;
        caught(imports, "verbs/qp.rs", text, 0);
        caught(unfinished, "verbs/qp.rs", text, 0);
        caught(|file| unsafe_outside(file, &[]), "verbs/qp.rs", text, 0);
        let code_after = format!("{text}\nuse crate::op::Z;");
        caught(imports, "verbs/qp.rs", &code_after, 1);
    }

    #[test]
    fn code_for_tests_or_something_else_counts() {
        caught(imports, "verbs/qp.rs", "#[cfg(not(test))] use crate::op::X;", 1);
        caught(imports, "verbs/qp.rs", "#[cfg(any(test, loom))] use crate::op::X;", 1);
    }

    #[test]
    fn unsafe_outside_of_the_list_is_caught() {
        let rule = |file: &File| unsafe_outside(file, &["mem/host.rs"]);
        caught(rule, "op/send.rs", "fn f() { unsafe { g() } }", 1);
        caught(rule, "op/send.rs", "#![allow(unsafe_code)]", 1);
        caught(rule, "op/send.rs", "#![forbid(unsafe_code)]", 0);
        caught(rule, "mem/host.rs", "fn f() { unsafe { g() } }", 0);
    }

    #[test]
    fn safety_needs_an_invariant_that_exists() {
        let known = invariants("# Safety\n### S1 Memory stays\n### C2 No lost wake-up\n");
        let rule = |file: &File| unexplained(file, &known);
        caught(rule, "a.rs", "// SAFETY: S1: owned by the slot\nunsafe { g() }", 0);
        caught(rule, "a.rs", "// SAFETY: owned by the slot\n// as C2 says\nunsafe impl Send for A {}", 0);
        caught(rule, "a.rs", "// SAFETY: the pointer is fine\nunsafe { g() }", 1);
        caught(rule, "a.rs", "// SAFETY: S9: no such thing\nunsafe { g() }", 1);
        caught(rule, "a.rs", "fn f() {\n unsafe { g() }\n}", 1);
        caught(rule, "a.rs", "unsafe impl Send for A {}", 1);
        caught(rule, "a.rs", "/// # Safety\n/// The caller's.\nunsafe fn f();", 0);
    }

    #[test]
    fn unfinished_and_unwrapped_code_is_caught() {
        caught(unfinished, "a.rs", "fn f() { todo!() }\nfn g() { dbg!(1); }\nfn h() { unimplemented!() }", 3);
        caught(unfinished, "a.rs", "fn f() { x.unwrap(); y.expect(\"why\"); }", 2);
        caught(unfinished, "a.rs", "fn f() { x.unwrap_or(1); y.unwrap_or_else(g); my_dbg!(1); }", 0);
    }

    #[test]
    fn names_of_others_are_caught() {
        let soft = |file: &File| outsiders(file, &["soft", "Soft"], "provider/soft/", &["lib.rs"]);
        caught(soft, "verbs/qp.rs", "use crate::provider::soft::Qp;", 1);
        caught(soft, "provider/soft/qp.rs", "use crate::provider::soft::Qp;", 0);
        caught(soft, "lib.rs", "pub use crate::provider::soft::Faults;", 0);
        let tokio = |file: &File| outsiders(file, &["tokio"], "completion/", &[]);
        caught(tokio, "op/send.rs", "use tokio::sync::Notify;", 1);
        caught(tokio, "op/send.rs", "//! for [`tokio::sync`]\n#[tokio_test] fn f() {}", 0);
    }

    #[test]
    fn long_file_is_caught() {
        caught(too_long, "a.rs", &"\n".repeat(TOO_LONG), 0);
        caught(too_long, "a.rs", &"\n".repeat(TOO_LONG + 1), 1);
    }

    #[test]
    fn modules_for_tests_are_found() {
        let file = File::new("a/mod.rs", "mod b;\n#[cfg(test)]\n#[allow(x)]\nmod c;\n#[cfg(all(test, loom))]\nmod d;");
        assert_eq!(test_modules(&file), ["a/c", "a/d"]);
        assert!(within("a/c/mod.rs", "a/c") && within("a/d.rs", "a/d") && !within("a/cd.rs", "a/c"));
    }
}
