//! The text of a pipeline file as a tree that knows where everything stands.
//!
//! YAML 1.2 without what a pipeline file has no use for: anchors, aliases, tags, several
//! documents. Each is a fault, like a key given twice.

use std::{ops::Range, sync::Arc};

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, ScanError, Span};

use super::faults::{Fault, Faults};

/// Nesting at most: the format needs six levels, and readers recurse.
const MAX_DEPTH: usize = 32;

/// Where the parts of a plan stand in its file.
#[derive(Clone, Debug)]
pub struct Origin {
    file: String,
    text: Arc<str>,
    root: Node,
}

impl Origin {
    pub(super) fn new(file: String, text: Arc<str>, root: Node) -> Self {
        Self { file, text, root }
    }

    /// A fault at a path such as `["models", "autoencoder", "features", "0", "column"]`; where
    /// the file has no such node, its nearest ancestor is marked. For faults that only show
    /// once the data is known: an unknown column, an unusable type.
    pub fn fault(&self, path: &[&str], message: String, help: Option<String>) -> Faults {
        let span = self.root.mark(&self.text, path);
        let fault = Fault { message, span, help, elsewhere: None };
        Faults { file: self.file.clone(), text: Arc::clone(&self.text), faults: vec![fault] }
    }

    /// The file's path, as the user wrote it.
    pub fn file(&self) -> &str {
        &self.file
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn root(&self) -> &Node {
        &self.root
    }

    pub(super) fn root_mut(&mut self) -> &mut Node {
        &mut self.root
    }

    pub(super) fn into_faults(self, faults: Vec<Fault>) -> Faults {
        Faults { file: self.file, text: self.text, faults }
    }
}

/// A value and the bytes that it takes in the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Node {
    pub span: Range<usize>,
    pub content: Content,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Content {
    /// Text before any reading of it as number, boolean or null; that is for plain scalars only.
    Scalar {
        text: String,
        style: ScalarStyle,
    },
    List(Vec<Node>),
    Map(Vec<Entry>),
    /// What could not be read and has its fault already.
    Broken,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub key: String,
    pub key_span: Range<usize>,
    pub value: Node,
}

impl Node {
    /// The value at a path of keys and list indices.
    pub fn get<S: AsRef<str>>(&self, path: &[S]) -> Option<&Node> {
        path.iter().try_fold(self, |node, step| node.child(step.as_ref()).map(|(_, child)| child))
    }

    /// The value at a path, to be changed.
    pub fn get_mut<S: AsRef<str>>(&mut self, path: &[S]) -> Option<&mut Node> {
        path.iter().try_fold(self, |node, step| match &mut node.content {
            Content::Map(entries) => entries.iter_mut().find(|e| e.key == step.as_ref()).map(|e| &mut e.value),
            Content::List(items) => items.get_mut(step.as_ref().parse::<usize>().ok()?),
            Content::Scalar { .. } | Content::Broken => None,
        })
    }

    /// The entries of a map; none for anything else.
    pub fn entries(&self) -> &[Entry] {
        if let Content::Map(entries) = &self.content { entries } else { &[] }
    }

    /// The text of a scalar.
    pub fn scalar(&self) -> Option<&str> {
        if let Content::Scalar { text, .. } = &self.content { Some(text) } else { None }
    }

    fn child(&self, step: &str) -> Option<(Option<&Range<usize>>, &Node)> {
        match &self.content {
            Content::Map(entries) => entries.iter().find(|e| e.key == step).map(|e| (Some(&e.key_span), &e.value)),
            Content::List(items) => items.get(step.parse::<usize>().ok()?).map(|item| (None, item)),
            Content::Scalar { .. } | Content::Broken => None,
        }
    }

    /// What to mark for a path, or for its nearest ancestor in the file: the value where it
    /// fits on one line, else its key.
    pub fn mark<S: AsRef<str>>(&self, text: &str, path: &[S]) -> Range<usize> {
        let (key, node, complete) = self.nearest(path);
        let inline = !node.span.is_empty() && !text[node.span.clone()].contains(['\n', '\r']);
        match key {
            Some(key) if !inline || !complete => key.clone(),
            _ if inline => node.span.clone(),
            _ => node.first_mark(text),
        }
    }

    /// The key at the end of a path, or what stands for it.
    pub fn mark_key<S: AsRef<str>>(&self, text: &str, path: &[S]) -> Range<usize> {
        let (key, node, _) = self.nearest(path);
        key.cloned().unwrap_or_else(|| node.first_mark(text))
    }

    /// The deepest node on a path, its key, and whether the whole path was found.
    fn nearest<S: AsRef<str>>(&self, path: &[S]) -> (Option<&Range<usize>>, &Node, bool) {
        let (mut key, mut node) = (None, self);
        for step in path {
            let Some((child_key, child)) = node.child(step.as_ref()) else { return (key, node, false) };
            (key, node) = (child_key, child);
        }
        (key, node, true)
    }

