//! Integration tests of `learn`.
