//! The training step on Burn.

use super::{LearnError, Step, model::NetShape};
use crate::pipeline::spec::{DeviceKind, Loss};

/// A replica on a device, with parameters drawn from `seed` (the same on every rank). `index`
/// is the device's number where there are several.
pub fn burn_step(
    shape: &NetShape,
    loss: Loss,
    device: DeviceKind,
    index: usize,
    seed: u64,
) -> Result<Box<dyn Step>, LearnError> {
    let _ = (shape, loss, device, index, seed);
    unimplemented!()
}