    /// The first key of a map, or the first line of anything else.
    fn first_mark(&self, text: &str) -> Range<usize> {
        if let Some(first) = self.entries().first() {
            return first.key_span.clone();
        }
        let line = text[self.span.clone()].lines().next().unwrap_or_default();
        self.span.start..self.span.start + line.trim_end().len()
    }

    /// The place in the file of some bytes of this scalar's value; the whole scalar where
    /// folding or escapes leave no such place.
    pub fn locate(&self, text: &str, range: Range<usize>) -> Range<usize> {
        let Some(value) = self.scalar() else { return self.span.clone() };
        let source = &text[self.span.clone()];
        let start = self.span.start;
        if let Some(shift) = source.find(value) {
            return start + shift + range.start..start + shift + range.end;
        }
        // The lines of a block without their indentation; each stands alone in the file.
        match (block_offset(source, value, range.start), block_offset(source, value, range.end)) {
            (Some(from), Some(to)) if from <= to => start + from..start + to,
            (Some(from), _) => start + from..start + from,
            _ => self.first_mark(text),
        }
    }
}

/// Where byte `at` of a block's value stands in its source. Both start with the same line,
/// but for blank lines and indentation.
fn block_offset(source: &str, value: &str, at: usize) -> Option<usize> {
    let skipped = value.len() - value.trim_start_matches('\n').len();
    let before = value.get(skipped..at)?;
    let column = before.len() - before.rfind('\n').map_or(0, |newline| newline + 1);
    let value_line = value[at - column..].split('\n').next()?;
    let mut start = source.len() - source.trim_start().len();
    for _ in before.matches('\n') {
        start += source[start..].find('\n')? + 1;
    }
    let source_line = source[start..].split('\n').next()?.trim_end_matches('\r');
    let indent = source_line.strip_suffix(value_line)?.len();
    Some(start + indent + column)
}

/// Reads YAML: the tree and the faults found on the way; no tree where the text is no YAML.
pub(super) fn parse(text: &str) -> (Option<Node>, Vec<Fault>) {
    let mut builder = Builder { places: Places::new(text), frames: Vec::new(), root: None, faults: Vec::new() };
    let body = &text[builder.places.shift..];
    let mut parser = Parser::new_from_str(body);
    while let Some(event) = parser.next_event() {
        match event {
            Ok((event, span)) => {
                if !builder.take(event, span) {
                    return (None, builder.faults);
                }
            }
            Err(error) => {
                let fault = builder.scan_fault(&error);
                builder.faults.push(fault);
                return (None, builder.faults);
            }
        }
    }
    match builder.root {
        Some(Node { content: Content::Map(_), .. }) => (builder.root, builder.faults),
        Some(node) if node.span.is_empty() => {
            (None, vec![fault("the file is empty", 0..0, Some("`emberflow init` writes one to start from"))])
        }
        Some(node) => {
            let span = node.first_mark(text);
            builder.faults.push(fault("a pipeline file consists of keys and values", span, None));
            (None, builder.faults)
        }
        None => (None, vec![fault("the file is empty", 0..0, Some("`emberflow init` writes one to start from"))]),
    }
}

fn fault(message: &str, span: Range<usize>, help: Option<&str>) -> Fault {
    Fault { message: message.to_owned(), span, help: help.map(str::to_owned), elsewhere: None }
}

const TABS: &str = "tabs cannot indent YAML";

/// A collection whose end has not come yet.
enum Frame {
    List { start: usize, items: Vec<Node> },
    Map { start: usize, entries: Vec<Entry>, key: Option<(String, Range<usize>)> },
}

/// Builds the tree from the parser's events; a stack, for the nesting is the user's.
struct Builder<'a> {
    places: Places<'a>,
    frames: Vec<Frame>,
    root: Option<Node>,
    faults: Vec<Fault>,
}

