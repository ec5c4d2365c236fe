//! `emberflow simulate`.

use super::{Context, Failure, output, pipeline_args::PipelineArgs, run};
use crate::{
    cluster::{self, Aside, Link, SimulateOptions, Stop},
    ids::RunId,
    limits,
    pipeline::spec::Choice,
    telemetry::Events,
};

/// Arguments of `simulate`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pipeline: PipelineArgs,
    /// Sizes of fleets, separated by commas.
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "1,2,4,8,16,64,256,1024,4096,10000",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::SIMULATED_EXECUTORS))
    )]
    executors: Vec<u32>,
    /// Each executor on a host like this one, whose network moves so many gigabits per second.
    #[arg(long, value_name = "GBIT", requires = "latency", value_parser = positive)]
    bandwidth: Option<f64>,
    /// Microseconds until a message is at another host.
    #[arg(long, value_name = "US", requires = "bandwidth", value_parser = positive)]
    latency: Option<f64>,
    /// Fleets to start as well, to see how far the model is off, separated by commas.
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    check: Vec<u32>,
    /// How executors are started, instead of how the file says.
    #[arg(long, value_enum)]
    launcher: Option<run::LauncherName>,
    /// How the result is printed; `json` is one line.
    #[arg(long, value_enum, default_value = "text")]
    output: run::OutputFormat,
}

fn positive(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if number.is_finite() && number > 0.0 { Ok(number) } else { Err("not a number above 0".to_owned()) }
}

/// Measures for a few seconds, and predicts.
pub(super) async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let mut plan = args.pipeline.plan()?;
    // Two of them show what an exchange takes.
    let executors = args.check.iter().copied().max().unwrap_or(0).max(2);
    plan.run = plan.run.started_with(Some(Choice::Fixed(executors)), args.launcher.map(Into::into));
    let link = args.bandwidth.zip(args.latency);
    let options = SimulateOptions {
        executors: args.executors,
        link: link.map(|(gbit, us)| Link { latency_s: us / 1e6, bytes_per_s: gbit * 1e9 / 8.0 }),
        check: args.check,
    };
    let run_id = RunId::new("simulate").ok_or_else(|| Failure::bug("no name for a run"))?;
    let events = Events::new(run_id, run::progress(context));
    let stop = Stop::default();
    let _signals = run::Signals::listen(stop.clone())?;
    let aside = Aside {
        storage: &context.storage,
        plan: &plan,
        site: &context.config,
        site_file: context.config_file.clone(),
        events: &events,
        stop: &stop,
    };
    let simulation = Box::pin(cluster::simulate(&aside, &options)).await?;
    output::result(args.output, &simulation)?;
    Ok(0)
}
