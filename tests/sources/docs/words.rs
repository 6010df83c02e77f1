//! Checks the rules of writing that a program can check: words, openings, columns.
//!
//! The rules cover comments and string literals of Rust sources, comments of scripts, and pages.
//! Quotations and code between backticks are exempt.

use std::fmt;

use super::{pages, read, root, sources};

/// Sequences of words that no text contains. The field has a term for each.
const DENIED: [&str; 46] = [
    "anybody",
    "anyone",
    "by now",
    "came back",
    "came home",
    "come back",
    "come home",
    "comes back",
    "comes home",
    "everybody",
    "for ever",
    "gave back",
    "give back",
    "given back",
    "gives back",
    "giving back",
    "goodbye",
    "hand out",
    "hand over",
    "handed out",
    "handed over",
    "hands out",
    "hands over",
    "in line",
    "late copy",
    "lines up",
    "nobody",
    "no one",
    "room",
    "say so",
    "says so",
    "send again",
    "sends again",
    "sent again",
    "somebody",
    "someone",
    "spoken for",
    "take leave",
    "takes leave",
    "that of",
    "those of",
    "told",
    "underway",
    "who",
    "whoever",
    "whom",
];

/// Parts of identifiers that no name contains.
const DENIED_IN_NAMES: [&str; 9] =
    ["anybody", "goodbye", "nobody", "room", "somebody", "told", "underway", "whoever", "whom"];

/// First words that hide the subject of a documentation comment.
const DENIED_OPENINGS: [&str; 7] = ["as", "of", "that", "those", "what", "where", "who"];

/// First words that end like a verb in the third person and are none.
const NOT_VERBS: [&str; 7] = ["always", "as", "its", "others", "these", "this", "thus"];

const COLUMNS: usize = 100;

const CODE: [&str; 7] = ["src", "crates", "tests", "testing", "benches", "examples", "fuzz"];

#[test]
fn text_has_neither_denied_words_nor_openings_without_a_subject() {
    let mut broken = Vec::new();
    let mut blocks = 0;
    for file in rust_files() {
        let source = Source::of(&read(&file));
        blocks += source.comments.len();
        broken.extend(source.complaints().into_iter().map(|found| format!("{file}:{found}")));
    }
    for page in pages() {
        let page_blocks = page_blocks(&read(&page));
        blocks += page_blocks.len();
        let found = page_blocks.iter().flat_map(Block::denied);
        broken.extend(found.map(|found| format!("{page}:{found}")));
    }
    for script in scripts() {
        let found = script_blocks(&read(&script)).into_iter();
        broken.extend(found.flat_map(|block| block.denied()).map(|at| format!("{script}:{at}")));
    }
    assert!(blocks > 5000, "only {blocks} blocks of text");
    assert!(broken.is_empty(), "{} complaints\n{}\n", broken.len(), broken.join("\n"));
}

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

#[test]
fn each_rule_finds_what_breaks_it() {
    let text = "\
        // The task that is\n\
        // told of it, and whoever waits.\n\
        /// Of the queue.\n\
        struct Queue;\n\
        /// The length of the queue.\n\
        fn len() { let has_room = \"nobody waits\"; }\n\
        /// Returns `room`, \"for ever\".\n\
        #[must_use]\n\
        pub fn fine() { // No entry is left.\n\
        }\n";
    let found: Vec<_> = Source::of(text).complaints().iter().map(ToString::to_string).collect();
    let expected = [
        "2: \"told\"",
        "2: \"whoever\"",
        "3: documentation opens with \"of\"",
        "5: documentation of a function opens with \"the\"",
        "6: \"nobody\"",
        "6: name \"has_room\"",
        "9: opening \"no entry is\"",
    ];
    assert_eq!(found, expected);
    let page = "# Who\nText.\n\n```\nwho\n```\n";
    let found: Vec<_> = page_blocks(page).iter().flat_map(Block::denied).collect();
    assert_eq!(found.len(), 1, "{found:?}");
}

/// A violation of a rule, on a line.
#[derive(Debug, Clone)]
struct Complaint {
    line: usize,
    text: String,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.line, self.text)
    }
}

/// Consecutive lines of one comment, a string literal, or a paragraph.
#[derive(Debug, Default)]
struct Block {
    /// Line number and text.
    lines: Vec<(usize, String)>,
    /// True for `///` comments.
    documents: bool,
    /// The code that follows a documentation comment, without attributes.
    item: String,
}

impl Block {
    fn one(line: usize, text: &str) -> Self {
        Self { lines: vec![(line, text.to_owned())], ..Self::default() }
    }