impl Builder<'_> {
    /// Takes one event; false when reading on makes no sense.
    fn take(&mut self, event: Event<'_>, span: Span) -> bool {
        let span = self.places.range(span);
        match event {
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => {}
            Event::DocumentStart(_) => {
                if self.root.is_some() {
                    let help = Some("a pipeline file is one document: give each its own file");
                    self.faults.push(fault("a second document starts here", span, help));
                    return false;
                }
            }
            Event::Alias(_) => {
                let help = Some("write the value out, or use a parameter");
                self.faults.push(fault("aliases are not part of this format", span.clone(), help));
                self.node(Node { span, content: Content::Broken });
            }
            Event::Scalar(text, style, anchor, tag) => {
                self.refuse(anchor, tag.is_some(), &span);
                let span = if text.is_empty() && style == ScalarStyle::Plain { span.start..span.start } else { span };
                let span = self.places.trim(span);
                self.node(Node { span, content: Content::Scalar { text: text.into_owned(), style } });
            }
            Event::SequenceStart(anchor, tag) => {
                self.refuse(anchor, tag.is_some(), &span);
                self.frames.push(Frame::List { start: span.start, items: Vec::new() });
            }
            Event::MappingStart(anchor, tag) => {
                self.refuse(anchor, tag.is_some(), &span);
                self.frames.push(Frame::Map { start: span.start, entries: Vec::new(), key: None });
            }
            Event::SequenceEnd | Event::MappingEnd => self.close(span.start),
        }
        if self.frames.len() > MAX_DEPTH {
            let at = self.places.last.byte;
            self.faults.push(fault("nested too deeply", at..at, None));
            return false;
        }
        true
    }

    fn refuse(&mut self, anchor: usize, tag: bool, span: &Range<usize>) {
        let what = match (anchor > 0, tag) {
            (false, false) => return,
            (true, _) => "anchors are not part of this format",
            (false, true) => "tags are not part of this format",
        };
        let first_line = self.places.trim(span.clone());
        self.faults.push(fault(what, first_line, Some("write the plain value")));
    }

    /// Ends a collection; `bracket` is where its closing bracket is, if it has one.
    fn close(&mut self, bracket: usize) {
        let node = match self.frames.pop() {
            Some(Frame::List { start, items }) => {
                let end = self.places.end_of(start, items.last().map(|item| item.span.end), bracket);
                Node { span: start..end, content: Content::List(items) }
            }
            Some(Frame::Map { start, entries, .. }) => {
                let last = entries.last().map(|entry| entry.value.span.end.max(entry.key_span.end));
                let end = self.places.end_of(start, last, bracket);
                Node { span: start..end, content: Content::Map(entries) }
            }
            None => return,
        };
        self.node(node);
    }

    /// Puts a finished node where it belongs.
    fn node(&mut self, node: Node) {
        match self.frames.last_mut() {
            None => self.root = Some(node),
            Some(Frame::List { items, .. }) => items.push(node),
            Some(Frame::Map { entries, key, .. }) => match key.take() {
                None => {
                    let text = node.scalar().unwrap_or_default().to_owned();
                    if !matches!(node.content, Content::Scalar { .. }) {
                        self.faults.push(fault("a key is a word, not a collection", node.span.clone(), None));
                    }
                    if self.places.indent_of(node.span.start).contains('\t') {
                        self.faults.push(fault(TABS, node.span.clone(), Some("use blanks")));
                    }
                    *key = Some((text, node.span));
                }
                Some((key, key_span)) => {
                    if let Some(first) = entries.iter().find(|entry| entry.key == key) {
                        let line = self.places.line_of(first.key_span.start);
                        let help = format!("it stands in line {line} already: keep one of them");
                        self.faults.push(fault(&format!("key `{key}` is given twice"), key_span, Some(&help)));
                    } else {
                        entries.push(Entry { key, key_span, value: node });
                    }
                }
            },
        }
    }

    fn scan_fault(&mut self, error: &ScanError) -> Fault {
        let at = self.places.offset(*error.marker());
        let line = self.places.line_around(at);
        let (message, help) = if self.places.indent_of(at).contains('\t') {
            (TABS.to_owned(), Some("use blanks"))
        } else if line.contains("${") && !line.contains("\"${") {
            (format!("this is not YAML: {}", error.info()), Some("inside { } and [ ], put \"${...}\" in quotes"))
        } else {
            (format!("this is not YAML: {}", error.info()), None)
        };
        fault(&message, at..self.places.next_char(at), help)
    }
}

/// Turns the parser's marks (line, and column in characters) into bytes of the text.
struct Places<'a> {
    text: &'a str,
    /// Bytes of a byte order mark, which the parser does not get to see.
    shift: usize,
    line_starts: Vec<usize>,
    last: Place,
}

/// The last place asked for: marks come in order, so the next one is found from here.
#[derive(Clone, Copy, Default)]
struct Place {
    line: usize,
    column: usize,
    byte: usize,
}

impl<'a> Places<'a> {
    fn new(text: &'a str) -> Self {
        let shift = if text.starts_with('\u{feff}') { '\u{feff}'.len_utf8() } else { 0 };
        let bytes = text.as_bytes();
        // YAML ends lines by LF, CRLF and a lone CR.
        let breaks = (0..bytes.len())
            .filter(|&i| bytes[i] == b'\n' || (bytes[i] == b'\r' && bytes.get(i + 1) != Some(&b'\n')))
            .map(|i| i + 1);
        Self { text, shift, line_starts: std::iter::once(shift).chain(breaks).collect(), last: Place::default() }
    }

