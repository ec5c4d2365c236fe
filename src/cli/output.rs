//! Data on stdout.

use std::{
    fmt,
    io::{self, ErrorKind, Write},
};

use serde::Serialize;

use super::{Failure, run::OutputFormat};

/// Writes to stdout. A reader that closed the pipe (`head`) has seen enough: no error.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::target("stdout", &error)),
        _ => Ok(()),
    }
}

/// A line on stderr, for hints.
pub(super) fn hint(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// A result, as asked for.
pub(super) fn result(format: OutputFormat, value: &(impl fmt::Display + Serialize)) -> Result<(), Failure> {
    match format {
        OutputFormat::Text => print(&value.to_string()),
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string(value).map_err(Failure::bug)?)),
    }
}

/// A value as indented JSON.
pub(super) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::bug)?;
    print(&format!("{text}\n"))
}

/// `1 model`, `2 models`.
pub(super) fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Rows of text under headings, columns aligned.
pub(super) fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([headings[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let body = rows.iter().map(|row| line(row.iter().map(String::as_str).collect()));
    std::iter::once(line(headings.to_vec())).chain(body).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["a".to_owned(), "1".to_owned()], vec!["long".to_owned(), String::new()]];
        assert_eq!(table(&["name", "n"], &rows), "name  n\na     1\nlong\n");
    }
}
