//! The stages of a run, in order; each writes down what it finished, so that a later attempt
//! goes on after it.

use std::{
    collections::HashSet,
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use super::{
    RunError,
    fleet::{Encoding, Fleet},
    run::until_stopped,
    training::{TrainWork, Training},
};
use crate::{
    data::{self, Dataset, Engine, FeatureLayout, FittedFeatures, Needs, Partitions, Snapshot},
    embed,
    learn::{Extent, Model, NetShape, Phases, Trained},
    pipeline::{EmbeddingPlan, ModelPlan, PipelinePlan, spec::PartitionBy},
    runs::{self, EmbeddingRecord, Lease, ModelRecord, RankRecord, RunRecord, RunsError},
    storage::{Location, Storage, StorageError},
    telemetry::{Event, Events, Ledger},
};

/// One attempt at a run, at work.
pub(super) struct Stages<'a> {
    pub storage: &'a Storage,
    pub plan: &'a PipelinePlan,
    pub snapshot: &'a Snapshot,
    /// Folder of checkpoints and staged rows.
    pub work: Location,
    pub lease: &'a Arc<Lease>,
    pub record: &'a mut RunRecord,
    pub events: &'a Events,
    pub stop: Arc<AtomicBool>,
    pub fleet: Fleet,
}

impl Stages<'_> {
    /// Trains every model and writes every embedding table that is not there yet.
    pub async fn run(&mut self) -> Result<(), RunError> {
        if let Some(table) = self.empty_source() {
            return Err(RunError::Empty { table });
        }
        let stop = Arc::clone(&self.stop);
        let engine = until_stopped(&stop, Engine::open(self.storage, self.plan, self.snapshot)).await?;
        for model_plan in &self.plan.models {
            if self.is_done(model_plan) {
                continue;
            }
            let dataset = self.dataset(&engine, model_plan).await?;
            let model = Arc::new(self.model(&engine, model_plan, &dataset).await?);
            for embedding in self.plan.embeddings.iter().filter(|embedding| embedding.model == model_plan.name) {
                self.embedding(&engine, embedding, model_plan, &model, &dataset).await?;
            }
        }
        Ok(())
    }

    /// Whether an earlier attempt has trained the model and committed all its tables.
    fn is_done(&self, model: &ModelPlan) -> bool {
        let committed = |table: &EmbeddingPlan| self.record.embeddings.iter().any(|done| done.table == table.name);
        let mut tables = self.plan.embeddings.iter().filter(|table| table.model == model.name);
        self.record.models.iter().any(|done| done.name == model.name) && tables.all(committed)
    }

    fn empty_source(&self) -> Option<String> {
        let empty = |(_, files): &(&String, &Vec<_>)| files.is_empty();
        self.snapshot.sources.iter().find(empty).map(|(name, _)| name.clone())
    }

    /// The rows of a model, with all columns that its embedding tables over the same rows need.
    pub async fn dataset(&self, engine: &Engine, model: &ModelPlan) -> Result<Arc<Dataset>, RunError> {
        let schema = engine.schema(&model.from).await?;
        let layout = FeatureLayout::resolve(model, &schema, &self.plan.origin)?;
        let carried = (self.plan.embeddings.iter())
            .filter(|embedding| embedding.model == model.name && embedding.from == model.from)
            .flat_map(|embedding| embedding.key.iter().chain(&embedding.columns));
        let hashed = (model.partition.by == PartitionBy::Hash).then(|| model.partition.clone());
        let hash_columns = hashed.iter().flat_map(|plan| &plan.columns);
        let needs = Needs {
            columns: unique(carried.chain(hash_columns).cloned().chain(layout.columns())),
            reject_missing: layout.reject_missing(),
            hash: hashed,
        };
        self.prepare(engine, &model.from, &needs, &model.name).await
    }

    async fn prepare(&self, engine: &Engine, table: &str, needs: &Needs, name: &str) -> Result<Arc<Dataset>, RunError> {
        let started = self.start("prepare", table, None, "rows");
        let staging = self.work.join(&format!("data/{name}"));
        let work = data::prepare(self.storage, self.plan, engine, table, needs, &staging);
        let dataset = until_stopped(&self.stop, work).await?;
        self.finish("prepare", table, started);
        if dataset.rows() == 0 {
            return Err(RunError::Empty { table: table.to_owned() });
        }
        Ok(Arc::new(dataset))
    }

    /// The trained model: as an earlier attempt left it, or fitted and trained now.
    async fn model(&mut self, engine: &Engine, plan: &ModelPlan, dataset: &Arc<Dataset>) -> Result<Model, RunError> {
        if let Some(done) = self.record.models.iter().find(|model| model.name == plan.name) {
            return Ok(Model::load(self.storage, &done.location).await?);
        }
        let features = self.fit(engine, plan, dataset).await?;
        let shape = NetShape::new(plan, &features);
        let plan = &self.choose(plan, &features, dataset).await?;
        let started = self.start("train", &plan.name, Some(u64::from(plan.train.epochs)), "epochs");
        let (trained, partitions) = self.train(plan, &features, dataset).await?;
        self.finish("train", &plan.name, started);
        let ledger = training_ledger(&plan.name, dataset, &partitions, &trained);
        self.balance(ledger)?;
        self.measure_training(&trained);
        let model = Model {
            name: plan.name.clone(),
            shape,
            loss: plan.train.loss,
            features,
            parameters: trained[0].parameters.clone(),
        };
        self.save(&model, &partitions, &trained).await?;
        Ok(model)
    }

    /// Trains to the end, with stops on the way where the number of executors may yet change.
    async fn train(
        &mut self,
        plan: &ModelPlan,
        features: &FittedFeatures,
        dataset: &Arc<Dataset>,
    ) -> Result<(Vec<Trained>, Arc<Partitions>), RunError> {
        let mut all: Vec<Trained> = Vec::new();
        let mut until = 1;
        loop {
            let stops = self.may_reconsider(plan) && until < plan.train.epochs;
            let mut work = self.training_work(plan, features, dataset)?;
            work.extent = if stops { Extent::Epochs(until) } else { Extent::Whole };
            let training = Training::new(self.storage, work, Arc::clone(dataset));
            let partitions = Arc::clone(training.partitions());
            let mut trained = self.fleet.train(training).await?;
            trained.iter_mut().zip(&all).for_each(|(rank, before)| rank.after(before));
            // Ranks that are no more.
            trained.extend(all.drain(..).skip(trained.len()));
            all = trained;
            let last = all.first().and_then(|first| first.history.last());
            match last {
                Some(last) if stops && last.epoch >= until => {
                    let left = last.rows as f64 * f64::from(plan.train.epochs - last.epoch);
                    let last = last.clone();
                    until = 2 * last.epoch;
                    self.reconsider(plan, &last, left).await?;
                }
                _ => return Ok((all, partitions)),
            }
        }
    }

    /// What executors need to know of a training.
    pub fn training_work(
        &self,
        plan: &ModelPlan,
        features: &FittedFeatures,
        dataset: &Dataset,
    ) -> Result<TrainWork, RunError> {
        Ok(TrainWork {
            model: plan.clone(),
            run: self.plan.run.clone(),
            shape: NetShape::new(plan, features),
            features: features.clone(),
            dataset: dataset.to_files(),
            identity: self.identity(plan)?,
            checkpoint: self.work.join(&format!("checkpoint-{}.safetensors", plan.name)),
            fence: self.lease.fence(),
            extent: Extent::Whole,
        })
    }

    pub async fn fit(
        &self,
        engine: &Engine,
        plan: &ModelPlan,
        dataset: &Arc<Dataset>,
    ) -> Result<FittedFeatures, RunError> {
        let location = self.work.join(&format!("features-{}.json", plan.name));
        if let Some(features) = self.written(&location).await? {
            return Ok(features);
        }
        let schema = engine.schema(&plan.from).await?;
        let layout = FeatureLayout::resolve(plan, &schema, &self.plan.origin)?;
        let started = self.start("fit", &plan.name, Some(dataset.rows()), "rows");
        let progress = self.progress("fit", &plan.name);
        let features = until_stopped(&self.stop, data::fit(self.storage, &layout, dataset, &progress)).await?;
        self.finish("fit", &plan.name, started);
        self.write(&location, &features).await?;
        Ok(features)
    }

    /// What this attempt or an earlier one wrote down.
    pub async fn written<T: DeserializeOwned>(&self, location: &Location) -> Result<Option<T>, RunError> {
        match self.storage.read(location).await {
            Ok(bytes) => {
                let unreadable = |source| RunsError::Unreadable { location: location.clone(), source };
                Ok(Some(serde_json::from_slice(&bytes).map_err(unreadable)?))
            }
            Err(StorageError::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes down what a later attempt is not to find out again.
    pub async fn write<T: Serialize>(&self, location: &Location, value: &T) -> Result<(), RunError> {
        let bytes = serde_json::to_vec(value).map_err(RunsError::Encode)?;
        Ok(self.storage.replace(location, bytes.into()).await?)
    }

    /// Ties a checkpoint to the file, the input and the model that it belongs to.
    fn identity(&self, plan: &ModelPlan) -> Result<String, RunError> {
        let mut hash = Sha256::new();
        hash.update(&self.plan.spec_hash);
        hash.update(serde_json::to_vec(self.snapshot).map_err(RunsError::Encode)?);
        hash.update(&plan.name);
        hash.update(plan.partition.count.to_le_bytes());
        Ok(format!("{:x}", hash.finalize()))
    }

    async fn save(&mut self, model: &Model, partitions: &Partitions, trained: &[Trained]) -> Result<(), RunError> {
        self.lease.check().await?;
        let location = model.save(self.storage, &self.plan.store).await?;
        self.record.models.push(ModelRecord {
            name: model.name.clone(),
            fingerprint: model.fingerprint(),
            location,
            parameters: model.shape.parameters() as u64,
            features: model.shape.features as u64,
            latent: model.shape.net.latent as u64,
            partition_rows: partitions.partitions.iter().map(|partition| partition.train_rows).collect(),
            epochs: trained[0].history.clone(),
            ranks: (0..).zip(trained).map(rank_record).collect(),
        });
        self.write_record().await
    }

    /// The folder of a model that is trained.
    fn saved(&self, name: &str) -> Result<Location, RunError> {
        let model = self.record.models.iter().find(|model| model.name == name);
        model
            .map(|model| model.location.clone())
            .ok_or(RunError::Protocol { what: "a model is encoded with before it is saved" })
    }

    /// The embedding table: as an earlier attempt committed it, or encoded and committed now.
    async fn embedding(
        &mut self,
        engine: &Engine,
        plan: &EmbeddingPlan,
        model_plan: &ModelPlan,
        model: &Arc<Model>,
        trained_on: &Arc<Dataset>,
    ) -> Result<(), RunError> {
        if self.record.embeddings.iter().any(|done| done.table == plan.name) {
            return Ok(());
        }
        let dataset = if plan.from == model_plan.from {
            Arc::clone(trained_on)
        } else {
            let columns = unique(plan.key.iter().chain(&plan.columns).cloned().chain(model.features.columns()));
            let reject_missing = model.features.reject_missing();
            let needs = Needs { columns, reject_missing, hash: None };
            self.prepare(engine, &plan.from, &needs, &plan.name).await?
        };
        let started = self.start("embed", &plan.name, Some(dataset.rows()), "rows");
        let encoding = Encoding {
            table: plan,
            dataset: &dataset,
            model,
            saved: self.saved(&model.name)?,
            staging: self.work.join(&format!("embed/{}", plan.name)),
            run: &self.plan.run,
        };
        let progress = self.progress("embed", &plan.name);
        let written = self.fleet.embed(self.storage, encoding, &self.stop, progress).await?;
        let elapsed_s = self.finish("embed", &plan.name, started);
        self.measure("embed_s", elapsed_s);
        self.measure("embed_rows", written.rows as f64);
        let ledger = Ledger {
            name: plan.name.clone(),
            input: dataset.rows() + dataset.rejected.values().sum::<u64>(),
            embedded: written.rows,
            rejected: dataset.rejected.clone(),
            ..Ledger::default()
        };
        self.balance(ledger)?;
        self.commit(plan, model, written).await
    }

    async fn commit(&mut self, plan: &EmbeddingPlan, model: &Model, written: embed::Written) -> Result<(), RunError> {
        let started = self.start("commit", &plan.name, None, "files");
        let (store, run_id) = (&self.plan.store, self.record.run_id.clone());
        // The input must still be what the rows were read from, and this attempt the owner.
        self.snapshot.verify(self.storage).await?;
        self.lease.check().await?;
        let fingerprint = model.fingerprint();
        let manifest =
            embed::commit(self.storage, store, plan, &self.plan.name, &run_id, &fingerprint, written).await?;
        let location = store.join(&format!("embeddings/{}/{}", plan.name, manifest.folder));
        self.events.emit(&Event::Committed {
            table: plan.name.clone(),
            version: manifest.version.0,
            rows: manifest.rows,
            location: location.to_string(),
            fingerprint: fingerprint.to_string(),
        });
        self.record.embeddings.push(EmbeddingRecord {
            table: plan.name.clone(),
            version: manifest.version,
            rows: manifest.rows,
            location,
            fingerprint,
        });
        // Before it counts as done, for what is done is not looked at again.
        embed::prune(self.storage, store, &plan.name, &run_id, plan.keep_versions).await?;
        self.write_record().await?;
        self.finish("commit", &plan.name, started);
        Ok(())
    }

    async fn write_record(&self) -> Result<(), RunError> {
        Ok(runs::write_run(self.storage, &self.plan.store, self.record).await?)
    }

    fn balance(&mut self, ledger: Ledger) -> Result<(), RunError> {
        self.events.emit(&Event::Ledger(ledger.clone()));
        self.record.ledgers.retain(|other| other.name != ledger.name);
        self.record.ledgers.push(ledger.clone());
        if ledger.balances() { Ok(()) } else { Err(RunError::Unbalanced { ledger: Box::new(ledger) }) }
    }

    /// Adds to a figure of the run: several models and attempts sum up.
    fn measure(&mut self, name: &str, value: f64) {
        *self.record.metrics.entry(name.to_owned()).or_default() += value;
    }

    /// Where the executors' time went, as a mean over them, and how fast they were.
    fn measure_training(&mut self, trained: &[Trained]) {
        let (executors, servers) = trained.split_at(trained.len().min(self.record.executors as usize));
        let mean = |phase: fn(&Trained) -> f64| executors.iter().map(phase).sum::<f64>() / executors.len() as f64;
        self.measure("feed_wait_s", mean(|rank| rank.phases.feed_wait_s));
        self.measure("compute_s", mean(|rank| rank.phases.compute_s));
        self.measure("wait_s", mean(|rank| rank.phases.wait_s));
        self.measure("communicate_s", mean(|rank| rank.phases.communicate_s));
        self.measure("update_s", mean(|rank| rank.phases.update_s));
        self.measure("bytes_sent", trained.iter().map(|rank| rank.bytes_sent as f64).sum());
        let peak: u64 = trained.iter().map(|rank| rank.peak_memory_bytes).sum();
        if peak > 0 {
            self.record.metrics.insert("executors_peak_memory_bytes".to_owned(), peak as f64);
            self.measure("executors_cpu_s", trained.iter().map(|rank| rank.cpu_s).sum());
        }
        let history = &trained[0].history;
        self.measure("train_rows", history.iter().map(|epoch| epoch.rows as f64).sum());
        self.measure("train_s", history.iter().map(|epoch| epoch.elapsed_s).sum());
        // Over all models; the speed-up is told where there is one.
        let speed = self.record.metrics["train_rows"] / self.record.metrics["train_s"].max(f64::MIN_POSITIVE);
        self.record.metrics.insert("train_rows_per_s".to_owned(), speed);
        if let ([decision], 1) = (&self.record.decisions[..], self.plan.models.len()) {
            let speed_up = speed / decision.single_rows_per_s.max(f64::MIN_POSITIVE);
            let efficiency = speed_up / f64::from(decision.executors);
            self.record.metrics.insert("speed_up".to_owned(), speed_up);
            self.record.metrics.insert("scaling_efficiency".to_owned(), efficiency);
        }
        let staleness = servers.iter().filter_map(|server| server.staleness).reduce(|mut all, server| {
            all.add(&server);
            all
        });
        if let Some(staleness) = staleness {
            self.record.metrics.insert("staleness_mean".to_owned(), staleness.mean());
            self.record.metrics.insert("staleness_max".to_owned(), staleness.max as f64);
        }
    }

    pub fn start(&self, kind: &str, name: &str, total: Option<u64>, unit: &str) -> Instant {
        let (kind, name, unit) = (kind.to_owned(), name.to_owned(), unit.to_owned());
        self.events.emit(&Event::StageStarted { kind, name, total, unit });
        Instant::now()
    }

    pub fn finish(&self, kind: &str, name: &str, started: Instant) -> f64 {
        let elapsed_s = started.elapsed().as_secs_f64();
        self.events.emit(&Event::StageFinished { kind: kind.to_owned(), name: name.to_owned(), elapsed_s });
        elapsed_s
    }

    fn progress(&self, kind: &'static str, name: &str) -> impl Fn(u64) + Send + Sync + 'static {
        let (events, name) = (self.events.clone(), name.to_owned());
        move |done| events.emit(&Event::Progress { kind: kind.to_owned(), name: name.clone(), done })
    }
}

fn rank_record((rank, trained): (u32, &Trained)) -> RankRecord {
    let Phases { feed_wait_s, compute_s, wait_s, communicate_s, update_s } = trained.phases;
    RankRecord {
        rank,
        rows: trained.rows_per_epoch.iter().sum(),
        feed_wait_s,
        compute_s,
        wait_s,
        communicate_s,
        update_s,
        bytes_sent: trained.bytes_sent,
        cpu_s: trained.cpu_s,
        peak_memory_bytes: trained.peak_memory_bytes,
    }
}

/// Every epoch must have trained on every row that was dealt to training.
fn training_ledger(name: &str, dataset: &Dataset, partitions: &Partitions, trained: &[Trained]) -> Ledger {
    let epochs = &trained[0].history;
    let short = epochs.iter().map(|epoch| epoch.rows).find(|rows| *rows != partitions.train_rows());
    Ledger {
        name: name.to_owned(),
        input: dataset.rows() + dataset.rejected.values().sum::<u64>(),
        trained: short.unwrap_or_else(|| partitions.train_rows()),
        held_out: partitions.held_out_rows(),
        embedded: 0,
        rejected: dataset.rejected.clone(),
    }
}

fn unique(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = HashSet::new();
    names.filter(|name| seen.insert(name.clone())).collect()
}
