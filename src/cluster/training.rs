//! The training of one model, as an executor takes part in it: a thread of this process, or
//! another process on another machine.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use super::RunError;
use crate::{
    data::{self, Dataset, DatasetFiles, Feed, FeedPlan, FittedFeatures, Partitions, StepPlan},
    ids::Rank,
    learn::{
        self, Checkpoint, Communicator, Control, Extent, LearnError, NetShape, Observer, Parts, SharedComm, TrainJob,
        Trained,
    },
    pipeline::{
        ModelPlan, RunPlan,
        spec::{DeviceKind, Spread},
    },
    runs::{EpochRecord, Fence},
    storage::{Location, Storage},
    telemetry::Event,
};

/// What an executor needs to know of a training.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TrainWork {
    pub model: ModelPlan,
    pub run: RunPlan,
    pub shape: NetShape,
    pub features: FittedFeatures,
    pub dataset: DatasetFiles,
    /// Ties checkpoints to what they belong to.
    pub identity: String,
    /// Where the checkpoint stands.
    pub checkpoint: Location,
    /// The attempt that this is for.
    pub fence: Fence,
    /// How far to train.
    pub extent: Extent,
}

/// A training with its rows at hand.
pub(super) struct Training {
    pub work: TrainWork,
    pub storage: Storage,
    dataset: Arc<Dataset>,
    features: Arc<FittedFeatures>,
    partitions: Arc<Partitions>,
}

/// A rank's place in a training.
pub(super) struct Place<'a> {
    pub comm: Box<dyn Communicator>,
    pub control: &'a Control,
    /// Threads that it computes with.
    pub threads: usize,
    /// The rank whose state all go on with.
    pub source: Rank,
    /// What it hears of the training; only rank 0 tells.
    pub observer: &'a mut dyn Observer,
}

impl Training {
    /// Deals the rows; a pure function of the work, so that every executor deals alike.
    pub fn new(storage: &Storage, work: TrainWork, dataset: Arc<Dataset>) -> Self {
        let partitions = data::deal(&dataset, &work.model.partition, work.model.train.validation, work.run.seed);
        let (features, partitions) = (Arc::new(work.features.clone()), Arc::new(partitions));
        Self { work, storage: storage.clone(), dataset, features, partitions }
    }

    /// The same in another process, which looks at the files first.
    pub async fn open(storage: &Storage, work: TrainWork) -> Result<Self, RunError> {
        let dataset = Arc::new(Dataset::open(storage, &work.dataset).await?);
        Ok(Self::new(storage, work, dataset))
    }

    /// How the rows are dealt.
    pub fn partitions(&self) -> &Arc<Partitions> {
        &self.partitions
    }

    /// Whether, after a failure, every executor's state is one to go on with; else it is that of the
    /// last checkpoint.
    pub fn survives(&self) -> bool {
        matches!(self.work.model.spread, Spread::Data {}) && learn::survives(self.work.model.train.sync)
    }

    /// Executors that it can use at most.
    pub fn most_executors(&self) -> u32 {
        self.work.model.spread.most_executors(self.work.model.net.hidden.len())
    }

    /// Steps of an epoch.
    pub fn steps(&self) -> u64 {
        self.step_plan().steps()
    }

    fn step_plan(&self) -> StepPlan {
        let rows: Vec<u64> = self.partitions.partitions.iter().map(|partition| partition.train_rows).collect();
        StepPlan::new(&rows, self.work.model.train.batch)
    }

    /// Ranks that it needs besides those that own rows.
    pub fn servers(&self) -> u32 {
        learn::servers(&self.work.model.train)
    }

    /// The checkpoint on storage, if there is one that fits.
    pub async fn checkpoint(&self) -> Result<Option<Checkpoint>, RunError> {
        if self.work.extent.trial().is_some() {
            return Ok(None);
        }
        Ok(Checkpoint::load(&self.storage, &self.work.checkpoint, &self.work.identity).await?)
    }

    /// Keeps a checkpoint.
    pub async fn save(&self, checkpoint: &Checkpoint) -> Result<(), LearnError> {
        // A later attempt may own the run by now; its checkpoint must not be overwritten.
        self.work.fence.check(&self.storage).await?;
        checkpoint.save(&self.storage, &self.work.checkpoint).await
    }

