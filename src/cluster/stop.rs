//! Asking a run to stop.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU8, Ordering},
};

use crate::remedy::Remedy;

/// A request to stop, which a run honours soon, and the exit code that it stands for, which
/// the run's events and record then tell. Cheap to clone; all clones are one request.
#[derive(Clone, Debug)]
pub struct Stop {
    requested: Arc<AtomicBool>,
    exit_code: Arc<AtomicU8>,
}

impl Default for Stop {
    fn default() -> Self {
        let exit_code = Arc::new(AtomicU8::new(Remedy::Interrupted.exit_code()));
        Self { requested: Arc::default(), exit_code }
    }
}

impl Stop {
    /// Asks for a stop; the process will exit with this code.
    pub fn request(&self, exit_code: u8) {
        self.exit_code.store(exit_code, Ordering::Release);
        self.requested.store(true, Ordering::Release);
    }

    /// The exit code of a run that ends so.
    pub fn exit_code(&self, remedy: Remedy) -> u8 {
        match remedy {
            Remedy::Interrupted => self.exit_code.load(Ordering::Acquire),
            remedy => remedy.exit_code(),
        }
    }

    /// Set once a stop is asked for.
    pub(super) fn requested(&self) -> &Arc<AtomicBool> {
        &self.requested
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_interrupted_run_takes_the_code_of_its_stop() {
        let stop = Stop::default();
        assert_eq!(stop.exit_code(Remedy::Interrupted), 143);
        stop.clone().request(130);
        assert!(stop.requested().load(Ordering::Acquire));
        assert_eq!(stop.exit_code(Remedy::Interrupted), 130);
        assert_eq!(stop.exit_code(Remedy::FixData), 65);
    }
}
