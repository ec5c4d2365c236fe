//! From values to a `PipelineSpec`, with every fault and not only the first.
//!
//! The derived deserializer of `spec` is the one source of truth about keys and types. It stops
//! at the first fault; so the fault is noted, its place mended with a stand-in, and the whole
//! tried again. Places that were mended are remembered: what is found there later is a
//! consequence, not a fault.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use serde_path_to_error::Segment;

use super::{
    document::{Content, Node, Origin},
    faults::{Fault, did_you_mean, nearest},
    spec::PipelineSpec,
};
use crate::limits;

/// Paths whose values are stand-ins.
#[derive(Debug, Default)]
pub(super) struct Mended(BTreeSet<Vec<String>>);

impl Mended {
    pub fn insert(&mut self, path: Vec<String>) {
        self.0.insert(path);
    }

    /// Whether the value at a path, or one that it stands in, is a stand-in.
    pub fn covers<S: AsRef<str>>(&self, path: &[S]) -> bool {
        let path: Vec<String> = path.iter().map(|step| step.as_ref().to_owned()).collect();
        (0..=path.len()).any(|length| self.0.contains(&path[..length]))
    }
}

/// Decodes; `None` where not even stand-ins help. A mistyped key is read as what it is meant
/// to be, in `origin` too, so that checks go on below it.
pub(super) fn decode(
    mut value: Value,
    origin: &mut Origin,
    mended: &mut Mended,
    faults: &mut Vec<Fault>,
) -> Option<PipelineSpec> {
    let mut decoder = Decoder { origin, mended, faults, tries: BTreeMap::new() };
    // Each round mends one place, and a place takes a few rounds.
    for _ in 0..limits::FAULTS_SHOWN * STAND_INS {
        match serde_path_to_error::deserialize(&value) {
            Ok(spec) => return Some(spec),
            Err(error) => {
                let path = steps(error.path(), &value);
                let refusal = Refusal::parse(&error.inner().to_string());
                decoder.mend(&mut value, path, refusal)?;
            }
        }
    }
    None
}

/// Stand-ins that are tried for one place: see `Decoder::stand_in`.
const STAND_INS: usize = 7;

/// Why the deserializer stopped.
enum Refusal {
    UnknownKey {
        known: Vec<String>,
    },
    MissingKey(String),
    UnknownChoice {
        choices: Vec<String>,
    },
    /// A choice such as `divide` without the value that it takes, or the reverse.
    ChoiceShape {
        needs_value: bool,
    },
    /// Another type where one of some choices should stand; the choices are not known yet.
    NotAChoice,
    Type {
        expected: String,
    },
}

impl Refusal {
    /// Reads serde's message; its wording is part of serde's interface in all but name, and
    /// the tests below hold it.
    fn parse(message: &str) -> Self {
        // What the user wrote comes first and may contain anything; what follows is ours.
        let expected = message.rsplit_once("expected ").map_or(message, |(_, expected)| expected);
        let names = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
        if message.starts_with("unknown field") {
            Self::UnknownKey { known: names(expected) }
        } else if message.starts_with("missing field") {
            Self::MissingKey(names(message).concat())
        } else if message.starts_with("unknown variant") {
            Self::UnknownChoice { choices: names(expected) }
        } else if expected == "unit" || expected.starts_with("unit variant") {
            Self::ChoiceShape { needs_value: false }
        } else if expected.starts_with("newtype variant") || expected.starts_with("struct variant") {
            Self::ChoiceShape { needs_value: true }
        } else if expected.starts_with("string or map") || expected.starts_with("map with a single key") {
            Self::NotAChoice
        } else {
            Self::Type { expected: plain_words(expected) }
        }
    }
}

/// A type in the words of someone who does not know Rust.
fn plain_words(expected: &str) -> String {
    let words = match expected {
        "u8" | "u16" | "u64" | "usize" => "a whole number, 0 or more",
        "u32" => "a whole number from 0 to 4294967295",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a string" => "text",
        "a boolean" => "`true` or `false`",
        "a sequence" => "a list",
        "a character" => "one character",
        "an array of length 2" => "a list of two numbers",
        _ => "keys and values",
    };
    words.to_owned()
}

struct Decoder<'a> {
    origin: &'a mut Origin,
    mended: &'a mut Mended,
    faults: &'a mut Vec<Fault>,
    /// How many stand-ins a path has had.
    tries: BTreeMap<Vec<String>, usize>,
}

