//! Parameters: declared in the file, set by `--param`, written `${name}` where a value stands.
//!
//! A scalar that is exactly `${name}` takes the parameter's typed value; within other text the
//! value stands as text. A date may be moved by whole days: `${ds-1d}`. `$${` is a plain `${`.

use std::{collections::BTreeMap, ops::Range, path::Path};

use chrono::{Days, NaiveDate};
use serde_json::Value;

use super::{
    document::{Content, Node, Origin},
    faults::{Elsewhere, Fault, did_you_mean},
    spec::ParamType,
};

/// The parameters' values; `None` for one whose declaration or value has a fault already.
pub(super) struct Params(BTreeMap<String, Option<Param>>);

struct Param {
    kind: ParamType,
    /// The value as the file would write it.
    value: Value,
    text: String,
}

impl Params {
    /// Reads declarations and overrides. Relative paths count from `folder` where the file
    /// gives them, from `working_dir` where the command line does.
    pub fn declare(
        origin: &Origin,
        overrides: &[(String, String)],
        folder: &Path,
        working_dir: &Path,
        faults: &mut Vec<Fault>,
    ) -> Self {
        let declared = origin.root().get(&["params"]).map_or(&[][..], Node::entries);
        let mut params = BTreeMap::new();
        for entry in declared {
            let given = overrides.iter().rev().find(|(name, _)| *name == entry.key);
            let param = match (kind(&entry.value), given) {
                (None, _) => Ok(None),
                (Some(kind), Some((name, text))) => {
                    parse(kind, text, working_dir).map(Some).map_err(|message| on_command_line(name, &message, None))
                }
                (Some(kind), None) => default(origin, &entry.key, &entry.value, kind, folder).map(Some),
            };
            params.insert(
                entry.key.clone(),
                param.unwrap_or_else(|fault| {
                    faults.push(fault);
                    None
                }),
            );
        }
        for (name, _) in overrides.iter().filter(|(name, _)| !params.contains_key(name)) {
            let help = did_you_mean(name, params.keys().map(String::as_str));
            faults.push(on_command_line(name, "the file has no such parameter", help));
        }
        Self(params)
    }

    /// All values as text.
    pub fn texts(&self) -> BTreeMap<String, String> {
        self.0.iter().filter_map(|(name, param)| Some((name.clone(), param.as_ref()?.text.clone()))).collect()
    }

