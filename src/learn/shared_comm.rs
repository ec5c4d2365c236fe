//! A communicator that the training loop and a step that is spread over ranks use in turn.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::comm::{AbortHandle, CommError, Communicator, Wire};
use crate::ids::{Rank, Step};

/// One end of an exchange in several hands of the same thread, which use it one after the other.
#[derive(Clone)]
pub struct SharedComm(Arc<Mutex<Box<dyn Communicator>>>);

impl SharedComm {
    /// Takes the end over.
    pub fn new(comm: Box<dyn Communicator>) -> Self {
        Self(Arc::new(Mutex::new(comm)))
    }

    fn comm(&self) -> MutexGuard<'_, Box<dyn Communicator>> {
        // A panic in the middle of an exchange ends the thread, and with it every hand.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Communicator for SharedComm {
    fn rank(&self) -> Rank {
        self.comm().rank()
    }

    fn world_size(&self) -> u32 {
        self.comm().world_size()
    }

    fn at_step(&mut self, step: Step) {
        self.comm().at_step(step);
    }

    fn all_reduce_sum(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        self.comm().all_reduce_sum(bucket, wire)
    }

    fn all_reduce_sum_f64(&mut self, bucket: &mut [f64]) -> Result<(), CommError> {
        self.comm().all_reduce_sum_f64(bucket)
    }

    fn reduce_scatter_sum(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        self.comm().reduce_scatter_sum(bucket, wire)
    }

    fn all_gather(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        self.comm().all_gather(bucket, wire)
    }

    fn broadcast(&mut self, root: Rank, bucket: &mut [f32]) -> Result<(), CommError> {
        self.comm().broadcast(root, bucket)
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        self.comm().barrier()
    }

    fn send(&mut self, to: Rank, message: &[f32]) -> Result<(), CommError> {
        self.comm().send(to, message)
    }

    fn receive(&mut self, from: Rank, message: &mut Vec<f32>) -> Result<(), CommError> {
        self.comm().receive(from, message)
    }

    fn receive_any(&mut self, message: &mut Vec<f32>) -> Result<Rank, CommError> {
        self.comm().receive_any(message)
    }

    fn bytes_sent(&self) -> u64 {
        self.comm().bytes_sent()
    }

    fn abort_handle(&self) -> AbortHandle {
        self.comm().abort_handle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learn::{comm::conformance, in_process};

    #[test]
    fn it_is_a_communicator() {
        conformance::check(&|world, deadline| {
            let ends = in_process(world, deadline).into_iter();
            ends.map(|end| Box::new(SharedComm::new(end)) as Box<dyn Communicator>).collect()
        });
    }
}
