//! Devices that this build and this machine have.

use burn::tensor::Device;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn::tensor::DeviceType;

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
    let name = |index: usize| match kind {
        DeviceKind::Cpu => {
            let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
            format!("CPU, {cores} cores")
        }
        DeviceKind::Wgpu => format!("GPU {index} (wgpu)"),
        DeviceKind::Cuda => format!("GPU {index} (CUDA)"),
    };
    (0..enumerate(kind).len()).map(|index| DeviceInfo { kind, index, name: name(index) }).collect()
}

/// Fails with a clear error where the device is missing: says whether the build or the
/// machine lacks it, and what to do. The CPU serves any number of replicas.
pub fn check_device(kind: DeviceKind, count: u32) -> Result<(), LearnError> {
    if kind == DeviceKind::Cpu {
        return Ok(());
    }
    if !is_built(kind) {
        return Err(LearnError::NotBuilt { kind });
    }
    let found = enumerate(kind).len();
    if found < count as usize { Err(LearnError::NoDevice { kind, found, wanted: count }) } else { Ok(()) }
}

/// The device of that number. Burn panics on one that is missing, so it is looked up first.
pub(super) fn open(kind: DeviceKind, index: usize) -> Result<Device, LearnError> {
    let index = if kind == DeviceKind::Cpu { 0 } else { index };
    check_device(kind, index as u32 + 1)?;
    let mut devices = enumerate(kind);
    if index < devices.len() {
        Ok(devices.swap_remove(index))
    } else {
        Err(LearnError::NoDevice { kind, found: devices.len(), wanted: index as u32 + 1 })
    }
}

fn is_built(kind: DeviceKind) -> bool {
    match kind {
        DeviceKind::Cpu => true,
        DeviceKind::Wgpu => cfg!(feature = "wgpu"),
        DeviceKind::Cuda => cfg!(feature = "cuda"),
    }
}

fn enumerate(kind: DeviceKind) -> Vec<Device> {
    match kind {
        DeviceKind::Cpu => vec![Device::flex()],
        #[cfg(feature = "wgpu")]
        DeviceKind::Wgpu => Device::enumerate(DeviceType::Wgpu).into_vec(),
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => Device::enumerate(DeviceType::Cuda).into_vec(),
        #[allow(unreachable_patterns)]
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_always_there() {
        assert_eq!(devices(DeviceKind::Cpu).len(), 1);
        assert!(check_device(DeviceKind::Cpu, 64).is_ok());
        assert!(open(DeviceKind::Cpu, 3).is_ok());
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_device_that_is_not_built_in_says_how_to_build_it() {
        let error = check_device(DeviceKind::Cuda, 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "this build has no CUDA support; build with `--features cuda`, or set `device: cpu`"
        );
        assert!(devices(DeviceKind::Cuda).is_empty());
    }
}
