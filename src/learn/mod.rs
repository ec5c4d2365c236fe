//! Autoencoders and how ranks train one together.
//!
//! ```text
//!   feed ──batch──▶ Step (Burn) ──flat f32 gradients──▶ sync ──▶ Communicator ──▶ other ranks
//!                     ▲                                   │
//!                     └────── flat f32 parameters ◀── optimizer
//! ```

mod burn_step;
mod checkpoint;
mod comm;
mod device;
mod error;
mod model;
mod optimizer;
mod step;
mod sync;
mod train;

pub use burn_step::burn_step;
pub use checkpoint::Checkpoint;
pub use comm::{CommError, Communicator, in_process};
pub use device::{DeviceInfo, check_device, devices};
pub use error::LearnError;
pub use model::{Model, NetShape};
pub use step::Step;
pub use train::{Control, Observer, Phases, TrainJob, Trained, train_rank};
