//! Faults of a pipeline file, all together, each with line, column, excerpt and fix.

use std::{fmt, ops::Range, sync::Arc};

use annotate_snippets::{AnnotationKind, Group, Level, Origin, Renderer, Snippet};

use crate::{
    limits,
    remedy::{Remedied, Remedy},
};

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What is wrong, in one line.
    pub message: String,
    /// Bytes of the file to mark; empty where the file as a whole is meant.
    pub span: Range<usize>,
    /// The way out, if there is one to name.
    pub help: Option<String>,
    /// What is at fault, where it is not the pipeline file.
    pub elsewhere: Option<Elsewhere>,
}

/// What may be at fault besides the pipeline file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Elsewhere {
    /// The SQL file that `span` points into.
    Sql(Arc<SqlFile>),
    /// A `--param`; `span` is empty.
    CommandLine,
}

/// A SQL file that a pipeline file names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqlFile {
    /// Its path.
    pub path: String,
    /// Its text; empty if it could not be read.
    pub text: String,
}

/// All faults of one file; `Display` gives them with marked excerpts.
#[derive(Clone, Debug)]
pub struct Faults {
    /// The file's path, as the user wrote it.
    pub file: String,
    /// The file's text; empty if it could not be read.
    pub text: Arc<str>,
    /// At least one, in the order of the file.
    pub faults: Vec<Fault>,
}

impl Faults {
    /// The faults with marked excerpts, for a terminal that shows colours or one that does not.
    pub fn render(&self, color: bool) -> String {
        let renderer = if color { Renderer::styled() } else { Renderer::plain() };
        let mut out = String::new();
        for fault in self.faults.iter().take(limits::FAULTS_SHOWN) {
            out.push_str(&self.excerpt(fault, &renderer));
            out.push_str("\n\n");
        }
        let count = self.faults.len();
        let plural = if count == 1 { "" } else { "s" };
        let rest = if count > limits::FAULTS_SHOWN { ", the first of them shown" } else { "" };
        let place = if self.on_command_line() { "the command line for " } else { "" };
        out + &format!("{count} fault{plural} in {place}{}{rest}", self.file)
    }

    /// Whether the file is fine and only what the command line sets is not.
    fn on_command_line(&self) -> bool {
        self.faults.iter().all(|fault| fault.elsewhere == Some(Elsewhere::CommandLine))
    }

    fn excerpt(&self, fault: &Fault, renderer: &Renderer) -> String {
        let title = Level::ERROR.primary_title(printable(&fault.message));
        let place = match &fault.elsewhere {
            Some(Elsewhere::Sql(file)) => Some((file.path.as_str(), file.text.as_str())),
            Some(Elsewhere::CommandLine) => None,
            None => Some((self.file.as_str(), &*self.text)),
        };
        let group: Group<'_> = match place {
            None => Group::with_title(title),
            Some((path, _)) if fault.span == (0..0) => title.element(Origin::path(path)),
            Some((path, text)) => {
                let mark = AnnotationKind::Primary.span(within(text, &fault.span));
                title.element(Snippet::source(text).path(path).annotation(mark))
            }
        };
        let group = match &fault.help {
            Some(help) => group.element(Level::HELP.message(printable(help))),
            None => group,
        };
        renderer.render(&[group])
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for Faults {}

impl Remedied for Faults {
    fn remedy(&self) -> Remedy {
        if self.on_command_line() { Remedy::FixCommand } else { Remedy::FixFile }
    }
}

/// The choice that a mistyped word may mean.
pub fn nearest<'a>(word: &str, choices: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = (word.chars().count() / 3).max(1);
    let word = word.to_lowercase();
    choices
        .into_iter()
        .map(|choice| (strsim::damerau_levenshtein(&word, &choice.to_lowercase()), choice))
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, choice)| choice)
}

/// A hint that names the choice which a mistyped word may mean.
pub fn did_you_mean<'a>(word: &str, choices: impl IntoIterator<Item = &'a str>) -> Option<String> {
    nearest(word, choices).map(|choice| format!("did you mean `{choice}`?"))
}

/// A span that lies within the text, on character boundaries.
fn within(text: &str, span: &Range<usize>) -> Range<usize> {
    let start = text.floor_char_boundary(span.start.min(text.len()));
    let end = text.ceil_char_boundary(span.end.min(text.len()));
    start..end.max(start)
}

/// Text of the user's without characters that would steer a terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}
