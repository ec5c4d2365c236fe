//! Where each worker is between two meetings of all ranks, who may go on, and where all meet.

/// The workers of one server. Steps are counted within the epoch.
pub(super) struct Pace {
    workers: Vec<Worker>,
    /// Steps that a worker may be ahead of the slowest.
    ahead: u64,
    meeting: u64,
}

#[derive(Clone)]
struct Worker {
    finished: u64,
    /// For an answer; else it is at its next step.
    waits: bool,
    left: bool,
}

impl Pace {
    /// All at the same step; they meet after step `meeting`, counted from 1, at the latest.
    pub fn new(workers: usize, step: u64, ahead: u64, meeting: u64) -> Self {
        Self { workers: vec![Worker { finished: step, waits: false, left: false }; workers], ahead, meeting }
    }

    /// A worker has finished so many steps, and waits for an answer.
    pub fn finish(&mut self, worker: usize, finished: u64) {
        self.workers[worker].finished = finished;
        self.workers[worker].waits = true;
    }

    /// Steps behind a worker.
    pub fn finished(&self, worker: usize) -> u64 {
        self.workers[worker].finished
    }

    /// A worker has gone to the meeting.
    pub fn leave(&mut self, worker: usize) {
        self.workers[worker].left = true;
    }

    /// Moves the meeting to the first step that no worker is beyond by the time it hears of it:
    /// those that are at a step finish it first. The slower ones go on to it.
    pub fn hurry(&mut self) {
        let reach = |worker: &Worker| worker.finished + u64::from(!worker.waits);
        let first = self.workers.iter().map(reach).max().unwrap_or(self.meeting);
        self.meeting = self.meeting.min(first);
    }

    /// Where all meet, as far as is known.
    pub fn meeting(&self) -> u64 {
        self.meeting
    }

    /// The workers whose wait is over.
    pub fn release(&mut self) -> Vec<usize> {
        let slowest = self.workers.iter().map(|worker| worker.finished).min().unwrap_or_default();
        let last = slowest.saturating_add(self.ahead);
        let released = |worker: &mut Worker| worker.finished <= last && std::mem::take(&mut worker.waits);
        self.workers.iter_mut().enumerate().filter_map(|(index, worker)| released(worker).then_some(index)).collect()
    }

    /// Steps behind all workers, once all have gone to the meeting.
    pub fn met(&self) -> Option<u64> {
        let all = self.workers.iter().all(|worker| worker.left);
        all.then(|| self.workers.iter().map(|worker| worker.finished).max().unwrap_or(self.meeting))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_waits_for_the_slowest() {
        let mut pace = Pace::new(2, 5, 2, 100);
        for finished in [6, 7] {
            pace.finish(0, finished);
            assert_eq!(pace.release(), [0]);
        }
        pace.finish(0, 8);
        assert!(pace.release().is_empty());
        pace.finish(1, 6);
        assert_eq!(pace.release(), [0, 1]);
        assert!(pace.release().is_empty(), "each is answered once");
    }

    #[test]
    fn a_meeting_is_where_the_fastest_will_be() {
        let mut pace = Pace::new(3, 0, 2, 100);
        pace.finish(0, 1);
        pace.release();
        pace.finish(0, 2);
        pace.release();
        pace.finish(1, 1);
        pace.hurry();
        assert_eq!(pace.meeting(), 3, "worker 0 is at its third step");
        for (worker, finished) in [(0, 3), (1, 2), (2, 1), (1, 3), (2, 2), (2, 3)] {
            assert_eq!(pace.met(), None);
            pace.finish(worker, finished);
            pace.hurry();
            assert_eq!(pace.meeting(), 3);
            pace.release();
            if finished == 3 {
                pace.leave(worker);
            }
        }
        assert_eq!(pace.met(), Some(3));
    }

    #[test]
    fn a_meeting_is_never_put_off() {
        let mut pace = Pace::new(1, 0, 2, 1);
        pace.hurry();
        assert_eq!(pace.meeting(), 1);
        pace.finish(0, 1);
        pace.release();
        pace.hurry();
        assert_eq!(pace.meeting(), 1);
    }
}
