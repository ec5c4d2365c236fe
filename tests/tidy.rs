//! Holds the house to its map: `src/lib.rs` lists the layers from the ground up, and no module
//! may use one that stands below it in that list, nor a list forget a module.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Files longer than this are several things in one.
const MAX_LINES: usize = 800;

#[test]
fn imports_run_downward() {
    let layers = layers();
    let mut faults = Vec::new();
    for file in sources(Path::new("src")) {
        let Some(room) = room_of(&file) else { continue };
        let mine = *layers.get(&room).unwrap_or_else(|| panic!("{room} is not on the map in src/lib.rs"));
        for used in used_rooms(&fs::read_to_string(&file).unwrap()) {
            match layers.get(&used) {
                Some(theirs) if *theirs < mine || used == room => {}
                Some(_) => faults.push(format!("{}: {room} may not use {used}", file.display())),
                None => faults.push(format!("{}: {used} is not on the map in src/lib.rs", file.display())),
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_map_is_complete() {
    let text = fs::read_to_string("src/lib.rs").unwrap();
    let declared: BTreeSet<_> =
        text.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')).map(str::to_owned).collect();
    let mapped: BTreeSet<_> = layers().into_keys().collect();
    assert_eq!(declared, mapped);
}

#[test]
fn files_stay_short_and_are_named_for_what_they_hold() {
    let vague = ["utils", "util", "common", "helpers", "helper", "base", "misc"];
    for file in sources(Path::new("src")).into_iter().chain(sources(Path::new("tests"))) {
        let lines = fs::read_to_string(&file).unwrap().lines().count();
        assert!(lines <= MAX_LINES, "{} has {lines} lines, more than {MAX_LINES}", file.display());
        let name = file.file_stem().unwrap().to_str().unwrap();
        assert!(!vague.contains(&name), "{}: name it for what it holds", file.display());
    }
}

/// Layer numbers by module, from the map in `src/lib.rs`; modules on one line may not use
/// each other.
fn layers() -> BTreeMap<String, usize> {
    let text = fs::read_to_string("src/lib.rs").unwrap();
    let map = text.split("```text").nth(1).unwrap().split("```").next().unwrap();
    let mut layers = BTreeMap::new();
    for (layer, line) in map.lines().map(|line| line.trim_start_matches("//!").trim()).enumerate() {
        let names = line.split("  ").next().unwrap_or_default();
        layers.extend(names.split_whitespace().map(|name| (name.to_owned(), layer)));
    }
    layers
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// The top-level module of a file; `None` for `lib.rs` and `main.rs`.
fn room_of(file: &Path) -> Option<String> {
    let first = file.strip_prefix("src").ok()?.components().next()?;
    let name = Path::new(first.as_os_str()).file_stem()?.to_str()?.to_owned();
    (name != "lib" && name != "main").then_some(name)
}

/// Top-level modules named after `crate::`, in paths and in grouped imports.
fn used_rooms(text: &str) -> BTreeSet<String> {
    let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut rooms = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        // `$crate::` and `other_crate::` are not ours.
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            rooms.extend(group_heads(group));
        } else {
            rooms.extend(head(rest));
        }
    }
    rooms
}

/// The first names of the entries of `a::{..}, b, c::d}`.
fn group_heads(group: &str) -> Vec<String> {
    let (mut heads, mut depth, mut entry) = (Vec::new(), 0, String::new());
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => heads.extend(head(std::mem::take(&mut entry).trim())),
            _ if depth == 0 => entry.push(c),
            _ => {}
        }
    }
    heads.extend(head(entry.trim()));
    heads
}

fn head(path: &str) -> Option<String> {
    let name: String = path.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!name.is_empty()).then_some(name)
}

#[test]
fn grouped_imports_are_seen() {
    let text = "use crate::{\n    a::{b, c},\n    d,\n};\nuse crate::e::f;\n// crate::g\nfn h() { crate::i::j() }";
    let rooms: Vec<_> = used_rooms(text).into_iter().collect();
    assert_eq!(rooms, ["a", "d", "e", "i"]);
}
