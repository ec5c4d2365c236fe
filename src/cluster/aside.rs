//! Trainings beside any run: what `verify` and `simulate` try out, in a folder of the store that is
//! removed in the end. Nothing is committed.

use std::{path::PathBuf, sync::Arc};

use super::{RunError, Stop, fleet::Fleet, run::new_record, stages::Stages};
use crate::{
    config::SiteConfig,
    data::{Dataset, Engine, FittedFeatures, Snapshot},
    ids::RunId,
    pipeline::{ModelPlan, PipelinePlan, spec::Spread},
    runs::{self, Lease},
    storage::Storage,
    telemetry::Events,
};

/// What trainings beside a run need of the outside.
pub struct Aside<'a> {
    /// Where rows are, and the store.
    pub storage: &'a Storage,
    /// The pipeline; its executors are started.
    pub plan: &'a PipelinePlan,
    /// The site's settings, and the file that they were read from if one was named.
    pub site: &'a SiteConfig,
    /// See `site`.
    pub site_file: Option<PathBuf>,
    /// Who hears of it.
    pub events: &'a Events,
    /// Ends it.
    pub stop: &'a Stop,
}

impl Aside<'_> {
    /// Works on every model of the file that each executor trains a replica of; what came of each.
    pub(super) async fn each_model<T>(
        &self,
        work: impl AsyncFn(&mut Stages<'_>, &ModelPlan, &FittedFeatures, &Arc<Dataset>) -> Result<T, RunError>,
    ) -> Result<Vec<T>, RunError> {
        let name = format!("_aside-{}-{}", std::process::id(), chrono::Utc::now().timestamp_millis());
        let scratch = self.plan.store.join(&name);
        let plan = PipelinePlan { store: scratch.clone(), ..self.plan.clone() };
        let result = self.each_model_in(&plan, work).await;
        self.storage.remove(&scratch).await?;
        result
    }

    async fn each_model_in<T>(
        &self,
        plan: &PipelinePlan,
        work: impl AsyncFn(&mut Stages<'_>, &ModelPlan, &FittedFeatures, &Arc<Dataset>) -> Result<T, RunError>,
    ) -> Result<Vec<T>, RunError> {
        let Self { storage, site, site_file, events, stop, .. } = self;
        let snapshot = Snapshot::take(storage, plan).await?;
        let run_id = RunId::new("aside").ok_or(RunError::Protocol { what: "a run's name" })?;
        let folder = runs::run_folder(&plan.store, &run_id);
        let lease = Arc::new(Lease::acquire(storage, &folder).await?);
        let mut record = new_record(plan, &run_id, lease.attempt());
        let mut stages = Stages {
            storage,
            plan,
            snapshot: &snapshot,
            work: folder.join("work"),
            lease: &lease,
            record: &mut record,
            events,
            stop: Arc::clone(stop.requested()),
            fleet: Fleet::start(&plan.run, site, site_file.clone(), events, stop.requested())?,
        };
        let engine = Engine::open(storage, plan, &snapshot).await?;
        let mut found = Vec::new();
        for model in plan.models.iter().filter(|model| matches!(model.spread, Spread::Data {})) {
            let dataset = stages.dataset(&engine, model).await?;
            let features = stages.fit(&engine, model, &dataset).await?;
            found.push(work(&mut stages, model, &features, &dataset).await?);
        }
        Ok(found)
    }
}
