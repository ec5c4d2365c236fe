//! One run: found finished, refused, resumed or begun; and brought to an end that is written
//! down whatever happens.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use sha2::{Digest, Sha256};

use super::{RunError, Stop, fleet::Fleet, stages::Stages};
use crate::{
    config::SiteConfig,
    data::{self, Snapshot},
    embed,
    ids::{Attempt, RunId},
    learn, limits,
    pipeline::{PipelinePlan, spec::FileFormat},
    remedy::{self, Remedied, Remedy},
    runs::{self, ErrorRecord, Lease, RunRecord, RunStatus, RunsError, SourceRecord},
    storage::{Location, Storage, StorageError},
    telemetry::{self, Event, Events},
};

/// How this start of a run differs from what the file says.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// The run's name; by default made from the file's meaning and its input, so that the same
    /// command over the same input is the same run.
    pub run_id: Option<RunId>,
    /// The site's settings, and the file that they were read from if one was named.
    pub site: SiteConfig,
    /// See `site`.
    pub site_file: Option<PathBuf>,
    /// What happens if there are no rows.
    pub empty: EmptyInput,
    /// Forget what an earlier attempt left, and begin anew.
    pub fresh: bool,
}

/// What happens if there are no rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmptyInput {
    /// The run fails.
    #[default]
    Error,
    /// The run ends as skipped.
    Skip,
    /// The run ends as succeeded, without a result.
    Ok,
}

/// How a run ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It did its work.
    Succeeded,
    /// It was finished before; nothing was done.
    Unchanged,
    /// There were no rows.
    Skipped,
}

impl Outcome {
    /// As events and results name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Unchanged => "unchanged",
            Self::Skipped => "skipped",
        }
    }
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// How it ended.
    pub status: Outcome,
    /// Its record.
    pub record: RunRecord,
}

/// A run that is about to be executed.
#[derive(Debug)]
pub struct Run<'a> {
    storage: &'a Storage,
    plan: &'a PipelinePlan,
    options: RunOptions,
    id: RunId,
    found: Found,
}

/// What is there of a run.
#[derive(Debug)]
enum Found {
    /// It is finished; its input was not looked at and may be gone.
    Finished(Box<RunRecord>),
    /// There is work to do on this input.
    Open(Snapshot),
}

impl<'a> Run<'a> {
    /// Names the run, looks whether it is finished, and if not, lists its input. Nothing is
    /// written.
    pub async fn open(storage: &'a Storage, plan: &'a PipelinePlan, options: RunOptions) -> Result<Self, RunError> {
        learn::check_device(plan.run.device, plan.run.executors)?;
        plan.models.iter().try_for_each(|model| learn::check_spread(model, plan.run.executors))?;
        let (run_id, snapshot) = if let Some(run_id) = &options.run_id {
            (run_id.clone(), None)
        } else {
            let snapshot = Snapshot::take(storage, plan).await?;
            (derived_run_id(plan, &snapshot)?, Some(snapshot))
        };
        let known = known(storage, plan, &run_id, options.fresh).await?;
        let found = match (known.filter(is_finished), snapshot) {
            (Some(record), _) => Found::Finished(Box::new(record)),
            (None, Some(snapshot)) => Found::Open(snapshot),
            (None, None) => Found::Open(Snapshot::take(storage, plan).await?),
        };
        Ok(Self { storage, plan, options, id: run_id, found })
    }

    /// The run's name.
    pub fn id(&self) -> &RunId {
        &self.id
    }

    /// Does what is left to do. Once a stop is requested it makes a checkpoint and fails with
    /// `Interrupted`. However it ends, the last event tells.
    pub async fn execute(self, events: &Events, stop: &Stop) -> Result<RunOutcome, RunError> {
        let started = Instant::now();
        let Self { storage, plan, options, id: run_id, found } = self;
        let result = match found {
            Found::Finished(record) => Ok(RunOutcome { status: Outcome::Unchanged, record: *record }),
            Found::Open(snapshot) => {
                let opened = Opened { storage, plan, options, run_id, snapshot };
                Box::pin(opened.execute(events, stop, started)).await
            }
        };
        tell_end(events, &result, stop, started);
        result
    }
}

