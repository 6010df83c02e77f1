//! Files that import each other in a circle can only be understood together: circles are short.
//!
//! An import of a name that a module re-exports counts as an import of the file that defines it.

use std::collections::{BTreeMap, BTreeSet};

use super::docs::{read, root, sources};

/// The most files of a circle, in each crate.
const LONGEST: [(&str, usize); 5] = [
    ("src", 4),
    ("crates/rdma-message-proto/src", 2),
    ("crates/rdma-provider/src", 2),
    ("crates/rdma-soft/src", 3),
    ("crates/rdma-ibverbs/src", 3),
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
fn circles_are_found_through_re_exports_and_paths_in_code() {
    let files = [
        ("", "mod a; mod b; pub use b::{Thing as Other, More};"),
        ("a", "use crate::{More, a::c::Deep};"),
        ("a::c", "use super::super::b;"),
        ("b", "#[cfg(test)]\nmod tests;\nfn f() {\n    use super::a::{self, c};\n}"),
        ("e", "fn f() -> crate::f::Type {}"),
        ("f", "pub(in crate::e) fn f() { super::e::f() }"),
        ("d", "use crate::a;\n#[cfg(test)]\nmod tests { use crate::b; }"),
    ];
    let parse = |(name, text): (&str, &str)| {
        (name.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect(), text.into())
    };
    let imports = Imports::among(files.map(parse).into_iter().collect());
    let found = circles(&imports.edges);
    let module = |path: &str| path.split("::").map(str::to_owned).collect::<Module>();
    let expected = [vec!["a", "a::c", "b"], vec!["e", "f"]];
    assert_eq!(found, expected.map(|group| group.into_iter().map(module).collect::<Vec<_>>()));
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

/// Returns the imports outside of tests: whether they are re-exports, their paths, and the names
/// that they give. A path that code names without `use` is an import, too.
fn imports(text: &str) -> Vec<(bool, Module, String)> {
    let code = without_tests(text);
    let mut found = Vec::new();
    for statement in code.split(';') {
        let mut offset = 0;
        let import = statement.split_inclusive('\n').find_map(|line| {
            let before = offset;
            offset += line.len();
            let (visibility, _) = line.trim_start().split_once("use ")?;
            let is_public = visibility.starts_with("pub");
            let is_import = visibility.is_empty() || is_public && !visibility.contains(['{', '=']);
            let start = before + line.find("use ")? + "use ".len();
            is_import.then_some((is_public, before, start))
        });
        let body = match import {
            Some((is_public, before, start)) => {
                let tree = statement[start..].replace('\n', " ");
                expand(&tree, &[], &mut |path, name| found.push((is_public, path, name)));
                &statement[..before]
            }
            None => statement,
        };
        found.extend(paths(body).map(|path| (false, path, String::new())));
    }
    found
}

/// Returns the code of a file without comments and without items that only tests have.
fn without_tests(text: &str) -> String {
    let mut code = String::new();
    let mut in_test = false;
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or_default().trim_end();
        let is_test = ["#[cfg(test)]", "#[cfg(all(test", "#[cfg(any(fuzzing, test))]"];
        in_test |= is_test.iter().any(|attribute| line.starts_with(attribute));
        if !in_test {
            code.push_str(line);
            code.push('\n');
        }
        // The item ends with a line that is not indented.
        if !line.starts_with([' ', '#']) && line.ends_with([';', '}']) {
            in_test = false;
        }
    }
    code
}

/// Returns the paths from the root of the crate and from parent modules that `code` names.
fn paths(code: &str) -> impl Iterator<Item = Module> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let starts = ["crate::", "super::"].into_iter().flat_map(|root| code.match_indices(root));
    starts
        .filter(move |&(at, _)| {
            let before = &code[..at];
            !before.ends_with(|c| is_name(c) || c == ':' || c == '$') && !before.ends_with("(in ")
        })
        .map(move |(at, _)| {
            let end = code[at..].find(|c| !is_name(c) && c != ':').unwrap_or(code.len() - at);
            let names = code[at..at + end].split("::").filter(|name| !name.is_empty());
            names.map(str::to_owned).collect()
        })
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
