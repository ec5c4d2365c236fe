//! Integration tests of `run`.