/// Tells how a run ended.
fn tell_end(events: &Events, result: &Result<RunOutcome, RunError>, stop: &Stop, started: Instant) {
    let status = match result {
        Ok(outcome) => outcome.status.as_str(),
        Err(error) => {
            let ErrorRecord { message, exit_code, retryable } = error_record(error, stop);
            events.emit(&Event::Error { message, exit_code, retryable });
            if error.remedy() == Remedy::Interrupted { "interrupted" } else { "failed" }
        }
    };
    events.emit(&Event::RunFinished { status: status.to_owned(), elapsed_s: started.elapsed().as_secs_f64() });
}

/// The record of a run, if there is one that counts; it must be of the same pipeline.
async fn known(
    storage: &Storage,
    plan: &PipelinePlan,
    run_id: &RunId,
    fresh: bool,
) -> Result<Option<RunRecord>, RunError> {
    let record = runs::read_run(storage, &plan.store, run_id).await?.filter(|_| !fresh);
    match record {
        Some(record) if record.spec_hash != plan.spec_hash => Err(RunError::OtherPipeline { run_id: run_id.clone() }),
        record => Ok(record),
    }
}

fn is_finished(record: &RunRecord) -> bool {
    record.status == RunStatus::Succeeded
}

/// A run with work to do.
struct Opened<'a> {
    storage: &'a Storage,
    plan: &'a PipelinePlan,
    options: RunOptions,
    run_id: RunId,
    snapshot: Snapshot,
}