    /// Text with all parameters filled in; the faults' spans count within `text`. `None` in
    /// place of the text where a parameter has no value, which has its fault elsewhere.
    pub fn expand(&self, text: &str) -> Result<Option<Expanded>, Vec<Fault>> {
        let mut out = Expanded::default();
        let (mut faults, mut known, mut at) = (Vec::new(), true, 0);
        while let Some(found) = text[at..].find("${").map(|found| at + found) {
            if text[at..found].ends_with('$') {
                out.literal(text, at..found - 1);
                out.literal(text, found..found + 2);
                at = found + 2;
                continue;
            }
            out.literal(text, at..found);
            let Some(end) = text[found..].find('}').map(|end| found + end + 1) else {
                let help = Some("close it with `}`, or write `$${` for a plain `${`".to_owned());
                faults.push(Fault { span: found..found + 2, ..fault("`${` is not closed".to_owned(), help) });
                break;
            };
            match self.reference(&text[found + 2..end - 1]) {
                Ok(Some((value, filled))) => {
                    out.whole = (found == 0 && end == text.len()).then_some(value);
                    out.filled(&filled, found..end);
                }
                Ok(None) => known = false,
                Err(fault) => faults.push(Fault { span: found..end, ..fault }),
            }
            at = end;
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        out.literal(text, at..text.len());
        Ok(known.then_some(out))
    }

    /// The value, typed and as text, of what stands between `${` and `}`; the fault has no span.
    fn reference(&self, inner: &str) -> Result<Option<(Value, String)>, Fault> {
        let name_end = inner.find(['+', '-']).unwrap_or(inner.len());
        let (name, shift) = (inner[..name_end].trim(), inner[name_end..].trim());
        let Some(param) = self.0.get(name) else {
            let help = did_you_mean(name, self.0.keys().map(String::as_str))
                .unwrap_or_else(|| "declare it under `params`, or write `$${` for a plain `${`".to_owned());
            return Err(fault(format!("there is no parameter `{name}`"), Some(help)));
        };
        let Some(param) = param else { return Ok(None) };
        if shift.is_empty() {
            return Ok(Some((param.value.clone(), param.text.clone())));
        }
        let form = || Some("write a date moved by whole days, such as `${ds-1d}` or `${ds+7d}`".to_owned());
        let date = match param.kind {
            ParamType::Date => param.text.parse::<NaiveDate>().ok(),
            _ => return Err(fault(format!("`{name}` is not a date and cannot be moved by `{shift}`"), form())),
        };
        let days = shift[1..].trim().strip_suffix('d').and_then(|days| days.parse::<u64>().ok()).map(Days::new);
        let (Some(date), Some(days)) = (date, days) else {
            return Err(fault(format!("`{shift}` is no number of days"), form()));
        };
        let moved = if shift.starts_with('-') { date.checked_sub_days(days) } else { date.checked_add_days(days) };
        let moved = moved.ok_or_else(|| fault(format!("`{inner}` is beyond the calendar"), None))?.to_string();
        Ok(Some((Value::from(moved.as_str()), moved)))
    }
}

/// Text with parameters filled in, which knows where each byte came from.
#[derive(Debug, Default)]
pub(super) struct Expanded {
    /// The text.
    pub text: String,
    /// The typed value, where the text was exactly one parameter.
    pub whole: Option<Value>,
    pieces: Vec<Piece>,
}

#[derive(Debug)]
struct Piece {
    start: usize,
    source: Range<usize>,
    literal: bool,
}

impl Expanded {
    fn literal(&mut self, text: &str, source: Range<usize>) {
        if !source.is_empty() {
            self.pieces.push(Piece { start: self.text.len(), source: source.clone(), literal: true });
            self.text.push_str(&text[source]);
        }
    }

    fn filled(&mut self, value: &str, source: Range<usize>) {
        self.pieces.push(Piece { start: self.text.len(), source, literal: false });
        self.text.push_str(value);
    }

    /// The bytes of the text before filling in that gave these bytes; a whole `${name}` for
    /// any part of its value.
    pub fn source(&self, range: Range<usize>) -> Range<usize> {
        let piece = |at: usize| {
            let next = self.pieces.partition_point(|piece| piece.start <= at);
            self.pieces.get(next.max(1) - 1)
        };
        let start =
            piece(range.start).map_or(0, |p| p.source.start + if p.literal { range.start - p.start } else { 0 });
        if range.is_empty() {
            return start..start;
        }
        let end = piece(range.end - 1)
            .map_or(start, |p| if p.literal { p.source.start + (range.end - p.start) } else { p.source.end });
        start..end.max(start)
    }
}

/// The file's values with parameters filled in, as JSON. What cannot be filled in gives a
/// fault and the path of the scalar.
pub(super) fn fill(origin: &Origin, params: &Params) -> (Value, Vec<Fault>, Vec<Vec<String>>) {
    let mut filler = Filler { origin, params, faults: Vec::new(), broken: Vec::new() };
    let value = filler.value(origin.root(), &mut Vec::new());
    (value, filler.faults, filler.broken)
}

struct Filler<'a> {
    origin: &'a Origin,
    params: &'a Params,
    faults: Vec<Fault>,
    broken: Vec<Vec<String>>,
}

