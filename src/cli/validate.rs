//! `emberflow validate`.

use std::path::PathBuf;

use super::{
    Context, Failure, output,
    pipeline_args::{ParamArgs, working_folder},
};

/// Arguments of `validate`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Pipeline files.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    params: ParamArgs,
}

/// Checks every file and tells all faults of all of them.
pub(super) fn run(context: &Context, args: &Args) -> Result<u8, Failure> {
    working_folder()?;
    let mut code = 0;
    for file in &args.files {
        match args.params.plan(file) {
            Ok(plan) => {
                let (models, tables) = (plan.models.len(), plan.embeddings.len());
                let (models, tables) = (output::count(models, "model"), output::count(tables, "embedding table"));
                output::print(&format!("{}: fine ({models}, {tables})\n", file.display()))?;
            }
            // A wrong file (78) outweighs a wrong command line (64).
            Err(failure) => code = code.max(failure.report(context.color)),
        }
    }
    Ok(code)
}
