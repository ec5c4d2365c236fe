//! The command line, as people and schedulers meet it.

mod exit_codes;
mod help;
mod output;
mod project;
mod signals;
mod sql;

use std::{
    fmt::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use crate::command::{Answer, command};

/// A folder to work in, and commands that run there.
pub(crate) struct Project(tempfile::TempDir);

impl Project {
    pub(crate) fn empty() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// What `init` writes.
    pub(crate) fn starter() -> Self {
        let project = Self::empty();
        project.emberflow(&["init"]).expect(0);
        project
    }

    /// What `init` writes, trained and embedded.
    pub(crate) fn trained() -> Self {
        let project = Self::starter();
        project.emberflow(&["run", "sensors.yaml", "--quiet"]).expect(0);
        project
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// Changes one part of a file.
    pub(crate) fn edit(&self, name: &str, from: &str, to: &str) {
        let text = self.read(name);
        assert!(text.contains(from), "{name} holds no {from:?}");
        self.write(name, &text.replacen(from, to, 1));
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = command(args);
        command.current_dir(self.0.path());
        command
    }

    pub(crate) fn emberflow(&self, args: &[&str]) -> Answer {
        self.command(args).output().unwrap().into()
    }

    pub(crate) fn spawn(&self, args: &[&str]) -> Child {
        self.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// A command and its answer, as a terminal would show them.
    fn transcript(&self, args: &[&str]) -> String {
        let answer = self.emberflow(args);
        let quoted = |arg: &&str| if arg.contains(' ') { format!("{arg:?}") } else { (*arg).to_owned() };
        let shown: Vec<_> = args.iter().map(quoted).collect();
        let mut text = format!("$ emberflow {}\n{}{}", shown.join(" "), answer.stdout, answer.stderr);
        match answer.code {
            Some(0) => {}
            Some(code) => writeln!(text, "[exit code {code}]").unwrap(),
            None => text.push_str("[killed]\n"),
        }
        text
    }
}

/// Compares a text with the snapshot of that name; what differs between machines and runs is
/// filtered.
fn check_snapshot(name: &str, folder: &Path, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_snapshot_path("cli/snapshots");
    settings.set_omit_expression(true);
    for (pattern, shown) in [
        (r"[0-9a-f]{64}", "[fingerprint]"),
        (r"sensors-[0-9a-f]{12}", "sensors-[id]"),
        (r"\b[0-9a-f]{12}\b", "[fingerprint]"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "[time]"),
        (r"attempt (\d+) on \S+", "attempt $1 on [host]"),
        (r"\d+ rows/s", "[n] rows/s"),
        (r"(\d+% [a-z ]+(, )?)+\n", "[shares]\n"),
        (r"\d+\.\d+ s\b", "[t] s"),
        (r"\b\d+\.\d{3,}\b", "[x]"),
        // DataFusion's plan depends on the number of cores.
        (r"(?s)(transform clean of readings\n).*?\n\n", "$1    [plan]\n\n"),
        // Columns are as wide as what is filtered; behind `|` stands an excerpt.
        (r"([^\s|]) {2,}", "$1  "),
    ] {
        settings.add_filter(pattern, shown);
    }
    let folder = folder.canonicalize().unwrap().display().to_string();
    let text = text.replace(&folder, "[folder]");
    settings.bind(|| insta::assert_snapshot!(name, text));
}