impl Decoder<'_> {
    /// Notes the fault at a path and mends it; `None` where nothing more can be done.
    fn mend(&mut self, value: &mut Value, mut path: Vec<String>, refusal: Refusal) -> Option<()> {
        match refusal {
            Refusal::UnknownKey { known } => self.unknown_key(value, &path, &known),
            Refusal::MissingKey(key) => {
                let known = self.mended.covers(&path);
                path.push(key.clone());
                if !known && !self.mended.covers(&path) {
                    // At the top there is no key to mark: the file as a whole lacks it.
                    let parent = &path[..path.len() - 1];
                    let root = parent.is_empty();
                    let span = if root { 0..0 } else { self.origin.root().mark_key(self.origin.text(), parent) };
                    self.note(span, format!("key `{key}` is missing"), None);
                }
                self.stand_in(value, path, None)
            }
            Refusal::UnknownChoice { choices } => {
                if !self.mended.covers(&path) {
                    self.unknown_choice(&path, &choices);
                }
                self.stand_in(value, path, choices.first())
            }
            Refusal::ChoiceShape { needs_value } => {
                if !self.mended.covers(&path) {
                    self.choice_shape(value, &path, needs_value);
                }
                self.stand_in(value, path, None)
            }
            Refusal::NotAChoice if !self.mended.covers(&path) => {
                // As text it is refused again, with the choices.
                *at(value, &path)? = Value::from("");
                Some(())
            }
            Refusal::NotAChoice => self.stand_in(value, path, None),
            Refusal::Type { expected } => {
                if !self.mended.covers(&path) {
                    self.wrong_type(&path, &expected);
                }
                self.stand_in(value, path, None)
            }
        }
    }

    fn unknown_key(&mut self, value: &mut Value, path: &[String], known: &[String]) -> Option<()> {
        let (key, parent) = path.split_last()?;
        let map = at(value, parent)?.as_object_mut()?;
        let found = map.shift_remove(key)?;
        let meant = nearest(key, known.iter().map(String::as_str)).map(str::to_owned);
        let span = self.origin.root().mark_key(self.origin.text(), path);
        let help = match &meant {
            Some(meant) if map.contains_key(meant) => format!("`{meant}` is given already: remove this one"),
            Some(meant) => format!("did you mean `{meant}`?"),
            None if known.is_empty() => "no keys belong here".to_owned(),
            None => format!("the keys here are {}", list(known, "and")),
        };
        if let Some(meant) = meant.filter(|meant| !map.contains_key(meant)) {
            map.insert(meant.clone(), found);
            if let Some(Content::Map(entries)) = self.origin.root_mut().get_mut(parent).map(|node| &mut node.content) {
                entries.iter_mut().filter(|entry| entry.key == *key).for_each(|entry| entry.key.clone_from(&meant));
            }
        }
        if !self.mended.covers(parent) {
            self.note(span, format!("unknown key `{key}`"), Some(help));
        }
        Some(())
    }

    fn unknown_choice(&mut self, path: &[String], choices: &[String]) {
        let (root, text) = (self.origin.root(), self.origin.text());
        // A choice that takes a value stands as the one key of a map.
        let (found, span) = match root.get(path).map(Node::entries) {
            Some([entry]) => (entry.key.clone(), entry.key_span.clone()),
            _ => (self.found(path), root.mark(text, path)),
        };
        let help = did_you_mean(&found, choices.iter().map(String::as_str));
        self.note(span, format!("expected {}, found {}", list(choices, "or"), quoted(&found)), help);
    }

    fn choice_shape(&mut self, value: &Value, path: &[String], needs_value: bool) {
        // The path may end at the choice itself: `scale.divide`.
        let choice = match pointer(value, path) {
            Some(Value::String(choice)) => choice.clone(),
            Some(Value::Object(map)) => map.keys().next().cloned().unwrap_or_default(),
            _ => path.last().cloned().unwrap_or_default(),
        };
        let span = self.origin.root().mark(self.origin.text(), path);
        if needs_value {
            let help = format!("write `{{ {choice}: ... }}`");
            self.note(span, format!("`{choice}` needs a value"), Some(help));
        } else {
            self.note(span, format!("`{choice}` takes no value"), Some(format!("write `{choice}` alone")));
        }
    }

    fn wrong_type(&mut self, path: &[String], expected: &str) {
        let found = self.found(path);
        let is_number = found.starts_with(|c: char| c.is_ascii_digit());
        let is_memory = path == ["run", "memory"];
        let expected = if is_memory { "a size" } else { expected };
        let help = match path {
            _ if is_memory => Some("write a number and a unit, such as `512MiB` or `4GiB`".to_owned()),
            _ if expected == "text" && (is_number || matches!(found.as_str(), "true" | "false")) => {
                Some(format!("put it in quotes: \"{found}\""))
            }
            _ if expected == "a list" && self.origin.root().get(path).is_some_and(|node| node.scalar().is_some()) => {
                Some(format!("write `[{found}]`"))
            }
            _ => None,
        };
        let span = self.origin.root().mark(self.origin.text(), path);
        self.note(span, format!("expected {expected}, found {}", quoted(&found)), help);
    }

    /// What the file has at a path, in short.
    fn found(&self, path: &[String]) -> String {
        match self.origin.root().get(path).map(|node| &node.content) {
            Some(Content::Scalar { text, .. }) if text.chars().count() <= 40 => text.clone(),
            Some(Content::Scalar { text, .. }) => format!("{}...", text.chars().take(40).collect::<String>()),
            Some(Content::List(_)) => "a list".to_owned(),
            Some(Content::Map(_)) => "keys and values".to_owned(),
            Some(Content::Broken) | None => String::new(),
        }
    }

    fn note(&mut self, span: std::ops::Range<usize>, message: String, help: Option<String>) {
        self.faults.push(Fault { message, span, help, elsewhere: None });
    }

    /// Puts the next stand-in to a path and remembers that.
    fn stand_in(&mut self, value: &mut Value, path: Vec<String>, choice: Option<&String>) -> Option<()> {
        let (step, parent) = path.split_last()?;
        let parent = at(value, parent)?;
        let number = self.tries.entry(path.clone()).or_default();
        // A key can be left out for its default. A list keeps its length, and the only key of a
        // map may be a choice that the map is there for.
        if *number == 0 && parent.as_object().is_none_or(|map| map.len() == 1 && map.contains_key(step)) {
            *number = 1;
        }
        let stand_in = match (choice, *number) {
            (_, 0) => None,
            (Some(choice), 1..STAND_INS) => Some(Value::from(choice.as_str())),
            (_, 1) => Some(Value::from(1)),
            (_, 2) => Some(Value::from("stand_in")),
            (_, 3) => Some(Value::Array(Vec::new())),
            (_, 4) => Some(Value::Object(serde_json::Map::new())),
            (_, 5) => Some(Value::Null),
            (_, 6) => Some(Value::Bool(false)),
            _ => return None,
        };
        *number += 1;
        match (parent, stand_in) {
            (Value::Object(map), None) => {
                map.shift_remove(step);
            }
            (Value::Object(map), Some(stand_in)) => {
                map.insert(step.clone(), stand_in);
            }
            (Value::Array(items), Some(stand_in)) => *items.get_mut(step.parse::<usize>().ok()?)? = stand_in,
            _ => return None,
        }
        self.mended.insert(path);
        Some(())
    }
}