    /// Returns the words in lower case, each with its line and whether it starts a sentence.
    fn words(&self) -> Vec<(usize, String, bool)> {
        let mut words = Vec::new();
        let mut starts = true;
        let mut inside_code = false;
        for (line, text) in &self.lines {
            let mut word = String::new();
            let mut quoted = false;
            for c in text.chars().chain([' ']) {
                match c {
                    '`' => inside_code = !inside_code,
                    '"' | '“' | '”' if !inside_code => quoted = !quoted,
                    _ => {}
                }
                let in_word = (c.is_alphanumeric() || "_'-".contains(c)) && !inside_code && !quoted;
                if in_word {
                    word.extend(c.to_lowercase());
                    continue;
                }
                if !word.is_empty() {
                    words.push((*line, std::mem::take(&mut word), starts));
                    starts = false;
                }
                starts |= ".!?".contains(c) && !inside_code && !quoted;
            }
        }
        words
    }

    fn denied(&self) -> Vec<Complaint> {
        let words = self.words();
        let mut found = Vec::new();
        for (at, (line, word, starts)) in words.iter().enumerate() {
            let following = |count: usize| {
                let words = words[at..].iter().take(count).map(|(_, word, _)| word.as_str());
                words.collect::<Vec<_>>().join(" ")
            };
            let denied = |phrase: &str| {
                phrase.starts_with(word.as_str()) && following(phrase.split(' ').count()) == phrase
            };
            if let Some(phrase) = DENIED.iter().find(|phrase| denied(phrase)) {
                found.push(Complaint { line: *line, text: format!("{phrase:?}") });
            }
            let verb = words.get(at + 2).map(|(_, word, _)| word.as_str());
            if *starts && word == "no" && verb.is_some_and(|verb| ["is", "are"].contains(&verb)) {
                found.push(Complaint { line: *line, text: format!("opening {:?}", following(3)) });
            }
        }
        found
    }

    /// Returns the complaint about the first word of a documentation comment, if any.
    fn opening(&self) -> Option<Complaint> {
        let (line, text) = self.lines.iter().find(|(_, text)| !text.trim().is_empty())?;
        let first: String = text.trim().chars().take_while(|c| !c.is_whitespace()).collect();
        let first = first.trim_end_matches([',', '.', ':']).to_lowercase();
        let complain = |text| Some(Complaint { line: *line, text });
        if DENIED_OPENINGS.contains(&first.as_str()) {
            return complain(format!("documentation opens with {first:?}"));
        }
        let verb = first.ends_with('s') && !NOT_VERBS.contains(&first.as_str());
        if self.is_of_function() && !verb {
            return complain(format!("documentation of a function opens with {first:?}"));
        }
        None
    }

    fn is_of_function(&self) -> bool {
        let before = self.item.split('(').next().unwrap_or_default();
        before.split_whitespace().any(|word| word == "fn") && !before.contains('=')
    }
}

/// The texts and names of a Rust file.
#[derive(Debug, Default)]
struct Source {
    comments: Vec<Block>,
    strings: Vec<Block>,
    names: Vec<(usize, String)>,
    /// True within an example of a comment.
    fenced: bool,
}

impl Source {
    fn of(text: &str) -> Self {
        let mut source = Self::default();
        let mut open_string: Option<(String, Block)> = None;
        for (at, line) in text.lines().enumerate() {
            source.line(at + 1, line, &mut open_string);
        }
        source
    }

    /// Splits a line into code, string literals and a comment.
    fn line(&mut self, number: usize, line: &str, open: &mut Option<(String, Block)>) {
        let mut rest = line;
        let mut code = String::new();
        loop {
            if let Some((end, mut block)) = open.take() {
                let Some(at) = end_of_string(rest, &end) else {
                    block.lines.push((number, unescaped(rest)));
                    *open = Some((end, block));
                    break;
                };
                block.lines.push((number, unescaped(&rest[..at])));
                self.strings.push(block);
                code.push(' ');
                rest = &rest[at + end.len()..];
            }
            let Some(at) = rest.find(['"', '/', '\'']) else {
                code.push_str(rest);
                break;
            };
            let (before, from) = rest.split_at(at);
            code.push_str(before);
            if from.starts_with("//") {
                self.comment(number, from, code.trim().is_empty());
                break;
            }
            if let Some(text) = from.strip_prefix('"') {
                let hashes = before.len() - before.trim_end_matches('#').len();
                let raw = before.trim_end_matches('#').ends_with('r');
                let end = if raw { format!("\"{}", "#".repeat(hashes)) } else { "\"".to_owned() };
                *open = Some((end, Block::default()));
                rest = text;
            } else if from.starts_with("'\\\"'") || from.starts_with("'\"'") {
                rest = from.split_once("\"'").map_or("", |(_, rest)| rest);
            } else {
                code.push(' ');
                rest = &from[1..];
            }
        }
        self.code(number, &code);
    }

