//! Logs, on stderr.

use std::io;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

use super::Failure;
use crate::config::env_vars;

/// How logs are written.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Starts logging; `EMBERFLOW_LOG` chooses what.
pub(super) fn start(format: LogFormat, color: bool) -> Result<(), Failure> {
    let filter = match std::env::var(env_vars::EMBERFLOW_LOG) {
        Ok(text) => EnvFilter::try_new(&text)
            .map_err(|error| Failure::usage(format!("{}={text}: {error}", env_vars::EMBERFLOW_LOG)))?,
        Err(_) => EnvFilter::new("warn"),
    };
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(color);
    match format {
        LogFormat::Text => logs.try_init(),
        LogFormat::Json => logs.json().try_init(),
    }
    .map_err(Failure::bug)
}
