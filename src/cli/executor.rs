//! `emberflow executor`: a process that trains and encodes for a run elsewhere.

use super::{Context, Failure};
use crate::cluster;

/// Arguments of `executor`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Where the run listens, such as `trainer-1:7400`.
    #[arg(long, value_name = "HOST:PORT")]
    join: String,
}

/// Works for a run until there is no more to do.
pub(super) async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let security = cluster::executor_security(&context.config)?;
    let (storage, runtime) = (context.storage.clone(), tokio::runtime::Handle::current());
    let work = move || cluster::execute(&storage, &args.join, &security, &runtime);
    tokio::task::spawn_blocking(work).await.map_err(Failure::bug)??;
    Ok(0)
}