impl Opened<'_> {
    async fn execute(self, events: &Events, stop: &Stop, started: Instant) -> Result<RunOutcome, RunError> {
        let store = &self.plan.store;
        self.storage.check_writable(store).await?;
        for embedding in &self.plan.embeddings {
            embed::check_target(self.storage, store, &embedding.name, &self.plan.name).await?;
        }
        let folder = runs::run_folder(store, &self.run_id);
        let lease = Arc::new(Lease::acquire(self.storage, &folder).await?);
        // Read only now: whoever held the lease may have got further since.
        let known = known(self.storage, self.plan, &self.run_id, self.options.fresh).await?;
        let result = match known {
            Some(record) if is_finished(&record) => Ok(RunOutcome { status: Outcome::Unchanged, record }),
            known => Box::pin(self.attempt(known, &folder, &lease, events, stop, started)).await,
        };
        if let Some(lease) = Arc::into_inner(lease) {
            lease.release().await?;
        }
        result
    }

    /// Works, and writes down how it ended.
    async fn attempt(
        &self,
        known: Option<RunRecord>,
        folder: &Location,
        lease: &Arc<Lease>,
        events: &Events,
        stop: &Stop,
        started: Instant,
    ) -> Result<RunOutcome, RunError> {
        let mut record = self.begin(known, lease.attempt(), folder).await?;
        events.emit(&Event::RunStarted {
            pipeline: self.plan.name.clone(),
            attempt: lease.attempt().0,
            resumed: lease.attempt().0 > 1,
            executors: record.executors,
            device: record.device.clone(),
        });
        let heartbeat = tokio::spawn(heartbeat(events.clone(), started));
        let result = self.work(folder, lease, &mut record, events, Arc::clone(stop.requested())).await;
        heartbeat.abort();
        // First, for a finished run is not looked at again.
        let result = match result {
            Ok(outcome) => self.clear(folder, lease).await.map(|()| outcome),
            error => error,
        };
        record.error = result.as_ref().err().map(|error| error_record(error, stop));
        let status = self.write_down(folder, lease, &mut record, result, started).await?;
        Ok(RunOutcome { status, record })
    }

    /// The record of this attempt: what an earlier one got done stays.
    async fn begin(
        &self,
        known: Option<RunRecord>,
        attempt: Attempt,
        folder: &Location,
    ) -> Result<RunRecord, RunError> {
        self.storage.remove_unfinished(folder).await?;
        if self.options.fresh {
            self.storage.remove(&folder.join("work")).await?;
            self.storage.remove(&folder.join("snapshot.json")).await?;
        }
        let mut record = known.unwrap_or_else(|| new_record(self.plan, &self.run_id, attempt));
        env!("CARGO_PKG_VERSION").clone_into(&mut record.code_version);
        record.host = runs::host_name();
        record.attempt = attempt;
        record.status = RunStatus::Running;
        record.ended_ms = None;
        record.error = None;
        record.executors = self.plan.run.executors;
        record.device = format!("{:?}", self.plan.run.device).to_lowercase();
        record.sources = self.sources();
        runs::write_run(self.storage, &self.plan.store, &record).await?;
        Ok(record)
    }

    fn sources(&self) -> BTreeMap<String, SourceRecord> {
        let record = |(name, files): (&String, &Vec<crate::storage::FileEntry>)| {
            let source = self.plan.source(name)?;
            let format = match data::source_format(source, files).ok().flatten() {
                Some(FileFormat::Csv) => "csv",
                Some(FileFormat::Arrow) => "arrow",
                Some(FileFormat::Parquet) | None => "parquet",
            };
            let record = SourceRecord {
                location: source.location.clone(),
                format: format.to_owned(),
                columns: source.columns.clone(),
                csv: source.csv.clone(),
                files: files.len() as u64,
                size_bytes: files.iter().map(|file| file.size_bytes).sum(),
            };
            Some((name.clone(), record))
        };
        self.snapshot.sources.iter().filter_map(record).collect()
    }

    async fn work(
        &self,
        folder: &Location,
        lease: &Arc<Lease>,
        record: &mut RunRecord,
        events: &Events,
        stop: Arc<AtomicBool>,
    ) -> Result<Outcome, RunError> {
        let snapshot = self.recorded_snapshot(folder).await?;
        let fleet = Fleet::start(&self.plan.run, &self.options.site, self.options.site_file.clone(), events, &stop)?;
        let mut stages = Stages {
            storage: self.storage,
            plan: self.plan,
            snapshot: &snapshot,
            work: folder.join("work"),
            lease,
            record,
            events,
            stop,
            fleet,
        };
        match stages.run().await {
            Err(RunError::Empty { .. }) if self.options.empty == EmptyInput::Skip => Ok(Outcome::Skipped),
            Err(RunError::Empty { table }) if self.options.empty == EmptyInput::Ok => {
                let message = format!("{table} has no rows; the run ends without a result");
                events.emit(&Event::Warning { message });
                Ok(Outcome::Succeeded)
            }
            Err(error) => Err(error),
            Ok(()) => Ok(Outcome::Succeeded),
        }
    }

    /// The input as the first attempt found it; later attempts work on the same files or fail
    /// with the name of the one that changed.
    async fn recorded_snapshot(&self, folder: &Location) -> Result<Snapshot, RunError> {
        let location = folder.join("snapshot.json");
        let content = serde_json::to_vec(&self.snapshot).map_err(RunsError::Encode)?;
        match self.storage.create(&location, content.into()).await {
            Ok(()) => return Ok(self.snapshot.clone()),
            Err(StorageError::AlreadyExists(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let bytes = self.storage.read(&location).await?;
        let snapshot: Snapshot =
            serde_json::from_slice(&bytes).map_err(|source| RunsError::Unreadable { location, source })?;
        snapshot.verify(self.storage).await?;
        Ok(snapshot)
    }

    /// Removes checkpoints and staged rows, unless a later attempt needs them.
    async fn clear(&self, folder: &Location, lease: &Lease) -> Result<(), RunError> {
        lease.check().await?;
        Ok(self.storage.remove(&folder.join("work")).await?)
    }

    /// Writes down how the attempt ended. What cannot be written down has not succeeded.
    async fn write_down(
        &self,
        folder: &Location,
        lease: &Lease,
        record: &mut RunRecord,
        result: Result<Outcome, RunError>,
        started: Instant,
    ) -> Result<Outcome, RunError> {
        record.status = match &result {
            Ok(Outcome::Skipped) => RunStatus::Skipped,
            Ok(_) => RunStatus::Succeeded,
            Err(error) if error.remedy() == Remedy::Interrupted => RunStatus::Interrupted,
            Err(_) => RunStatus::Failed,
        };
        record.ended_ms = Some(now_ms());
        *record.metrics.entry("elapsed_s".to_owned()).or_default() += started.elapsed().as_secs_f64();
        if let Some(peak) = telemetry::peak_memory_bytes() {
            record.metrics.insert("peak_memory_bytes".to_owned(), peak as f64);
        }
        let rows_may_come = matches!(result, Ok(Outcome::Skipped) | Err(RunError::Empty { .. }));
        let written = async {
            // A fenced attempt no longer owns the record.
            lease.check().await?;
            runs::write_run(self.storage, &self.plan.store, record).await?;
            if rows_may_come {
                // The same run then looks again.
                self.storage.remove(&folder.join("snapshot.json")).await?;
            }
            Ok::<_, RunError>(())
        };
        match (result, written.await) {
            (Ok(_), Err(error)) => Err(error),
            (Err(error), Err(unwritten)) => {
                tracing::warn!(error = %unwritten, "how the run ended could not be written down");
                Err(error)
            }
            (result, Ok(())) => result,
        }
    }
}

/// The record of a run that begins.
pub(super) fn new_record(plan: &PipelinePlan, run_id: &RunId, attempt: Attempt) -> RunRecord {
    RunRecord {
        format: 1,
        run_id: run_id.clone(),
        pipeline: plan.name.clone(),
        file: plan.origin.file().to_owned(),
        spec_hash: plan.spec_hash.clone(),
        params: plan.params.clone(),
        code_version: String::new(),
        host: String::new(),
        attempt,
        status: RunStatus::Running,
        started_ms: now_ms(),
        ended_ms: None,
        executors: 0,
        device: String::new(),
        seed: plan.run.seed,
        sources: BTreeMap::new(),
        models: Vec::new(),
        embeddings: Vec::new(),
        ledgers: Vec::new(),
        decisions: Vec::new(),
        metrics: BTreeMap::new(),
        error: None,
    }
}

/// The run that the same file, parameters and input always are.
fn derived_run_id(plan: &PipelinePlan, snapshot: &Snapshot) -> Result<RunId, RunError> {
    let mut hash = Sha256::new();
    hash.update(plan.spec_hash.as_bytes());
    hash.update(serde_json::to_vec(snapshot).map_err(RunsError::Encode)?);
    let digest = format!("{:x}", hash.finalize());
    let text = format!("{}-{}", plan.name, &digest[..12]);
    RunId::new(&text).ok_or(RunError::Thread(format!("{text} is no run ID").into()))
}

/// The whole chain in one line, as a scheduler shows it.
fn error_record(error: &RunError, stop: &Stop) -> ErrorRecord {
    let message = remedy::causes(error).join(": ");
    let remedy = error.remedy();
    ErrorRecord { message, exit_code: stop.exit_code(remedy), retryable: remedy.retryable() }
}

async fn heartbeat(events: Events, started: Instant) {
    loop {
        tokio::time::sleep(limits::HEARTBEAT).await;
        events.emit(&Event::Heartbeat {
            elapsed_s: started.elapsed().as_secs_f64(),
            peak_memory_bytes: telemetry::peak_memory_bytes(),
        });
    }
}

fn now_ms() -> i64 {
    chrono::Utc::now().timestamp_millis()
}

/// Waits for `work`, but no longer than until `stop` is set.
pub(super) async fn until_stopped<T, E: Into<RunError>>(
    stop: &AtomicBool,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, RunError> {
    let stopped = async {
        while !stop.load(Ordering::Relaxed) {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        result = work => result.map_err(Into::into),
        () = stopped => Err(RunError::Interrupted),
    }
}
