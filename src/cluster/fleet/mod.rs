//! The executors of a run, started once and kept from stage to stage: threads of this process, or
//! processes.

mod in_process;
mod launch;
mod members;
mod processes;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
};

use processes::Processes;

use super::{
    RunError,
    protocol::{EmbedWork, Failure, blame},
    training::Training,
};
use crate::{
    config::{SiteConfig, env_vars},
    data::Dataset,
    embed::{self, EmbedJob, Written},
    learn::{self, LearnError, Model, Step, Trained},
    pipeline::{EmbeddingPlan, RunPlan, spec::Launcher},
    storage::{Location, Storage},
    telemetry::Events,
    wire::{Security, Tls, Token, WireError},
};

/// How many executors there are to be, and who starts them.
#[derive(Clone, Debug)]
pub(super) struct FleetPlan {
    pub wanted: usize,
    pub min: usize,
    pub max: usize,
    /// Whether they are children of this process.
    pub children: bool,
    /// The settings file that children are to read.
    pub config: Option<PathBuf>,
}

/// The executors.
pub(super) enum Fleet {
    Threads {
        executors: u32,
        events: Events,
        stop: Arc<AtomicBool>,
    },
    /// Behind a lock, for it works on threads that may block.
    Processes(Arc<Mutex<Processes>>),
}

/// The encoding of one table.
pub(super) struct Encoding<'a> {
    pub table: &'a EmbeddingPlan,
    pub dataset: &'a Arc<Dataset>,
    pub model: &'a Arc<Model>,
    /// The saved model's folder.
    pub saved: Location,
    pub staging: Location,
    pub run: &'a RunPlan,
}

impl Fleet {
    /// Starts the executors, or makes ready for them to join.
    pub fn start(
        run: &RunPlan,
        site: &SiteConfig,
        config: Option<PathBuf>,
        events: &Events,
        stop: &Arc<AtomicBool>,
    ) -> Result<Self, RunError> {
        let plan = FleetPlan {
            wanted: run.executors as usize,
            min: run.min_executors.min(run.executors) as usize,
            max: run.max_executors.max(run.executors) as usize,
            children: run.launcher == Launcher::Local,
            config,
        };
        let (events, stop) = (events.clone(), Arc::clone(stop));
        let (listen, security) = match run.launcher {
            Launcher::InProcess => return Ok(Self::Threads { executors: run.executors, events, stop }),
            Launcher::Local => (LOOPBACK.to_owned(), Security::plain(Token::random()?)),
            Launcher::Static => (site.listen.clone().unwrap_or(LOOPBACK.to_owned()), executor_security(site)?),
        };
        let processes = Processes::start(plan, &listen, &security, events, stop)?;
        Ok(Self::Processes(Arc::new(Mutex::new(processes))))
    }

    /// How many executors take part from now on, of those that may.
    pub fn resize(&mut self, executors: u32) {
        match self {
            Self::Threads { executors: now, .. } => *now = executors,
            Self::Processes(processes) => lock(processes).resize(executors as usize),
        }
    }

    /// Hosts that executors have joined from.
    pub fn hosts(&self) -> usize {
        match self {
            Self::Threads { .. } => 1,
            Self::Processes(processes) => lock(processes).hosts(),
        }
    }

    /// Trains to the end and gives the accounts of all ranks that lived to give one, rank 0's first.
    pub async fn train(&self, training: Training) -> Result<Vec<Trained>, RunError> {
        match self {
            Self::Threads { executors, events, stop } => {
                in_process::train(training, *executors, events.clone(), Arc::clone(stop)).await
            }
            Self::Processes(processes) => {
                let training = Arc::new(training);
                let (work, fleet) = (Arc::clone(&training), Arc::clone(processes));
                let mut trained = blocking(move || lock(&fleet).train(&work)).await?;
                if training.work.extent.trial().is_some() {
                    return Ok(trained);
                }
                let state = training.checkpoint().await?.ok_or(RunError::Protocol { what: "no last checkpoint" })?;
                if let Some(first) = trained.first_mut() {
                    first.parameters = state.kept(training.work.model.train.keep).to_vec();
                    first.history = state.history;
                }
                Ok(trained)
            }
        }
    }

    /// Encodes every row of the data set; see `embed::embed`.
    pub async fn embed(
        &self,
        storage: &Storage,
        encoding: Encoding<'_>,
        stop: &AtomicBool,
        progress: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<Written, RunError> {
        let Encoding { table, dataset, model, saved, staging, run } = encoding;
        match self {
            Self::Threads { executors, .. } => {
                let replica = || -> Result<Box<dyn Step>, LearnError> {
                    let mut replica = learn::burn_step(&model.shape, model.loss, run.device, 0, run.seed)?;
                    replica.write_parameters(&model.parameters);
                    Ok(replica)
                };
                let (executors, staging) = (*executors, &staging);
                let job = EmbedJob { plan: table, dataset, model, replica: &replica, executors, staging };
                Ok(embed::embed(storage, &job, stop, &progress).await?)
            }
            Self::Processes(processes) => {
                storage.remove(&staging).await?;
                let work = EmbedWork {
                    table: table.clone(),
                    dataset: dataset.to_files(),
                    model: saved,
                    staging: staging.clone(),
                    device: run.device,
                    seed: run.seed,
                };
                let (fleet, parts) = (Arc::clone(processes), embed::parts(dataset));
                let written = blocking(move || lock(&fleet).embed(work, parts, &progress)).await?;
                Ok(embed::gather(&staging, dataset, model.shape.net.latent, written)?)
            }
        }
    }
}

/// Where executors of this machine join: any free port.
const LOOPBACK: &str = "127.0.0.1:0";

fn lock(processes: &Mutex<Processes>) -> std::sync::MutexGuard<'_, Processes> {
    processes.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RunError> + Send + 'static,
) -> Result<T, RunError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| RunError::Thread(error.into()))?
}

/// What an executor that failed says.
fn failed(failure: Failure) -> RunError {
    RunError::Executor { message: failure.message, remedy: failure.remedy }
}

/// What a run and executors that others start share: the site's token and TLS; a child of a run
/// has the token in its environment.
pub fn executor_security(site: &SiteConfig) -> Result<Security, RunError> {
    let token = match (&site.token_file, std::env::var(env_vars::EMBERFLOW_TOKEN)) {
        (_, Ok(token)) => Token::from_text(&token),
        (Some(file), Err(_)) => Token::from_file(file)?,
        (None, Err(_)) => return Err(WireError::NoToken.into()),
    };
    let tls = match (&site.tls_certificate, &site.tls_key, &site.tls_authority) {
        (Some(certificate), Some(key), Some(authority)) => Some(Tls::from_files(certificate, key, authority)?),
        (None, None, None) => None,
        _ => {
            let reason = "`tls_certificate`, `tls_key` and `tls_authority` belong together".to_owned();
            return Err(WireError::Tls { reason }.into());
        }
    };
    Ok(Security { token, tls, allow_plain: site.allow_plain.as_deref() == Some("yes") })
}
