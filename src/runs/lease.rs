//! Who owns a run: at most one live attempt, and a later attempt fences an earlier one.
//!
//! No store here can update a file on a condition, but each can create one atomically. So an
//! attempt is owned by creating `attempts/<n>.json`, the highest number wins, and the owner
//! shows that it lives by rewriting `lease.json`. A start that finds the lease standing still
//! for `limits::LEASE_EXPIRY` by its own clock (no clocks are compared) takes over; where the
//! owner was a process of this very machine that is gone, at once.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::RunsError;
use crate::{
    ids::Attempt,
    limits,
    storage::{Location, Storage, StorageError},
};

/// The right to work on a run. Renewed in the background until dropped.
#[derive(Debug)]
pub struct Lease {
    storage: Storage,
    folder: Location,
    owner: Owner,
    lost: Arc<AtomicBool>,
    renewal: tokio::task::JoinHandle<()>,
}

/// The claim of an attempt, to be checked by any process that works for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    folder: Location,
    attempt: Attempt,
}

impl Fence {
    /// Fails if a later attempt has taken the run over. Called before anything is published.
    pub async fn check(&self, storage: &Storage) -> Result<(), RunsError> {
        let fenced = latest_attempt(storage, &self.folder).await? != self.attempt;
        if fenced { Err(RunsError::Fenced { folder: self.folder.clone() }) } else { Ok(()) }
    }
}

/// A process, so that others can tell whether it still lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The attempt that it works on.
    pub attempt: Attempt,
    /// Its machine's name.
    pub host: String,
    /// Its process ID there.
    pub pid: u32,
    /// Tells this boot and process namespace of the machine from others of the same name.
    machine: String,
    /// Start of the process in the kernel's ticks: a process ID may be used again.
    pid_start: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Renewal {
    owner: Owner,
    /// Counts up; a lease lives as long as this changes.
    renewals: u64,
    /// Whether the owner is done.
    released: bool,
}

impl Lease {
    /// Takes the run whose folder this is, as its next attempt. Fails with `RunsError::Live`
    /// if another process works on it; finding out takes up to `limits::LEASE_EXPIRY`.
    pub async fn acquire(storage: &Storage, folder: &Location) -> Result<Self, RunsError> {
        let latest = latest_attempt(storage, folder).await?;
        if latest.0 > 0 {
            wait_until_dead(storage, folder).await?;
        }
        let owner = Owner::this_process(Attempt(latest.0 + 1));
        match storage.create(&attempt_file(folder, owner.attempt), json(&owner)?).await {
            Ok(()) => {}
            Err(StorageError::AlreadyExists(_)) => return Err(live(folder, None)),
            Err(error) => return Err(error.into()),
        }
        write_renewal(storage, folder, &owner, 0, false).await?;
        let lost = Arc::new(AtomicBool::new(false));
        let renewal = tokio::spawn(renew(storage.clone(), folder.clone(), owner.clone(), Arc::clone(&lost)));
        Ok(Self { storage: storage.clone(), folder: folder.clone(), owner, lost, renewal })
    }

    /// The attempt that this lease is for.
    pub fn attempt(&self) -> Attempt {
        self.owner.attempt
    }

    /// The process that holds it: this one.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Fails if a later attempt has taken the run over. Called before anything is published.
    pub async fn check(&self) -> Result<(), RunsError> {
        if self.lost.load(Ordering::Relaxed) {
            return Err(RunsError::Fenced { folder: self.folder.clone() });
        }
        self.fence().check(&self.storage).await
    }

    /// The claim, for other processes.
    pub fn fence(&self) -> Fence {
        Fence { folder: self.folder.clone(), attempt: self.owner.attempt }
    }

    /// Gives the run back, so that the next start need not wait.
    pub async fn release(self) -> Result<(), RunsError> {
        self.renewal.abort();
        if self.check().await.is_ok() {
            write_renewal(&self.storage, &self.folder, &self.owner, u64::MAX, true).await?;
        }
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.renewal.abort();
    }
}

