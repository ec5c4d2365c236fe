//! Executors in this process: one thread each, with a share of the cores.

use std::{
    sync::{Arc, atomic::AtomicBool},
    thread,
};

use tokio::runtime::Handle;

use super::RunError;
use crate::{
    data::{Dataset, Feed, FeedPlan, FittedFeatures, Partitions, StepPlan},
    ids::Rank,
    learn::{
        self, Checkpoint, Communicator, Control, LearnError, NetShape, Observer, Parts, SharedComm, TrainJob, Trained,
    },
    limits,
    pipeline::{ModelPlan, RunPlan},
    runs::{EpochRecord, Lease},
    storage::{Location, Storage},
    telemetry::{Event, Events},
};

/// The training of one model by all executors.
#[derive(Clone)]
pub(super) struct Fleet {
    pub storage: Storage,
    pub plan: ModelPlan,
    pub run: RunPlan,
    pub executors: u32,
    pub shape: NetShape,
    pub dataset: Arc<Dataset>,
    pub features: Arc<FittedFeatures>,
    pub partitions: Arc<Partitions>,
    /// Ties checkpoints to what they belong to.
    pub identity: String,
    /// Where the checkpoint stands.
    pub checkpoint: Location,
    pub lease: Arc<Lease>,
    pub events: Events,
    pub stop: Arc<AtomicBool>,
}

/// Trains to the end and gives every rank's account, rank 0's first.
pub(super) async fn train(fleet: Fleet) -> Result<Vec<Trained>, RunError> {
    let resume = Checkpoint::load(&fleet.storage, &fleet.checkpoint, &fleet.identity).await?;
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || run_ranks(&fleet, resume.as_ref(), &runtime))
        .await
        .map_err(|error| RunError::Thread(error.into()))?
}

fn run_ranks(fleet: &Fleet, resume: Option<&Checkpoint>, runtime: &Handle) -> Result<Vec<Trained>, RunError> {
    let control = Control { stop: Arc::clone(&fleet.stop), regroup: Arc::default() };
    let comms = learn::in_process(fleet.executors, limits::COLLECTIVE);
    let results: Vec<_> = thread::scope(|scope| {
        let spawn = |comm: Box<dyn Communicator>| {
            let control = &control;
            scope.spawn(move || run_rank(fleet, resume.cloned(), control, comm, runtime))
        };
        let threads: Vec<_> = comms.into_iter().map(spawn).collect();
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

/// How little an error tells of the cause: 0 first.
fn blame(error: &RunError) -> u8 {
    match error {
        RunError::Learn(LearnError::NotFinite { blame, .. }) if !blame.is_empty() => 0,
        RunError::Learn(LearnError::Comm(_)) => 3,
        RunError::Learn(LearnError::Interrupted) => 2,
        _ => 1,
    }
}

fn run_rank(
    fleet: &Fleet,
    resume: Option<Checkpoint>,
    control: &Control,
    comm: Box<dyn Communicator>,
    runtime: &Handle,
) -> Result<Trained, RunError> {
    let _runtime = runtime.enter();
    let rank = comm.rank();
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = (cores / fleet.executors.max(1) as usize).max(1);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|error| RunError::Thread(error.into()))?;
    let mut comm = SharedComm::new(comm);
    let feed_plan = learn::share_of_rows(fleet.feed_plan(), fleet.plan.spread, rank, fleet.executors);
    let job = fleet.job(feed_plan.features.names());
    let feed = Feed::new(fleet.storage.clone(), feed_plan);
    let mut state = resume.unwrap_or_default();
    let mut watch = Watch { fleet, runtime };
    let observer: Option<&mut dyn Observer> = if rank == Rank(0) { Some(&mut watch) } else { None };
    pool.install(|| {
        let mut step = learn::replica(&fleet.plan, &fleet.shape, &fleet.run, &comm)?;
        Ok(learn::train_rank(&job, control, &feed, step.as_mut(), &mut comm, observer, &mut state)?)
    })
}

impl Fleet {
    /// To read all rows of all columns.
    fn feed_plan(&self) -> FeedPlan {
        FeedPlan {
            dataset: Arc::clone(&self.dataset),
            features: Arc::clone(&self.features),
            width: self.features.width(),
            partitions: Arc::clone(&self.partitions),
            owned: self.partitions.owned_by(Rank(0), 1),
            batch: self.plan.train.batch,
            // The other half is for decoding, the network and what is written.
            memory_bytes: self.run.memory_bytes / 2,
        }
    }

    fn job(&self, feature_names: Vec<String>) -> TrainJob<'_> {
        let rows: Vec<u64> = self.partitions.partitions.iter().map(|partition| partition.train_rows).collect();
        TrainJob {
            plan: &self.plan.train,
            steps: StepPlan::new(&rows, self.plan.train.batch),
            held_out_rows: self.partitions.held_out_rows(),
            feature_names,
            identity: self.identity.clone(),
            source: Rank(0),
            parts: Parts::new(self.plan.spread, &self.shape, self.executors),
        }
    }
}

/// Rank 0's account of the training, to whoever listens and to storage.
struct Watch<'a> {
    fleet: &'a Fleet,
    runtime: &'a Handle,
}

impl Observer for Watch<'_> {
    fn progress(&mut self, epoch: u32, _step: u64) {
        let (kind, name) = ("train".to_owned(), self.fleet.plan.name.clone());
        self.fleet.events.emit(&Event::Progress { kind, name, done: u64::from(epoch) });
    }

    fn epoch(&mut self, record: &EpochRecord) {
        self.fleet.events.emit(&Event::Epoch {
            model: self.fleet.plan.name.clone(),
            epoch: record.epoch,
            epochs: self.fleet.plan.train.epochs,
            loss: record.loss,
            held_out_loss: record.held_out_loss,
            learning_rate: record.learning_rate,
            rows: record.rows,
            rows_per_s: record.rows as f64 / record.elapsed_s.max(f64::MIN_POSITIVE),
        });
    }

    fn checkpoint(&mut self, checkpoint: &Checkpoint) -> Result<(), LearnError> {
        let fleet = self.fleet;
        self.runtime.block_on(async {
            // A later attempt may own the run by now; its checkpoint must not be overwritten.
            fleet.lease.check().await?;
            checkpoint.save(&fleet.storage, &fleet.checkpoint).await
        })?;
        let (epoch, step) = (checkpoint.epoch, checkpoint.step);
        fleet.events.emit(&Event::Checkpoint { model: fleet.plan.name.clone(), epoch, step });
        Ok(())
    }
}
