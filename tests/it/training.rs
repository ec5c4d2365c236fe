//! A pipeline file over rows of the test's making, prepared, trained and watched within the
//! test's own process.

use std::{
    ops::ControlFlow,
    path::PathBuf,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use arrow::array::ArrayRef;
use emberflow::{
    config::SiteConfig,
    data::{
        self, Dataset, Engine, FeatureLayout, Feed, FeedPlan, FittedFeatures, Needs, Partitions, Snapshot, StepPlan,
    },
    ids::Rank,
    learn::{
        self, Checkpoint, Communicator, Control, Extent, LearnError, Model, NetShape, Observer, Parts, SharedComm,
        Step, TrainJob, Trained, train_rank,
    },
    pipeline::{EmbeddingPlan, ModelPlan, PipelinePlan, spec::PartitionBy},
    runs::EpochRecord,
    storage::{Location, Storage},
};
use tokio::runtime::Runtime;

use crate::command::{wave, write_features, write_parquet};

/// What checkpoints of these tests belong to.
pub(crate) const IDENTITY: &str = "test";

/// One runtime for all tests, as one serves all executors of a process.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new().unwrap())
}

/// A folder with `rows/` and a pipeline file with model `m` and embedding table `t`.
pub(crate) struct World {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) storage: Storage,
    pub(crate) plan: PipelinePlan,
}

impl World {
    /// `model` and `table` are the inside of a YAML flow mapping.
    pub(crate) fn new(model: &str, table: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("rows")).unwrap();
        let file = folder.path().join("pipeline.yaml");
        let text = format!(
            "version: 1\nname: test\nstore: out\nrun: {{ memory: 64MiB }}\nsources:\n  rows: {{ path: rows }}\n\
             models:\n  m: {{ from: rows, {model} }}\nembeddings:\n  t: {{ model: m, {table} }}\n"
        );
        std::fs::write(&file, text).unwrap();
        let plan = PipelinePlan::read(&file, &[], folder.path()).unwrap_or_else(|faults| panic!("{faults}"));
        Self { folder, storage: Storage::new(&SiteConfig::default()), plan }
    }

    /// The same with files of `id`, `f0`, `f1` and `f2`, so many rows each.
    pub(crate) fn with_rows(model: &str, files: &[usize]) -> Self {
        let world = Self::new(model, "key: [id]");
        for (index, rows) in files.iter().enumerate() {
            write_features(&world.path(index), *rows, |row, feature| wave(row + 1_000 * index, feature));
        }
        world
    }

    /// Where the rows' file of that number is.
    pub(crate) fn path(&self, index: usize) -> PathBuf {
        self.folder.path().join(format!("rows/part-{index:03}.parquet"))
    }

    pub(crate) fn put(&self, index: usize, columns: Vec<(&str, ArrayRef)>) {
        write_parquet(&self.path(index), columns);
    }

    pub(crate) fn model_plan(&self) -> &ModelPlan {
        self.plan.model("m").unwrap()
    }

    pub(crate) fn table_plan(&self) -> &EmbeddingPlan {
        &self.plan.embeddings[0]
    }

    pub(crate) fn location(&self, name: &str) -> Location {
        Location::parse(name, self.folder.path()).unwrap()
    }

    /// Everything from the files to the dealt rows.
    pub(crate) fn prepare(&self) -> Prepared {
        runtime().block_on(async {
            let (storage, plan, model) = (&self.storage, &self.plan, self.model_plan());
            let snapshot = Snapshot::take(storage, plan).await.unwrap();
            let engine = Engine::open(storage, plan, &snapshot).await.unwrap();
            let layout = FeatureLayout::resolve(model, &engine.schema("rows").await.unwrap(), &plan.origin).unwrap();
            let mut columns = [self.table_plan().key.clone(), self.table_plan().columns.clone()].concat();
            columns.extend(layout.columns());
            let mut seen = std::collections::BTreeSet::new();
            columns.retain(|column| seen.insert(column.clone()));
            let hash = (model.partition.by == PartitionBy::Hash).then(|| model.partition.clone());
            let needs = Needs { columns, reject_missing: layout.reject_missing(), hash };
            let staging = self.location("staging");
            let dataset = data::prepare(storage, plan, &engine, "rows", &needs, &staging).await.unwrap();
            let features = Arc::new(data::fit(storage, &layout, &Arc::new(dataset.clone()), &|_| {}).await.unwrap());
            let partitions = data::deal(&dataset, &model.partition, model.train.validation, plan.run.seed);
            Prepared {
                storage: storage.clone(),
                plan: plan.clone(),
                model: model.clone(),
                shape: NetShape::new(model, &features),
                dataset: Arc::new(dataset),
                features,
                partitions: Arc::new(partitions),
                memory_bytes: plan.run.memory_bytes,
            }
        })
    }
}