fn quoted(found: &str) -> String {
    match found {
        "" => "nothing".to_owned(),
        "a list" | "keys and values" => found.to_owned(),
        _ => format!("`{found}`"),
    }
}

/// Words as `a`, `b` or `c`.
fn list(words: &[String], last: &str) -> String {
    let quoted: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((end, rest)) if !rest.is_empty() => format!("{} {last} {end}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// The deserializer's path as steps through the value, as far as the value has them.
fn steps(path: &serde_path_to_error::Path, value: &Value) -> Vec<String> {
    let mut steps = Vec::new();
    for segment in path {
        steps.push(match segment {
            Segment::Seq { index } => index.to_string(),
            Segment::Map { key } | Segment::Enum { variant: key } => key.clone(),
            Segment::Unknown => break,
        });
        if pointer(value, &steps).is_none() {
            steps.pop();
            break;
        }
    }
    steps
}

fn pointer<'a>(value: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(value, |value, step| match value {
        Value::Object(map) => map.get(step),
        Value::Array(items) => items.get(step.parse::<usize>().ok()?),
        _ => None,
    })
}

fn at<'a>(value: &'a mut Value, path: &[String]) -> Option<&'a mut Value> {
    path.iter().try_fold(value, |value, step| match value {
        Value::Object(map) => map.get_mut(step),
        Value::Array(items) => items.get_mut(step.parse::<usize>().ok()?),
        _ => None,
    })
}
