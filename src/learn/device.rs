//! Devices that this build and this machine have.

use super::LearnError;
use crate::pipeline::spec::DeviceKind;

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// `cpu`, `wgpu` or `cuda`.
    pub kind: DeviceKind,
    /// Number among its kind.
    pub index: usize,
    /// For people.
    pub name: String,
}

/// The devices of a kind; empty where this build lacks the kind or the machine has none.
pub fn devices(kind: DeviceKind) -> Vec<DeviceInfo> {
    let _ = kind;
    unimplemented!()
}

/// Fails with a clear error where the device is missing: says whether the build or the
/// machine lacks it, and what to do.
pub fn check_device(kind: DeviceKind, count: u32) -> Result<(), LearnError> {
    let _ = (kind, count);
    unimplemented!()
}
