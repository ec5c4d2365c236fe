//! The interactive shell of `emberflow sql`.

use std::path::PathBuf;

use datafusion::prelude::SessionContext;
use rustyline::{
    Editor, Helper,
    completion::{Completer, Pair},
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::DefaultHistory,
    validate::{ValidationContext, ValidationResult, Validator},
};

use super::{Failure, output, sql};

/// What is completed besides table names.
const KEYWORDS: [&str; 16] = [
    "SELECT",
    "FROM",
    "WHERE",
    "GROUP BY",
    "ORDER BY",
    "LIMIT",
    "JOIN",
    "WITH",
    "AS",
    "DESC",
    "count(*)",
    "HAVING",
    "DISTINCT",
    "array_cosine_similarity(",
    "array_distance(",
    "inner_product(",
];

const HELP: &str = "\\d lists tables, \\d NAME describes one, \\q ends; a query ends with ;";

/// Reads and answers queries until the end of input.
pub(super) async fn run(session: SessionContext) -> Result<u8, Failure> {
    let runtime = tokio::runtime::Handle::current();
    let shell = tokio::task::spawn_blocking(move || read_and_answer(&session, &runtime));
    shell.await.map_err(Failure::bug)?
}

fn read_and_answer(session: &SessionContext, runtime: &tokio::runtime::Handle) -> Result<u8, Failure> {
    let mut editor = Editor::<Sql, DefaultHistory>::new().map_err(|error| Failure::io("the terminal", error))?;
    editor.set_helper(Some(Sql { words: words(session) }));
    let history = history_file();
    if let Some(file) = &history {
        // The first start has no history yet.
        let _ = editor.load_history(file);
    }
    output::hint(HELP);
    loop {
        match editor.readline("emberflow> ") {
            Ok(line) => {
                // Only an over-long history fails here; the line is still answered.
                let _ = editor.add_history_entry(line.trim());
                if matches!(line.trim(), "\\q" | "quit" | "exit") {
                    break;
                }
                if let Err(failure) = runtime.block_on(answer(session, line.trim())) {
                    failure.report(false);
                }
            }
            Err(ReadlineError::Interrupted) => {}
            Err(ReadlineError::Eof) => break,
            Err(error) => return Err(Failure::io("the terminal", error)),
        }
    }
    if let Some(file) = &history {
        let saved = file.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(ReadlineError::from);
        if let Err(error) = saved.and_then(|()| editor.save_history(file)) {
            output::hint(&format!("{}: the history cannot be kept: {error}", file.display()));
        }
    }
    Ok(0)
}

async fn answer(session: &SessionContext, line: &str) -> Result<(), Failure> {
    match line.split_once(char::is_whitespace).unwrap_or((line, "")) {
        ("", _) => Ok(()),
        ("\\d", "") => output::print(&(sql::tables(session).join("\n") + "\n")),
        ("\\d", name) => sql::answer_on_stdout(session, &format!("DESCRIBE \"{}\"", name.trim_matches('"'))).await,
        (command, _) if command.starts_with('\\') => Err(Failure::usage(format!("{command} is no command: {HELP}"))),
        _ => {
            for statement in sql::statements(line)? {
                sql::answer_on_stdout(session, &statement).await?;
            }
            Ok(())
        }
    }
}

fn words(session: &SessionContext) -> Vec<String> {
    KEYWORDS.iter().map(|&word| word.to_owned()).chain(sql::tables(session)).collect()
}

fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state = state.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/state")));
    state.map(|folder| folder.join("emberflow/history"))
}

/// Completion of words, and input over several lines until `;`.
struct Sql {
    words: Vec<String>,
}

impl Helper for Sql {}

impl Highlighter for Sql {}

impl Hinter for Sql {
    type Hint = String;
}

impl Completer for Sql {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        let start = line[..position].rfind(|c: char| c.is_whitespace() || "(,".contains(c)).map_or(0, |at| at + 1);
        let typed = line[start..position].to_lowercase();
        let fits = |word: &&String| !typed.is_empty() && word.to_lowercase().starts_with(&typed);
        let pair = |word: &String| Pair { display: word.clone(), replacement: word.clone() };
        Ok((start, self.words.iter().filter(fits).map(pair).collect()))
    }
}

impl Validator for Sql {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let complete = is_complete(context.input());
        Ok(if complete { ValidationResult::Valid(None) } else { ValidationResult::Incomplete })
    }
}

/// Whether Enter ends the input: commands and blanks at once, queries at `;`.
fn is_complete(input: &str) -> bool {
    let input = input.trim();
    input.is_empty() || input.starts_with('\\') || input.ends_with(';') || matches!(input, "quit" | "exit")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_go_on_until_a_semicolon() {
        for (input, complete) in
            [("", true), ("\\d t", true), ("SELECT 1", false), ("SELECT\n1;", true), ("quit", true)]
        {
            assert_eq!(is_complete(input), complete, "{input}");
        }
    }
}