impl Owner {
    fn this_process(attempt: Attempt) -> Self {
        let pid = std::process::id();
        Self { attempt, host: host_name(), pid, machine: machine_id(), pid_start: pid_start(pid).unwrap_or(0) }
    }

    /// Whether it certainly no longer runs: a process of this machine that is gone.
    fn is_gone(&self) -> bool {
        let ours = !self.machine.is_empty() && self.host == host_name() && self.machine == machine_id();
        ours && pid_start(self.pid) != Some(self.pid_start)
    }
}

/// The name of this machine.
pub fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}

fn machine_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    if boot.is_empty() { String::new() } else { format!("{} {}", boot.trim(), namespace.display()) }
}

/// Field 22 of `/proc/<pid>/stat`, counted after the command's closing bracket; `None` for a
/// process that is gone or a zombie.
fn pid_start(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if state == "Z" || state == "X" { None } else { fields.nth(18)?.parse().ok() }
}

async fn renew(storage: Storage, folder: Location, owner: Owner, lost: Arc<AtomicBool>) {
    for renewals in 1.. {
        sleep(limits::LEASE_RENEWAL).await;
        match latest_attempt(&storage, &folder).await {
            Ok(latest) if latest != owner.attempt => return lost.store(true, Ordering::Relaxed),
            // A store that is away for a moment costs a renewal, not the lease.
            Ok(_) | Err(_) => {}
        }
        if let Err(error) = write_renewal(&storage, &folder, &owner, renewals, false).await {
            tracing::warn!(%error, "the lease could not be renewed");
        }
    }
}

/// Watches the lease until it is released, its owner is gone, or it has stood still.
async fn wait_until_dead(storage: &Storage, folder: &Location) -> Result<(), RunsError> {
    let first = read_renewal(storage, folder).await?;
    let deadline = Instant::now() + limits::LEASE_EXPIRY;
    loop {
        let now = read_renewal(storage, folder).await?;
        match &now {
            Some(lease) if lease.released || lease.owner.is_gone() => return Ok(()),
            Some(lease) if Some(lease) != first.as_ref() => return Err(live(folder, Some(&lease.owner))),
            _ if Instant::now() >= deadline => return Ok(()),
            _ => sleep(limits::LEASE_RENEWAL / 4).await,
        }
    }
}

fn live(folder: &Location, owner: Option<&Owner>) -> RunsError {
    let owner =
        owner.map_or_else(|| "another process".to_owned(), |owner| format!("process {} on {}", owner.pid, owner.host));
    RunsError::Live { folder: folder.clone(), owner }
}

async fn latest_attempt(storage: &Storage, folder: &Location) -> Result<Attempt, RunsError> {
    let names = storage.children(&folder.join("attempts")).await?;
    let numbers = names.iter().filter_map(|name| name.strip_suffix(".json")?.parse().ok());
    Ok(Attempt(numbers.max().unwrap_or(0)))
}

fn attempt_file(folder: &Location, attempt: Attempt) -> Location {
    folder.join(&format!("attempts/{:06}.json", attempt.0))
}

async fn read_renewal(storage: &Storage, folder: &Location) -> Result<Option<Renewal>, RunsError> {
    match storage.read(&folder.join("lease.json")).await {
        // One that was torn by a crash of the machine is as good as none.
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(StorageError::NotFound(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

async fn write_renewal(
    storage: &Storage,
    folder: &Location,
    owner: &Owner,
    renewals: u64,
    released: bool,
) -> Result<(), RunsError> {
    let content = json(&Renewal { owner: owner.clone(), renewals, released })?;
    Ok(storage.replace(&folder.join("lease.json"), content).await?)
}

fn json(value: &impl Serialize) -> Result<bytes::Bytes, RunsError> {
    serde_json::to_vec(value).map(Into::into).map_err(RunsError::Encode)
}