    /// The rows of a rank; goes on with a feed of the same training where there is one.
    pub fn feed(&self, rank: Rank, world_size: u32, before: Option<&Feed>) -> Feed {
        // Servers stand behind the ranks that own rows.
        let workers = world_size.saturating_sub(self.servers()).max(1);
        let spread = self.work.model.spread;
        if let (Some(feed), Spread::Data {}) = (before, spread) {
            return feed.owning(self.partitions.owned_by(rank, workers));
        }
        Feed::new(self.storage.clone(), learn::share_of_rows(self.all_rows(), spread, rank, workers))
    }

    /// What is read, of which each rank has a share.
    fn all_rows(&self) -> FeedPlan {
        FeedPlan {
            dataset: Arc::clone(&self.dataset),
            features: Arc::clone(&self.features),
            width: self.features.width(),
            partitions: Arc::clone(&self.partitions),
            owned: Vec::new(),
            batch: self.work.model.train.batch,
            // The other half is for decoding, the network and what is written.
            memory_bytes: self.work.run.memory_bytes / 2,
        }
    }

    /// Trains on the calling thread; see `learn::train_rank`.
    pub fn run(&self, feed: &Feed, place: Place<'_>, state: &mut Checkpoint) -> Result<Trained, RunError> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(place.threads.max(1)).build();
        let pool = pool.map_err(|error| RunError::Thread(error.into()))?;
        let TrainWork { model, run, shape, .. } = &self.work;
        let Place { comm, control, source, observer, .. } = place;
        let (rank, world_size, mut comm) = (comm.rank(), comm.world_size(), SharedComm::new(comm));
        let job = TrainJob {
            plan: &model.train,
            steps: self.step_plan(),
            held_out_rows: self.partitions.held_out_rows(),
            feature_names: feed.feature_names(),
            identity: self.work.identity.clone(),
            source,
            parts: Parts::new(model.spread, shape, world_size),
            extent: self.work.extent,
        };
        // A server computes nothing that needs a device.
        let serves = rank.0 + self.servers() >= world_size;
        let run = RunPlan { device: if serves { DeviceKind::Cpu } else { run.device }, ..run.clone() };
        pool.install(|| {
            let mut step = learn::replica(model, shape, &run, &comm)?;
            let observer: Option<&mut dyn Observer> = if rank == Rank(0) { Some(observer) } else { None };
            Ok(learn::train_rank(&job, control, feed, step.as_mut(), &mut comm, observer, state)?)
        })
    }
}

/// Rank 0's account of a training, to storage and to whoever listens.
pub(super) struct Watch<'a> {
    pub training: &'a Training,
    pub runtime: &'a Handle,
    pub tell: &'a (dyn Fn(Event) + Sync),
}

impl Observer for Watch<'_> {
    fn progress(&mut self, epoch: u32, _step: u64) {
        if self.training.work.extent.trial().is_some() {
            return;
        }
        let (kind, name) = ("train".to_owned(), self.training.work.model.name.clone());
        (self.tell)(Event::Progress { kind, name, done: u64::from(epoch) });
    }

    fn epoch(&mut self, record: &EpochRecord) {
        (self.tell)(Event::Epoch {
            model: self.training.work.model.name.clone(),
            epoch: record.epoch,
            epochs: self.training.work.model.train.epochs,
            loss: record.loss,
            held_out_loss: record.held_out_loss,
            learning_rate: record.learning_rate,
            rows: record.rows,
            rows_per_s: record.rows as f64 / record.elapsed_s.max(f64::MIN_POSITIVE),
        });
    }

    fn checkpoint(&mut self, checkpoint: &Checkpoint) -> Result<(), LearnError> {
        self.runtime.block_on(self.training.save(checkpoint))?;
        let (epoch, step) = (checkpoint.epoch, checkpoint.step);
        (self.tell)(Event::Checkpoint { model: self.training.work.model.name.clone(), epoch, step });
        Ok(())
    }
}
