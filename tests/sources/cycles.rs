//! Files that import each other in a circle can only be understood together: circles are short.
//!
//! An import of a name that a module re-exports counts as an import of the file that defines it.

use std::collections::{BTreeMap, BTreeSet};

use super::docs::{read, root, sources};

/// The most files of a circle, in each crate.
const LONGEST: [(&str, usize); 4] = [
    ("src", 4),
    ("crates/rdma-message-proto/src", 2),
    // These hold objects that hold each other.
    ("crates/rdma-soft/src", 23),
    ("crates/rdma-ibverbs/src", 15),
];

/// The path of a module: its names from the root of the crate.
type Module = Vec<String>;

#[test]
fn circles_of_imports_are_short() {
    for (directory, longest) in LONGEST {
        let found = circles(&Imports::of(directory).edges);
        let length = found.first().map_or(0, Vec::len);
        assert!(length <= longest, "{directory}: {length} files: {:?}", found[0]);
    }
}

#[test]
fn circle_is_found_also_through_a_re_export() {
    let files = [
        ("", "mod a; mod b; pub use b::{Thing as Other, More};"),
        ("a", "use crate::{More, a::c::Deep};"),
        ("a::c", "use super::super::b;"),
        ("b", "use super::a::{self, c};"),
        ("d", "use crate::a;\n#[cfg(test)]\nmod tests { use crate::b; }"),
    ];
    let parse = |(name, text): (&str, &str)| {
        (name.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect(), text.into())
    };
    let imports = Imports::among(files.map(parse).into_iter().collect());
    let found = circles(&imports.edges);
    assert_eq!(found, [[vec!["a".to_owned()], vec!["a".into(), "c".into()], vec!["b".into()]]]);
}

struct Imports {
    edges: BTreeMap<Module, BTreeSet<Module>>,
}

impl Imports {
    /// Reads the files of a crate, without its tests.
    fn of(directory: &str) -> Self {
        let base = root().join(directory);
        let mut files = BTreeMap::new();
        for path in sources(&[directory]) {
            let Ok(relative) = path.strip_prefix(&base) else { continue };
            let mut module: Module = relative
                .with_extension("")
                .iter()
                .map(|name| name.to_str().expect("a name in UTF-8").to_owned())
                .collect();
            if module.last().is_some_and(|name| name == "mod" || name == "lib") {
                module.pop();
            }
            if !module.iter().any(|name| ["tests", "loom", "model", "fuzzing"].contains(&&**name)) {
                let path = format!("{directory}/{}", relative.display());
                files.insert(module, read(&path));
            }
        }
        Self::among(files)
    }

    fn among(files: BTreeMap<Module, String>) -> Self {
        let mut named = BTreeMap::new();
        let mut uses = Vec::new();
        for (module, text) in &files {
            for (is_public, path, name) in imports(text) {
                let target = absolute(module, &path, &files);
                if let (true, Some(target)) = (is_public, &target) {
                    named.insert((module.clone(), name), target.clone());
                } else if let Some(target) = target {
                    uses.push((module.clone(), target));
                }
            }
        }
        let mut edges: BTreeMap<Module, BTreeSet<Module>> =
            files.keys().map(|module| (module.clone(), BTreeSet::new())).collect();
        for (module, target) in uses {
            let defined = defining(&target, &files, &named);
            if defined != module {
                edges.entry(module).or_default().insert(defined);
            }
        }
        Self { edges }
    }
}

/// Returns the file that defines the item at `path`.
fn defining(
    path: &[String],
    files: &BTreeMap<Module, String>,
    named: &BTreeMap<(Module, String), Module>,
) -> Module {
    let mut path = path.to_vec();
    for _ in 0..5 {
        let len = (0..=path.len()).rev().find(|&len| files.contains_key(&path[..len])).unwrap_or(0);
        let module = path[..len].to_vec();
        let target = path.get(len).and_then(|name| named.get(&(module.clone(), name.clone())));
        let Some(target) = target else { return module };
        path = [target, &path[len + 1..]].concat();
    }
    path
}

/// Returns the path of an import from the root of the crate, unless it leads to another crate.
fn absolute(own: &[String], path: &[String], files: &BTreeMap<Module, String>) -> Option<Module> {
    let mut base = own.to_vec();
    let mut rest = path;
    match rest.first()?.as_str() {
        "crate" => (base, rest) = (Vec::new(), &rest[1..]),
        "self" => rest = &rest[1..],
        "super" => {
            while rest.first().is_some_and(|name| name == "super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        child => {
            let child = [own, &[child.to_owned()]].concat();
            if !files.contains_key(&child) {
                return None;
            }
        }
    }
    Some([&base, rest].concat())
}

/// Returns the imports above the tests: whether they are re-exports, their paths, and the names
/// that they give.
fn imports(text: &str) -> Vec<(bool, Module, String)> {
    let code: String = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .take_while(|line| !line.starts_with("mod tests") && !line.starts_with("#[cfg(test)]"))
        .map(|line| format!("{line}\n"))
        .collect();
    let mut found = Vec::new();
    for statement in code.split(';') {
        let statement = statement.trim_start_matches(|c: char| c.is_whitespace() || c == '}');
        let last = statement.rsplit_once("]\n").map_or(statement, |(_, after)| after).trim();
        let Some((before, tree)) = last.split_once("use ") else { continue };
        let is_public = before.starts_with("pub");
        if before.is_empty() || is_public && !before.contains(['{', '=']) {
            let compact = tree.replace('\n', " ");
            expand(&compact, &[], &mut |path, name| found.push((is_public, path, name)));
        }
    }
    found
}

/// Calls `add` with each path of a tree of imports.
fn expand(tree: &str, prefix: &[String], add: &mut impl FnMut(Module, String)) {
    let tree = tree.trim();
    let (path, group) = match tree.split_once('{') {
        Some((path, group)) => (path, group.strip_suffix('}')),
        None => (tree, None),
    };
    let (path, alias) = match path.split_once(" as ") {
        Some((path, alias)) if group.is_none() => (path, Some(alias.trim().to_owned())),
        _ => (path, None),
    };
    let names = path.split("::").map(str::trim).filter(|name| !name.is_empty() && *name != "*");
    let mut all = prefix.to_vec();
    all.extend(names.map(str::to_owned));
    if all.len() > 1 && all.last().is_some_and(|name| name == "self") {
        all.pop();
    }
    let Some(group) = group else {
        let name = alias.or_else(|| all.last().cloned()).unwrap_or_default();
        return add(all, name);
    };
    let (mut depth, mut start) = (0, 0);
    for (at, c) in group.char_indices().chain([(group.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !group[start..at].trim().is_empty() {
                    expand(&group[start..at], &all, add);
                }
                start = (at + 1).min(group.len());
            }
            _ => {}
        }
    }
}

/// Returns the strongly connected files, the largest group first.
fn circles(edges: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<Vec<Module>> {
    let reached: BTreeMap<&Module, BTreeSet<&Module>> = edges
        .keys()
        .map(|from| {
            let (mut seen, mut ahead) = (BTreeSet::new(), vec![from]);
            while let Some(module) = ahead.pop() {
                ahead.extend(edges[module].iter().filter(|next| seen.insert(*next)));
            }
            (from, seen)
        })
        .collect();
    let mut groups: BTreeSet<Vec<Module>> = BTreeSet::new();
    for (from, seen) in &reached {
        let group: Vec<Module> =
            seen.iter().filter(|to| reached[**to].contains(from)).map(|to| (*to).clone()).collect();
        if group.len() > 1 {
            groups.insert(group);
        }
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.len()));
    groups
}
