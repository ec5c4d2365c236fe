//! Autoencoders and how ranks train one together.
//!
//! ```text
//!   feed ──batch──▶ Step (Burn) ──flat f32 gradients──▶ sync ──▶ Communicator ──▶ other ranks
//!                     ▲                                   │
//!                     └────── flat f32 parameters ◀── optimizer
//! ```

mod bf16;
mod blame;
mod burn_step;
mod checkpoint;
mod comm;
mod device;
mod error;
mod in_process;
mod model;
mod network;
mod optimizer;
mod shape;
mod shared_comm;
mod slice;
mod spread;
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
pub use shared_comm::SharedComm;
pub use spread::{Parts, check_spread, exchanged_numbers, features_read, partitions_read, replica, share_of_rows};
pub use step::Step;
pub use sync::{Staleness, servers, survives};
pub use tcp::{TcpPlace, tcp};
pub use train::{Control, Extent, Observer, Phases, TrainJob, Trained, train_rank};