impl Filler<'_> {
    fn value(&mut self, node: &Node, path: &mut Vec<String>) -> Value {
        match &node.content {
            Content::Scalar { text, style } => self.scalar(node, text, *style, path),
            Content::List(items) => {
                let mut step = |(index, item): (usize, &Node)| self.step(item, index.to_string(), path);
                Value::Array(items.iter().enumerate().map(&mut step).collect())
            }
            Content::Map(entries) => entries
                .iter()
                .map(|entry| (entry.key.clone(), self.step(&entry.value, entry.key.clone(), path)))
                .collect(),
            Content::Broken => {
                self.broken.push(path.clone());
                Value::Null
            }
        }
    }

    fn step(&mut self, node: &Node, step: String, path: &mut Vec<String>) -> Value {
        path.push(step);
        let value = self.value(node, path);
        path.pop();
        value
    }

    fn scalar(&mut self, node: &Node, text: &str, style: saphyr_parser::ScalarStyle, path: &[String]) -> Value {
        let plain = style == saphyr_parser::ScalarStyle::Plain;
        let literal = || if plain { core_schema(text) } else { Value::from(text) };
        if !text.contains("${") {
            return literal();
        }
        if path.first().is_some_and(|first| first == "params") {
            // A default stands for itself; `Params::declare` says so.
            return literal();
        }
        match self.params.expand(text) {
            Ok(Some(Expanded { whole: Some(value), .. })) => return value,
            Ok(Some(expanded)) if plain => return core_schema(&expanded.text),
            Ok(Some(expanded)) => return Value::from(expanded.text),
            Ok(None) => {}
            Err(faults) => {
                let located =
                    |fault: Fault| Fault { span: node.locate(self.origin.text(), fault.span.clone()), ..fault };
                self.faults.extend(faults.into_iter().map(located));
            }
        }
        self.broken.push(path.to_vec());
        Value::Null
    }
}

/// A plain scalar by YAML's core schema; infinities and NaN, which no setting takes, stay text.
pub(super) fn core_schema(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return Value::Bool(true),
        "false" | "False" | "FALSE" => return Value::Bool(false),
        _ => {}
    }
    let radix = |prefix, radix| text.strip_prefix(prefix).and_then(|digits| u64::from_str_radix(digits, radix).ok());
    if let Some(number) = radix("0x", 16).or_else(|| radix("0o", 8)) {
        return Value::from(number);
    }
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    if unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        let digits = text.strip_prefix('+').unwrap_or(text);
        if let Ok(number) = digits.parse::<u64>() {
            return Value::from(number);
        }
        if let Ok(number) = digits.parse::<i64>() {
            return Value::from(number);
        }
        if let Some(number) = digits.parse::<f64>().ok().and_then(serde_json::Number::from_f64) {
            return Value::Number(number);
        }
    }
    Value::from(text)
}

fn fault(message: String, help: Option<String>) -> Fault {
    Fault { message, span: 0..0, help, elsewhere: None }
}

fn on_command_line(name: &str, message: &str, help: Option<String>) -> Fault {
    Fault { elsewhere: Some(Elsewhere::CommandLine), ..fault(format!("--param {name}: {message}"), help) }
}

/// The declared type, if the declaration has one that exists.
fn kind(declaration: &Node) -> Option<ParamType> {
    let text = declaration.get(&["type"])?.scalar()?;
    serde_json::from_value(Value::from(text)).ok()
}

fn default(origin: &Origin, name: &str, declaration: &Node, kind: ParamType, folder: &Path) -> Result<Param, Fault> {
    let path = ["params", name, "default"];
    let at = |message: String, help: Option<String>| Fault {
        span: origin.root().mark(origin.text(), &path),
        ..fault(message, help)
    };
    let required = || Fault {
        span: origin.root().mark_key(origin.text(), &path[..2]),
        ..fault(format!("parameter `{name}` has no value"), Some(format!("give one: --param {name}=...")))
    };
    let Some(node) = declaration.get(&["default"]) else { return Err(required()) };
    let Content::Scalar { text, style } = &node.content else {
        return Err(at("a default is a single value".to_owned(), None));
    };
    if *style == saphyr_parser::ScalarStyle::Plain && core_schema(text).is_null() {
        return Err(required());
    }
    if text.contains("${") {
        return Err(at("a default cannot refer to a parameter".to_owned(), None));
    }
    parse(kind, text, folder).map_err(|message| at(message, None))
}

