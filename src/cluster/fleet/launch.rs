//! How executor processes come to be: as children of this one, or by others.

use std::{
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::FleetPlan;
use crate::{
    cluster::{RunError, protocol::Hello},
    config::env_vars,
    limits,
    wire::Security,
};

/// Whoever starts executors.
pub(super) enum Launch {
    /// This process.
    Children(Children),
    /// Somebody else.
    Others,
}

/// Executors on this machine. One that ends is started again, a few times.
pub(super) struct Children {
    program: PathBuf,
    arguments: Vec<String>,
    token: String,
    wanted: usize,
    /// Starts that are left, the first ones included.
    starts: usize,
    running: Vec<Child>,
}

impl Launch {
    pub fn new(plan: &FleetPlan, address: &str, security: &Security) -> Result<Self, RunError> {
        if !plan.children {
            return Ok(Self::Others);
        }
        let mut arguments = vec!["executor".to_owned(), "--join".to_owned(), address.to_owned()];
        if let Some(config) = &plan.config {
            arguments.extend(["--config".to_owned(), config.display().to_string()]);
        }
        let program = std::env::current_exe().map_err(|error| RunError::Launch { source: error })?;
        let token = security.token.to_text();
        let starts = plan.wanted + limits::RESTARTS;
        Ok(Self::Children(Children { program, arguments, token, wanted: plan.wanted, starts, running: Vec::new() }))
    }

    /// How many there are to be from now on.
    pub fn want(&mut self, wanted: usize) {
        if let Self::Children(children) = self {
            children.starts += wanted.saturating_sub(children.wanted);
            children.wanted = children.wanted.max(wanted);
        }
    }

    /// Starts what is missing.
    pub fn keep_up(&mut self) -> Result<(), RunError> {
        match self {
            Self::Children(children) => children.keep_up(),
            Self::Others => Ok(()),
        }
    }

    /// Whether, beyond those that have joined, nobody will.
    pub fn is_exhausted(&self, joined: usize) -> bool {
        match self {
            Self::Children(children) => children.starts == 0 && children.running.len() <= joined,
            Self::Others => false,
        }
    }

    /// An executor is given up: a process of ours that may be frozen.
    pub fn lost(&mut self, executor: &Hello) {
        if let Self::Children(children) = self
            && let Some(place) = children.running.iter().position(|child| child.id() == executor.pid)
        {
            end(children.running.swap_remove(place));
        }
    }

    /// Gives the processes a moment to end, and ends those that do not.
    pub fn finish(&mut self) {
        let Self::Children(children) = self else { return };
        let deadline = Instant::now() + limits::GOODBYE;
        while !children.running.is_empty() && Instant::now() < deadline {
            children.reap();
            thread::sleep(Duration::from_millis(5));
        }
        children.running.drain(..).for_each(end);
    }
}

impl Children {
    fn keep_up(&mut self) -> Result<(), RunError> {
        self.reap();
        while self.running.len() < self.wanted && self.starts > 0 {
            self.starts -= 1;
            let mut command = Command::new(&self.program);
            command.args(&self.arguments).env(env_vars::EMBERFLOW_TOKEN, &self.token);
            // Signals of the terminal are for the driver, which tells its executors.
            command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
            self.running.push(command.spawn().map_err(|source| RunError::Launch { source })?);
        }
        Ok(())
    }

    fn reap(&mut self) {
        self.running.retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
    }
}

/// Ends a process, frozen or not.
fn end(mut child: Child) {
    // One that has ended by itself is as well.
    let _ = child.kill();
    let _ = child.wait();
}
