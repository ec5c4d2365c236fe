//! How a command fails: an error told once, with its causes, and an exit code.

use std::{
    error::Error,
    io::{self, ErrorKind, IsTerminal, Write},
};

use clap::ColorChoice;

use crate::{
    cluster::RunError,
    config::env_vars,
    data::DataError,
    pipeline::Faults,
    remedy::{self, Remedied, Remedy},
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

    /// A file that the command line names could not be written.
    pub(super) fn target(what: impl std::fmt::Display, error: &io::Error) -> Self {
        let remedy = match error.kind() {
            ErrorKind::PermissionDenied => Remedy::AskPermission,
            _ => Remedy::FixTarget,
        };
        Self { error: format!("{what}: {error}").into(), remedy }
    }

    /// The same failure with the exit code of another remedy.
    pub(super) fn with_remedy(self, remedy: Remedy) -> Self {
        Self { remedy, ..self }
    }

    /// What its reader can do.
    pub(super) fn remedy(&self) -> Remedy {
        self.remedy
    }

    /// The error and its causes.
    pub(super) fn causes(&self) -> Vec<String> {
        remedy::causes(self.error.as_ref())
    }

    /// Tells it on stderr and gives its exit code.
    pub(super) fn report(&self, color: bool) -> u8 {
        let mut text = if let Some(faults) = self.faults() {
            // Each fault brings its own heading, excerpt and all.
            faults.render(color)
        } else {
            let heading = if color { "\u{1b}[1;31merror\u{1b}[0m" } else { "error" };
            format!("{heading}: {}", self.causes().join("\n  caused by: "))
        };
        if self.remedy == Remedy::ReportBug {
            text.push_str("\nthis is a bug in emberflow; please report it");
        }
        // Where even stderr is closed, the exit code tells.
        let _ = writeln!(io::stderr(), "{text}");
        self.remedy.exit_code()
    }

    /// The faults of a pipeline file, if they are what failed.
    fn faults(&self) -> Option<&Faults> {
        match self.error.downcast_ref() {
            Some(RunError::Faults(faults) | RunError::Data(DataError::Faults(faults))) => Some(faults),
            _ => self.error.downcast_ref(),
        }
    }
}

/// Whether stderr and stdout take colours.
pub(super) fn use_color(choice: ColorChoice) -> bool {
    match choice {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => std::env::var_os(env_vars::NO_COLOR).is_none() && io::stderr().is_terminal(),
    }
}

/// A panic is told in one line, as a bug; the thread's owner turns it into an error.
pub(super) fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.payload_as_str().unwrap_or("no message");
        let place = panic.location().map(|place| format!(" at {place}")).unwrap_or_default();
        let _ = writeln!(io::stderr(), "bug: {message}{place}; please report this");
    }));
}
