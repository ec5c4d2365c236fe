//! The driver: a run's life, from lease to commit, and its executors.