/// Rows ready to train on.
pub(crate) struct Prepared {
    pub(crate) storage: Storage,
    pub(crate) plan: PipelinePlan,
    pub(crate) model: ModelPlan,
    pub(crate) shape: NetShape,
    pub(crate) dataset: Arc<Dataset>,
    pub(crate) features: Arc<FittedFeatures>,
    pub(crate) partitions: Arc<Partitions>,
    pub(crate) memory_bytes: u64,
}

/// Makes another step of a rank's.
pub(crate) type Tamper<'a> = dyn Fn(&dyn Communicator, Box<dyn Step>) -> Box<dyn Step> + Sync + 'a;

/// What a fleet did: each rank's result and steps, and what rank 0 told.
pub(crate) struct Outcome {
    pub(crate) ranks: Vec<Result<Trained, LearnError>>,
    /// Forward and backward passes of each rank.
    pub(crate) steps: Vec<u64>,
    pub(crate) checkpoints: Vec<Checkpoint>,
    pub(crate) epochs: Vec<EpochRecord>,
}

impl Outcome {
    /// Rank 0's account; every rank must have succeeded with the same parameters and losses.
    pub(crate) fn trained(&self) -> &Trained {
        let ranks: Vec<&Trained> = self.ranks.iter().map(|rank| rank.as_ref().unwrap()).collect();
        for rank in &ranks {
            assert_eq!(bits(&rank.parameters), bits(&ranks[0].parameters));
            assert_eq!(losses(&rank.history), losses(&ranks[0].history));
        }
        ranks[0]
    }

    /// Every rank's error.
    pub(crate) fn errors(&self) -> Vec<&LearnError> {
        self.ranks.iter().map(|rank| rank.as_ref().unwrap_err()).collect()
    }
}

pub(crate) fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Bits of the training and held-out losses.
pub(crate) fn losses(history: &[EpochRecord]) -> Vec<(u64, Option<u64>)> {
    history.iter().map(|epoch| (epoch.loss.to_bits(), epoch.held_out_loss.map(f64::to_bits))).collect()
}

impl Prepared {
    pub(crate) fn feed_plan(&self, rank: Rank, executors: u32) -> FeedPlan {
        let whole = FeedPlan {
            dataset: Arc::clone(&self.dataset),
            features: Arc::clone(&self.features),
            width: self.features.width(),
            partitions: Arc::clone(&self.partitions),
            owned: self.partitions.owned_by(Rank(0), 1),
            batch: self.model.train.batch,
            memory_bytes: self.memory_bytes,
        };
        learn::share_of_rows(whole, self.model.spread, rank, executors)
    }

    pub(crate) fn feed(&self, rank: Rank, executors: u32) -> Feed {
        let _runtime = runtime().enter();
        Feed::new(self.storage.clone(), self.feed_plan(rank, executors))
    }

    pub(crate) fn step(&self) -> Box<dyn Step> {
        learn::burn_step(&self.shape, self.model.train.loss, self.plan.run.device, 0, self.plan.run.seed).unwrap()
    }

    pub(crate) fn train(&self, executors: u32) -> Outcome {
        self.train_watched(executors, None, &|_, _| ControlFlow::Continue(()))
    }

    /// Trains with this many executors from `resume` on. `watch` is called by rank 0 with each
    /// checkpoint and its number; when it breaks, the rank in the middle is told to stop, as if
    /// a signal had reached its process only.
    pub(crate) fn train_watched(
        &self,
        executors: u32,
        resume: Option<&Checkpoint>,
        watch: &(dyn Fn(usize, &Checkpoint) -> ControlFlow<()> + Sync),
    ) -> Outcome {
        self.train_tampered(executors, resume, watch, &|_, step| step)
    }

