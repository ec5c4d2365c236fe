//! How a command fails: an error told once, with its causes, and an exit code.

use std::{
    error::Error,
    io::{IsTerminal, Write},
};

use clap::ColorChoice;

use crate::{
    config::env_vars,
    remedy::{Remedied, Remedy},
};

/// Why a command failed, and what its reader can do.
#[derive(Debug)]
pub(super) struct Failure {
    error: Box<dyn Error + Send + Sync>,
    remedy: Remedy,
}

impl<E: Remedied + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { remedy: error.remedy(), error: Box::new(error) }
    }
}

impl Failure {
    /// The command line asks for what cannot be.
    pub(super) fn usage(message: impl Into<String>) -> Self {
        Self { error: message.into().into(), remedy: Remedy::FixCommand }
    }

    /// The fault is ours.
    pub(super) fn bug(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { error: error.into(), remedy: Remedy::ReportBug }
    }

    /// Something could not be read or written.
    pub(super) fn io(what: impl std::fmt::Display, error: impl std::fmt::Display) -> Self {
        Self { error: format!("{what}: {error}").into(), remedy: Remedy::CheckStorage }
    }

    /// The same failure with the exit code of another remedy.
    pub(super) fn with_remedy(self, remedy: Remedy) -> Self {
        Self { remedy, ..self }
    }

    /// What its reader can do.
    pub(super) fn remedy(&self) -> Remedy {
        self.remedy
    }

    /// Tells it on stderr and gives its exit code. Faults of a pipeline file bring their own
    /// heading, excerpts and all.
    pub(super) fn report(&self, color: bool) -> u8 {
        let mut text = self.error.to_string();
        if !text.starts_with("error") {
            let heading = if color { "\u{1b}[1;31merror\u{1b}[0m" } else { "error" };
            text = format!("{heading}: {text}");
        }
        let mut cause = self.error.source();
        let mut told = self.error.to_string();
        while let Some(error) = cause {
            let message = error.to_string();
            // Some libraries repeat their cause in their own message.
            if !told.contains(&message) {
                text = format!("{text}\n  caused by: {message}");
                told = message;
            }
            cause = error.source();
        }
        if self.remedy == Remedy::ReportBug {
            text = format!("{text}\nthis is a bug in emberflow; please report it");
        }
        // Where even stderr is closed, the exit code tells.
        let _ = writeln!(std::io::stderr(), "{text}");
        self.remedy.exit_code()
    }
}

/// Whether stderr and stdout take colours.
pub(super) fn use_color(choice: ColorChoice) -> bool {
    match choice {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => std::env::var_os(env_vars::NO_COLOR).is_none() && std::io::stderr().is_terminal(),
    }
}

/// A panic is told in one line, as a bug; the thread's owner turns it into an error.
pub(super) fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.payload_as_str().unwrap_or("no message");
        let place = panic.location().map(|place| format!(" at {place}")).unwrap_or_default();
        let _ = writeln!(std::io::stderr(), "bug: {message}{place}; please report this");
    }));
}