/// A value from text; `folder` is what relative paths count from.
fn parse(kind: ParamType, text: &str, folder: &Path) -> Result<Param, String> {
    let wrong = |expected: &str| format!("expected {expected}, found `{text}`");
    let (value, text) = match kind {
        ParamType::String => (Value::from(text), text.to_owned()),
        ParamType::Int => match core_schema(text) {
            Value::Number(number) if !number.is_f64() => (Value::Number(number), text.to_owned()),
            _ => return Err(wrong("a whole number")),
        },
        ParamType::Float => match core_schema(text) {
            Value::Number(number) => (Value::Number(number), text.to_owned()),
            _ => return Err(wrong("a number")),
        },
        ParamType::Bool => match core_schema(text) {
            Value::Bool(value) => (Value::Bool(value), value.to_string()),
            _ => return Err(wrong("`true` or `false`")),
        },
        ParamType::Date => {
            let day = NaiveDate::parse_from_str(text, "%Y-%m-%d").ok().map(|day| day.to_string());
            match day.filter(|day| day == text) {
                Some(day) => (Value::from(day.as_str()), day),
                None => return Err(wrong("a day of the calendar, YYYY-MM-DD")),
            }
        }
        ParamType::Path if text.trim().is_empty() => return Err(wrong("a path or URL")),
        ParamType::Path => {
            let absolute = if text.contains("://") { text.to_owned() } else { folder.join(text).display().to_string() };
            (Value::from(absolute.as_str()), absolute)
        }
    };
    Ok(Param { kind, value, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_scalars_follow_the_core_schema() {
        for (text, expected) in [
            ("", Value::Null),
            ("~", Value::Null),
            ("True", Value::from(true)),
            ("yes", Value::from("yes")),
            ("+3", Value::from(3)),
            ("-3", Value::from(-3)),
            ("0o17", Value::from(15)),
            ("0xff", Value::from(255)),
            ("1e-3", Value::from(0.001)),
            (".5", Value::from(0.5)),
            ("18446744073709551615", Value::from(u64::MAX)),
            (".inf", Value::from(".inf")),
            ("1e999", Value::from("1e999")),
            ("nan", Value::from("nan")),
            ("infinity", Value::from("infinity")),
            ("2026-12-01", Value::from("2026-12-01")),
            ("1_000", Value::from("1_000")),
        ] {
            assert_eq!(core_schema(text), expected, "{text:?}");
        }
    }

    #[test]
    fn filled_text_knows_where_it_came_from() {
        let param = parse(ParamType::Date, "2026-03-01", Path::new("/")).ok();
        let params = Params(BTreeMap::from([("ds".to_owned(), param), ("broken".to_owned(), None)]));
        let source = "ä ${ds-1d} $${ds} z";
        let expanded = params.expand(source).unwrap().unwrap();
        assert_eq!(expanded.text, "ä 2026-02-28 ${ds} z");
        for (part, expected) in
            [("ä", "ä"), ("02", "${ds-1d}"), ("${ds}", "${ds}"), ("z", "z"), ("28 ${", "${ds-1d} $${")]
        {
            let start = expanded.text.find(part).unwrap();
            assert_eq!(&source[expanded.source(start..start + part.len())], expected, "{part}");
        }
        assert_eq!(params.expand("${ds}").unwrap().unwrap().whole, Some(Value::from("2026-03-01")));
        assert!(params.expand("a ${broken}").unwrap().is_none());
        assert_eq!(params.expand("${x} ${y").unwrap_err().len(), 2);
    }
}