    fn offset(&mut self, mark: Marker) -> usize {
        let line = mark.line().max(1) - 1;
        let Some(&start) = self.line_starts.get(line) else { return self.text.len() };
        let known = self.last;
        let (column, from) = match known.line == line && known.column <= mark.col() && known.byte >= start {
            true => (known.column, known.byte),
            false => (0, start),
        };
        let rest = &self.text[from..];
        let byte = rest.char_indices().nth(mark.col() - column).map_or(self.text.len(), |(at, _)| from + at);
        self.last = Place { line, column: mark.col(), byte };
        byte
    }

    fn range(&mut self, span: Span) -> Range<usize> {
        let start = self.offset(span.start);
        let kept = self.last;
        let end = self.offset(span.end);
        self.last = kept;
        start..end.max(start)
    }

    /// Without the blanks and line breaks at the end.
    fn trim(&self, span: Range<usize>) -> Range<usize> {
        span.start..span.start + self.text[span.clone()].trim_end().len()
    }

    /// Where a collection ends: with its bracket, or with its last part.
    fn end_of(&self, start: usize, last: Option<usize>, bracket: usize) -> usize {
        let closed = self.text[start..].starts_with(['[', '{']) && self.text[bracket..].starts_with([']', '}']);
        let end = if closed { bracket + 1 } else { last.unwrap_or(start) };
        end.max(start)
    }

    /// The number, from 1, of the line of a byte.
    fn line_of(&self, byte: usize) -> usize {
        self.line_starts.partition_point(|&start| start <= byte)
    }

    fn line_around(&self, byte: usize) -> &'a str {
        let line = self.line_of(byte).max(1) - 1;
        let end = self.line_starts.get(line + 1).copied().unwrap_or(self.text.len());
        &self.text[self.line_starts[line]..end]
    }

    /// What stands before the first word of the line of a byte.
    fn indent_of(&self, byte: usize) -> &'a str {
        let line = self.line_around(byte);
        &line[..line.len() - line.trim_start().len()]
    }

    fn next_char(&self, byte: usize) -> usize {
        byte + self.text[byte..].chars().next().map_or(0, char::len_utf8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(text: &str) -> Node {
        let (root, faults) = parse(text);
        assert_eq!(faults, []);
        root.unwrap()
    }

    #[test]
    fn every_value_knows_its_bytes() {
        let text = "# ü\r\nä: 'b c'\r\nd: {e: [1, \"二\"], f: }\r\ng:\r\n  - h: x # y\r\n  -\r\n    i: z\r\n";
        let root = tree(text);
        for (path, expected) in [
            (&["ä"][..], "'b c'"),
            (&["d"], "{e: [1, \"二\"], f: }"),
            (&["d", "e"], "[1, \"二\"]"),
            (&["d", "e", "1"], "\"二\""),
            (&["d", "f"], ""),
            (&["g"], "- h: x # y\r\n  -\r\n    i: z"),
            (&["g", "0", "h"], "x"),
            (&["g", "1"], "i: z"),
        ] {
            assert_eq!(&text[root.get(path).unwrap().span.clone()], expected, "{path:?}");
        }
    }

    #[test]
    fn marks_fit_on_one_line() {
        let text = "a:\n  b: [1,\n    2]\n  c:\n    - d: 1\n      e: 2\n    - |\n      long\n      text\n";
        let root = tree(text);
        for (path, expected) in [
            (&[][..], "a"),
            (&["a"], "a"),
            (&["a", "b"], "b"),
            (&["a", "b", "1"], "2"),
            (&["a", "c", "0"], "d"),
            (&["a", "c", "1"], "long"),
            (&["a", "x", "y"], "a"),
        ] {
            assert_eq!(&text[root.mark(text, path)], expected, "{path:?}");
        }
    }

    #[test]
    fn parts_of_a_scalar_are_found_in_the_file() {
        for (text, part, expected) in [
            ("a: x four y", "four", Some("four")),
            ("a: 'x four y'", "four", Some("four")),
            ("a: |\n  ä\n\n    four y\n  z\n", "four", Some("four")),
            ("a: |\n\n\n  ä\r\n  four\r\n", "four", Some("four")),
            ("a: |2-\n    x\n   four", "four", Some("four")),
            ("a: |\n  x\n  four\n  y\n", "x\nfour", Some("x\n  four")),
            ("a: \"x\\tfour\"", "four", Some("\"x\\tfour\"")),
            ("a: >\n  x\n  four\n", "four", Some("x")),
        ] {
            let root = tree(text);
            let node = root.get(&["a"]).unwrap();
            let start = node.scalar().unwrap().find(part).unwrap();
            let found = node.locate(text, start..start + part.len());
            assert_eq!(text.get(found), expected, "{text:?}");
        }
    }
}
