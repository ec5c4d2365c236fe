//! Executors in this process: one thread each, with a share of the cores.

use std::{
    sync::{Arc, atomic::AtomicBool},
    thread,
};

use tokio::runtime::Handle;

use super::blame;
use crate::{
    cluster::{
        RunError,
        training::{Place, Training, Watch},
    },
    ids::Rank,
    learn::{self, Checkpoint, Communicator, Control, Trained},
    limits,
    telemetry::Events,
};

/// Trains to the end and gives every rank's account, rank 0's first.
pub(super) async fn train(
    training: Training,
    executors: u32,
    events: Events,
    stop: Arc<AtomicBool>,
) -> Result<Vec<Trained>, RunError> {
    let resume = training.checkpoint().await?;
    let runtime = Handle::current();
    let control = Control { stop, regroup: Arc::default() };
    let ranks = move || run_ranks(&training, executors, resume.as_ref(), &control, &events, &runtime);
    tokio::task::spawn_blocking(ranks).await.map_err(|error| RunError::Thread(error.into()))?
}

fn run_ranks(
    training: &Training,
    executors: u32,
    resume: Option<&Checkpoint>,
    control: &Control,
    events: &Events,
    runtime: &Handle,
) -> Result<Vec<Trained>, RunError> {
    let world = executors + training.servers();
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = cores / executors.max(1) as usize;
    let run = |comm: Box<dyn Communicator>| {
        let _runtime = runtime.enter();
        let mut state = resume.cloned().unwrap_or_default();
        let feed = training.feed(comm.rank(), world, None);
        let tell = |event| events.emit(&event);
        let mut watch = Watch { training, runtime, tell: &tell };
        let place = Place { comm, control, threads, source: Rank(0), observer: &mut watch };
        training.run(&feed, place, &mut state)
    };
    let comms = learn::in_process(world, limits::COLLECTIVE);
    let results: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| run(comm))).collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
    });
    let mut trained = Vec::with_capacity(results.len());
    let mut failures = Vec::new();
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(Ok(rank)) => trained.push(rank),
            Ok(Err(error)) => failures.push(error),
            Err(_) => failures.push(RunError::Panicked { rank: Rank(rank as u32) }),
        }
    }
    // When one rank fails the others miss it; the one that did not merely miss another tells why.
    failures.sort_by_key(blame);
    failures.into_iter().next().map_or(Ok(trained), Err)
}
