//! Autoencoders and how ranks train one together.
//!
//! ```text
//!   feed ──batch──▶ Step (Burn) ──flat f32 gradients──▶ sync ──▶ Communicator ──▶ other ranks
//!                     ▲                                   │
//!                     └────── flat f32 parameters ◀── optimizer
//! ```

mod blame;
mod burn_step;
mod checkpoint;
mod comm;
mod device;
mod error;
mod in_process;
mod model;
mod optimizer;
mod shape;
mod step;
mod sync;
mod tcp;
mod tensor_file;
mod train;

pub use burn_step::burn_step;
pub use checkpoint::Checkpoint;
pub use comm::{AbortHandle, CommError, Communicator, Wire, shard};
pub use device::{DeviceInfo, check_device, devices};
pub use error::LearnError;
pub use in_process::in_process;
pub use model::Model;
pub use shape::NetShape;
pub use step::Step;
pub use sync::{Staleness, servers, survives};
pub use tcp::{TcpPlace, tcp};
pub use train::{Control, Observer, Phases, TrainJob, Trained, train_rank};
