//! `emberflow explain`.

use super::{Context, Failure, output, pipeline_args::PipelineArgs};
use crate::cluster;

/// Arguments of `explain`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pipeline: PipelineArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Shows what a run would do.
pub(super) async fn run(context: &Context, args: &Args) -> Result<u8, Failure> {
    let plan = args.pipeline.plan()?;
    let explanation = cluster::explain(&context.storage, &plan).await?;
    if args.json {
        output::print_json(&explanation)?;
    } else {
        output::print(&explanation.to_string())?;
    }
    Ok(0)
}