    /// The same with every rank's step as `tamper` makes it.
    pub(crate) fn train_tampered(
        &self,
        executors: u32,
        resume: Option<&Checkpoint>,
        watch: &(dyn Fn(usize, &Checkpoint) -> ControlFlow<()> + Sync),
        tamper: &Tamper<'_>,
    ) -> Outcome {
        let world = executors + learn::servers(&self.model.train);
        let stops: Vec<Arc<AtomicBool>> = (0..world).map(|_| Arc::default()).collect();
        let counts: Vec<AtomicU64> = (0..world).map(|_| AtomicU64::new(0)).collect();
        let told = Mutex::new((Vec::new(), Vec::new()));
        let run = |comm: Box<dyn Communicator>| {
            let (rank, mut comm) = (comm.rank(), SharedComm::new(comm));
            let step = tamper(&comm, learn::replica(&self.model, &self.shape, &self.plan.run, &comm).unwrap());
            let count = &counts[rank.0 as usize];
            let before = |_, _: &[f32]| {
                count.fetch_add(1, Ordering::Relaxed);
                Pass::Good
            };
            let mut step = Tampered { step, pass: 0, before };
            let control = Control { stop: Arc::clone(&stops[rank.0 as usize]), regroup: Arc::default() };
            let mut state = resume.cloned().unwrap_or_default();
            let mut watcher = Watcher { told: &told, watch, stop: &stops[executors as usize / 2] };
            let observer: Option<&mut dyn Observer> = if rank == Rank(0) { Some(&mut watcher) } else { None };
            let feed = self.feed(rank, executors);
            let job = self.job(rank, executors);
            train_rank(&job, &control, &feed, &mut step, &mut comm, observer, &mut state)
        };
        let comms = learn::in_process(world, Duration::from_mins(1));
        let ranks = thread::scope(|scope| {
            let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| run(comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let passes = counts.into_iter().map(AtomicU64::into_inner).collect();
        let (checkpoints, epochs) = told.into_inner().unwrap();
        Outcome { ranks, steps: passes, checkpoints, epochs }
    }

    fn job(&self, rank: Rank, executors: u32) -> TrainJob<'_> {
        let rows: Vec<u64> = self.partitions.partitions.iter().map(|partition| partition.train_rows).collect();
        TrainJob {
            plan: &self.model.train,
            steps: StepPlan::new(&rows, self.model.train.batch),
            held_out_rows: self.partitions.held_out_rows(),
            feature_names: self.feed_plan(rank, executors).features.names(),
            identity: IDENTITY.to_owned(),
            source: Rank(0),
            parts: Parts::new(self.model.spread, &self.shape, executors),
            extent: Extent::Whole,
        }
    }

    /// A model with these parameters.
    pub(crate) fn model(&self, parameters: Vec<f32>) -> Model {
        Model {
            name: self.model.name.clone(),
            shape: self.shape.clone(),
            loss: self.model.train.loss,
            features: FittedFeatures::clone(&self.features),
            parameters,
        }
    }
}

/// Rank 0's observer: keeps what it is told.
struct Watcher<'a> {
    told: &'a Mutex<(Vec<Checkpoint>, Vec<EpochRecord>)>,
    watch: &'a (dyn Fn(usize, &Checkpoint) -> ControlFlow<()> + Sync),
    stop: &'a AtomicBool,
}

impl Observer for Watcher<'_> {
    fn progress(&mut self, _epoch: u32, _step: u64) {}

    fn epoch(&mut self, record: &EpochRecord) {
        self.told.lock().unwrap().1.push(record.clone());
    }

    fn checkpoint(&mut self, checkpoint: &Checkpoint) -> Result<(), LearnError> {
        let checkpoints = &mut self.told.lock().unwrap().0;
        if (self.watch)(checkpoints.len(), checkpoint).is_break() {
            self.stop.store(true, Ordering::Relaxed);
        }
        checkpoints.push(checkpoint.clone());
        Ok(())
    }
}

/// Lets a training go on, whatever it tells.
pub(crate) fn go_on(_number: usize, _checkpoint: &Checkpoint) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A step that does something else before a pass.
struct Tampered<F> {
    step: Box<dyn Step>,
    pass: u64,
    before: F,
}

/// What becomes of a pass.
pub(crate) enum Pass {
    Good,
    NotFinite,
    Fails,
}

impl<F: FnMut(u64, &[f32]) -> Pass + Send> Step for Tampered<F> {
    fn parameters(&self) -> usize {
        self.step.parameters()
    }

    fn read_parameters(&self, out: &mut [f32]) {
        self.step.read_parameters(out);
    }

    fn write_parameters(&mut self, parameters: &[f32]) {
        self.step.write_parameters(parameters);
    }

    fn gradients(&mut self, x: &[f32], rows: usize, gradients: &mut [f32]) -> Result<f64, LearnError> {
        let pass = (self.before)(self.pass, x);
        self.pass += 1;
        let loss = self.step.gradients(x, rows, gradients)?;
        match pass {
            Pass::Good => Ok(loss),
            Pass::NotFinite => {
                gradients[0] = f32::NAN;
                Ok(loss)
            }
            Pass::Fails => Err(LearnError::Device { source: "pulled the plug".into() }),
        }
    }

    fn loss(&mut self, x: &[f32], rows: usize) -> Result<f64, LearnError> {
        self.step.loss(x, rows)
    }

    fn encode(
        &mut self,
        x: &[f32],
        rows: usize,
        embeddings: &mut Vec<f32>,
        errors: Option<&mut Vec<f32>>,
    ) -> Result<(), LearnError> {
        self.step.encode(x, rows, embeddings, errors)
    }
}

/// `step`, but on one rank `before` is called with the number of each pass and its rows.
pub(crate) fn on(
    rank: u32,
    comm: &dyn Communicator,
    step: Box<dyn Step>,
    before: impl FnMut(u64, &[f32]) -> Pass + Send + 'static,
) -> Box<dyn Step> {
    if comm.rank() == Rank(rank) { Box::new(Tampered { step, pass: 0, before }) } else { step }
}
