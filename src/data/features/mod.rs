//! Columns to feature vectors: resolved against a schema, fitted once over all rows, saved
//! with the model.
//!
//! ```text
//!   features: of the file ──layout──▶ FeatureLayout ──fit, one pass──▶ FittedFeatures ──encode──▶ f32 rows
//!                            columns, shapes            offset, divisor, fill        (value - offset) / divisor
//! ```
//!
//! Every column is a fixed number of values per row (one, or as many as its lists have
//! elements), followed by its indicator, if it has one. NULL and NaN are *missing*; a list is
//! missing as a whole or element by element.

mod column;
mod encode;
mod error;
mod fit;
mod fitted;
mod layout;
mod stats;

pub use error::FeatureError;
pub use fit::fit;
pub use fitted::FittedFeatures;
pub use layout::FeatureLayout;
