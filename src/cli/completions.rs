//! `emberflow completions`.

use clap::CommandFactory;
use clap_complete::Shell;

use super::{Cli, Failure, output};

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The shell.
    shell: Shell,
}

/// Prints the completion script of a shell.
pub(super) fn run(args: &Args) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "emberflow", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}
