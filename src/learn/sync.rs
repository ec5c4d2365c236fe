//! How gradients meet: synchronous all-reduce.