    fn comment(&mut self, number: usize, text: &str, alone: bool) {
        let documents = text.starts_with("///") && !text.starts_with("////");
        let inner = text.trim_start_matches('/').trim_start_matches('!');
        let fence = inner.trim_start().starts_with("```");
        self.fenced ^= fence;
        let example = fence || self.fenced || inner.starts_with("     ") && documents;
        let inner = if example { "" } else { inner };
        let continued = self.comments.last_mut().filter(|block| {
            let (last, _) = block.lines.last().expect("a block has a line");
            alone && last + 1 == number && block.documents == documents && block.item.is_empty()
        });
        match continued {
            Some(block) => block.lines.push((number, inner.to_owned())),
            None => {
                let block = Block { documents, ..Block::one(number, inner) };
                self.comments.push(block);
            }
        }
    }

    fn code(&mut self, number: usize, code: &str) {
        let code_only = code.trim();
        if code_only.is_empty() {
            return;
        }
        if let Some(block) = self.comments.last_mut()
            && block.item.is_empty()
            && !code_only.starts_with("#[")
            && !code_only.ends_with(")]")
        {
            block.item = code_only.to_owned();
        }
        let names = code.split(|c: char| !c.is_alphanumeric() && c != '_');
        self.names.extend(names.filter(|name| !name.is_empty()).map(|n| (number, n.to_owned())));
    }

    fn complaints(&self) -> Vec<Complaint> {
        let mut found: Vec<_> =
            self.comments.iter().chain(&self.strings).flat_map(Block::denied).collect();
        let documentation = self.comments.iter().filter(|block| block.documents);
        found.extend(documentation.filter_map(Block::opening));
        for (line, name) in &self.names {
            let parts = snake_case(name);
            let denied = parts.split('_').any(|part| DENIED_IN_NAMES.contains(&part));
            if denied || format!("_{parts}_").contains("_in_line_") {
                found.push(Complaint { line: *line, text: format!("name {name:?}") });
            }
        }
        found.sort_by_key(|complaint| complaint.line);
        found
    }
}

/// Returns the position of the delimiter that ends a string literal.
fn end_of_string(text: &str, end: &str) -> Option<usize> {
    let raw = end.len() > 1;
    let escaped = |at: usize| {
        let slashes = text[..at].len() - text[..at].trim_end_matches('\\').len();
        slashes % 2 == 1
    };
    text.match_indices(end).map(|(at, _)| at).find(|&at| raw || !escaped(at))
}

/// Returns a string literal's text without quotation marks, which would exempt what they enclose.
fn unescaped(text: &str) -> String {
    text.replace("\\\"", " ").replace("\\n", " ").replace('`', " ")
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    let mut lower = false;
    for c in name.chars() {
        if c.is_uppercase() && lower {
            snake.push('_');
        }
        lower = c.is_lowercase();
        snake.extend(c.to_lowercase());
    }
    snake
}

fn page_blocks(text: &str) -> Vec<Block> {
    let mut fenced = false;
    let mut blocks = vec![Block::default()];
    for (at, line) in text.lines().enumerate() {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        if fenced || fence || line.trim().is_empty() || line.starts_with("> ") {
            blocks.push(Block::default());
            continue;
        }
        let starts_block = ["#", "|", "- ", "* "].iter().any(|mark| line.starts_with(mark));
        if starts_block {
            blocks.push(Block::default());
        }
        blocks.last_mut().expect("one block").lines.push((at + 1, without_targets(line)));
    }
    blocks.retain(|block| !block.lines.is_empty());
    blocks
}

/// Returns a line of a page without the targets of its links.
fn without_targets(line: &str) -> String {
    let mut parts = line.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text.push(' ');
        text.push_str(part.split_once(')').map_or("", |(_, rest)| rest));
    }
    text
}

fn script_blocks(text: &str) -> Vec<Block> {
    let mut blocks = vec![Block::default()];
    for (at, line) in text.lines().enumerate() {
        match line.trim_start().strip_prefix('#') {
            Some(comment) if !comment.starts_with('!') => {
                blocks.last_mut().expect("one block").lines.push((at + 1, comment.to_owned()));
            }
            _ => blocks.push(Block::default()),
        }
    }
    blocks.retain(|block| !block.lines.is_empty());
    blocks
}

/// Returns the Rust files except this one, which lists the denied words.
fn rust_files() -> Vec<String> {
    let files = sources(&CODE).into_iter();
    let names = files.map(|file| file.to_str().expect("a name in UTF-8").to_owned());
    let relative = |name: String| {
        let root = format!("{}/", root().display());
        name.strip_prefix(&root).unwrap_or(&name).to_owned()
    };
    names.map(relative).filter(|name| !name.ends_with("docs/words.rs")).collect()
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
